"""A member's term as the master: slaves are accepted, the log is confirmed, then it is opened for own records."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable

from broker.ha.archive_settling import ArchiveSettling
from broker.ha.confirm import Confirm
from broker.ha.epoch_file import StoredEpochs
from broker.ha.frames import Hello
from broker.ha.greeting import identified
from broker.ha.ha_service import HaEvents, HaService, Leadership
from broker.ha.master_session import StreamRules
from broker.ha.member import Member
from broker.ha.member_events import Event
from broker.ha.member_role import MemberRole
from broker.ha.role_state import RoleState
from broker.store.message_store import MessageStore

log = logging.getLogger(__name__)

LEAD_TRIES = 3  # with growing pauses: a temporary lack of file descriptors is over then


class MasterTerm:
    """The present term, if this member is the master. Its log is open for own records while `role.leads`."""

    def __init__(
        self,
        member: Member,
        store: MessageStore,
        epochs: StoredEpochs,
        ha_service: HaService,
        settling: ArchiveSettling,
        *,
        hello: Hello,
        stream: StreamRules,
        state: RoleState,
        role: MemberRole,
        on_confirmed: Callable[[], None],
        stop_acknowledging: Callable[[], None],
    ) -> None:
        """Create it outside of a term.

        `hello` is this broker's HELLO without id and life. `on_confirmed` is called when more may be acknowledged.
        `stop_acknowledging` answers all waiting appends that their outcome is unknown.
        """
        self._member, self._store, self._epochs, self.ha_service = member, store, epochs, ha_service
        self.settling, self._hello, self._stream, self._state, self._role = settling, hello, stream, state, role
        self._on_confirmed, self.stop_acknowledging = on_confirmed, stop_acknowledging
        self.confirming: Confirm | None = None  # the member's, during a term
        # it leads, or has tried to: the role-dependent state may be partly a master's
        self._has_started_to_lead = False
        self._failures = 0  # consecutive failures to lead

    # -- queries

    @property
    def leads_in(self) -> int | None:
        """Return the epoch in which this broker is the master; None: it is not."""
        confirming = self.confirming
        return confirming.master_epoch if self._role.leads and confirming is not None else None

    @property
    def in_sync(self) -> list[int]:
        """Return the connected in-sync slaves, of a master."""
        confirming = self.confirming
        return [] if confirming is None else [slave for slave in self.ha_service.slaves if confirming.in_sync(slave)]

    @property
    def to_open(self) -> Confirm | None:
        """Return the term whose log may be opened now: all bytes that this member had at its election are confirmed."""
        term = self.confirming
        if term is None or self._role.leads or term.value < term.epoch_start or not self.settling.is_settled:
            return None
        return term

    # -- a term

    def begin(self, term: Confirm, events: HaEvents, settled: Callable[[], None]) -> None:
        """Begin a term: accept slaves. `settled` is called if the archive is settled later."""
        self.confirming = term
        self.settling.begin(term, settled)
        own = identified(self._hello, self._member.record.life, term.master_epoch)
        self.ha_service.lead(
            Leadership(
                own,
                self._epochs.cache,
                term,
                events,
                rules=self._stream,
                is_member=lambda member_id: member_id > 0,
                now=self.settling.greeting,
            )
        )
        if self._stream.admits_stock:
            self._role.register()
        events.confirmed(term.value)

    def confirmed(self, offset: int) -> None:
        """Publish the confirm offset."""
        self._store.visibility.confirm(offset)
        self._state.confirmed()  # before waiting requests are answered
        self._on_confirmed()

    async def open(self, term: Confirm, happens: Callable[[Event], None]) -> None:
        """Open the log for own records. Heartbeats continue meanwhile; if the term ends, a reload is the next step."""
        if self.confirming is not term or self._role.leads:
            return
        self._has_started_to_lead = True
        try:
            await self._state.prepare()
            if self.confirming is not term:
                return
            self._state.lead(term.master_epoch)
        except Exception as error:
            self._failures += 1
            if self._failures == LEAD_TRIES:
                log.critical(
                    "this member was elected and can't lead; the process ends, so that another one is elected: %r",
                    error,
                )
                self._store.end.fail(error if isinstance(error, OSError) else OSError(errno.EIO, str(error)))
            raise
        self._role.leads, self._failures = True, 0
        self._role.update()
        log.info("leads the broker set in epoch %d, from %d on", term.master_epoch, term.epoch_start)
        self._role.register()
        await self.record_settled(happens)

    async def record_settled(self, happens: Callable[[Event], None]) -> None:
        """Record in the log that the archive is settled. If the log does not accept it now, a tick tries again."""
        if self._role.leads:
            await self.settling.record(happens)

    def end(self) -> bool:
        """End the term at once. Return whether the role-dependent state has to be loaded again."""
        self.confirming = None
        self.stop_acknowledging()
        self.ha_service.stop_leading()
        self.settling.end()
        if not self._has_started_to_lead:
            return False
        self._role.leads, self._has_started_to_lead, self._failures = False, False, 0
        return True

    def close_log(self) -> None:
        """Reject own records from this moment on, after `end`."""
        try:
            self._state.follow()
        except OSError as error:  # nothing is appended anyway, and a start recovers the log as it is
            log.critical("this log can't be marked as that of a follower: %s", error)
            self._store.end.fail(error)
