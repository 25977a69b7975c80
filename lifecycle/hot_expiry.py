"""Expiry by TTL in the hot tier: a queue's minimum offset rises."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import takewhile

from infra.clock import Clock
from lifecycle.hot_store import HotStore
from lifecycle.retention import RetentionPolicy
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Expire
from tiered.journal.named_topics import StalePlan
from tiered.journal.writer import JournalWriter
from tiered.write.offload_plan import TopicUnreadable
from tiered.write.set_aside import SetAside

Minimums = dict[str, dict[int, int]]  # topic -> queue -> the lowest offset in view


class ExpiryRecord:
    """Record in the journal of messages that expired unarchived, so that the COMMIT of a later round keeps them hidden.

    Without an archive (`journal` is None) nothing is recorded: no round could show such messages again.
    """

    def __init__(self, journal: JournalWriter | None, policy: Callable[[], RetentionPolicy], clock: Clock) -> None:
        self._journal, self._policy, self._clock = journal, policy, clock

    def mark(self) -> int:
        """Return a mark of the record's state, taken before the queues are read."""
        return 0 if self._journal is None else self._journal.named.mark()

    def has_live(self, topic: str, queue: int, below: int, ttl_ms: int, now_ms: int) -> bool:
        """Whether recording this minimum would hide archived messages that have not expired.

        That is so after the clock was set back; then the whole minimum waits.
        """
        if self._journal is None or not self._policy().archived(topic):
            return False
        if not _is_new(self._journal.catalog, topic, queue, below):
            return False
        runs = self._journal.catalog.queue(topic, queue).runs_in_view()
        return any(not run.group.has_expired(ttl_ms, now_ms) for run in takewhile(lambda run: run.first < below, runs))

    def record(self, rising: Mapping[str, Mapping[int, int]], mark: int) -> None:
        """Record the minimums. Raises StalePlan if a topic was deleted since `mark`: it may begin at offset 0 again."""
        if self._journal is None:
            return
        archived = self._policy().archived
        minimums: Minimums = {}
        for topic in filter(archived, rising):
            for queue, offset in rising[topic].items():
                if _is_new(self._journal.catalog, topic, queue, offset):
                    minimums.setdefault(topic, {})[queue] = offset
        if minimums:
            after = self._clock.now_ms() + self._policy().grace_ms  # without effect: the entry names no object
            self._journal.append(Expire(keys=[], delete_after_ms=after, minimums=minimums), plan=mark)


def _is_new(catalog: Catalog, topic: str, queue: int, offset: int) -> bool:
    """Whether messages below are in no object, so that the expiry plan of the archive does not cover them."""
    recorded = catalog.recorded_minimum(topic, queue)
    return offset > recorded and not catalog.queue(topic, queue).has_all(recorded, offset)


class HotExpiry:
    """Hides expired messages, and shows again those that a wrong clock or TTL has hidden."""

    def __init__(
        self, hot: HotStore, record: ExpiryRecord, policy: Callable[[], RetentionPolicy], *, is_member: bool = False
    ) -> None:
        """`is_member`: of a broker set, whose next master may lack records that not all members have synced."""
        self._hot, self._record, self._policy, self._is_member = hot, record, policy, is_member
        self.set_aside = SetAside("expired")
        # Topic -> a time such that no message is older, as of the last look. Topics are skipped until their TTL is due.
        self._oldest_ms: dict[str, int] = {}

    def hide(self, now_ms: int) -> int:
        """Hide expired messages. Returns how many queues' minimums rose."""
        mark = self._record.mark()
        rising, before = self._rising(now_ms)
        if rising:
            # The outcome of the append may remain unknown. If these offsets were not durable, a start after a power
            # failure would assign them again, and the recorded minimum would hide the new messages.
            end = self._hot.flush()
            rising = self._within(rising, end) if self._is_member else rising
        try:
            self._record.record(rising, mark)
        except StalePlan:
            return self.hide(now_ms)
        if rising:
            # A topic may have been created again at offset 0 meanwhile, so only messages that are old now are hidden.
            for topic, error in self._hot.expire_below(rising, before).items():
                self.set_aside.note(topic, error)  # its minimum is unchanged, so the next run tries again
        return sum(map(len, rising.values()))

    def _within(self, rising: Minimums, end: int) -> Minimums:
        """Cap the minimums at the records in [0, end): only their offsets are never assigned again."""
        capped: Minimums = {}
        if not end:
            return capped
        for topic, offsets in rising.items():
            try:
                above = self._hot.first_offsets(topic, end)
            except TopicUnreadable as error:
                self.set_aside.note(topic, error)
                continue
            low = {queue: min(offset, above.get(queue, offset)) for queue, offset in offsets.items()}
            risen = {queue: offset for queue, offset in low.items() if offset > self._hot.min_offset(topic, queue)}
            if risen:
                capped[topic] = risen
        return capped

    def show(self) -> tuple[Minimums, int]:
        """Show all messages that the local log has; the caller then hides the expired ones again.

        Returns the minimums, and how many of them moved.
        """
        self._oldest_ms.clear()
        minimums: Minimums = {}
        moved = 0
        for topic in self._hot.topics():
            for queue in self._hot.queues_of(topic):
                before = self._hot.min_offset(topic, queue)
                minimums.setdefault(topic, {})[queue] = self._hot.show_from(topic, queue, 0)
                moved += minimums[topic][queue] < before
        return minimums, moved

    def _rising(self, now: int) -> tuple[Minimums, dict[str, int]]:
        """Return the queues' new minimums, and topic -> the time before which its messages have expired."""
        rising: Minimums = {}
        policy, topics = self._policy(), self._hot.topics()
        self.set_aside.keep(set(topics))
        ttls = {topic: ttl for topic in topics if (ttl := policy.ttl_ms(topic)) is not None}
        before = {topic: now - ttl + 1 for topic, ttl in ttls.items()}
        # At most now: a time from a clock that was ahead would exclude new messages from all later looks.
        known = self._oldest_ms = {
            topic: min(since, now) for topic, since in self._oldest_ms.items() if topic in before
        }
        wanted = {topic: time for topic, time in before.items() if known.get(topic, -1) < time}
        for topic, found in self._hot.aged(wanted):
            if isinstance(found, TopicUnreadable):
                self.set_aside.note(topic, found)
                continue
            self.set_aside.clear(topic)
            known[topic] = -1 if found.ends else found.oldest_ms
            risen = {
                queue: end
                for queue, end in found.ends.items()
                if not self._record.has_live(topic, queue, end, ttls[topic], now)
            }
            if risen:
                rising[topic] = risen
        return rising, before
