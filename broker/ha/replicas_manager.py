"""Driver of a broker's membership: passes events to its `Member` and does its actions. RocketMQ's ReplicasManager.

    events   a tick four times a second; answers and notifications of controllers; frames of slaves, by `HaService`, and
             of the master, by `HaClient`
    actions  requests to controllers run concurrently, and no action waits for their answers; heartbeats wait for
             nothing. One task does all other actions in order, each completely before the next. An action that fails
             is retried, and the change of role waits for it

A master opens its log for appends once all bytes that it had at its election are confirmed. Until then its
role-dependent state is not loaded, and readers see the confirmed part. The end of a leadership term takes effect at
once when it is known. All code except that one task and what it awaits runs on the event loop without suspension.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque

import msgspec

from broker.ha.confirm import Confirm
from broker.ha.controller_requests import ControllerRequests
from broker.ha.diverged_tail import DivergedTail, Waiter
from broker.ha.epoch_file import StoredEpochs
from broker.ha.epochs import EpochCache
from broker.ha.frames import Hello
from broker.ha.ha_client import DivergenceRefused
from broker.ha.master_follower import MasterFollower
from broker.ha.master_term import MasterTerm
from broker.ha.member import LEADING, Member, State
from broker.ha.member_events import (
    Action,
    Ask,
    AskReplicaInfo,
    BeginEpoch,
    ClipGroups,
    ConfirmReceived,
    DropSlaves,
    EndRoleChange,
    Event,
    Follow,
    Heartbeat,
    MetadataSynced,
    NotifyOperator,
    RoleTaken,
    Save,
    SetSeen,
    StopAcknowledging,
    StopFollowing,
    Superseded,
    Switchover,
    SyncMetadata,
    Tick,
    Truncate,
    TruncateTornTail,
    TruncationRequested,
    View,
    Withdraw,
)
from broker.ha.member_file import MemberFile
from broker.ha.member_life import MemberLife
from broker.ha.member_role import MemberRole
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.process.startup import EXIT_IN_USE, StartupError

log = logging.getLogger(__name__)

TICK_S = 0.25
# Epoch of a log that was written before there was a set; a controller's epochs begin with 1. Only the first master of
# the set assigns it: the log of another single broker has other bytes.
BEFORE_THE_SET = 0
# Timeout in seconds of a switchover: shorter than that of a client that requests one by 1002.
SWITCHOVER_S = 8.0


class SwitchoverRefused(Exception):
    """No other member leads. The message has the reason."""


class SwitchoverNotDecided(SwitchoverRefused):
    """It is unknown which member leads."""


class _TablesInstalled(msgspec.Struct, frozen=True):
    """All tables that a log without its first bytes lacks are installed now."""


class _RecordSettled(msgspec.Struct, frozen=True):
    """The log is to record that the archive is settled."""


class _OpenLog(msgspec.Struct, frozen=True):
    """All bytes that this member had at its election are confirmed."""

    term: Confirm


class _Reload(msgspec.Struct, frozen=True):
    """This member no longer leads, or its log was truncated below its confirmed end."""

    waiter: Waiter | None = None  # of the truncation that waits for it


# Steps that the task does in order: the member's actions, and those of this module.
Step = Action | _OpenLog | _RecordSettled | _Reload | _TablesInstalled


class ReplicasManager:
    """Driver of one broker's membership in a set."""

    def __init__(
        self,
        member: Member,
        life: MemberLife,
        file: MemberFile,
        *,
        store: MessageStore,
        epochs: StoredEpochs,
        clock: Clock,
        role: MemberRole,
        requests: ControllerRequests,
        term: MasterTerm,
        follower: MasterFollower,
        tail: DivergedTail,
    ) -> None:
        self.member, self.life, self._file, self._store, self._epochs = member, life, file, store, epochs
        self.clock, self.role, self.requests = clock, role, requests
        self.term, self.follower, self.tail = term, follower, tail
        self._steps: deque[Step] = deque()
        self._work, self._changed = asyncio.Event(), asyncio.Event()
        self._is_stopped = False
        self.state_since_ms = clock.now_ms()
        self.operator_message = ""  # the last one
        self.switches: Counter[str] = Counter()  # changes of role, by the new role

    # -- start and stop

    async def start(self) -> None:
        """Listen for slaves. From here on `run` and `tick` have to run. Raise StartupError if the port is in use."""
        try:
            await self.term.ha_service.start()
        except OSError as error:
            raise StartupError(f"haListenPort: {error.strerror or error}", EXIT_IN_USE) from error
        self.follower.start()

    async def shutdown(self) -> None:
        """Close the connections to slaves, master and controllers for good. The log no longer changes."""
        self._is_stopped = True
        self._changed.set()
        self.requests.controllers.close()
        self.term.stop_acknowledging()
        await self.follower.stop()
        await self.term.ha_service.shutdown()

    # -- queries

    @property
    def epochs(self) -> EpochCache:
        """Return the epochs of the log."""
        return self._epochs.cache

    @property
    def end(self) -> int:
        """Return the end of the log."""
        return self._store.max_physical_offset

    @property
    def unconfirmed(self) -> int:
        """Return the number of unconfirmed bytes of the own log."""
        return self.end - min(self.member.confirm, self.end)

    # -- events

    def tick(self) -> None:
        """Pass a tick to the member. Called four times a second."""
        self.happens(Tick(self.end))
        if self.role.leads and not self.term.settling.is_recorded and _RecordSettled() not in self._steps:
            self._queue(_RecordSettled())
        if self.follower.has_missing_tables and _TablesInstalled() not in self._steps:
            self._queue(_TablesInstalled())

    def notified(self, view: View) -> None:
        """Take a notification (1008) of a controller about roles."""
        self.happens(SetSeen(view))

    def can_not_follow(self, why: str) -> None:
        """Stop this member, because a change in the log can't be applied here. It must not become master."""
        self.happens(Superseded(why))

    def master_settled(self, epoch: int) -> None:
        """Take the record in the log that its master has settled its archive."""
        self.term.settling.master_settled(epoch, self.happens)

    async def switch_over(self, target: int | None = None) -> int:
        """Switch over to an in-sync member, and return its id. The default is the one with most of the log.

        No record is appended until the outcome is known. Raise SwitchoverRefused: this member continues to lead if it
        did. After SwitchoverNotDecided the master is unknown.
        """
        try:
            async with asyncio.timeout(SWITCHOVER_S):
                return await self._switch_over(target)
        except TimeoutError as error:
            why = "no controller reports the present master; until one does, this member accepts no sends"
            raise SwitchoverNotDecided(why) from error

    async def _switch_over(self, target: int | None) -> int:
        term = self.term.confirming
        if term is None or not self.role.leads:
            raise SwitchoverRefused("this member is not the master")
        if (under_way := self.member.switchover_target) is not None:
            if target not in (None, under_way):
                raise SwitchoverRefused("a switchover is already in progress")
            return await self._switched_over(term, under_way)
        in_sync = self.term.in_sync
        if target is None:
            target = max(in_sync, key=lambda member: (term.end_of(member), -member), default=0)
        if target not in in_sync:
            raise SwitchoverRefused(f"member {target} is not an in-sync slave" if target else "no slave is in sync")
        self.tick()  # records the present end of the log: from this callback on nothing is appended
        self.happens(Switchover(target))
        return await self._switched_over(term, target)

    async def _switched_over(self, term: Confirm, target: int) -> int:
        while self.term.confirming is term and self.member.switchover_target is not None and not self._is_stopped:
            self._changed.clear()
            await self._changed.wait()
        if self.term.confirming is term:
            raise SwitchoverRefused(f"member {target} did not catch up in time, or no controller answered")
        if self.member.record.view.master != target:
            raise SwitchoverRefused(f"another member was elected instead of {target}")
        log.info("switched over to member %d", target)
        return target

    def happens(self, event: Event) -> None:
        """Pass an event to the member, and queue its actions. Only the end of a term takes effect at once."""
        if self._is_stopped:
            return
        member, term = self.member, self.term.confirming
        before, state = member.confirm, member.state
        actions = member.happens(event, self.clock.monotonic())
        if member.state is not state:
            self._changed.set()
            self.state_since_ms = self.clock.now_ms()
            log.info("member %d is %s, by epoch %d.%d", member.broker_id, member.state.value, *member.role.pair)
        if term is not None and member.confirming is not term:
            self._end_term()
        elif term is not None:
            self.term.ha_service.confirm_changed(before)
            self._open_when_confirmed()
        self.role.update()
        for action in actions:
            self._take(action)

    def _take(self, action: Action) -> None:
        """Queue an action. Heartbeats and queries, which show that this member is alive, are sent without waiting."""
        if isinstance(action, Heartbeat | AskReplicaInfo):
            self.requests.send(action, self.happens)
            return
        if isinstance(action, Save) and len(self._steps) > 1 and isinstance(self._steps[-1], Save):
            self._steps.pop()  # the new one contains the state of the queued one
        self._queue(action)

    def _queue(self, step: Step) -> None:
        self._steps.append(step)
        self._work.set()

    def _end_term(self) -> None:
        if self.term.end():
            self._queue(_Reload())
            self.term.close_log()

    def _open_when_confirmed(self) -> None:
        term = self.term.to_open
        if term is not None and not any(isinstance(step, _OpenLog) for step in self._steps):
            self._queue(_OpenLog(term))

    # -- callbacks about slaves (HaEvents)

    def confirmed(self, offset: int) -> None:
        """Publish the confirm offset."""
        self.term.confirmed(offset)
        self._open_when_confirmed()

    def slave_connected(self, member_id: int, hello: Hello | None) -> None:
        log.info("member %d follows", member_id)

    def slave_reported(self, member_id: int) -> None:
        """Check at once whether a slave outside the SyncStateSet may join."""
        self.tick()

    # -- actions

    async def run(self) -> None:
        """Do all queued actions. Never returns, but raises if an action fails; the next run retries that action."""
        while True:
            while self._steps and not self._is_stopped:
                await self._carry_out(self._steps[0])
                self._steps.popleft()
            self._work.clear()
            await self._work.wait()

    async def _carry_out(self, step: Step) -> None:
        match step:
            case Save(saved=saved):
                await self._file.in_thread(self._file.save, saved)
            case StopFollowing():
                await self.follower.stop()
            case _TablesInstalled():
                await self.follower.tables_installed()
            case TruncateTornTail():
                await self.tail.sync_log()  # the log has whole records only: a partly received one was never appended
            case BeginEpoch(epoch=epoch):
                await self._begin_epoch(epoch)
            case _OpenLog(term=term):
                await self.term.open(term, self.happens)
            case _RecordSettled():
                await self.term.record_settled(self.happens)
            case _Reload(waiter=waiter):
                await self.tail.reload(waiter)
            case Truncate(to=to):
                if (waiter := await self.tail.truncate(to)) is not None:
                    # the next step, even if no caller waits any longer: the truncation has happened
                    self._steps.insert(1, _Reload(waiter))
            case _:
                self._at_once(step)

    def _at_once(self, step: Step) -> None:
        match step:
            case StopAcknowledging():
                self.term.stop_acknowledging()
            case DropSlaves():
                self.term.ha_service.stop_leading()
            case ClipGroups():
                pass  # done when the log is opened: before all of it is confirmed, offsets must not be clipped
            case Follow():
                self.follower.follow(step, _Following(self, step))
            case EndRoleChange(epoch=epoch):
                self._end_role_change(epoch)
            case SyncMetadata():
                self.happens(MetadataSynced())  # each change of a table is in the log before it is in the table
            case NotifyOperator(reason=reason):
                self.operator_message = reason
                log.error("this member of the broker set needs an operator: %s", reason)
            case Withdraw():
                self.requests.withdraw()
            case _:
                assert isinstance(step, Ask)
                self.requests.send(step, self.happens)

    async def _begin_epoch(self, epoch: int) -> None:
        """Save a new epoch before its first byte."""
        first, end = self._store.min_physical_offset, self.end
        is_first_of_set = not self.epochs.entries() and first < end  # so far it was a single broker
        await self._epochs.assign((*([(BEFORE_THE_SET, first)] if is_first_of_set else []), (epoch, end)))

    def _end_role_change(self, epoch: int) -> None:
        self.happens(RoleTaken(epoch, self.end))
        member, term = self.member, self.member.confirming
        if member.state is State.SLAVE:
            self.switches["slave"] += 1
            self.role.register()
        if term is not None and member.state in LEADING and self.term.confirming is None:
            self.switches["master"] += 1
            self.term.begin(term, self, self._open_when_confirmed)

    # -- slave

    async def request_truncation(self, to: int) -> None:
        """Ask the member for a truncation, and wait for it. Raise DivergenceRefused or StoreError."""
        store, member = self._store, self.member
        waiter = self.tail.wait()
        start, floor = store.reader.record_start(to), store.reader.record_start(member.confirm)
        self.happens(TruncationRequested(start, floor))
        if member.state is State.REFUSED:
            raise DivergenceRefused(
                f"the log diverges from its master's at {start}, below the confirmed offset {floor}"
            )
        await waiter

    def receive_confirm(self, offset: int) -> None:
        """Take the confirm offset from a frame of the master, up to the end of the stored log."""
        if self.role.broker.has_master and not self._is_stopped:
            self.member.happens(ConfirmReceived(offset), self.clock.monotonic())  # only confirm changes by it
        else:
            # the first on a connection also changes the role: clients may be redirected to the master
            self.happens(ConfirmReceived(offset))
        self.follower.confirmed(offset)


class _Following:
    """Callbacks of a replication connection to one master (SlaveEvents)."""

    def __init__(self, manager: ReplicasManager, follow: Follow) -> None:
        self._manager, self._follow = manager, follow

    async def truncate(self, to: int) -> None:
        await self._manager.request_truncation(to)

    async def following(self, master_epoch: int) -> None:
        await self._manager.follower.attached(self._follow, master_epoch)

    def confirmed(self, offset: int) -> None:
        self._manager.receive_confirm(offset)
