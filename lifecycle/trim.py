"""Trim on an operator's request: a topic's queues begin at given offsets in both tiers, and messages below are deleted.

It works as expiry by a TTL does, but by offsets. An EXPIRE entry records the queues' minimums for readers, slaves and
restores; then the local minimums rise. Objects that are wholly below are deleted after the grace. Until then `unexpire`
brings back what still exists. An object that also has messages above remains until its TTL, and its messages below are
not visible. An interrupted trim is completed by repeating it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

from infra import failpoint
from lifecycle.hot_store import HotStore
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from neve.archive.format.journal import Expire
from neve.archive.policy.expiry import plan_dropped
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)

# Objects named in one entry.
_BATCH = 500
_ANY_TIME = 1 << 62


class TrimRefused(Exception):
    """The trim is impossible; nothing was changed."""


class Trimmed(NamedTuple):
    """The new first offset of each trimmed queue, and the number of objects that left the readers' view."""

    topic: str
    begins: Mapping[int, int]
    objects: int


class TrimTopic:
    """The trim in both tiers, or in the hot tier alone if there is no archive (`journal` is None)."""

    def __init__(
        self,
        hot: HotStore,
        journal: JournalWriter | None,
        policy: Callable[[], RetentionPolicy],
        safe_clock: SafeClock,
        turns: Turns,
        *,
        is_member: bool,
        is_copy: bool,
    ) -> None:
        """`is_member`: the broker is a member of a broker set.

        `is_copy`: the log is a copy of another master's, which would still show the messages.
        """
        self._hot, self._journal, self._policy = hot, journal, policy
        self._safe_clock, self._turns = safe_clock, turns
        self._is_member, self._is_copy = is_member, is_copy

    def run(self, topic: str, wanted: Mapping[int, int]) -> Trimmed:
        """Trim queues of a topic to the wanted offsets.

        Raises:
            TrimRefused: the trim is impossible.
            StalePlan: the topic was deleted meanwhile.
            TopicUnreadable: the local log could not hide the messages. The archive has; repeat to complete it.

        It also raises the errors of an append to the journal.
        """
        if self._is_copy:
            raise TrimRefused("this broker has a copy of a master's log: trim at the master")
        if self._journal is None and self._is_member:
            raise TrimRefused("a broker set without an archive cannot notify its slaves of a trim")
        with self._turns:
            if self._journal is not None:
                return self._trim_both(self._journal, topic, wanted)
            _hide(self._hot, topic, _rising(self._hot, topic, wanted))
            return Trimmed(topic, _begins(self._hot, topic, wanted), 0)

    def _trim_both(self, journal: JournalWriter, topic: str, wanted: Mapping[int, int]) -> Trimmed:
        if not journal.ownership.leads:
            raise TrimRefused("this broker is not the master of its set")
        journal.ownership.confirm()
        mark = journal.named.mark()
        rising = _rising(self._hot, topic, wanted)
        objects = self._expire(journal, topic, rising, mark) if self._policy().archived(topic) else 0
        failpoint.hit("trim.after_expire")
        _hide(self._hot, topic, rising)
        recorded = journal.catalog.recorded_minimum
        begins = {queue: max(offset, recorded(topic, queue)) for queue, offset in rising.items()}
        return Trimmed(topic, {**_begins(self._hot, topic, wanted), **begins}, objects)

    def _expire(self, journal: JournalWriter, topic: str, rising: Mapping[int, int], mark: int) -> int:
        """Write the EXPIRE entries. The first one has the minimums, so that readers lose all messages in one step."""
        catalog = journal.catalog
        recorded = {queue: catalog.recorded_minimum(topic, queue) for queue in {*rising, *catalog.queues(topic)}}
        below = {queue: max(rising.get(queue, 0), recorded[queue]) for queue in catalog.queues(topic)}
        keys = plan_dropped(catalog.topic(topic).names(), below)
        raised = {queue: offset for queue, offset in rising.items() if offset > recorded[queue]}
        after = self._safe_clock.now_ms(journal.store) + self._policy().grace_ms
        if raised:
            first = Expire(keys=keys[:_BATCH], delete_after_ms=after, minimums={topic: raised}, reason="trimmed")
            journal.append(first, plan=mark)
        elif keys:
            journal.append(Expire(keys=keys[:_BATCH], delete_after_ms=after, reason="trimmed"))
        for at in range(_BATCH, len(keys), _BATCH):
            journal.append(Expire(keys=keys[at : at + _BATCH], delete_after_ms=after, reason="trimmed"))
        log.warning("topic %s trimmed to %s: %d objects expired", topic, dict(rising), len(keys))
        return len(keys)


def _rising(hot: HotStore, topic: str, wanted: Mapping[int, int]) -> dict[int, int]:
    """Check the wanted offsets: messages below must be durable on all electable members, so that none is reassigned.

    Raises:
        TrimRefused: a queue does not exist, or ends below its offset.
    """
    if missing := sorted(set(wanted) - set(hot.queues_of(topic))):
        raise TrimRefused(f"{topic} has no message in queue {', '.join(map(str, missing))} here")
    ends = hot.first_offsets(topic, hot.flush())
    if above := [f"queue {queue} ends at {ends[queue]}" for queue, offset in wanted.items() if offset > ends[queue]]:
        raise TrimRefused(f"{topic}: {', '.join(above)}")
    return dict(wanted)


def _hide(hot: HotStore, topic: str, rising: Mapping[int, int]) -> None:
    above = {queue: offset for queue, offset in rising.items() if offset > hot.min_offset(topic, queue)}
    if above:
        for error in hot.expire_below({topic: above}, {topic: _ANY_TIME}).values():
            raise error


def _begins(hot: HotStore, topic: str, wanted: Mapping[int, int]) -> dict[int, int]:
    return {queue: hot.min_offset(topic, queue) for queue in wanted}
