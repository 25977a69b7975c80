"""Job that expires messages by their TTL: it hides them in both tiers, and deletes their objects after the grace.

The EXPIRE entry is written first. Objects are deleted later, and the DELETED entry is last. After a crash in between,
the next run completes the work.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from infra import failpoint
from infra.loop.pace import Pace
from lifecycle.evict import EVERYTHING
from lifecycle.hot_expiry import HotExpiry
from lifecycle.hot_store import HotStore
from lifecycle.recorded_minimums import minimums_to_raise
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from neve.archive.format.journal import CommittedObject, Deleted, Expire, Topic
from neve.archive.policy.expiry import expire_topic, plan_dropped
from tiered.journal.writer import JournalWriter
from tiered.worker.failed import WorkerFailed

log = logging.getLogger(__name__)

# Objects that are named in one entry and deleted in one turn. Other jobs wait for as long as a batch takes.
DELETE_BATCH = 250
EXPIRE_BATCH = 500
_TOPICS_AT_ONCE = 2_000  # topics without expired objects per turn; each turn costs requests for the journal's end
_ANY_TIME = 1 << 62


@dataclass(slots=True)
class _Batch:
    """The work of one turn: expired keys with their queues' minimums, and objects of deleted topics."""

    keys: list[str] = field(default_factory=list)
    minimums: dict[str, dict[int, int]] = field(default_factory=dict)
    former: list[str] = field(default_factory=list)
    size: int = 0
    current_topic: str = ""  # the topic whose remaining keys follow in the next batch


class ExpireMessages:
    """The expire job: both tiers, or the hot tier alone if there is no archive (`journal` is None)."""

    def __init__(  # noqa: PLR0917
        self,
        hot: HotStore,
        journal: JournalWriter | None,
        hot_expiry: HotExpiry,
        policy: Callable[[], RetentionPolicy],
        safe_clock: SafeClock,
        turns: Turns,
        *,
        pace: Callable[[], Pace],
        is_member: bool = False,
        described_below: Callable[[], int],
        forget: Callable[[Sequence[CommittedObject]], None],
    ) -> None:
        """`pace`: creates the pace of a run. `is_member`: whether the broker is a member of a broker set.

        `described_below`: returns the CommitLog offset up to which the archive describes this broker's log.
        `forget`: removes objects from the caches, and raises WorkerFailed if it can't.
        """
        self._forget = forget
        self._is_member, self._described_below = is_member, described_below
        self._hot, self._journal, self._hot_expiry, self._policy = hot, journal, hot_expiry, policy
        self._safe_clock, self._turns, self._pace = safe_clock, turns, pace
        self.deleted = 0  # objects, since the start

    def run(self) -> dict[str, int]:
        """Hide expired messages, and delete objects that have been hidden for the grace."""
        journal, pace = self._journal, self._pace()
        if journal is None:
            with self._turns:
                return {"expired": 0, "deleted": 0, "raised": self._hot_expiry.hide(self._safe_clock.now_ms())}
        with self._turns:
            if not journal.ownership.leads:
                journal.ownership.follow()
                return {"expired": 0, "deleted": 0, "raised": self._hide_as_master(journal)}
            self._take_up(journal)
            self._complete_tombstones(journal)
            now = self._safe_clock.now_ms(journal.store)
            left = deque(journal.catalog.topics_with_objects())
            batch = self._expire_next(journal, left, "", now)
        expired, dropped = len(batch.keys), len(batch.former)
        while left and not self._turns.closed:
            pace.pause()
            with self._turns:
                self._take_up(journal)
                batch = self._expire_next(journal, left, batch.current_topic, now)
            expired, dropped = expired + len(batch.keys), dropped + len(batch.former)
        if expired or dropped:
            grace = self._policy().grace_ms // 1000
            log.info("objects expired: %d, of deleted topics: %d, deletion in %d s", expired, dropped, grace)
        failpoint.hit("ttl.after_expire")
        with self._turns:
            raised = self._hot_expiry.hide(now)
        return {"expired": expired + dropped, "deleted": self._delete_expired(journal, now, pace), "raised": raised}

    def _take_up(self, journal: JournalWriter) -> None:
        """Follow the journal at the start of a turn: since the last one the archive or its objects may have changed."""
        journal.ownership.confirm()

    def _hide_as_master(self, journal: JournalWriter) -> int:
        """Raise a slave's local minimums to those in the journal, so that its readers see what the master shows."""
        hot = self._hot
        if self._described_below() < EVERYTHING:  # offsets that the journal calls expired may have other messages here
            return 0
        queues = {topic: hot.queues_of(topic) for topic in hot.topics()}
        rising = minimums_to_raise(queues, journal.catalog.recorded_minimum, hot.min_offset)
        if rising:
            for topic, error in hot.expire_below(rising, dict.fromkeys(rising, _ANY_TIME)).items():
                self._hot_expiry.set_aside.note(topic, error)  # tried again by the next run
        return sum(map(len, rising.values()))

    def _complete_tombstones(self, journal: JournalWriter) -> None:
        """Write tombstones again for topics that got messages while their deletion was recorded.

        The store did not accept the tombstone of these messages. A member of a broker set waits until all members have
        them, because an offset that may be assigned again must not be named.
        """
        catalog, deleted_up_to = journal.catalog, self._policy().deleted_up_to
        deleted = self._hot.deleted_below()
        end = self._hot.flush() if self._is_member and deleted else None
        for topic, ends in deleted.items():
            if end is not None and deleted_up_to(topic) > end:
                continue
            named = catalog.named_offsets(topic)
            minimums = {queue: catalog.recorded_minimum(topic, queue) for queue in ends}
            if any(minimums[queue] < end and minimums[queue] <= named.get(queue, -1) for queue, end in ends.items()):
                journal.append(Topic(topic=topic, deleted=True, minimums=dict(ends)))
                log.warning("deletion of topic %s below %s recorded in the archive", topic, dict(ends))

    def _expire_next(self, journal: JournalWriter, left: deque[str], current_topic: str, now: int) -> _Batch:
        """Write the EXPIRE entries of the next batch, as planned in this turn."""
        batch = self._next_batch(journal, left, current_topic, now)
        after = now + self._policy().grace_ms
        if batch.keys or batch.minimums:
            journal.append(Expire(keys=batch.keys, delete_after_ms=after, minimums=batch.minimums))
        if batch.former:
            journal.append(Expire(keys=batch.former, delete_after_ms=after, reason="topic deleted"))
        return batch

    def _next_batch(self, journal: JournalWriter, left: deque[str], current_topic: str, now: int) -> _Batch:
        """Plan a batch for the next topics and take these from `left`, except one with keys for further batches.

        A topic's minimums are in the entry with its first keys. So readers lose everything below them in one step,
        however many entries the objects need. `current_topic`: the topic whose minimums are already written.
        """
        catalog, policy, batch = journal.catalog, self._policy(), _Batch()
        last = len(left) - _TOPICS_AT_ONCE
        while len(left) > max(last, 0) and batch.size < EXPIRE_BATCH:
            topic = left[0]
            most = EXPIRE_BATCH + 1 if topic == current_topic else None
            plan = expire_topic(catalog, topic, policy.ttl_ms(topic), now, most)
            former = self._former(journal, topic, set(plan.keys))
            batch.keys += plan.keys[:EXPIRE_BATCH]
            batch.former += former[:EXPIRE_BATCH]
            if plan.minimums:
                batch.minimums[topic] = plan.minimums
            batch.size += len(plan.keys) + len(plan.minimums) + len(former)
            if max(len(plan.keys), len(former)) > EXPIRE_BATCH:
                batch.current_topic = topic
                break
            left.popleft()
        return batch

    def _former(self, journal: JournalWriter, topic: str, expired: Container[str]) -> list[str]:
        """Return the objects from before a topic's deletion. Checks only the oldest objects."""
        catalog = journal.catalog
        entry = catalog.topic_entry(topic)
        if entry is None or not entry.minimums:
            return []
        return [key for key in plan_dropped(catalog.topic(topic).names(), entry.minimums) if key not in expired]

    def _delete_expired(self, journal: JournalWriter, now: int, pace: Pace) -> int:
        """Delete objects whose EXPIRE time has passed; an object that is missing already counts as deleted.

        Each batch has its own turn. Between two turns, objects may return to view or the archive's owner may change.
        """
        deleted, forgets = 0, True
        for batch in _batches(self._due(journal, now), DELETE_BATCH):
            if self._turns.closed:
                break
            with self._turns:
                self._take_up(journal)
                due = journal.catalog.still_due(batch, now)
                if not due:
                    continue
                journal.store.delete_many([key for keys in due.values() for key in keys])
                failpoint.hit("ttl.after_delete")
                erased = self._erased(journal, due)
                forgets = forgets and (not erased or self._forgotten(erased))
                kept = set() if forgets else {name.key for name in erased}
                removed = [key for keys in due.values() for key in keys if key not in kept]
                if removed:
                    journal.append(Deleted(keys=removed))
            deleted += len(removed)
            self.deleted += len(removed)
            pace.pause()
        if deleted:
            log.info("%d expired objects are deleted", deleted)
        return deleted

    def _due(self, journal: JournalWriter, now: int) -> Iterator[str]:
        catalog = journal.catalog
        with self._turns:
            topics = [] if self._turns.closed else catalog.expiring_topics()
        for topic in topics:
            yield from catalog.topic(topic).due(now)

    def _erased(self, journal: JournalWriter, due: Mapping[str, Sequence[str]]) -> list[CommittedObject]:
        """Return the objects of topics with erased messages: each of these objects may have contained some."""
        catalog = journal.catalog
        erased = [topic for topic in due if any(gap.is_erased for gap in catalog.gaps(topic))]
        keys = {topic: set(due[topic]) for topic in erased}
        return [
            name for topic in erased for _, name in catalog.topic(topic).expiring_names() if name.key in keys[topic]
        ]

    def _forgotten(self, erased: Sequence[CommittedObject]) -> bool:
        """Remove cached data of objects with erased messages, after their deletion, so that no copy is left here.

        Returns False if the next run has to retry. The caller does not retry in this run, because a worker that does
        not respond can take minutes to fail.
        """
        try:
            self._forget(erased)
        except WorkerFailed as error:
            log.warning("erased messages may still be in the cache of cold reads: %s; retrying", error)
            return False
        return True


def _batches(keys: Iterable[str], most: int) -> Iterator[list[str]]:
    left = iter(keys)
    while batch := list(islice(left, most)):
        yield batch
