"""What each topic has still to archive: sealed segments are counted once, of the active one what is new.

For each topic and stretch of a segment that no round has settled: how far it was counted, how many bytes it has and
from when its oldest message is. A count holds as long as the stretch begins there. A segment may have several: of a
round with two names the first may be closed without an object and the second be published.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import msgspec

from lifecycle.hot_store import HotStore, Segment
from lifecycle.retention import Pending
from neve.archive.catalog.catalog import Catalog
from tiered.write.offload_plan import Found, TopicRange, TopicUnreadable


class _Count(msgspec.Struct, gc=False):
    stop: int
    bytes: int = 0
    oldest_ms: int = -1
    empty: bool = True


class _Stretch(NamedTuple):
    """What no round has settled, within a segment."""

    base: int  # of the segment
    start: int
    stop: int
    last: int  # where the topic's last record in the segment is


class Look(NamedTuple):
    """What a look at a topic found: the range of its next round, within the segment of its first unarchived record,
    and all that is pending."""

    target: TopicRange
    pending: Pending


# Topics that are looked at in one go; a scrape waits for no more.
_AT_ONCE = 64


class Backlog:
    """Thread-safe: jobs and scrapes ask it."""

    def __init__(self, hot: HotStore, catalog: Catalog) -> None:
        self._hot, self._catalog = hot, catalog
        # Topic -> (base of the segment, begin of the stretch) -> count.
        self._counts: dict[str, dict[tuple[int, int], _Count]] = {}
        self._born: dict[str, int] = {}
        self._lock = threading.Lock()

    def keep(self, topics: Container[str], segments: Iterable[Segment]) -> None:
        """Forget topics and segments that are gone."""
        bases = {segment.base for segment in segments}
        with self._lock:
            for topic in [topic for topic in self._counts if topic not in topics]:
                del self._counts[topic]
            for counts in self._counts.values():
                for place in [place for place in counts if place[0] not in bases]:
                    del counts[place]

    def of(
        self, topics: Iterable[tuple[str, int]], segments: Sequence[Segment], end: int
    ) -> Iterator[tuple[str, Look | TopicUnreadable | None]]:
        """Of each topic, in turn; None: nothing is pending.

        `topics`: each with where it came again: older counts are of another.
        Below `end` all entries are visible: what is counted as empty here is not looked at again.
        `segments` are in log order, and not older than `end`.
        """
        left = iter(topics)
        while some := list(islice(left, _AT_ONCE)):
            with self._lock:
                found = self._looked_at(some, segments, end)
            yield from found

    def _looked_at(
        self, topics: Sequence[tuple[str, int]], segments: Sequence[Segment], end: int
    ) -> list[tuple[str, Look | TopicUnreadable | None]]:
        counts: dict[str, dict[_Stretch, _Count]] = {}
        new: list[tuple[TopicRange, _Count]] = []
        for topic, gone_below in topics:
            if self._born.get(topic, 0) != gone_below:
                self._counts.pop(topic, None)
            self._born[topic] = gone_below
            before = self._counts.get(topic, {})
            counts[topic] = {}
            for stretch in self._stretches(topic, segments, end):
                count = counts[topic][stretch] = _counted_before(before.get((stretch.base, stretch.start)), stretch)
                if count.stop <= stretch.last:  # else there is none between the two
                    new.append((TopicRange(topic, count.stop, stretch.stop), count))
        unreadable = self._add(new)
        found: list[tuple[str, Look | TopicUnreadable | None]] = []
        for topic, _ in topics:
            if topic in unreadable:
                found.append((topic, unreadable[topic]))
                continue
            for stretch, count in counts[topic].items():
                count.stop = stretch.stop
            self._counts[topic] = {(one.base, one.start): count for one, count in counts[topic].items()}
            found.append((topic, _look(topic, counts[topic])))
        return found

    def _stretches(self, topic: str, segments: Sequence[Segment], end: int) -> Iterator[_Stretch]:
        """As far as the topic has records."""
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
        """To the counts what has come since. Why some topics can't be read: what they had then holds, none is lost."""
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


def _count_more(count: _Count, found: Found, stop: int) -> None:
    if found.runs and count.empty:
        count.oldest_ms, count.empty = found.oldest_ms, False
    count.bytes += sum(int(run.sizes.sum()) for run in found.runs.values())
    count.stop = stop


def _look(topic: str, counts: Mapping[_Stretch, _Count]) -> Look | None:
    filled = [(stretch, count) for stretch, count in counts.items() if not count.empty]
    if not filled:
        return None
    first, oldest = filled[0]
    target = TopicRange(topic, first.start, first.stop)
    return Look(target, Pending(sum(count.bytes for _, count in filled), oldest.oldest_ms))
