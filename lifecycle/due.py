"""Selection of topics and ranges for the next offload round.

A topic's range is within the segment of its first unarchived record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from infra.clock import Clock
from lifecycle.backlog import Backlog, TopicBacklog
from lifecycle.hot_store import HotStore, LogSegment
from lifecycle.retention import Pending, RetentionPolicy, due_topics, waited_as_by_default, wanted_segments
from neve.archive.catalog.catalog import Catalog
from tiered.write.offload_plan import TopicRange, TopicUnreadable, restarted_text
from tiered.write.set_aside import SetAside

_BREATH = 32  # topics between two calls of `pause`


class Due:
    """Topics due for offload. `set_aside` records topics with unreadable local files; other topics are unaffected."""

    def __init__(
        self,
        hot: HotStore,
        catalog: Catalog,
        policy: Callable[[], RetentionPolicy],
        clock: Clock,
        set_aside: SetAside,
        *,
        is_copy: bool = False,
    ) -> None:
        """`is_copy`: the log is a copy of an Apache master's, whose topics may begin again at offset 0."""
        self._is_copy = is_copy
        self._hot, self._catalog, self._policy, self._clock = hot, catalog, policy, clock
        self._set_aside = set_aside
        self._backlog = Backlog(hot, catalog)
        # The oldest unarchived message of the last look, normalized as if archiveMaxAge applied to each topic.
        self.oldest_ms = -1  # below 0: none, or its age is unknown

    def reach(self) -> int:
        """Return the CommitLog offset below which records may be archived now."""
        return self._hot.flush()

    def ranges(self, *, everything: bool) -> list[TopicRange]:
        """Return the ranges of the next round: those of due topics, or with `everything` of all topics."""
        end = self._hot.flush()
        segments = sorted(self._hot.segments(), key=lambda segment: segment.base)
        ranges: dict[str, TopicRange] = {}
        pending: dict[str, Pending] = {}
        topics = self._hot.topics()
        existing = set(topics)
        self._set_aside.keep(existing)
        self._backlog.keep(existing, segments)
        for topic, found in self._of(self._not_open(topics), segments, end):
            if isinstance(found, TopicUnreadable):
                self._set_aside.note(topic, found)
            elif found is not None:
                ranges[topic], pending[topic] = found
            else:
                self._set_aside.clear(topic)
        now, policy = self._clock.now_ms(), self._policy()
        self.oldest_ms = waited_as_by_default(pending, policy, now)
        if everything:
            return [ranges[topic] for topic in sorted(ranges)]
        wanted = wanted_segments(segments, policy, now, self._hot.disk_ratio())
        due = due_topics(pending, wanted, settled_through(self._catalog), policy, now)
        return [ranges[topic] for topic in due]

    def pending(self, pause: Callable[[], None] = lambda: None) -> dict[str, Pending]:
        """Return the unarchived part of each topic that has any.

        `pause` is called repeatedly between topics.
        """
        # Counts are kept, so records that appear later below `end` would be missed.
        _, end = self._hot.confirmed_range()
        segments = sorted(self._hot.segments(), key=lambda segment: segment.base)
        archived = self._policy().archived
        topics = [topic for topic in self._hot.topics() if archived(topic)]
        looks = self._of(topics, segments, end)  # unreadable topics are skipped here and reported by the next round
        pending: dict[str, Pending] = {}
        for number, (topic, found) in enumerate(looks):
            if isinstance(found, TopicBacklog):
                pending[topic] = found.pending
            if number % _BREATH == 0:
                pause()
        return pending

    def _not_open(self, topics: Iterable[str]) -> list[str]:
        """Return the archived topics without an open name of an earlier round."""
        open_topics = {name.topic for names in self._catalog.rounds.open_intents().values() for name in names}
        archived = self._policy().archived
        return [topic for topic in topics if topic not in open_topics and archived(topic)]

    def _of(
        self, topics: Sequence[str], segments: Sequence[LogSegment], end: int
    ) -> Iterator[tuple[str, TopicBacklog | TopicUnreadable | None]]:
        deleted_up_to = self._policy().deleted_up_to
        for topic, found in self._backlog.of(((topic, deleted_up_to(topic)) for topic in topics), segments, end):
            if isinstance(found, TopicBacklog) and self._is_copy and deleted_up_to(topic):
                try:
                    self._refuse_restarted_topic(topic)
                except TopicUnreadable as error:
                    yield topic, error
                    continue
            yield topic, found

    def _refuse_restarted_topic(self, topic: str) -> None:
        """Raise TopicUnreadable if a queue of a deleted and recreated topic begins below its recorded minimum.

        Readers would not see objects below the minimum. `plan_topic` detects the same by records that are in view.
        """
        for queue in self._hot.queues_of(topic):
            minimum = self._catalog.recorded_minimum(topic, queue)
            if self._hot.min_offset(topic, queue) < minimum:
                raise TopicUnreadable(restarted_text(topic, queue, minimum - 1))


def settled_through(catalog: Catalog) -> dict[str, int]:
    """Return for each topic the CommitLog offset below which it is settled in the archive."""
    return {topic: catalog.through(topic) or 0 for topic in catalog.topics()}


def ages_ms(pending: Mapping[str, Pending], now_ms: int) -> dict[str, int]:
    """Return the age of each topic's oldest unarchived message in milliseconds; 0 if it is unknown."""
    return {topic: max(0, now_ms - what.oldest_ms) if what.oldest_ms >= 0 else 0 for topic, what in pending.items()}
