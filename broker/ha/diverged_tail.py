"""Truncation of the tail that diverges from the master's log, and the reload of the tables that contain its changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from broker.ha.epoch_file import StoredEpochs
from broker.ha.member_role import MemberRole
from broker.ha.role_state import RoleState
from broker.store.message_store import MessageStore
from infra.loop.in_steps import run_beside
from infra.loop.threads import Threads

log = logging.getLogger(__name__)

#: Set once the truncation that a connection waits for is complete.
Waiter = asyncio.Future[None]


class DivergedTail:
    """At most one truncation at a time. While one or a reload runs, the role FENCED keeps clients out."""

    def __init__(
        self,
        store: MessageStore,
        epochs: StoredEpochs,
        state: RoleState,
        role: MemberRole,
        *,
        sync_log: Callable[[], Awaitable[None]],
        threads: Threads,
    ) -> None:
        self._store, self._epochs, self._state, self._role = store, epochs, state, role
        self.sync_log, self._threads = sync_log, threads
        self._waiter: Waiter | None = None
        self.truncations = 0  # number of those that saved bytes in `diverged/`

    def wait(self) -> Waiter:
        """Return the future of the next truncation."""
        self._waiter = asyncio.get_running_loop().create_future()
        return self._waiter

    async def truncate(self, to: int) -> Waiter | None:
        """Truncate the log, unless the master is no longer followed. The member has checked the confirm offset.

        Return the waiter if the tables have to be loaded again before it is set; None: nothing more is to do.
        """
        waiter, self._waiter = self._waiter, None
        if waiter is None or waiter.done():
            return None
        self._role.is_truncating = True
        self._role.update()  # other callbacks run before the log is consistent again
        self._state.before_truncation()
        try:
            parts = self._store.truncation(to, epoch=self._epochs.cache.last_epoch, floor=to)
            saved = await run_beside(parts, self._threads.run)
        except Exception as error:
            self._end()
            if waiter.done():
                raise
            waiter.set_exception(error)  # an unexpected error ends `follow-master`, which is restarted
            return None
        if saved is not None:
            self.truncations += 1
            log.warning("the diverged tail of this broker is in %s", saved)
            return waiter
        self._end()
        if not waiter.done():
            waiter.set_result(None)
        return None

    def _end(self) -> None:
        self._role.is_truncating = False
        self._role.update()

    async def reload(self, waiter: Waiter | None) -> None:
        """Load the tables again. Other callbacks run before they are complete."""
        self._role.is_reloading = True
        self._role.update()
        await self._state.reload()
        self._role.is_reloading = self._role.is_truncating = False
        self._role.update()
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
