"""What each topic has still to archive: sealed segments are counted once, of the active one what is new.

For each topic and segment: where its part that is not archived begins, how far that was counted, how many bytes it has
and from when its oldest message is. A count holds as long as its beginning does.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Sequence

import msgspec

from lifecycle.hot_store import HotStore, Segment
from lifecycle.retention import Pending
from neve.archive.catalog import Catalog
from tiered.write.offload_plan import TopicRange


class _Count(msgspec.Struct, gc=False):
    start: int
    stop: int
    bytes: int = 0
    oldest_ms: int = -1
    empty: bool = True


class Backlog:
    """Thread-safe: jobs and scrapes ask it."""

    def __init__(self, hot: HotStore, catalog: Catalog) -> None:
        self._hot, self._catalog = hot, catalog
        self._counts: dict[str, dict[int, _Count]] = {}
        self._born: dict[str, int] = {}
        self._lock = threading.Lock()

    def keep(self, topics: Container[str], segments: Iterable[Segment]) -> None:
        """Forget topics and segments that are gone."""
        bases = {segment.base for segment in segments}
        with self._lock:
            for topic in [topic for topic in self._counts if topic not in topics]:
                del self._counts[topic]
            for counts in self._counts.values():
                for base in counts.keys() - bases:
                    del counts[base]

    def of(
        self, topic: str, segments: Sequence[Segment], end: int, gone_below: int = 0
    ) -> tuple[TopicRange, Pending] | None:
        """The range of its next round, within the segment of its first unarchived record, and all that is pending.

        `segments` are in log order; `gone_below` is where the topic came again: older counts are of another.
        Raises TopicUnreadable.
        """
        with self._lock:
            if self._born.get(topic, 0) != gone_below:
                self._counts.pop(topic, None)
            self._born[topic] = gone_below
            through = self._catalog.through(topic) or 0
            target: TopicRange | None = None
            total, oldest = 0, -1
            for segment in segments:
                start, covered = self._catalog.next_uncovered(topic, max(segment.base, through))
                stop = min(segment.end, end if covered is None else min(end, covered))
                if start >= stop or segment.topics.get(topic, (-1, -1))[0] < start:
                    continue
                count = self._counted(topic, segment.base, start, stop)
                if count.empty:
                    continue
                total += count.bytes
                if target is None:
                    target, oldest = TopicRange(topic, start, stop), count.oldest_ms
            return (target, Pending(total, oldest)) if target is not None else None

    def _counted(self, topic: str, base: int, start: int, stop: int) -> _Count:
        counts = self._counts.setdefault(topic, {})
        count = counts.get(base)
        if count is None or count.start != start or count.stop > stop:
            counts.pop(base, None)
            count = _Count(start, start)
        if count.stop < stop:
            self._add(topic, count, stop)
            counts[base] = count
        return count

    def _add(self, topic: str, count: _Count, stop: int) -> None:
        runs = {q: run for q, run in self._hot.entries(topic, count.stop, stop).items() if len(run.physical)}
        if runs and count.empty:
            queue, run = min(runs.items(), key=lambda item: int(item[1].physical[0]))
            count.oldest_ms = self._hot.store_time(topic, queue, run.first_offset)
            count.empty = False
        count.bytes += sum(int(run.sizes.sum()) for run in runs.values())
        count.stop = stop
