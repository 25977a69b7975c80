"""Whether a log is the one that an archive is of: a committed range is built again from it, and the hashes compared.

A name is no proof: two clusters, say staging and production, may have brokers of one name on one bucket. Of the objects
that the log should have whole the highest is taken, for two logs of one origin differ at their ends.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from neve.archive.catalog import Catalog
from neve.archive.journal import CommittedName
from tiered.write.entry_run import EntryRun
from tiered.write.offload_plan import TopicUnreadable

log = logging.getLogger(__name__)
_READ_BYTES = 4 << 20


class OwnLog(Protocol):
    """The local log, as far as readers see it. What asks of a topic raises TopicUnreadable."""

    def confirmed_range(self) -> tuple[int, int]:
        """The CommitLog offsets that it has, all entries of which are visible."""
        ...

    def gone_below(self, topic: str) -> int:
        """Below it the topic's records are of one that was deleted."""
        ...

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]: ...

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]: ...


class ReadAt(Protocol):
    """Some bytes of a file."""

    def __call__(self, path: Path, offset: int, size: int) -> bytes: ...


def is_archive_of(catalog: Catalog, hot: OwnLog, read_at: ReadAt) -> bool | None:
    """None: nothing that is in the archive is in the log as well."""
    for name in _candidates(catalog, hot):
        try:
            same = _is_same(name, hot, read_at)
        except (TopicUnreadable, OSError) as error:
            log.warning("%s can't be compared with the local log: %s", name.key, error)
            continue
        if same is not None:
            return same
    return None


def _candidates(catalog: Catalog, hot: OwnLog) -> list[CommittedName]:
    begin, end = hot.confirmed_range()
    found = [
        name
        for topic in catalog.topics_with_objects()
        for name in catalog.objects(topic)
        if max(begin, hot.gone_below(topic)) <= name.start and name.end <= end
    ]
    return sorted(found, key=lambda name: (-name.end, name.wire_bytes))


def _is_same(name: CommittedName, hot: OwnLog, read_at: ReadAt) -> bool | None:
    """None: the queues' files here no longer reach so far down."""
    runs = hot.entries(name.topic, name.start, name.end)
    is_whole = True
    for queue, (first, last, _) in name.queues.items():
        run = runs.get(queue)
        if run is None or not len(run.physical):
            is_whole = False
            continue
        if run.first_offset < first or run.first_offset + len(run.physical) - 1 != last:
            return False
        is_whole = is_whole and run.first_offset == first
    if any(len(run.physical) and queue not in name.queues for queue, run in runs.items()):
        return False
    if not is_whole:
        return None
    files = [(Path(path), base, length) for path, base, length in hot.files(name.start, name.end)]
    digest = hashlib.sha256()
    for _, run in sorted(runs.items()):
        for start, end in _spans(run):
            for path, position, size in _pieces(files, start, end):
                digest.update(read_at(path, position, size))
    return digest.hexdigest() == name.sha256


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
