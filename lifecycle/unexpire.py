"""Undo of expiry by a wrong clock or TTL, during the grace, while the objects still exist.

`neve.archive.policy.unexpiry` decides what returns to view.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from infra.objects.store import NotFound, ObjectStore
from lifecycle.hot_expiry import HotExpiry
from lifecycle.retention import Policy
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from neve.archive.format.journal import Unexpire
from neve.archive.policy.unexpiry import plan_unexpiry
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)


class UnexpireLocal:
    """Undo without an archive: show what the local log still has."""

    def __init__(self, hot_expiry: HotExpiry, safe_clock: SafeClock, turns: Turns) -> None:
        self._hot_expiry, self._safe_clock, self._turns = hot_expiry, safe_clock, turns

    def run(self) -> dict[str, int]:
        """Show messages again; returns how many objects and local queues changed."""
        with self._turns:
            now = self._safe_clock.now_ms()
            _, moved = self._hot_expiry.show()
            self._hot_expiry.hide(now)
            return {"objects": 0, "local_queues": moved}


class UnexpireArchived:
    """Undo in both tiers."""

    def __init__(
        self,
        journal: JournalWriter,
        hot_expiry: HotExpiry,
        policy: Callable[[], Policy],
        safe_clock: SafeClock,
        turns: Turns,
    ) -> None:
        self._journal, self._hot_expiry, self._policy = journal, hot_expiry, policy
        self._safe_clock, self._turns = safe_clock, turns

    def run(self) -> dict[str, int]:
        """Show messages again; returns how many objects and local queues changed."""
        with self._turns:
            self._journal.ensure_online()
            self._journal.follow()
            now = self._safe_clock.now_ms(self._journal.store)
            local, moved = self._hot_expiry.show()
            back = self._unexpire_objects(local, now)
            self._hot_expiry.hide(now)
            return {"objects": back, "local_queues": moved}

    def _unexpire_objects(self, local: Mapping[str, Mapping[int, int]], now: int) -> int:
        undo = plan_unexpiry(self._journal.catalog, local, self._policy().ttl_ms, now, is_there(self._journal.store))
        if undo.keys or undo.minimums:
            self._journal.append(Unexpire(keys=undo.keys, minimums=undo.minimums))
            log.warning("%d expired objects are back in view", len(undo.keys))
        return len(undo.keys)


def is_there(store: ObjectStore) -> Callable[[str], bool]:
    def exists(key: str) -> bool:
        try:
            store.head(key)
        except NotFound:
            return False
        return True

    return exists
