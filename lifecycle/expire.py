"""Expire: what has outlived its TTL leaves the readers' view, in both tiers, and after the grace the bucket.

EXPIRE comes first, deletion later, DELETED last; a crash in between leaves what the next run goes on with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from infra import failpoint
from lifecycle.evict import EVERYTHING
from lifecycle.hot_expiry import HotExpiry
from lifecycle.hot_store import HotStore
from lifecycle.recorded_minimums import minimums_to_raise
from lifecycle.retention import Policy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from neve.archive.expiry import expire_topic, plan_dropped
from neve.archive.journal import Deleted, Expire, Topic
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)

DELETE_BATCH = 500
_ANY_TIME = 1 << 62


class ExpireLocal:
    """The job without an archive: the hot tier alone."""

    def __init__(self, hot_expiry: HotExpiry, safe_clock: SafeClock, turns: Turns) -> None:
        self._hot_expiry, self._safe_clock, self._turns = hot_expiry, safe_clock, turns

    def run(self) -> dict[str, int]:
        """How many queues' minimums rose."""
        with self._turns:
            return {"expired": 0, "deleted": 0, "raised": self._hot_expiry.hide(self._safe_clock.now_ms())}


class ExpireArchived:
    """The job with an archive: both tiers."""

    def __init__(  # noqa: PLR0917
        self,
        hot: HotStore,
        journal: JournalWriter,
        hot_expiry: HotExpiry,
        policy: Callable[[], Policy],
        safe_clock: SafeClock,
        turns: Turns,
        *,
        is_member: bool = False,
        is_of: Callable[[], int],
    ) -> None:
        """`is_member`: of a broker set. `is_of`: the CommitLog offset up to which the archive is of this log."""
        self._is_member, self._is_of = is_member, is_of
        self._hot, self._journal, self._hot_expiry, self._policy = hot, journal, hot_expiry, policy
        self._safe_clock, self._turns = safe_clock, turns
        self.deleted = 0  # objects, since the start

    def run(self) -> dict[str, int]:
        """Take what has expired out of view, and delete what has been out of view for the grace."""
        with self._turns:
            if not self._journal.leads:
                self._journal.follow()
                return {"expired": 0, "deleted": 0, "raised": self._hide_as_master()}
            self._journal.ensure_online()
            self._journal.follow()
            self._complete_tombstones()
            now = self._safe_clock.now_ms(self._journal.store)
            expired = self._expire_objects(now)
            raised = self._hot_expiry.hide(now)
            return {"expired": expired, "deleted": self._delete_expired(now), "raised": raised}

    def _hide_as_master(self) -> int:
        """A slave's readers see what its master's do: by the journal, as soon as it is told of it."""
        hot = self._hot
        if self._is_of() < EVERYTHING:  # what it calls gone may be there again
            return 0
        queues = {topic: hot.queues_of(topic) for topic in hot.topics()}
        rising = minimums_to_raise(queues, self._journal.catalog.recorded_minimum, hot.min_offset)
        if rising:
            hot.expire_below(rising, dict.fromkeys(rising, _ANY_TIME))
        return sum(map(len, rising.values()))

    def _complete_tombstones(self) -> None:
        """What was sent while a topic's deletion was being recorded, and whose own tombstone the store did not take.

        In a broker set also what all its members did not have yet: an offset that one may give again must not be named.
        """
        catalog, gone_below = self._journal.catalog, self._policy().gone_below
        deleted = self._hot.deleted_below()
        end = self._hot.flush() if self._is_member and deleted else None
        for topic, ends in deleted.items():
            if end is not None and gone_below(topic) > end:
                continue
            named = catalog.named_offsets(topic)
            minimums = {queue: catalog.recorded_minimum(topic, queue) for queue in ends}
            if any(minimums[queue] < end and minimums[queue] <= named.get(queue, -1) for queue, end in ends.items()):
                self._journal.append(Topic(topic=topic, deleted=True, minimums=dict(ends)))
                log.warning("topic %s was deleted below %s, which the archive did not know yet", topic, dict(ends))

    def _expire_objects(self, now: int) -> int:
        keys, minimums = self._plan(now)
        expired = set(keys)
        dropped = [key for key in self._dropped() if key not in expired]
        after = now + self._policy().grace_ms
        if keys or minimums:
            self._journal.append(Expire(keys=keys, delete_after_ms=after, minimums=minimums))
        if dropped:
            self._journal.append(Expire(keys=dropped, delete_after_ms=after, reason="topic deleted"))
        if keys or dropped:
            grace = self._policy().grace_ms // 1000
            log.info("%d objects expired, %d of deleted topics; gone in %d s", len(keys), len(dropped), grace)
        failpoint.hit("ttl.after_expire")
        return len(keys) + len(dropped)

    def _plan(self, now: int) -> tuple[list[str], dict[str, dict[int, int]]]:
        """Objects to expire and queues' new minimums; looks at the oldest objects of topics with a TTL, no further."""
        catalog, policy = self._journal.catalog, self._policy()
        keys: list[str] = []
        minimums: dict[str, dict[int, int]] = {}
        for topic in catalog.topics_with_objects():
            plan = expire_topic(catalog, topic, policy.ttl_ms(topic), now)
            keys += plan.keys
            if plan.minimums:
                minimums[topic] = plan.minimums
        return keys, minimums

    def _dropped(self) -> list[str]:
        catalog = self._journal.catalog
        dropped: list[str] = []
        for topic in catalog.topics_with_objects():
            entry = catalog.topic_entry(topic)
            if entry is not None and entry.minimums:
                dropped += plan_dropped(catalog.from_oldest(topic), entry.minimums)
        return dropped

    def _delete_expired(self, now: int) -> int:
        """Only names whose EXPIRE time has passed; one of them gone already is as good as deleted."""
        due = self._journal.catalog.due_names(now)
        for position in range(0, len(due), DELETE_BATCH):
            batch = due[position : position + DELETE_BATCH]
            for key in batch:
                self._journal.store.delete(key)
                failpoint.hit("ttl.after_delete")
            self._journal.append(Deleted(keys=batch))
            self.deleted += len(batch)
            log.info("%d expired objects are deleted", len(batch))
        return len(due)
