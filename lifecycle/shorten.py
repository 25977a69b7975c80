"""Job that deletes journal entries that are covered by a checkpoint and older than the journal retention."""

from __future__ import annotations

import logging
from collections.abc import Callable

from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)

DELETE_BATCH = 100  # entries deleted in one turn; they are deleted one after another


class ShortenJournal:
    """The shorten job."""

    def __init__(
        self, journal: JournalWriter, policy: Callable[[], RetentionPolicy], safe_clock: SafeClock, turns: Turns
    ) -> None:
        self._journal, self._policy, self._safe_clock, self._turns = journal, policy, safe_clock, turns
        self.deleted = 0  # entries, since the start

    def run(self) -> int:
        """Delete old entries; returns how many. Each batch has its own turn, because the owner may change between."""
        due, deleted = self._due(), 0
        for position in range(0, len(due), DELETE_BATCH):
            if self._turns.closed:
                break
            batch = due[position : position + DELETE_BATCH]
            with self._turns:
                self._journal.ownership.confirm()
                self._journal.delete_entries(batch)
            deleted += len(batch)
            self.deleted += len(batch)
        if deleted:
            log.info("journal shortened: %d entries, up to %d", deleted, due[deleted - 1])
        return deleted

    def _due(self) -> list[int]:
        with self._turns:
            self._journal.ownership.confirm()
            now = self._safe_clock.now_ms(self._journal.store)
            return self._journal.entries_to_delete(now, self._policy().journal_retention_ms)
