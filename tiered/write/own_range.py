"""Whether a log is the one that an archive is of: a committed range is built again from it, and the hashes compared.

A name is no proof: two clusters, say staging and production, may have brokers of one name on one bucket. Of the objects
that the log should have whole the highest is taken, for two logs of one origin differ at their ends. Two things are no
sign of another log, and the next lower object is asked:

    a log that went on above its archive    lacks the end of what it names: offsets that it has nowhere
    a damaged record, here or there         the same offsets at the same places, of the same time, and other bytes

What was erased from the archive the log may still have: what a gap holds is not compared.
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
#: Of a queue: (first, last) of what exists nowhere, as its archive says.
GapSpans = Callable[[int], Sequence[tuple[int, int]]]
_MOST_DAMAGED = 4  # objects of other bytes; then it is another log


class _Likeness(Enum):
    """Of a committed range and what the log has in its place."""

    SAME = auto()
    OTHER = auto()
    DAMAGED = auto()
    NOT_COMPARABLE = auto()  # not all of it is here


class OwnLog(Protocol):
    """The local log, as far as readers see it. What asks of a topic raises TopicUnreadable."""

    def confirmed_range(self) -> tuple[int, int]:
        """The CommitLog offsets that it has, all entries of which are visible."""
        ...

    def gone_below(self, topic: str) -> int:
        """Below it the topic's records are of one that was deleted."""
        ...

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]: ...

    def first_offsets(self, topic: str, start: int) -> Mapping[int, int]:
        """Of each queue the first offset that lies at or above `start`; its end where none does."""
        ...

    def store_time(self, topic: str, queue: int, offset: int) -> int: ...

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]: ...


class ReadAt(Protocol):
    """Some bytes of a file."""

    def __call__(self, path: Path, offset: int, size: int) -> bytes: ...


def is_archive_of(catalog: Catalog, hot: OwnLog, read_at: ReadAt) -> bool | None:
    """None: nothing that is in the archive is in the log as well."""
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
    """The highest first; of an archive of a million objects the first few mostly tell."""
    begin, end = hot.confirmed_range()
    return catalog.from_highest(lambda topic: max(begin, hot.gone_below(topic)), end)


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
            is_whole = False  # the queue's files here no longer reach so far down, or its end is lacking
            continue
        have = run.first_offset + len(run.physical) - 1
        if run.first_offset < first or have > last or (have < last and above[queue] <= last):
            return _Likeness.OTHER
        is_whole = is_whole and (run.first_offset, have) == (first, last)
    return _likeness_of_bytes(name, parts, hot, read_at) if is_whole else _Likeness.NOT_COMPARABLE


def _outside(run: EntryRun, gaps: Sequence[tuple[int, int]]) -> Iterable[PartOfRun]:
    """What of a run is in none of the gaps, piece by piece."""
    begin, end = run.first_offset, run.first_offset + len(run.physical)
    for first, last in without(begin, end - 1, [gap for gap in gaps if gap[0] < end and begin <= gap[1]]):
        part = slice(first - begin, last + 1 - begin)
        yield PartOfRun(first, run.physical[part], run.sizes[part])


def _bounds(parts: Iterable[tuple[int, EntryRun]]) -> list[tuple[int, int, int]]:
    return [(queue, part.first_offset, part.first_offset + len(part.physical) - 1) for queue, part in parts]


def _runs_of(name: CommittedObject) -> list[tuple[int, int, int]]:
    """(queue, first, last) of what an object has without a hole, as its rows lie."""
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
    """Other messages would have come at other times. Of a damaged record the archive knows none."""
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
    """CommitLog ranges in the order of the rows, records that lie next to each other in one."""
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
