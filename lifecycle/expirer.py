"""Expiry: what has outlived its TTL leaves the readers' view, in both tiers, and after the grace the bucket.

EXPIRE comes first, deletion later, DELETED last; a crash in between leaves what the next run goes on with.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from infra import failpoint
from infra.clock import Clock
from lifecycle.hot_store import HotStore
from lifecycle.retention import Policy, deletable
from lifecycle.safe_clock import SafeClock
from lifecycle.unexpire import is_there, plan_undo, show_local
from neve.archive.expiry import plan_dropped, plan_expiry
from neve.archive.journal import Deleted, Expire, Topic, Unexpire
from tiered.journal.named_topics import StalePlan
from tiered.journal.writer import JournalWriter
from tiered.write.offload_plan import TopicUnreadable
from tiered.write.set_aside import SetAside

_log = logging.getLogger(__name__)

DELETE_BATCH = 500


class Expirer:
    """`journal` is None where no archive is configured."""

    def __init__(
        self,
        hot: HotStore,
        journal: JournalWriter | None,
        policy: Callable[[], Policy],
        clock: Clock,
        safe_clock: SafeClock,
    ) -> None:
        self._hot, self._journal, self._policy = hot, journal, policy
        self._clock, self._safe_clock = clock, safe_clock
        self.set_aside = SetAside("expired")
        self.deleted = 0  # objects, since the start

    def run(self) -> dict[str, int]:
        if self._journal is None:
            return {"expired": 0, "deleted": 0, "raised": self._expire_local(self._safe_clock.now_ms())}
        self._journal.ensure_online()
        self._journal.follow()
        self._bury_the_rest()
        now = self._safe_clock.now_ms(self._journal.store)
        expired = self._expire_objects(now)
        raised = self._expire_local(now)
        return {"expired": expired, "deleted": self._delete_expired(now), "raised": raised}

    def undo(self) -> dict[str, int]:
        """See `unexpire`."""
        if self._journal is not None:
            self._journal.ensure_online()
            self._journal.follow()
        now = self._safe_clock.now_ms(self._journal.store if self._journal is not None else None)
        local, moved = show_local(self._hot)
        back = self._unexpire_objects(local, now)
        self._expire_local(now)
        return {"objects": back, "local_queues": moved}

    def _unexpire_objects(self, local: Mapping[str, Mapping[int, int]], now: int) -> int:
        if self._journal is None:
            return 0
        undo = plan_undo(self._journal.catalog, local, self._policy(), now, is_there(self._journal.store))
        if undo.keys or undo.minimums:
            self._journal.append(Unexpire(keys=undo.keys, minimums=undo.minimums))
            _log.warning("%d expired objects are back in view", len(undo.keys))
        return len(undo.keys)

    def _bury_the_rest(self) -> None:
        """What was sent while a topic's deletion was being recorded, and whose own tombstone the store did not take."""
        assert self._journal is not None
        catalog = self._journal.catalog
        for topic, ends in self._hot.deleted_below().items():
            named = catalog.named_offsets(topic)
            minimums = {queue: catalog.recorded_minimum(topic, queue) for queue in ends}
            if any(minimums[queue] < end and minimums[queue] <= named.get(queue, -1) for queue, end in ends.items()):
                self._journal.append(Topic(topic=topic, deleted=True, minimums=dict(ends)))
                _log.warning("topic %s was deleted below %s, which the archive did not know yet", topic, dict(ends))

    def _expire_objects(self, now: int) -> int:
        assert self._journal is not None
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
            _log.info("%d objects expired, %d of deleted topics; gone in %d s", len(keys), len(dropped), grace)
        failpoint.hit("ttl.after_expire")
        return len(keys) + len(dropped)

    def _plan(self, now: int) -> tuple[list[str], dict[str, dict[int, int]]]:
        """Objects to expire and queues' new minimums; looks at the oldest objects of topics with a TTL, no further."""
        assert self._journal is not None
        catalog, policy = self._journal.catalog, self._policy()
        keys: list[str] = []
        minimums: dict[str, dict[int, int]] = {}
        for topic in catalog.topics_with_objects():
            ttl = policy.ttl_ms(topic)
            if ttl is None:
                continue
            recorded = functools.partial(catalog.recorded_minimum, topic)
            plan = plan_expiry(catalog.from_oldest(topic), ttl, now, recorded)
            keys += plan.keys
            if plan.minimums:
                minimums[topic] = plan.minimums
        return keys, minimums

    def _dropped(self) -> list[str]:
        assert self._journal is not None
        catalog = self._journal.catalog
        dropped: list[str] = []
        for topic in catalog.topics_with_objects():
            entry = catalog.topic_entry(topic)
            if entry is not None and entry.minimums:
                dropped += plan_dropped(catalog.from_oldest(topic), entry.minimums)
        return dropped

    def _expire_local(self, now: int) -> int:
        """The TTL holds on the hot tier too: a queue's minimum moves up, never back."""
        plan = self._journal.plan_mark() if self._journal is not None else 0
        rising, before = self._rising(now)
        try:
            self._record_unarchived(rising, plan)
        except StalePlan:
            return self._expire_local(now)
        if rising:
            # A topic may have come again meanwhile, at offset 0: only what is old now goes.
            self._hot.expire_below(rising, before)
        return sum(map(len, rising.values()))

    def _rising(self, now: int) -> tuple[dict[str, dict[int, int]], dict[str, int]]:
        """topic -> queue -> its new minimum; topic -> the time before which its TTL lets go."""
        rising: dict[str, dict[int, int]] = {}
        before: dict[str, int] = {}
        policy, topics = self._policy(), self._hot.topics()
        self.set_aside.keep(set(topics))
        for topic in topics:
            ttl = policy.ttl_ms(topic)
            if ttl is None:
                continue
            before[topic] = now - ttl + 1
            try:
                queues = self._hot.queues_of(topic)
                ends = {queue: self._hot.offset_by_time(topic, queue, before[topic], False) for queue in queues}
            except TopicUnreadable as error:
                self.set_aside.note(topic, error)
                continue
            self.set_aside.clear(topic)
            risen = {queue: end for queue, end in ends.items() if end > self._hot.min_offset(topic, queue)}
            if risen:
                rising[topic] = risen
        return rising, before

    def _record_unarchived(self, rising: Mapping[str, Mapping[int, int]], plan: int) -> None:
        """What expires before a round has taken it must not come back into view with that round's COMMIT.

        Raises StalePlan where a topic was deleted meanwhile: it may begin at offset 0 again.
        """
        if self._journal is None:
            return
        catalog, archived = self._journal.catalog, self._policy().archived
        minimums: dict[str, dict[int, int]] = {}
        for topic in filter(archived, rising):
            for queue, offset in rising[topic].items():
                recorded = catalog.recorded_minimum(topic, queue)
                if offset > recorded and not catalog.has_all(topic, queue, recorded, offset):
                    minimums.setdefault(topic, {})[queue] = offset
        if minimums:
            after = self._clock.now_ms() + self._policy().grace_ms  # of no object
            self._journal.append(Expire(keys=[], delete_after_ms=after, minimums=minimums), plan=plan)

    def _delete_expired(self, now: int) -> int:
        """Only names whose EXPIRE time has passed; one of them gone already is as good as deleted."""
        assert self._journal is not None
        due = deletable(self._journal.catalog.expiring(), now)
        for position in range(0, len(due), DELETE_BATCH):
            batch = due[position : position + DELETE_BATCH]
            for key in batch:
                self._journal.store.delete(key)
                failpoint.hit("ttl.after_delete")
            self._journal.append(Deleted(keys=batch))
            self.deleted += len(batch)
            _log.info("%d expired objects are deleted", len(batch))
        return len(due)
