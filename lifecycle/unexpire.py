"""Undo of expiry by a wrong clock or TTL, during the grace, while the objects still exist.

`neve.archive.policy.unexpiry` decides what returns to view.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from infra.objects.store import NotFound, ObjectStore
from lifecycle.hot_expiry import HotExpiry
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from neve.archive.format.journal import Unexpire
from neve.archive.policy.unexpiry import plan_unexpiry
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)


class UnexpireMessages:
    """The undo in both tiers, or in the hot tier alone if there is no archive (`journal` is None)."""

    def __init__(
        self,
        journal: JournalWriter | None,
        hot_expiry: HotExpiry,
        policy: Callable[[], RetentionPolicy],
        safe_clock: SafeClock,
        turns: Turns,
    ) -> None:
        self._journal, self._hot_expiry, self._policy = journal, hot_expiry, policy
        self._safe_clock, self._turns = safe_clock, turns

    def run(self) -> dict[str, int]:
        """Show messages again; returns how many objects and local queues changed."""
        journal = self._journal
        with self._turns:
            if journal is not None:
                journal.ownership.confirm()
            now = self._safe_clock.now_ms(None if journal is None else journal.store)
            local, moved = self._hot_expiry.show()
            back = 0 if journal is None else self._unexpire_objects(journal, local, now)
            self._hot_expiry.hide(now)
            return {"objects": back, "local_queues": moved}

    def _unexpire_objects(self, journal: JournalWriter, local: Mapping[str, Mapping[int, int]], now: int) -> int:
        undo = plan_unexpiry(journal.catalog, local, self._policy().ttl_ms, now, is_there(journal.store))
        if undo.keys or undo.minimums:
            journal.append(Unexpire(keys=undo.keys, minimums=undo.minimums))
            log.warning("%d expired objects are visible again", len(undo.keys))
        return len(undo.keys)


def is_there(store: ObjectStore) -> Callable[[str], bool]:
    def exists(key: str) -> bool:
        try:
            store.head(key)
        except NotFound:
            return False
        return True

    return exists
