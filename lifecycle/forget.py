"""Job that removes names of deleted topics without remaining data from the archive's state and from this broker's.

A name is kept so that no offset is assigned twice while a message with it may be visible. It is no longer needed when
every object of the topic is deleted, its last record has left the local log, and the journal's retention has passed
since its tombstone. From then on the topic is as if it had never existed, and begins at offset 0 if it is created.

The FORGET entry is written first, then the queues' ends are removed from the local state. A topic that is created in
between, or after a crash there, continues above its old ends, which is harmless.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lifecycle.hot_store import HotStore
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)

FORGET_BATCH = 1_000  # names in one entry


class ForgetNames:
    """The job. It does nothing in a broker set: each member knows where the queues ended, and none may begin again."""

    def __init__(
        self,
        hot: HotStore,
        journal: JournalWriter,
        policy: Callable[[], RetentionPolicy],
        safe_clock: SafeClock,
        turns: Turns,
        *,
        is_alone: bool,
    ) -> None:
        self._hot, self._journal, self._policy = hot, journal, policy
        self._safe_clock, self._turns, self._is_alone = safe_clock, turns, is_alone

    def run(self) -> int:
        """Forget names; returns how many the archive has forgotten."""
        if not self._is_alone:
            return 0
        with self._turns:
            self._journal.ownership.confirm()
            forgotten = self._journal.forget(self._left_behind()[:FORGET_BATCH])
            # Includes topics left by a crash, and those that no entry ever named.
            exists, named = self._policy().exists, self._journal.named
            to_forget = [topic for topic in self._hot.deleted_topics() if not exists(topic) and topic not in named]
            self._hot.forget_deleted(to_forget)
        if forgotten:
            log.info("names of deleted topics removed: %d", len(forgotten))
        return len(forgotten)

    def _left_behind(self) -> list[str]:
        """Return deleted topics without data in either tier whose tombstone is old enough."""
        policy, hot = self._policy(), self._hot
        begin, _ = hot.confirmed_range()
        long_ago = self._safe_clock.now_ms(self._journal.store) - policy.journal_retention_ms
        known = set(hot.topics())
        return [
            tombstone.topic
            for tombstone in self._journal.catalog.forgettable()
            if tombstone.time_ms <= long_ago
            and tombstone.topic not in known
            and not policy.exists(tombstone.topic)
            and policy.deleted_up_to(tombstone.topic) <= begin
        ]
