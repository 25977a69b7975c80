"""Which topics the next round takes, and what of each: within the segment of its first record that is not archived."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from infra.clock import Clock
from lifecycle.backlog import Backlog, Look
from lifecycle.hot_store import HotStore, Segment
from lifecycle.retention import Pending, Policy, due_topics, waited_as_by_default, wanted_segments
from neve.archive.catalog.catalog import Catalog
from tiered.write.offload_plan import TopicRange, TopicUnreadable, begun_again
from tiered.write.set_aside import SetAside

_BREATH = 32  # topics between two


class Due:
    """`set_aside` notes the topics whose local files can't be read; the others go on without them."""

    def __init__(
        self,
        hot: HotStore,
        catalog: Catalog,
        policy: Callable[[], Policy],
        clock: Clock,
        set_aside: SetAside,
        *,
        is_copy: bool = False,
    ) -> None:
        """`is_copy`: the log is the copy of an Apache master's, whose topics may begin again at offset 0."""
        self._is_copy = is_copy
        self._hot, self._catalog, self._policy, self._clock = hot, catalog, policy, clock
        self._set_aside = set_aside
        self._backlog = Backlog(hot, catalog)
        # Of what is not archived, as the last look saw it, and as if archiveMaxAge held for each topic.
        self.oldest_ms = -1  # below 0: nothing, or of unknown age

    def reach(self) -> int:
        """Where what may be archived ends, as it stands now."""
        return self._hot.flush()

    def ranges(self, *, everything: bool) -> list[TopicRange]:
        """The topics of the next round with their ranges: those whose time has come, or all."""
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
        """What each topic has still to archive, as it stands now; topics without are not there.

        `pause`: called again and again on the way.
        """
        _, end = self._hot.confirmed_range()  # no further: a count is kept, and what appears in it later never counted
        segments = sorted(self._hot.segments(), key=lambda segment: segment.base)
        archived = self._policy().archived
        topics = [topic for topic in self._hot.topics() if archived(topic)]
        looks = self._of(topics, segments, end)  # what can't be read the next round sets aside, and says why
        pending: dict[str, Pending] = {}
        for number, (topic, found) in enumerate(looks):
            if isinstance(found, Look):
                pending[topic] = found.pending
            if number % _BREATH == 0:
                pause()
        return pending

    def _not_open(self, topics: Iterable[str]) -> list[str]:
        """Archived topics of which no earlier round has left anything open."""
        open_topics = {name.topic for names in self._catalog.rounds.open_intents().values() for name in names}
        archived = self._policy().archived
        return [topic for topic in topics if topic not in open_topics and archived(topic)]

    def _of(
        self, topics: Sequence[str], segments: Sequence[Segment], end: int
    ) -> Iterator[tuple[str, Look | TopicUnreadable | None]]:
        gone_below = self._policy().gone_below
        for topic, found in self._backlog.of(((topic, gone_below(topic)) for topic in topics), segments, end):
            if isinstance(found, Look) and self._is_copy and gone_below(topic):
                try:
                    self._refuse_begun_again(topic)
                except TopicUnreadable as error:
                    yield topic, error
                    continue
            yield topic, found

    def _refuse_begun_again(self, topic: str) -> None:
        """Of a topic that was deleted and has come again: what it had may have expired since (`plan_topic` sees what
        has not), and what is archived below that no reader would see."""
        for queue in self._hot.queues_of(topic):
            minimum = self._catalog.recorded_minimum(topic, queue)
            if self._hot.min_offset(topic, queue) < minimum:
                raise TopicUnreadable(begun_again(topic, queue, minimum - 1))


def settled_through(catalog: Catalog) -> dict[str, int]:
    """Topic -> the CommitLog offset below which it is settled in the archive."""
    return {topic: catalog.through(topic) or 0 for topic in catalog.topics()}


def ages_ms(pending: Mapping[str, Pending], now_ms: int) -> dict[str, int]:
    """Topic -> how old its oldest message is that is not archived."""
    return {topic: max(0, now_ms - what.oldest_ms) if what.oldest_ms >= 0 else 0 for topic, what in pending.items()}
