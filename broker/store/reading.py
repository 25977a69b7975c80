"""Reads: entries of a queue to slices of the log, and times to offsets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from broker.store import erased
from broker.store.commit_log import CommitLog, LogFile
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import StoreError
from broker.store.layout import (
    INT,
    LONG,
    QUEUE_ENTRY,
    QUEUE_ENTRY_SIZE,
)
from broker.store.log_records import used_size
from neve.record.layout import (
    BORN_HOST_AT,
    BORN_HOST_V6,
    HOST_V4_SIZE,
    HOST_V6_SIZE,
    MAGIC_V1,
    MAGIC_V2,
    PHYSICAL_OFFSET_AT,
    RECORD_SIZE_MIN,
    SIZE_AND_MAGIC,
    SYS_FLAG_AT,
    host_sizes,
)
from neve.remoting.codes import GetMessageStatus

Entry = tuple[int, int, int]  # physical offset, size, tags code; as QUEUE_ENTRY
_ENTRY_TYPE = np.dtype([("physical", ">i8"), ("size", ">i4"), ("tags", ">i8")])
assert _ENTRY_TYPE.itemsize == QUEUE_ENTRY_SIZE
_READ_TOGETHER = 1 << 13  # records whose times are read in one turn of the event loop: each may be on another page


class GetResult(msgspec.Struct, frozen=True):
    """Answer to a read. Each buffer contains one or more whole records, back to back."""

    status: GetMessageStatus
    next_offset: int
    min_offset: int
    max_offset: int
    buffers: list[memoryview] = []
    count: int = 0
    # Physical begin and end offset of each buffer. Only set for a read below `old_below`.
    runs: list[tuple[int, int]] = []
    is_archived: bool = False  # read from the archive: the reader should continue at a slave


class EntryArrays(msgspec.Struct, frozen=True):
    """Contiguous entries of one queue, as arrays of native integers."""

    first_offset: int
    physical: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int32]
    tags: npt.NDArray[np.int64]


def read(  # noqa: PLR0912, PLR0917 - as `StoreReader.get`; each case costs a comparison and no call
    log: CommitLog,
    queue: ConsumeQueue,
    minimum: int,
    offset: int,
    max_count: int,
    max_bytes: int,
    *,
    tag_codes: frozenset[int] | None,
    scan_entries: int,
    old_below: int,
) -> GetResult:
    """Read a queue from an offset on; see `StoreReader.get`."""
    maximum = queue.visible
    if maximum == 0:
        if 0 < offset <= queue.end:
            return _not_shown_yet(offset, minimum, maximum)
        return GetResult(GetMessageStatus.NO_MESSAGE_IN_QUEUE, 0, 0, 0)
    if offset < minimum:
        return GetResult(GetMessageStatus.OFFSET_TOO_SMALL, minimum, minimum, maximum)
    if offset >= maximum:
        if offset == maximum:
            return GetResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset, minimum, maximum)
        if offset <= queue.end:
            return _not_shown_yet(offset, minimum, maximum)
        return GetResult(GetMessageStatus.OFFSET_OVERFLOW_BADLY, maximum, minimum, maximum)
    erased_spans = queue.erased
    if erased_spans and (shown := erased.behind(erased_spans, offset)) != offset:
        # As for a gap of the archive: readers skip it at once.
        return GetResult(GetMessageStatus.NO_MATCHED_MESSAGE, min(shown, maximum), minimum, maximum)
    limit = max_count if tag_codes is None else scan_entries
    if erased_spans:
        erased_spans = erased.meeting(erased_spans, offset, offset + max(limit, 1))
    for first, view in queue.slices(offset, min(maximum, offset + max(limit, 1))):
        if first != offset:
            break
        if tag_codes is None and not erased_spans:
            entries = list(QUEUE_ENTRY.iter_unpack(view))
            buffers, count = _slices(log, entries, max_bytes)
            following = offset + count
        else:
            matches = _matches(view, tag_codes, offset, erased_spans)
            entries = [QUEUE_ENTRY.unpack_from(view, index * QUEUE_ENTRY_SIZE) for index in matches[:max_count]]
            buffers, count = _slices(log, entries, max_bytes)
            following = offset + (matches[count] if count < len(matches) else len(view) // QUEUE_ENTRY_SIZE)
        if not count:
            return GetResult(GetMessageStatus.NO_MATCHED_MESSAGE, following, minimum, maximum)
        runs = _runs(entries[:count]) if entries[0][0] < old_below else []
        return GetResult(GetMessageStatus.FOUND, following, minimum, maximum, buffers, count, runs)
    return GetResult(GetMessageStatus.OFFSET_FOUND_NULL, queue.next_existing(offset), minimum, maximum)


def _not_shown_yet(offset: int, minimum: int, maximum: int) -> GetResult:
    """Return an empty result at the reader's own offset, which is not confirmed here yet.

    The reader got there with another master. It must not be moved back.
    """
    return GetResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset, minimum, maximum)


def _matches(view: memoryview, codes: frozenset[int] | None, first: int, erased_spans: erased.Spans) -> list[int]:
    """Return the indexes of the entries with these codes, or of all if None, without erased ones.

    `first` is the offset of the first entry.
    """
    tags = np.frombuffer(view, _ENTRY_TYPE)["tags"]
    if codes is None:
        found = np.ones(len(tags), np.bool_)
    elif len(codes) == 1:
        (code,) = codes
        found = tags == code
    else:
        found = np.isin(tags, list(codes))
    if erased_spans:
        found &= erased.left_of(len(tags), first, erased_spans)
    return list(np.flatnonzero(found).tolist())


def _slices(log: CommitLog, entries: list[Entry], max_bytes: int) -> tuple[list[memoryview], int]:
    """Return the mapped records of the first entries, adjacent ones merged, and how many fit; at least one.

    A view keeps the map of an evicted file alive. No record crosses a file border, because an END record precedes it.
    Raises StoreError for an entry that refers to bytes outside the log.
    """
    found: list[memoryview] = []
    base = file_size = count = 0
    begin = end = -1
    view = memoryview(b"")
    for physical_offset, size, _ in entries:
        max_bytes -= size
        if max_bytes < 0 and count:
            break
        count += 1
        start = physical_offset - base
        if start == end:
            end += size
            continue
        if end > file_size:
            break
        if count > 1:
            found.append(view[begin:end])
        if start >= file_size:
            file = log.at(physical_offset)
            if file is None:
                raise StoreError(f"no file of the log has offset {physical_offset} of an entry above the minimum")
            base, file_size, view = file.base, file.size, memoryview(file.map)
            start = physical_offset - base
        begin, end = start, start + size
    if end > file_size:
        raise StoreError(f"entries name {base + begin} to {base + end}, more than the log's file has")
    if count:
        found.append(view[begin:end])
    return found, count


def _runs(entries: list[Entry]) -> list[tuple[int, int]]:
    """Return the physical offset ranges of the buffers that `_slices` returns."""
    runs: list[tuple[int, int]] = []
    for physical_offset, size, _ in entries:
        if runs and runs[-1][1] == physical_offset:
            runs[-1] = runs[-1][0], physical_offset + size
        else:
            runs.append((physical_offset, physical_offset + size))
    return runs


def record_at(log: CommitLog, physical_offset: int, confirmed: int) -> bytes | None:
    """Return the record that begins exactly at an offset, which may come from a client; None if there is none.

    The confirmed offset may be inside a record. That record is not confirmed.
    """
    file = log.at(physical_offset)
    if file is None or physical_offset + RECORD_SIZE_MIN > (limit := min(confirmed, file.end)):
        return None
    position = physical_offset - file.base
    size, magic = SIZE_AND_MAGIC.unpack_from(file.map, position)
    (stored_offset,) = LONG.unpack_from(file.map, position + PHYSICAL_OFFSET_AT)
    if magic not in {MAGIC_V1, MAGIC_V2} or stored_offset != physical_offset or physical_offset + size > limit:
        return None
    return file.map[position : position + size]


def find_text(log: CommitLog, physical_offset: int, text: bytes) -> tuple[int, bool]:
    """Return the size of the record at an offset, and whether its bytes contain a text; copies nothing.

    A record must have begun at the offset. The size is 0 if the log no longer has the record.
    """
    file = log.at(physical_offset)
    if file is None or physical_offset + RECORD_SIZE_MIN > file.end:
        return 0, False
    position = physical_offset - file.base
    size, _ = SIZE_AND_MAGIC.unpack_from(file.map, position)
    return size, file.map.find(text, position, position + size) >= 0


def store_time_at(log: CommitLog, physical_offset: int) -> int:
    """Return the store time of the record at an offset where one began; -1 if the log no longer has it."""
    file = log.at(physical_offset)
    if file is None:
        return -1
    position = physical_offset - file.base
    (sys_flag,) = INT.unpack_from(file.map, position + SYS_FLAG_AT)
    host_size, _ = host_sizes(sys_flag)
    return int(LONG.unpack_from(file.map, position + BORN_HOST_AT + host_size)[0])


def store_time(log: CommitLog, queue: ConsumeQueue, offset: int) -> int:
    """Return the store time of a message; -1 if the local log does not have it."""
    entry = queue.entry(offset) if offset < queue.visible else None
    return -1 if entry is None else store_time_at(log, entry[0])


def first_stored(log: CommitLog, queue: ConsumeQueue, start: int, wanted: int) -> tuple[int, bool]:
    """Search a queue from an offset on for the first message that was stored at or after a time.

    Returns its offset, or the end of the queue. In files where the clock was set back, store times are not sorted.
    There messages are read one after the other, a bounded number per call. If the second value is False, all messages
    below the returned offset are older, and the search resumes there.
    """
    end = queue.visible
    entry = queue.entry(queue.next_existing(start))
    lowest = 0 if entry is None else entry[0]
    for file in list(log.files):
        if file.end <= lowest or (file.sealed and file.newest_store_time < wanted):
            continue
        low, stop = max(queue.first_at(file.base), start), min(queue.first_at(file.end), end)
        if low >= stop:
            continue
        # store times above `high_time` are sorted: no record is older than an earlier one above it
        if wanted > file.high_time:
            if (found := _first_by_halving(log, queue, low, stop, wanted)) < stop:
                return found, True
            continue
        part = min(stop, low + _READ_TOGETHER)
        found = _first_by_reading(file, queue, low, part, wanted)
        return found, found < part
    return max(end, start), True


def _first_by_halving(log: CommitLog, queue: ConsumeQueue, low: int, high: int, wanted: int) -> int:
    while low < high:
        middle = (low + high) // 2
        if store_time(log, queue, queue.next_existing(middle)) < wanted:
            low = middle + 1
        else:
            high = middle
    return low


def _first_by_reading(file: LogFile, queue: ConsumeQueue, low: int, stop: int, wanted: int) -> int:
    """Search linearly in a file whose store times are not sorted because the clock was set back."""
    data = np.frombuffer(file.map, np.uint8)
    for first, view in queue.looked_at(low, stop):
        places = np.frombuffer(view, _ENTRY_TYPE)["physical"].astype(np.int64) - file.base
        found = np.flatnonzero(_store_times(data, places) >= wanted)
        if len(found):
            return first + int(found[0])
    return stop


def _store_times(data: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return `store_time_at` of many records at once."""
    flags = data[places + SYS_FLAG_AT + INT.size - 1]
    hosts = np.where(flags & BORN_HOST_V6, HOST_V6_SIZE, HOST_V4_SIZE)
    begins = places + BORN_HOST_AT + hosts
    times: npt.NDArray[np.int64] = data[begins[:, None] + np.arange(LONG.size)].view(">i8")[:, 0].astype(np.int64)
    return times


def log_bytes(log: CommitLog, start: int, end: int, limit: int, *, padding: bool) -> tuple[int, memoryview]:
    """Return bytes of the log in [start, end), and the offset where they begin; from one file, at most `limit`.

    They are empty if nothing is available yet. Holes between files are skipped, so that the bytes may begin above
    `start`. Without `padding`, the unused rest of a file behind its END record is skipped too.
    """
    file = log.at(start)
    if file is not None and file.sealed and not padding and start - file.base >= used_size(file):
        file = None
    if file is None:
        file = next((later for later in log.files if later.base > start), None)
        if file is None or file.base >= end:
            return start, memoryview(b"")
        start = file.base
    stop = min(end, file.end, start + limit)
    if file.sealed and not padding:
        stop = min(stop, file.base + used_size(file))
    return start, memoryview(file.map)[start - file.base : stop - file.base]


def entry_run(queue: ConsumeQueue, first: int, end: int) -> EntryArrays | None:
    """Return the visible entries of [first, end) as copies, up to a hole."""
    for start, view in queue.looked_at(first, end):
        parts = [np.frombuffer(view, _ENTRY_TYPE)]
        following = start + len(parts[0])
        for later, more in queue.looked_at(following, end):
            if later != following:
                break
            parts.append(np.frombuffer(more, _ENTRY_TYPE))
            following += len(parts[-1])
        entries = np.concatenate(parts)
        return EntryArrays(
            start,
            entries["physical"].astype(np.int64),
            entries["size"].astype(np.int32),
            entries["tags"].astype(np.int64),
        )
    return None


class EntrySlice(msgspec.Struct, frozen=True):
    """Entries of a queue. They continue the slice before, unless `anew` is set: then they begin a new run."""

    queue_id: int
    run: EntryArrays
    anew: bool


def entry_slices(queue: ConsumeQueue, first: int, end: int, most: int) -> Iterator[EntrySlice]:
    """Yield the visible entries of [first, end), at most `most` per slice.

    Raises StoreError for a hole above the minimum.
    """
    end, at = min(end, queue.visible), first
    while at < end:
        run = entry_run(queue, at, min(end, at + most))
        start = queue.next_existing(at) if run is None else run.first_offset
        if start > at > first and start > queue.floor:
            raise StoreError(f"{queue.topic}, queue {queue.queue_id} has a hole between the offsets {first} and {end}")
        if run is None:
            at = start
            continue
        yield EntrySlice(queue.queue_id, run, at == first or start > at)  # messages below a hole are permanently hidden
        at = start + len(run.sizes)


def joined(slices: Iterable[EntrySlice]) -> dict[int, EntryArrays]:
    """Return one run for each queue."""
    parts: dict[int, list[EntryArrays]] = {}
    for piece in slices:
        if piece.anew:
            parts[piece.queue_id] = []
        parts[piece.queue_id].append(piece.run)
    return {queue_id: _joined(runs) for queue_id, runs in parts.items()}


def _joined(runs: list[EntryArrays]) -> EntryArrays:
    if len(runs) == 1:
        return runs[0]
    return EntryArrays(
        runs[0].first_offset,
        np.concatenate([run.physical for run in runs]),
        np.concatenate([run.sizes for run in runs]),
        np.concatenate([run.tags for run in runs]),
    )
