"""Counts of each topic's unarchived records: sealed segments are counted once, the active one incrementally.

A count belongs to a topic and an unsettled stretch of a segment. It has the offset up to which records were counted,
their bytes, and the store time of the oldest one. It is valid as long as the stretch begins at the same offset. A
segment may have several stretches: of a round with two names, one may be closed without an object and the other
published.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from lifecycle.hot_store import HotStore, LogSegment
from lifecycle.retention import Pending
from neve.archive.catalog.catalog import Catalog
from tiered.write.offload_plan import FoundEntries, TopicRange, TopicUnreadable


class _Count(msgspec.Struct, gc=False):
    stop: int
    bytes: int = 0
    oldest_ms: int = -1
    empty: bool = True


class _Stretch(NamedTuple):
    """A range within a segment that no round has settled."""

    base: int  # base offset of the segment
    start: int
    stop: int
    last: int  # offset of the topic's last record in the segment


class TopicBacklog(NamedTuple):
    """The result for a topic: the range of its next round, and all that is pending."""

    target: TopicRange
    pending: Pending


# Topics that are counted under one lock; a scrape waits for at most one such group.
_AT_ONCE = 64


class Backlog:
    """The counts of all topics. Thread-safe: jobs and scrapes use it."""

    def __init__(self, hot: HotStore, catalog: Catalog) -> None:
        self._hot, self._catalog = hot, catalog
        # Topic -> (base of the segment, start of the stretch) -> count.
        self._counts: dict[str, dict[tuple[int, int], _Count]] = {}
        self._born: dict[str, int] = {}
        self._lock = threading.Lock()

    def keep(self, topics: Container[str], segments: Iterable[LogSegment]) -> None:
        """Drop the counts of topics and segments that no longer exist."""
        bases = {segment.base for segment in segments}
        with self._lock:
            for topic in [topic for topic in self._counts if topic not in topics]:
                del self._counts[topic]
            for counts in self._counts.values():
                for place in [place for place in counts if place[0] not in bases]:
                    del counts[place]

    def of(
        self, topics: Iterable[tuple[str, int]], segments: Sequence[LogSegment], end: int
    ) -> Iterator[tuple[str, TopicBacklog | TopicUnreadable | None]]:
        """Yield the result for each topic; None if nothing is pending.

        Args:
            topics: each with the offset below which its records belong to a deleted topic; older counts are dropped.
            segments: in log order, from a time at or after that of `end`.
            end: all entries below it are visible, because a range that was counted as empty is not counted again.
        """
        left = iter(topics)
        while some := list(islice(left, _AT_ONCE)):
            with self._lock:
                found = self._looked_at(some, segments, end)
            yield from found

    def _looked_at(
        self, topics: Sequence[tuple[str, int]], segments: Sequence[LogSegment], end: int
    ) -> list[tuple[str, TopicBacklog | TopicUnreadable | None]]:
        counts: dict[str, dict[_Stretch, _Count]] = {}
        new: list[tuple[TopicRange, _Count]] = []
        for topic, deleted_up_to in topics:
            if self._born.get(topic, 0) != deleted_up_to:
                self._counts.pop(topic, None)
            self._born[topic] = deleted_up_to
            before = self._counts.get(topic, {})
            counts[topic] = {}
            for stretch in self._stretches(topic, segments, end):
                count = counts[topic][stretch] = _counted_before(before.get((stretch.base, stretch.start)), stretch)
                if count.stop <= stretch.last:  # else there is no record between the two
                    new.append((TopicRange(topic, count.stop, stretch.stop), count))
        unreadable = self._add(new)
        found: list[tuple[str, TopicBacklog | TopicUnreadable | None]] = []
        for topic, _ in topics:
            if topic in unreadable:
                found.append((topic, unreadable[topic]))
                continue
            for stretch, count in counts[topic].items():
                count.stop = stretch.stop
            self._counts[topic] = {(one.base, one.start): count for one, count in counts[topic].items()}
            found.append((topic, _look(topic, counts[topic])))
        return found

    def _stretches(self, topic: str, segments: Sequence[LogSegment], end: int) -> Iterator[_Stretch]:
        """Yield the unsettled stretches of a topic, up to its last record."""
        through = self._catalog.through(topic) or 0
        for segment in segments:
            last, at = segment.topics.get(topic, (-1, -1))[0], max(segment.base, through)
            while at <= last:
                start, covered = self._catalog.next_uncovered(topic, at)
                stop = min(segment.end, end if covered is None else min(end, covered))
                if start >= stop or last < start:
                    break
                yield _Stretch(segment.base, start, stop, last)
                at = stop

    def _add(self, new: Sequence[tuple[TopicRange, _Count]]) -> Mapping[str, TopicUnreadable]:
        """Add new records to the counts. Returns the unreadable topics, whose counts remain as they were."""
        unreadable: dict[str, TopicUnreadable] = {}
        looked_up = self._hot.entries_of([wanted for wanted, _ in new], timed=True)
        for (wanted, count), found in zip(new, looked_up, strict=True):
            if isinstance(found, TopicUnreadable):
                unreadable[wanted.topic] = found
            elif wanted.topic not in unreadable:
                _count_more(count, found, wanted.end)
        return unreadable


def _counted_before(count: _Count | None, stretch: _Stretch) -> _Count:
    return _Count(stretch.start) if count is None or count.stop > stretch.stop else count


def _count_more(count: _Count, found: FoundEntries, stop: int) -> None:
    if found.runs and count.empty:
        count.oldest_ms, count.empty = found.oldest_ms, False
    count.bytes += sum(int(run.sizes.sum()) for run in found.runs.values())
    count.stop = stop


def _look(topic: str, counts: Mapping[_Stretch, _Count]) -> TopicBacklog | None:
    filled = [(stretch, count) for stretch, count in counts.items() if not count.empty]
    if not filled:
        return None
    first, oldest = filled[0]
    target = TopicRange(topic, first.start, first.stop)
    return TopicBacklog(target, Pending(sum(count.bytes for _, count in filled), oldest.oldest_ms))
