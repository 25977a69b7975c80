"""Reads: entries of a queue to slices of the log, times to offsets."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from broker.store.commit_log import CommitLog
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import StoreError
from broker.store.layout import (
    BORN_HOST_AT,
    INT,
    LONG,
    PHYSICAL_OFFSET_AT,
    QUEUE_ENTRY,
    QUEUE_ENTRY_SIZE,
    SIZE_AND_MAGIC,
    SYS_FLAG_AT,
)
from neve.message import BORN_HOST_V6, MAGIC_V1, MAGIC_V2, RECORD_SIZE_MIN

FOUND = "FOUND"
NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"

_ENTRY_TYPE = np.dtype([("physical", ">i8"), ("size", ">i4"), ("tags", ">i8")])


class GetResult(msgspec.Struct, frozen=True):
    """The answer to a read. Each buffer holds one or more whole records, back to back; `runs` says where in the log."""

    status: str
    next_offset: int
    min_offset: int
    max_offset: int
    buffers: list[memoryview] = []
    count: int = 0
    runs: list[tuple[int, int]] = []  # physical offset of each buffer's first and after its last byte


class EntryRun(msgspec.Struct, frozen=True):
    """Entries of one queue, without a hole, as arrays of native integers."""

    first_offset: int
    physical: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
    tags: npt.NDArray[np.int64]


def read(  # noqa: PLR0917 - as `MessageStore.get`
    log: CommitLog,
    queue: ConsumeQueue,
    minimum: int,
    offset: int,
    max_count: int,
    max_bytes: int,
    *,
    tag_codes: frozenset[int] | None,
    scan_entries: int,
) -> GetResult:
    """Read a queue from an offset on."""
    maximum = queue.visible
    if maximum == 0:
        return GetResult(NO_MESSAGE_IN_QUEUE, 0, 0, 0)
    if offset < minimum:
        return GetResult(OFFSET_TOO_SMALL, minimum, minimum, maximum)
    if offset >= maximum:
        if offset == maximum:
            return GetResult(OFFSET_OVERFLOW_ONE, offset, minimum, maximum)
        return GetResult(OFFSET_OVERFLOW_BADLY, maximum, minimum, maximum)
    limit = max_count if tag_codes is None else scan_entries
    for first, view in queue.slices(offset, min(maximum, offset + max(limit, 1))):
        if first != offset:
            break
        if tag_codes is None:
            runs, count = _runs_of(QUEUE_ENTRY.iter_unpack(view), max_bytes)
            following = offset + count
        else:
            runs, count, following = _matching(view, offset, max_count, max_bytes, tag_codes)
        status = FOUND if count else NO_MATCHED_MESSAGE
        return GetResult(status, following, minimum, maximum, _slices(log, runs), count, runs)
    return GetResult(OFFSET_FOUND_NULL, queue.next_existing(offset), minimum, maximum)


def _runs_of(entries: Iterable[tuple[int, int, int]], max_bytes: int) -> tuple[list[tuple[int, int]], int]:
    """Where the records of the first entries lie, neighbours together, and how many fit; one always does."""
    runs: list[tuple[int, int]] = []
    start = end = -1
    room, count = max_bytes, 0
    for physical_offset, size, _ in entries:
        room -= size
        if room < 0 and count:
            break
        count += 1
        if physical_offset != end:
            if count > 1:
                runs.append((start, end))
            start = physical_offset
        end = physical_offset + size
    if count:
        runs.append((start, end))
    return runs, count


def _matching(
    view: memoryview, offset: int, max_count: int, max_bytes: int, codes: frozenset[int]
) -> tuple[list[tuple[int, int]], int, int]:
    """Runs and count of the entries with these codes, and the offset to go on at."""
    tags = np.frombuffer(view, _ENTRY_TYPE)["tags"]
    if len(codes) == 1:
        (code,) = codes
        matches = np.flatnonzero(tags == code).tolist()
    else:
        matches = np.flatnonzero(np.isin(tags, list(codes))).tolist()
    wanted = (QUEUE_ENTRY.unpack_from(view, index * QUEUE_ENTRY_SIZE) for index in matches[:max_count])
    runs, count = _runs_of(wanted, max_bytes)
    return runs, count, offset + (matches[count] if count < len(matches) else len(tags))


def _slices(log: CommitLog, runs: list[tuple[int, int]]) -> list[memoryview]:
    """The mapped bytes of runs; a view keeps an evicted file's map. None crosses a file: an END record lies between."""
    found: list[memoryview] = []
    while len(found) < len(runs):
        file = log.at(runs[len(found)][0])
        if file is None:
            raise StoreError(f"no file of the log has {runs[len(found)][0]}, which an entry above the minimum names")
        base, limit, view = file.base, file.end, memoryview(file.map)
        if not found and runs[-1][1] <= limit:
            return [view[start - base : end - base] for start, end in runs]
        for start, end in runs[len(found) :]:
            if start >= limit:
                break
            found.append(view[start - base : end - base])
    return found


def record_at(log: CommitLog, physical_offset: int, confirmed: int) -> bytes | None:
    """The record that begins exactly at an offset; the offset may come from anyone."""
    file = log.at(physical_offset)
    if file is None or physical_offset + RECORD_SIZE_MIN > min(confirmed, file.end):
        return None
    position = physical_offset - file.base
    size, magic = SIZE_AND_MAGIC.unpack_from(file.map, position)
    (said,) = LONG.unpack_from(file.map, position + PHYSICAL_OFFSET_AT)
    if magic not in {MAGIC_V1, MAGIC_V2} or said != physical_offset or position + size > file.size:
        return None
    return file.map[position : position + size]


def store_time_at(log: CommitLog, physical_offset: int) -> int:
    """Store time of the record at an offset known to be one; -1 if the log no longer has it."""
    file = log.at(physical_offset)
    if file is None:
        return -1
    position = physical_offset - file.base
    (sys_flag,) = INT.unpack_from(file.map, position + SYS_FLAG_AT)
    host_size = 20 if sys_flag & BORN_HOST_V6 else 8
    return int(LONG.unpack_from(file.map, position + BORN_HOST_AT + host_size)[0])


def store_time(log: CommitLog, queue: ConsumeQueue, offset: int) -> int:
    """Store time of a message; -1 if the local log has none there."""
    entry = queue.entry(offset) if offset < queue.visible else None
    return -1 if entry is None else store_time_at(log, entry[0])


def offset_by_time(log: CommitLog, queue: ConsumeQueue, minimum: int, timestamp: int, *, upper: bool) -> int:
    """Lower: the first offset stored at or after a time, or the end. Upper: the last at or before, or the first."""
    low, high = minimum, queue.visible
    wanted = timestamp + 1 if upper else timestamp
    while low < high:
        middle = (low + high) // 2
        if store_time(log, queue, queue.next_existing(middle)) < wanted:
            low = middle + 1
        else:
            high = middle
    return max(low - 1, minimum) if upper else low


def entry_run(queue: ConsumeQueue, first: int, end: int) -> EntryRun | None:
    """The visible entries of [first, end) as arrays of their own; stops at a hole."""
    for start, view in queue.slices(first, end):
        parts = [np.frombuffer(view, _ENTRY_TYPE)]
        following = start + len(parts[0])
        for later, more in queue.slices(following, end):
            if later != following:
                break
            parts.append(np.frombuffer(more, _ENTRY_TYPE))
            following += len(parts[-1])
        entries = np.concatenate(parts)
        return EntryRun(
            start,
            entries["physical"].astype(np.int64),
            entries["size"].astype(np.int32),
            entries["tags"].astype(np.int64),
        )
    return None
