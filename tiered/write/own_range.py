"""Check whether an archive was made from this log: rebuild a committed range from the log, and compare the hashes.

Broker names do not prove it: two clusters, say staging and production, may use the same broker name on one bucket.
The check uses the highest object that the log should have whole, because two logs of common origin differ at their
ends. Two differences do not prove another log, and then the next lower object is checked:

    a log that continued above its archive    lacks the end of what the object names: these offsets are nowhere
    a damaged record, here or there           same offsets at the same places with the same times, but other bytes

The log may still have records that were erased from the archive, so offsets in gaps are not compared.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Protocol

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.queue_runs import without
from neve.archive.format.journal import CommittedObject
from tiered.write.entry_run import EntryRun, PartOfRun
from tiered.write.offload_plan import TopicUnreadable

log = logging.getLogger(__name__)
_READ_BYTES = 4 << 20
#: Returns the (first, last) spans of a queue that the archive records as gaps.
GapSpans = Callable[[int], Sequence[tuple[int, int]]]
_MOST_DAMAGED = 4  # objects with other bytes; as many prove another log


class _Likeness(Enum):
    """Result of comparing a committed range with the log."""

    SAME = auto()
    OTHER = auto()
    DAMAGED = auto()
    NOT_COMPARABLE = auto()  # the log does not have all of it


class OwnLog(Protocol):
    """The visible part of the local log. Methods with a topic raise TopicUnreadable."""

    def confirmed_range(self) -> tuple[int, int]:
        """Return the range of CommitLog offsets in which all entries are visible."""
        ...

    def deleted_up_to(self, topic: str) -> int:
        """Return the offset below which the topic's records belong to a deleted topic."""
        ...

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]: ...

    def first_offsets(self, topic: str, start: int) -> Mapping[int, int]:
        """Return queue -> its first offset at or above `start`; the queue's end if there is none."""
        ...

    def store_time(self, topic: str, queue: int, offset: int) -> int: ...

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]: ...


class ReadAt(Protocol):
    """Reads bytes of a file."""

    def __call__(self, path: Path, offset: int, size: int) -> bytes: ...


def is_archive_of(catalog: Catalog, hot: OwnLog, read_at: ReadAt) -> bool | None:
    """Return whether the archive was made from this log; None if no object can be compared."""
    damaged = 0
    for name in _candidates(catalog, hot):
        try:
            likeness = _likeness(name, hot, read_at, functools.partial(_gap_spans, catalog, name.topic))
        except (TopicUnreadable, OSError) as error:
            log.warning("%s can't be compared with the local log: %s", name.key, error)
            continue
        if likeness is _Likeness.SAME:
            return True
        if likeness is _Likeness.OTHER:
            return False
        if likeness is _Likeness.DAMAGED:
            log.error("%s has other bytes than the local log, in which a record is damaged or is not there", name.key)
            damaged += 1
            if damaged == _MOST_DAMAGED:
                break
    return False if damaged else None


def _candidates(catalog: Catalog, hot: OwnLog) -> Iterator[CommittedObject]:
    """Yield the objects that the log should have, highest first. Lazy: the first few of a million mostly decide."""
    begin, end = hot.confirmed_range()
    return catalog.from_highest(lambda topic: max(begin, hot.deleted_up_to(topic)), end)


def _gap_spans(catalog: Catalog, topic: str, queue: int) -> Sequence[tuple[int, int]]:
    return catalog.queue(topic, queue).gap_spans()


def _likeness(name: CommittedObject, hot: OwnLog, read_at: ReadAt, gaps: GapSpans) -> _Likeness:
    entries = hot.entries(name.topic, name.start, name.end)
    runs = {queue: run for queue, run in entries.items() if len(run.physical)}
    parts = [(queue, part) for queue, run in sorted(runs.items()) for part in _outside(run, gaps(queue))]
    if sum(len(part.physical) for _, part in parts) < sum(len(run.physical) for run in runs.values()):
        if _bounds(parts) != _runs_of(name):
            return _Likeness.NOT_COMPARABLE
        return _likeness_of_bytes(name, parts, hot, read_at)
    if any(queue not in name.queues for queue in runs):
        return _Likeness.OTHER
    above = hot.first_offsets(name.topic, name.end)
    is_whole = True
    for queue, (first, last, _) in name.queues.items():
        run = runs.get(queue)
        if run is None:
            is_whole = False  # the queue's files here begin above, or its end is missing
            continue
        have = run.first_offset + len(run.physical) - 1
        if run.first_offset < first or have > last or (have < last and above[queue] <= last):
            return _Likeness.OTHER
        is_whole = is_whole and (run.first_offset, have) == (first, last)
    return _likeness_of_bytes(name, parts, hot, read_at) if is_whole else _Likeness.NOT_COMPARABLE


def _outside(run: EntryRun, gaps: Sequence[tuple[int, int]]) -> Iterable[PartOfRun]:
    """Yield the parts of a run outside the gaps."""
    begin, end = run.first_offset, run.first_offset + len(run.physical)
    for first, last in without(begin, end - 1, [gap for gap in gaps if gap[0] < end and begin <= gap[1]]):
        part = slice(first - begin, last + 1 - begin)
        yield PartOfRun(first, run.physical[part], run.sizes[part])


def _bounds(parts: Iterable[tuple[int, EntryRun]]) -> list[tuple[int, int, int]]:
    return [(queue, part.first_offset, part.first_offset + len(part.physical) - 1) for queue, part in parts]


def _runs_of(name: CommittedObject) -> list[tuple[int, int, int]]:
    """Return an object's runs of rows without a hole: (queue, first, last)."""
    found: list[tuple[int, int, int]] = []
    for queue, first, last in name.runs:
        if found and (found[-1][0], found[-1][2] + 1) == (queue, first):
            found[-1] = queue, found[-1][1], last
        else:
            found.append((queue, first, last))
    return found


def _likeness_of_bytes(
    name: CommittedObject, parts: Sequence[tuple[int, EntryRun]], hot: OwnLog, read_at: ReadAt
) -> _Likeness:
    files = [(Path(path), base, length) for path, base, length in hot.files(name.start, name.end)]
    digest = hashlib.sha256()
    for _, run in parts:
        for start, end in _spans(run):
            for path, position, size in _pieces(files, start, end):
                digest.update(read_at(path, position, size))
    if digest.hexdigest() == name.sha256:
        return _Likeness.SAME
    return _Likeness.DAMAGED if _is_of_its_time(name, parts, hot) else _Likeness.OTHER


def _is_of_its_time(name: CommittedObject, parts: Sequence[tuple[int, EntryRun]], hot: OwnLog) -> bool:
    """Whether first and last store times match: other messages would have other times. Damaged records have none."""
    places = sorted(
        (place, queue, run.first_offset + index)
        for queue, run in parts
        for index, place in enumerate(run.physical.tolist())
    )
    first, last = (
        [hot.store_time(name.topic, queue, offset) for _, queue, offset in ends] for ends in (places[:2], places[-2:])
    )
    return name.min_time in first and name.max_time in last


def _spans(run: EntryRun) -> Iterable[tuple[int, int]]:
    """Yield CommitLog ranges in the order of the rows; adjacent records share a range."""
    start = end = -1
    for physical, size in zip(run.physical.tolist(), run.sizes.tolist(), strict=True):
        if physical != end:
            if start >= 0:
                yield start, end
            start = physical
        end = physical + size
    if start >= 0:
        yield start, end


def _pieces(files: Sequence[tuple[Path, int, int]], start: int, end: int) -> Iterable[tuple[Path, int, int]]:
    for path, base, length in files:
        at, stop = max(start, base), min(end, base + length)
        while at < stop:
            size = min(stop - at, _READ_BYTES)
            yield path, at - base, size
            at += size
