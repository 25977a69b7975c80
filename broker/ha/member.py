"""State machine of a member of a broker set. Pure: events go in, actions come out. `_TABLE` maps them by state.

  state           appends  acknowledges  reads       leaves it when
  NAMELESS        -        -             -           it has an id
  UNREGISTERED    -        -             -           a controller has accepted this life of it
  WAITING         -        -             <= confirm  there is a master, itself or another
  TURNING_MASTER  -        -             -           all steps of the change are done
  MASTER          yes      <= confirm    <= confirm  the set has another epoch; a switchover begins
  HANDING_OVER    -        <= confirm    <= confirm  the set has another epoch, or the switchover has surely failed
  TURNING_SLAVE   -        -             -           all steps of the change are done
  SLAVE           -        -             <= confirm  the set has another master, or its master another epoch
  REFUSED         -        -             -           never: an operator restarts it with an empty directory

Rules, each of which guards an interleaving:

- A role is taken for a pair (masterEpoch, syncStateSetEpoch) that is not below any known before, former lives included.
  The pair is on the disk before the first step. No epoch is taken twice, and not by a later life either. Its last bytes
  may be lost here and exist elsewhere, and two different logs would have the same epoch.
- If a controller was reset and gave this member's id to another directory, the member has no id until it gets another.
- A member that is elected for an epoch that a former life has taken asks for another election. Apache's controller
  does not elect again while it takes the former life for this one. The member is therefore silent until the controller
  considers the former life dead.
- A member without a log of a set that already exists never asks to become the first master. The controller's state may
  be lost, and the members that have the log may be away. A forced election makes it master.
- A role is this member's if both id and address match: a copy of its directory has the same id.
- A master that learns of another epoch stops acknowledging at once, before any other step. A slave that becomes master
  first closes its connection to the former master, whose acknowledgements depend on it.
- Views that arrive during a change of role wait for its end. Only the newest counts.
- A 1001 without an answer is repeated, unless the slave that joins by it has disconnected. Then the present set is
  requested, and the new epoch decides the outcome of the first request.
- After a failed switchover the master resumes only after the answer to a later 1004 shows its own epoch.
- Bytes below the own confirm offset are never truncated, if acknowledgements wait for the set.

Times are seconds of the own monotonic clock. No lease and no clock decides about data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from broker.ha.confirm import Confirm, SyncStateSet
from broker.ha.member_events import (
    Action,
    AlterRefused,
    ApplyBrokerId,
    AskNextBrokerId,
    BeginEpoch,
    BrokerIdApplied,
    BrokerIdLost,
    BrokerIdTaken,
    ClipGroups,
    ConfirmReceived,
    DropSlaves,
    Elect,
    EndRoleChange,
    Event,
    Follow,
    Heartbeat,
    MasterSettled,
    MetadataSynced,
    NextBrokerId,
    NotifyOperator,
    NotRegistered,
    Register,
    Registered,
    RoleTaken,
    Save,
    SavedMember,
    SetSeen,
    SettledArchive,
    StockControllers,
    StopAcknowledging,
    StopFollowing,
    Superseded,
    Switchover,
    SyncMetadata,
    Tick,
    Truncate,
    TruncateTornTail,
    TruncationRequested,
    Withdraw,
)
from broker.ha.member_record import MemberRecord
from broker.ha.member_requests import MemberRequests
from broker.ha.member_rules import MemberRules


class State(Enum):
    """State of a member. The table in the module's docstring explains each."""

    NAMELESS = "nameless"
    UNREGISTERED = "unregistered"
    WAITING = "waiting"
    TURNING_MASTER = "turning master"
    MASTER = "master"
    HANDING_OVER = "handing over"
    TURNING_SLAVE = "turning slave"
    SLAVE = "slave"
    REFUSED = "refused"


@dataclass(slots=True)
class _Switchover:
    """A switchover: log and tables are replicated to the target, then it is designated, then its role is read."""

    target: int
    until: float
    metadata_synced: bool = False
    is_asked: bool = False  # 1002 was sent: from here on another member may be master
    ask: int = 0  # the first 1004 sent after the deadline; 0: none yet


ConfirmOf = Callable[..., Confirm]


class Member:
    """One life of a member. Only `happens` changes it, and the reports of slaves that go to `confirming`."""

    def __init__(self, rules: MemberRules, *, process: str, address: str, confirm_of: ConfirmOf = Confirm) -> None:
        """Create a member without an id, whose life has not begun."""
        self.rules, self.address, self._confirm_of = rules, address, confirm_of
        self.record = MemberRecord(SavedMember(), process)
        self.role = self.record.view  # the view under which it acts
        self.confirming: Confirm | None = None  # while it is master: progress of the slaves
        self._requests = MemberRequests(rules, process)
        self._used_epoch = 0  # taken by former lives, or as master by this one
        self._confirm = self._end = 0
        self._switchover: _Switchover | None = None
        self._is_under_stock = False  # the controllers are Apache's
        self.state = State.NAMELESS

    def begin(self, saved: SavedMember, check_code: str) -> None:
        """Begin the life. Called once, before any event.

        `saved` is the result of `begin_life`, and is on the disk. `check_code` is address;millis, for a directory that
        has none yet.
        """
        if not saved.check_code:
            saved = msgspec.structs.replace(saved, check_code=check_code)
        self.record = MemberRecord(saved, self.record.process)
        self.role = self.record.view
        self._used_epoch, self._confirm = saved.master_epoch, saved.confirm
        self.state = State.UNREGISTERED if saved.broker_id else State.NAMELESS

    # -- queries

    @property
    def broker_id(self) -> int:
        """Return the id; 0: none yet."""
        return self.record.saved.broker_id

    @property
    def confirm(self) -> int:
        """Return the confirm offset that this member knows. Readers see the log up to there."""
        return self._confirm if self.confirming is None else self.confirming.value

    def may_append(self, now: float) -> bool:
        """Return whether an append is allowed now."""
        confirming = self.confirming
        if self.state is not State.MASTER or confirming is None:
            return False
        return confirming.may_append() and not confirming.is_isolated(now)

    def acknowledged(self, now: float) -> int:
        """Return the offset below which records may be acknowledged; -1: none."""
        return -1 if self.confirming is None else self.confirming.acknowledged(now)

    @property
    def is_readable(self) -> bool:
        """Return whether pulls are answered, up to `confirm`."""
        return self.state in (State.WAITING, State.MASTER, State.HANDING_OVER, State.SLAVE)

    @property
    def switchover_target(self) -> int | None:
        """Return the target of the pending switchover; None: there is none."""
        return None if self._switchover is None else self._switchover.target

    @property
    def is_to_join(self) -> bool:
        """Return whether it has no part of the existing set's log yet, and no master of that set is known."""
        view = self.record.view
        return self.rules.set_exists and view.master is None and view.master_epoch == 0

    def end_life(self) -> SavedMember:
        """Return the state that a stop saves last, after the log is synced."""
        return self.record.updated(self.confirm, clean=True)

    # -- events

    def happens(self, event: Event, now: float) -> list[Action]:
        """Return the actions for an event. The caller does them in this order, each completely before the next."""
        handler = _TABLE[type(event)].get(self.state)
        return [] if handler is None else handler(self, event, now)

    # -- until a controller has registered it

    def _under_stock_controllers(self, event: StockControllers, now: float) -> list[Action]:
        self._is_under_stock = True
        return []

    def _named(self, event: BrokerIdApplied, now: float) -> list[Action]:
        self.state = State.UNREGISTERED
        record = self.record
        record.saved = msgspec.structs.replace(record.saved, broker_id=event.broker_id)
        return [Save(record.saved), *self._unregistered_tick(Tick(self._end), now)]

    def _unregistered_tick(self, event: Tick, now: float) -> list[Action]:
        self._end = event.end
        wanted: Action = AskNextBrokerId() if self.state is State.NAMELESS else self._register
        return [wanted] if self._requests.is_due(type(wanted), now, self.rules.ask_again_after) else []

    def _registered(self, event: Registered, now: float) -> list[Action]:
        self.state = State.WAITING
        self._requests.registered(now)
        seen = self._seen(SetSeen(event.view), now) if event.view is not None else []
        return [*([] if self._is_silent else [self._heartbeat]), *seen]

    def _retry_apply(self, event: NotRegistered, now: float) -> list[Action]:
        """Apply for the own id again, which is free unless another directory has it.

        The controller's state was reset to before this member joined.
        """
        if not self._requests.is_due(NotRegistered, now, self.rules.ask_again_after):
            return []
        return [ApplyBrokerId(self.broker_id, self.record.saved.check_code), self._register]

    def _lose_id(self, event: BrokerIdLost, now: float) -> list[Action]:
        """Become a new member that keeps its log, because the id is another directory's."""
        if event.broker_id != self.broker_id:
            return []  # a slow answer about a former id
        self._step_down()
        self.state = State.NAMELESS
        # either itself, or the other directory, whose address this answer doesn't have
        record = self.record
        if record.view.master == self.broker_id:
            record.view = msgspec.structs.replace(record.view, master=None, master_address="")
        save = record.save(self.confirm, broker_id=0)
        return [
            StopAcknowledging(),
            StopFollowing(),
            DropSlaves(),
            save,
            *self._unregistered_tick(Tick(self._end), now),
        ]

    def _refuse(self, event: Superseded, now: float) -> list[Action]:
        self._step_down()
        self.state = State.REFUSED
        return [StopAcknowledging(), StopFollowing(), DropSlaves(), NotifyOperator(event.reason)]

    def _renewed_registration(self, event: Registered, now: float) -> list[Action]:
        return [] if event.view is None else self.happens(SetSeen(event.view), now)

    # -- views of the set

    def _seen(self, event: SetSeen, now: float) -> list[Action]:
        if event.view.pair < self.record.view.pair:
            return []  # a slow answer
        self.record.take_view(event.view)
        actions: list[Action] = [*self.record.save_pair(self.confirm)]
        if self.confirming is not None:
            return self._seen_as_master(event, actions, now)
        return actions if self.state in _TURNING else actions + self._take_role(now)

    def _seen_as_master(self, event: SetSeen, actions: list[Action], now: float) -> list[Action]:
        """Check in `Confirm` whether this member is still the master. If not, stop acknowledging at once."""
        view, confirming = event.view, self.confirming
        assert confirming is not None
        members = SyncStateSet(view.sync_state_set_epoch, view.sync_state_set)
        is_displaced = view.master == self.broker_id and view.master_address != self.address
        if not is_displaced and confirming.read(view.master_epoch, members, now, forgets_in_place=self._is_under_stock):
            confirming.controller_answered(now)
            self.role = view
            if not confirming.is_altering:
                self._requests.altered()
            switchover = self._switchover
            if switchover is not None and switchover.ask and event.ask >= switchover.ask:
                self._resume()
            return actions
        self._step_down()
        self.state = State.WAITING
        return [StopAcknowledging(), DropSlaves(), *actions, *self._take_role(now)]

    def _step_down(self) -> None:
        """End the term: no record is acknowledged from here on."""
        self._confirm = self.confirm
        self.confirming = self._switchover = None
        self._requests.altered()

    def _take_role(self, now: float) -> list[Action]:
        """Take the role of the newest view. For states that wait for a role or follow another master."""
        view = self.record.view
        is_own = view.master == self.broker_id
        if is_own and view.master_address != self.address:
            return []  # another process has this id: a copy of the directory, or its original
        if self._is_silent:
            return [Withdraw()] if self._requests.is_due(Withdraw, now, self.rules.register_every) else []
        if self.is_to_join:
            return []
        if view.master is None or (is_own and view.master_epoch <= self._used_epoch):
            return [Elect()] if self._requests.is_due(Elect, now, self.rules.ask_again_after) else []
        is_new = self.state is State.WAITING or (view.master, view.master_epoch) != (
            self.role.master,
            self.role.master_epoch,
        )
        self.role = view
        if not is_new:
            return []
        if is_own:
            self.state = State.TURNING_MASTER
            self._used_epoch = epoch = view.master_epoch
            return [
                StopFollowing(),
                DropSlaves(),
                TruncateTornTail(),
                BeginEpoch(epoch),
                ClipGroups(),
                EndRoleChange(epoch),
            ]
        self.state = State.TURNING_SLAVE
        follow = Follow(view.master, view.master_address, view.master_epoch)
        return [StopFollowing(), DropSlaves(), follow, EndRoleChange(view.master_epoch)]

    def _role_is_taken(self, event: RoleTaken, now: float) -> list[Action]:
        role = self.role
        if event.epoch != role.master_epoch:
            return []
        self._end = event.end
        if self.state is State.TURNING_SLAVE:
            self.state = State.SLAVE
            return self._take_role(now)
        self.state = State.MASTER
        self._confirm = min(self._confirm, event.end)
        self.confirming = self._confirm_of(
            self.rules.confirm,
            self.broker_id,
            role.master_epoch,
            SyncStateSet(role.sync_state_set_epoch, role.sync_state_set),
            epoch_start=event.end,
            own_end=event.end,
            confirm=self._confirm,
            now=now,
            is_alone=self.rules.is_alone,
        )
        return self._seen_as_master(SetSeen(self.record.view), [], now)

    def _archive_settled(self, event: SettledArchive, now: float) -> list[Action]:
        return [*self.record.archive_settled(self.confirm)] if event.epoch == self.role.master_epoch else []

    # -- as slave

    def _master_settled(self, event: MasterSettled, now: float) -> list[Action]:
        if event.epoch != self.role.master_epoch:
            return []
        return [*self.record.master_settled(event.epoch, self.confirm)]

    def _confirm_received(self, event: ConfirmReceived, now: float) -> list[Action]:
        self._confirm = max(self._confirm, event.offset)
        return []

    def _truncate(self, event: TruncationRequested, now: float) -> list[Action]:
        # An `async` master confirms its own end. Bytes that it alone has are truncated and kept in a file: the mode
        # allows it.
        if self.rules.confirm.waits and event.to < event.floor:
            reason = f"the log diverges from its master's at {event.to}, below the confirmed offset {event.floor}"
            return self._refuse(Superseded(reason), now)
        self._confirm = min(self._confirm, event.to)
        return [Truncate(event.to)]

    def _slave_tick(self, event: Tick, now: float) -> list[Action]:
        actions = [*self._tick(event, now), *self._save_confirm(now)]
        if self.record.view.master is None or self.state is State.WAITING:
            actions += self._take_role(now)
        return actions

    # -- as master

    def _master_tick(self, event: Tick, now: float) -> list[Action]:
        actions, confirming = [*self._tick(event, now), *self._save_confirm(now)], self.confirming
        assert confirming is not None
        actions += self._requests.alter(confirming, now, may_begin=self._switchover is None)
        return [*actions, *self._continue_switchover(now)]

    def _alter_refused(self, event: AlterRefused, now: float) -> list[Action]:
        assert self.confirming is not None
        self._requests.alter_refused(event, self.confirming)
        return [self._requests.replica_info(now)]

    # -- switchover

    def _begin_switchover(self, event: Switchover, now: float) -> list[Action]:
        assert self.confirming is not None
        if event.target == self.broker_id or not self.confirming.in_sync(event.target):
            return [NotifyOperator(f"{event.target} is not in the SyncStateSet: it can't take over")]
        self.state = State.HANDING_OVER
        self._switchover = _Switchover(event.target, now + self.rules.switchover_within)
        return [SyncMetadata()]

    def _metadata_synced(self, event: MetadataSynced, now: float) -> list[Action]:
        if self._switchover is not None:
            self._switchover.metadata_synced = True
        return self._continue_switchover(now)

    def _continue_switchover(self, now: float) -> list[Action]:
        switchover, confirming = self._switchover, self.confirming
        if switchover is None or confirming is None:
            return []
        if not switchover.is_asked:
            if now > switchover.until:
                self._resume()
                return []
            if switchover.metadata_synced and confirming.end_of(switchover.target) >= self._end:
                switchover.is_asked = True
                return [Elect(switchover.target)]
            return []
        if now <= switchover.until or not self._requests.is_due(Switchover, now, self.rules.ask_again_after):
            return []
        ask = self._requests.replica_info(now)
        switchover.ask = switchover.ask or ask.ask
        return [ask]

    def _resume(self) -> None:
        self._switchover = None
        self.state = State.MASTER

    # -- common to all registered states

    def _tick(self, event: Tick, now: float) -> list[Action]:
        self._end = event.end
        return self._requests.regular(None if self._is_silent else self._heartbeat, self._register, now)

    @property
    def _is_silent(self) -> bool:
        """Return whether the controller takes this life for a former one, elects it, and would never elect another."""
        view = self.record.view
        if not self._is_under_stock or self.state not in (State.WAITING, State.SLAVE):
            return False
        is_taken = view.master == self.broker_id and view.master_address == self.address
        return is_taken and view.master_epoch <= self._used_epoch

    @property
    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self.record.life, self._end, self.confirm, self.record.view.pair)

    @property
    def _register(self) -> Register:
        return Register(self.record.life, self.record.saved.check_code)

    def _save_confirm(self, now: float) -> list[Action]:
        if self.confirm == self.record.saved.confirm:
            return []
        is_due = self._requests.is_due(Save, now, self.rules.save_confirm_every)
        return [self.record.save(self.confirm)] if is_due else []


# -- events by state; an event without an entry changes nothing


def _apply_for_id(member: Member, event: NextBrokerId, now: float) -> list[Action]:
    return [ApplyBrokerId(event.broker_id, member.record.saved.check_code)]


_Handler = Callable[[Member, Any, float], list[Action]]


def _cells(states: tuple[State, ...], handler: _Handler) -> dict[State, _Handler]:
    return dict.fromkeys(states, handler)


LEADING = (State.MASTER, State.HANDING_OVER)
_TURNING = (State.TURNING_MASTER, State.TURNING_SLAVE)
_KNOWN = (State.WAITING, *_TURNING, *LEADING, State.SLAVE)

_TABLE: Mapping[type, Mapping[State, _Handler]] = {
    Tick: {
        **_cells((State.NAMELESS, State.UNREGISTERED), Member._unregistered_tick),
        **_cells((State.WAITING, State.SLAVE), Member._slave_tick),
        **_cells(_TURNING, Member._tick),
        **_cells(LEADING, Member._master_tick),
    },
    StockControllers: dict.fromkeys(State, Member._under_stock_controllers),
    NextBrokerId: {State.NAMELESS: _apply_for_id},
    BrokerIdTaken: {},  # the next tick requests another one
    BrokerIdApplied: {State.NAMELESS: Member._named},
    NotRegistered: _cells((State.UNREGISTERED, *_KNOWN), Member._retry_apply),
    BrokerIdLost: _cells((State.UNREGISTERED, *_KNOWN), Member._lose_id),
    Superseded: _cells((State.UNREGISTERED, *_KNOWN), Member._refuse),
    Registered: {State.UNREGISTERED: Member._registered, **_cells(_KNOWN, Member._renewed_registration)},
    SetSeen: _cells(_KNOWN, Member._seen),
    RoleTaken: _cells(_TURNING, Member._role_is_taken),
    ConfirmReceived: {State.SLAVE: Member._confirm_received},
    TruncationRequested: _cells((State.TURNING_SLAVE, State.SLAVE), Member._truncate),
    AlterRefused: _cells(LEADING, Member._alter_refused),
    SettledArchive: _cells(LEADING, Member._archive_settled),
    MasterSettled: {State.SLAVE: Member._master_settled},
    Switchover: {State.MASTER: Member._begin_switchover},
    MetadataSynced: {State.HANDING_OVER: Member._metadata_synced},
}
