"""Settling of a set's archive at a change of master, and the record of it in the log.

A master that may lack archived bytes appends nothing until the log continues above all offsets that the archive names.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.structs import replace

from broker.ha.confirm import Confirm
from broker.ha.controller_requests import Spawn
from broker.ha.frames import Hello
from broker.ha.member import Member
from broker.ha.member_events import Event, MasterSettled, SettledArchive
from broker.ha.role_state import RoleState, SetArchive


class ArchiveSettling:
    """State of the archive in the present term, and the records of it that the member waits for."""

    def __init__(
        self,
        member: Member,
        archive: Callable[[], SetArchive],
        state: RoleState,
        *,
        sync_log: Callable[[], Awaitable[None]],
        spawn: Spawn,
    ) -> None:
        self._member, self._archive, self._state = member, archive, state
        self._sync_log, self._spawn = sync_log, spawn
        self._term: Confirm | None = None  # the term as master
        self.is_settled = False  # the log continues above all offsets that the archive names
        self.is_recorded = False  # the log records that

    def begin(self, term: Confirm, settled: Callable[[], None]) -> None:
        """Begin the archive of a term. `settled` is called if it is settled later."""
        self._term = term
        self._archive().lead(term.master_epoch)
        self.is_settled, self.is_recorded = not self._member.record.may_lack_archived, False
        if not self.is_settled:
            self._spawn("settle-archive", partial(self._settle, term, settled))

    async def _settle(self, term: Confirm, settled: Callable[[], None]) -> None:
        if await self._archive().settle() and self._term is term:
            self.is_settled = True
            settled()

    def end(self) -> None:
        """End the term: nothing is archived as the master any longer."""
        self._term = None
        self._archive().follow()

    @property
    def fault(self) -> str:
        """Return why the archive of the term can't be settled now; empty: nothing prevents it."""
        return "" if self._term is None else self._archive().unsettled

    async def record(self, happens: Callable[[Event], None]) -> None:
        """Record in the log that the archive is settled. Called while the log is open.

        `happens` is called once the record is on the disk.
        """
        term = self._term
        if term is None or self.is_recorded or not await self._state.record_settled():
            return
        if self._term is not term:
            return
        self.is_recorded = True
        if self._member.record.may_lack_archived:
            self._spawn("settled", partial(self._synced, SettledArchive(term.master_epoch), happens))

    def master_settled(self, epoch: int, happens: Callable[[Event], None]) -> None:
        """Take the record in the log that its master has settled its archive.

        All changes that it depends on are applied.
        """
        if self._member.record.saved.settled_in != epoch:
            self._spawn("settled", partial(self._synced, MasterSettled(epoch), happens))

    async def _synced(self, event: SettledArchive | MasterSettled, happens: Callable[[Event], None]) -> None:
        """Report an event once its record in the log is on the disk. If it is lost, the next life settles again."""
        await self._sync_log()
        happens(event)

    def greeting(self, hello: Hello) -> Hello:
        """Return a HELLO with the present state of the archive."""
        archive = self._archive()
        return replace(hello, log_uuid=archive.log_uuid, eviction_frontier=archive.eviction_frontier)
