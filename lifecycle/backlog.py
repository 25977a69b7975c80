"""What each topic has still to archive: sealed segments are counted once, of the active one what is new.

For each topic and stretch of a segment that no round has settled: how far it was counted, how many bytes it has and
from when its oldest message is. A count holds as long as the stretch begins there. A segment may have several: of a
round with two names the first may be closed without an object and the second be published.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from lifecycle.hot_store import HotStore, Segment
from lifecycle.retention import Pending
from neve.archive.catalog import Catalog
from tiered.write.offload_plan import TopicRange


class _Count(msgspec.Struct, gc=False):
    stop: int
    bytes: int = 0
    oldest_ms: int = -1
    empty: bool = True


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
        self, topic: str, segments: Sequence[Segment], end: int, gone_below: int = 0
    ) -> tuple[TopicRange, Pending] | None:
        """The range of its next round, within the segment of its first unarchived record, and all that is pending.

        Below `end` all entries are visible: what is counted as empty here is not looked at again.
        `segments` are in log order; `gone_below` is where the topic came again: older counts are of another.
        Raises TopicUnreadable.
        """
        with self._lock:
            if self._born.get(topic, 0) != gone_below:
                self._counts.pop(topic, None)
            self._born[topic] = gone_below
            target: TopicRange | None = None
            total, oldest = 0, -1
            before, counts = self._counts.get(topic, {}), dict[tuple[int, int], _Count]()
            for base, start, stop in self._stretches(topic, segments, end):
                count = self._counted(topic, before.get((base, start)), start, stop)
                counts[base, start] = count
                if count.empty:
                    continue
                total += count.bytes
                if target is None:
                    target, oldest = TopicRange(topic, start, stop), count.oldest_ms
            self._counts[topic] = counts
            return (target, Pending(total, oldest)) if target is not None else None

    def _stretches(self, topic: str, segments: Sequence[Segment], end: int) -> Iterator[tuple[int, int, int]]:
        """Base of the segment, and [begin, end) of what no round has settled, as far as the topic has records."""
        through = self._catalog.through(topic) or 0
        for segment in segments:
            last, at = segment.topics.get(topic, (-1, -1))[0], max(segment.base, through)
            while at <= last:
                start, covered = self._catalog.next_uncovered(topic, at)
                stop = min(segment.end, end if covered is None else min(end, covered))
                if start >= stop or last < start:
                    break
                yield segment.base, start, stop
                at = stop

    def _counted(self, topic: str, count: _Count | None, start: int, stop: int) -> _Count:
        if count is None or count.stop > stop:
            count = _Count(start)
        if count.stop < stop:
            self._add(topic, count, stop)
        return count

    def _add(self, topic: str, count: _Count, stop: int) -> None:
        runs = {q: run for q, run in self._hot.entries(topic, count.stop, stop).items() if len(run.physical)}
        if runs and count.empty:
            queue, run = min(runs.items(), key=lambda item: int(item[1].physical[0]))
            count.oldest_ms = self._hot.store_time(topic, queue, run.first_offset)
            count.empty = False
        count.bytes += sum(int(run.sizes.sum()) for run in runs.values())
        count.stop = stop
