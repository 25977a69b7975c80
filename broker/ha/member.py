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

from broker.ha.confirm import Confirm, ConfirmRules, SyncStateSet
from broker.ha.member_events import (
    Action,
    Alter,
    AlterRefused,
    Answer,
    ApplyBrokerId,
    ArchiveSettled,
    AskNextBrokerId,
    AskReplicaInfo,
    BeginEpoch,
    BrokerIdApplied,
    BrokerIdLost,
    BrokerIdTaken,
    ClipGroups,
    ConfirmHeard,
    Cut,
    CutTornTail,
    CutWanted,
    Disowned,
    DropSlaves,
    Elect,
    EndTurn,
    Event,
    Follow,
    HandOver,
    Heartbeat,
    Life,
    MasterSettled,
    MetadataSynced,
    NextBrokerId,
    NotRegistered,
    Register,
    Registered,
    RoleTaken,
    Save,
    Saved,
    Seen,
    StockControllers,
    StopFollowing,
    SyncMetadata,
    Tell,
    Tick,
    View,
    Withdraw,
)


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


class MemberRules(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a member. Times are in seconds."""

    confirm: ConfirmRules
    acknowledges_from_memory: bool = True  # ASYNC_FLUSH: after a crash this member may lack bytes that it acknowledged
    is_alone: bool = False  # the set has no other member
    set_exists: bool = False  # the set had a master: a controller that knows of none has lost its state
    heartbeat_every: float = 1.0
    ask_again_after: float = 1.0  # without an answer
    # 1004, if there is no other reason for one: an async master has to hear from another process in `cut_off_after`
    poll_every: float = 1.0
    # 1003, in normal operation: a delayed one of a former life may have arrived after this life's
    register_every: float = 5.0
    save_confirm_every: float = 1.0
    hand_over_within: float = 1.0


def begin_life(saved: Saved, new_incarnation: str, rules: MemberRules, *, is_copy: bool = False) -> Saved:
    """Return the state that a start saves before it does anything else.

    `is_copy`: the directory has moved, so it is a backup or a copy. The original may be alive, and may have
    acknowledged more. This member starts as a new one, with its log.
    """
    if is_copy:
        saved = msgspec.structs.replace(saved, broker_id=0, check_code="", incarnation="", starts=0)
    may_lack = not saved.clean and rules.acknowledges_from_memory
    incarnation = new_incarnation if may_lack or not saved.incarnation else saved.incarnation
    return msgspec.structs.replace(saved, incarnation=incarnation, starts=saved.starts + 1, clean=False)


@dataclass(slots=True)
class _HandOver:
    """A switchover: log and tables are replicated to the target, then it is designated, then its role is read."""

    target: int
    until: float
    metadata_synced: bool = False
    is_asked: bool = False  # 1002 was sent: from here on another member may be master
    ask: int = 0  # the first 1004 sent after the deadline; 0: none yet


ConfirmOf = Callable[..., Confirm]


class Member:
    """One life of a member. Only `happens` changes it, and the reports of slaves that go to `confirming`."""

    def __init__(
        self,
        saved: Saved,
        rules: MemberRules,
        *,
        process: str,
        address: str,
        check_code: str,
        confirm_of: ConfirmOf = Confirm,
    ) -> None:
        """Create a member.

        `saved` is the result of `begin_life`, and is on the disk. `check_code` is address;millis, for a directory that
        has none yet.
        """
        self.rules = rules
        self.saved = saved if saved.check_code else msgspec.structs.replace(saved, check_code=check_code)
        self.process, self.address = process, address
        known = frozenset(saved.sync_state_set)
        self.view = View(saved.master_epoch, saved.sync_state_set_epoch, known)  # the newest
        self.role = self.view  # the one under which it acts
        self.confirming: Confirm | None = None  # while it is master: progress of the slaves
        self._used_epoch = saved.master_epoch  # taken by former lives, or as master by this one
        self._confirm = saved.confirm
        self._end = 0
        self._confirm_of = confirm_of
        self._due: dict[type, float] = {}
        self._asks = 0
        self._altering: Alter | None = None  # the last 1001
        self._requests = 0
        self._hand_over: _HandOver | None = None
        self._is_under_stock = False  # the controllers are Apache's
        self.state = State.UNREGISTERED if saved.broker_id else State.NAMELESS

    # # -- queries

    @property
    def broker_id(self) -> int:
        """Return the id; 0: none yet."""
        return self.saved.broker_id

    @property
    def check_code(self) -> str:
        """Return the code with which this directory applies for ids."""
        return self.saved.check_code

    @property
    def life(self) -> Life:
        """Return the life as it is sent to controllers and masters."""
        return Life(self.saved.broker_id, self.saved.incarnation, self.saved.starts, self.process)

    @property
    def confirm(self) -> int:
        """Return the confirm offset that this member knows. Readers see the log up to there."""
        return self._confirm if self.confirming is None else self.confirming.value

    def may_append(self, now: float) -> bool:
        """Return whether an append is allowed now."""
        confirming = self.confirming
        if self.state is not State.MASTER or confirming is None:
            return False
        return confirming.may_append() and not confirming.is_cut_off(now)

    def acknowledged(self, now: float) -> int:
        """Return the offset below which records may be acknowledged; -1: none."""
        return -1 if self.confirming is None else self.confirming.acknowledged(now)

    @property
    def is_readable(self) -> bool:
        """Return whether pulls are answered, up to `confirm`."""
        return self.state in (State.WAITING, State.MASTER, State.HANDING_OVER, State.SLAVE)

    @property
    def hands_over_to(self) -> int | None:
        """Return the target of the pending switchover; None: there is none."""
        return None if self._hand_over is None else self._hand_over.target

    @property
    def is_in_sync(self) -> bool:
        """Return whether this member has all confirmed bytes. Only then can a reader rely on the end of a queue."""
        return self.broker_id in self.view.sync_state_set

    @property
    def is_to_join(self) -> bool:
        """Return whether it has no part of the existing set's log yet, and no master of that set is known."""
        view = self.view
        return self.rules.set_exists and view.master is None and view.master_epoch == 0

    @property
    def may_lack_archived(self) -> bool:
        """Return whether this master may lack archived bytes, because the members it was elected from may lack them."""
        return self.saved.may_lack_archived

    def end_life(self) -> Saved:
        """Return the state that a stop saves last, after the log is synced."""
        return msgspec.structs.replace(self._saved_now(), clean=True)

    # # -- events

    def happens(self, event: Event, now: float) -> list[Action]:
        """Return the actions for an event. The caller does them in this order, each completely before the next."""
        handler = _TABLE[type(event)].get(self.state)
        return [] if handler is None else handler(self, event, now)

    # -- until a controller has registered it

    def _under_stock_controllers(self, event: StockControllers, now: float) -> list[Action]:
        self._is_under_stock = True
        return []

    def _nameless_tick(self, event: Tick, now: float) -> list[Action]:
        return [AskNextBrokerId()] if self._is_due(AskNextBrokerId, now, self.rules.ask_again_after) else []

    def _apply(self, event: NextBrokerId, now: float) -> list[Action]:
        return [ApplyBrokerId(event.broker_id, self.check_code)]

    def _named(self, event: BrokerIdApplied, now: float) -> list[Action]:
        self.state = State.UNREGISTERED
        self.saved = msgspec.structs.replace(self.saved, broker_id=event.broker_id)
        return [Save(self.saved), *self._unregistered_tick(Tick(self._end), now)]

    def _unregistered_tick(self, event: Tick, now: float) -> list[Action]:
        self._end = event.end
        return [Register(self.life, self.check_code)] if self._is_due(Register, now, self.rules.ask_again_after) else []

    def _registered(self, event: Registered, now: float) -> list[Action]:
        self.state = State.WAITING
        self._due[Register] = now + self.rules.register_every
        seen = self._seen(Seen(event.view), now) if event.view is not None else []
        return [*([] if self._is_silent else [self._heartbeat()]), *seen]

    def _apply_again(self, event: NotRegistered, now: float) -> list[Action]:
        """Apply for the own id again, which is free unless another directory has it.

        The controller's state was reset to before this member joined.
        """
        if not self._is_due(NotRegistered, now, self.rules.ask_again_after):
            return []
        return [ApplyBrokerId(self.broker_id, self.check_code), Register(self.life, self.check_code)]

    def _lose_id(self, event: BrokerIdLost, now: float) -> list[Action]:
        """Become a new member that keeps its log, because the id is another directory's."""
        if event.broker_id != self.broker_id:
            return []  # a slow answer about a former id
        self._step_down()
        self.state = State.NAMELESS
        # either itself, or the other directory, whose address this answer doesn't have
        if self.view.master == self.broker_id:
            self.view = msgspec.structs.replace(self.view, master=None, master_address="")
        self.saved = msgspec.structs.replace(self._saved_now(), broker_id=0)
        return [Answer(), StopFollowing(), DropSlaves(), Save(self.saved), *self._nameless_tick(Tick(self._end), now)]

    def _refuse(self, event: Disowned, now: float) -> list[Action]:
        return self._refused(event.reason)

    def _refused(self, reason: str) -> list[Action]:
        self._step_down()
        self.state = State.REFUSED
        return [Answer(), StopFollowing(), DropSlaves(), Tell(reason)]

    def _registered_again(self, event: Registered, now: float) -> list[Action]:
        return [] if event.view is None else self.happens(Seen(event.view), now)

    # -- views of the set

    def _seen(self, event: Seen, now: float) -> list[Action]:
        view = event.view
        if view.pair < self.view.pair:
            return []  # a slow answer
        self._take_view(view)
        actions = self._save_pair()
        if self.confirming is not None:
            return self._seen_as_master(event, actions, now)
        return actions + self._take_role(now)

    def _seen_while_turning(self, event: Seen, now: float) -> list[Action]:
        if event.view.pair < self.view.pair:
            return []
        self._take_view(event.view)
        return self._save_pair()

    def _take_view(self, view: View) -> None:
        """Take a newer view, and derive from it whether this member may lack archived bytes.

        An election alone gives no member any bytes. A member that is in sync with itself as master, or without a
        master, has the archived bytes only if it was in sync before. A member that is in sync with another master has
        what that one has. That includes all archived bytes if the log records that the master has settled its archive.
        """
        known, self.view = self.view, view
        may_lack = self.may_lack_archived
        if self.broker_id in view.sync_state_set:
            if view.master not in (None, self.broker_id):
                may_lack = self.saved.settled_in != view.master_epoch
            elif not _has_stayed_in_sync(self.broker_id, known, view):
                may_lack = True
        self.saved = msgspec.structs.replace(self.saved, may_lack_archived=may_lack)

    def _seen_as_master(self, event: Seen, actions: list[Action], now: float) -> list[Action]:
        """Check in `Confirm` whether this member is still the master. If not, stop acknowledging at once."""
        view, confirming = event.view, self.confirming
        assert confirming is not None
        members = SyncStateSet(view.sync_state_set_epoch, view.sync_state_set)
        is_displaced = view.master == self.broker_id and view.master_address != self.address
        if not is_displaced and confirming.read(view.master_epoch, members, now, forgets_in_place=self._is_under_stock):
            confirming.controller_heard(now)
            self.role = view
            if self._altering is not None and not confirming.is_altering:
                self._altering = None
            hand_over = self._hand_over
            if hand_over is not None and hand_over.ask and event.ask >= hand_over.ask:
                self._resume()
            return actions
        self._step_down()
        self.state = State.WAITING
        return [Answer(), DropSlaves(), *actions, *self._take_role(now)]

    def _step_down(self) -> None:
        """End the term: no record is acknowledged from here on."""
        self._confirm = self.confirm
        self.confirming = self._altering = self._hand_over = None

    def _save_pair(self) -> list[Action]:
        if self.view.pair <= (self.saved.master_epoch, self.saved.sync_state_set_epoch):
            return []
        self.saved = self._saved_now()
        return [Save(self.saved)]

    def _saved_now(self) -> Saved:
        view = self.view
        return msgspec.structs.replace(
            self.saved,
            master_epoch=view.master_epoch,
            sync_state_set_epoch=view.sync_state_set_epoch,
            sync_state_set=tuple(sorted(view.sync_state_set)),
            confirm=self.confirm,
        )

    def _take_role(self, now: float) -> list[Action]:
        """Take the role of the newest view. For states that wait for a role or follow another master."""
        view = self.view
        is_own = view.master == self.broker_id
        if is_own and view.master_address != self.address:
            return []  # another process has this id: a copy of the directory, or its original
        if self._is_silent:
            return [Withdraw()] if self._is_due(Withdraw, now, self.rules.register_every) else []
        if self.is_to_join:
            return []
        if view.master is None or (is_own and view.master_epoch <= self._used_epoch):
            return [Elect()] if self._is_due(Elect, now, self.rules.ask_again_after) else []
        is_news = self.state is State.WAITING or (view.master, view.master_epoch) != (
            self.role.master,
            self.role.master_epoch,
        )
        self.role = view
        if not is_news:
            return []
        if is_own:
            self.state = State.TURNING_MASTER
            self._used_epoch = epoch = view.master_epoch
            return [StopFollowing(), DropSlaves(), CutTornTail(), BeginEpoch(epoch), ClipGroups(), EndTurn(epoch)]
        self.state = State.TURNING_SLAVE
        follow = Follow(view.master, view.master_address, view.master_epoch)
        return [StopFollowing(), DropSlaves(), follow, EndTurn(view.master_epoch)]

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
        return self._seen_as_master(Seen(self.view), [], now)

    def _settled(self, event: ArchiveSettled, now: float) -> list[Action]:
        """Record that the log continues above all offsets that the archive names."""
        if not self.may_lack_archived or event.epoch != self.role.master_epoch:
            return []
        self.saved = msgspec.structs.replace(self._saved_now(), may_lack_archived=False)
        return [Save(self.saved)]

    # -- as slave

    def _master_settled(self, event: MasterSettled, now: float) -> list[Action]:
        view = self.view
        if event.epoch != self.role.master_epoch or event.epoch == self.saved.settled_in:
            return []
        is_in_sync_with_it = event.epoch == view.master_epoch and view.master is not None and self.is_in_sync
        self.saved = msgspec.structs.replace(
            self._saved_now(),
            settled_in=event.epoch,
            may_lack_archived=self.may_lack_archived and not is_in_sync_with_it,
        )
        return [Save(self.saved)]

    def _confirm_heard(self, event: ConfirmHeard, now: float) -> list[Action]:
        self._confirm = max(self._confirm, event.offset)
        return []

    def _cut(self, event: CutWanted, now: float) -> list[Action]:
        # An `async` master confirms its own end. Bytes that it alone has are truncated and kept in a file: the mode
        # allows it.
        if self.rules.confirm.waits and event.to < event.floor:
            return self._refused(
                f"the log parts from its master's at {event.to}, below {event.floor}, which was confirmed"
            )
        self._confirm = min(self._confirm, event.to)
        return [Cut(event.to)]

    def _slave_tick(self, event: Tick, now: float) -> list[Action]:
        self._end = event.end
        actions = [*self._regular(now), *self._save_confirm(now)]
        if self.view.master is None or self.state is State.WAITING:
            actions += self._take_role(now)
        return actions

    def _turning_tick(self, event: Tick, now: float) -> list[Action]:
        self._end = event.end
        return self._regular(now)

    # -- as master

    def _master_tick(self, event: Tick, now: float) -> list[Action]:
        self._end = event.end
        return [*self._regular(now), *self._save_confirm(now), *self._steer(now), *self._go_on_handing_over(now)]

    def _steer(self, now: float) -> list[Action]:
        """Return the requests that change the SSS."""
        confirming = self.confirming
        assert confirming is not None
        if not confirming.is_altering:
            wish = None if self._hand_over is not None else confirming.wish(now)
            return [] if wish is None else [self._alter(wish, now)]
        if not self._is_due(Alter, now, self.rules.ask_again_after):
            return []
        assert self._altering is not None
        wanted = frozenset(self._altering.members)
        if confirming.allows(wanted):
            confirming.asked(wanted)
            again: Action = self._altering
        else:
            again = self._alter(confirming.sync_state_set.members, now)
        return [again, self._ask_replica_info(now)]

    def _alter(self, wanted: frozenset[int], now: float) -> Alter:
        confirming = self.confirming
        assert confirming is not None
        based_on = confirming.asked(wanted)
        self._requests += 1
        self._due[Alter] = now + self.rules.ask_again_after
        self._altering = Alter(
            f"{self.process}-{self._requests}",
            self.role.master_epoch,
            based_on,
            tuple(sorted(wanted)),
        )
        return self._altering

    def _alter_refused(self, event: AlterRefused, now: float) -> list[Action]:
        confirming, altering = self.confirming, self._altering
        assert confirming is not None
        if altering is not None and altering.request_id == event.request_id and not event.has_moved:
            confirming.refused(altering.members, altering.sync_state_set_epoch)
        return [self._ask_replica_info(now)]

    # -- switchover

    def _begin_hand_over(self, event: HandOver, now: float) -> list[Action]:
        assert self.confirming is not None
        if event.target == self.broker_id or not self.confirming.in_sync(event.target):
            return [Tell(f"{event.target} is not in the SyncStateSet: it can't take over")]
        self.state = State.HANDING_OVER
        self._hand_over = _HandOver(event.target, now + self.rules.hand_over_within)
        return [SyncMetadata()]

    def _metadata_synced(self, event: MetadataSynced, now: float) -> list[Action]:
        if self._hand_over is not None:
            self._hand_over.metadata_synced = True
        return self._go_on_handing_over(now)

    def _go_on_handing_over(self, now: float) -> list[Action]:
        hand_over, confirming = self._hand_over, self.confirming
        if hand_over is None or confirming is None:
            return []
        if not hand_over.is_asked:
            if now > hand_over.until:
                self._resume()
                return []
            if hand_over.metadata_synced and confirming.end_of(hand_over.target) >= self._end:
                hand_over.is_asked = True
                return [Elect(hand_over.target)]
            return []
        if now <= hand_over.until or not self._is_due(HandOver, now, self.rules.ask_again_after):
            return []
        ask = self._ask_replica_info(now)
        hand_over.ask = hand_over.ask or ask.ask
        return [ask]

    def _resume(self) -> None:
        self._hand_over = None
        self.state = State.MASTER

    # -- common to all registered states

    def _regular(self, now: float) -> list[Action]:
        actions = list[Action]()
        if not self._is_silent and self._is_due(Heartbeat, now, self.rules.heartbeat_every):
            actions.append(self._heartbeat())
        if self._is_due(AskReplicaInfo, now, self.rules.poll_every):
            actions.append(self._ask_replica_info(now))
        if self._is_due(Register, now, self.rules.register_every):
            actions.append(Register(self.life, self.check_code))
        return actions

    @property
    def _is_silent(self) -> bool:
        """Return whether the controller takes this life for a former one, elects it, and would never elect another."""
        view = self.view
        if not self._is_under_stock or self.state not in (State.WAITING, State.SLAVE):
            return False
        is_taken = view.master == self.broker_id and view.master_address == self.address
        return is_taken and view.master_epoch <= self._used_epoch

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self.life, self._end, self.confirm, self.view.pair)

    def _ask_replica_info(self, now: float) -> AskReplicaInfo:
        self._asks += 1
        self._due[AskReplicaInfo] = now + self.rules.poll_every
        return AskReplicaInfo(self._asks)

    def _save_confirm(self, now: float) -> list[Action]:
        if self.confirm == self.saved.confirm or not self._is_due(Save, now, self.rules.save_confirm_every):
            return []
        self.saved = self._saved_now()
        return [Save(self.saved)]

    def _is_due(self, what: type, now: float, every: float) -> bool:
        if now < self._due.get(what, now):
            return False
        self._due[what] = now + every
        return True


def _has_stayed_in_sync(broker_id: int, known: View, view: View) -> bool:
    """Return whether a member that is in sync in `view` is so by more than an election, which makes it the only one.

    An election increments both epochs, the end of a master's term the master epoch alone, any other change of the set
    the set's epoch alone.
    """
    changes = view.sync_state_set_epoch - known.sync_state_set_epoch
    if view.master == broker_id and view.master_epoch > known.master_epoch:
        return changes == 1 and broker_id in known.sync_state_set
    return changes == 0 or view.master_epoch <= known.master_epoch + 1


# -- events by state; an event without an entry changes nothing

_Handler = Callable[[Member, Any, float], list[Action]]


def _cells(states: tuple[State, ...], handler: _Handler) -> dict[State, _Handler]:
    return dict.fromkeys(states, handler)


_LEADING = (State.MASTER, State.HANDING_OVER)
_TURNING = (State.TURNING_MASTER, State.TURNING_SLAVE)
_KNOWN = (State.WAITING, *_TURNING, *_LEADING, State.SLAVE)

_TABLE: Mapping[type, Mapping[State, _Handler]] = {
    Tick: {
        State.NAMELESS: Member._nameless_tick,
        State.UNREGISTERED: Member._unregistered_tick,
        **_cells((State.WAITING, State.SLAVE), Member._slave_tick),
        **_cells(_TURNING, Member._turning_tick),
        **_cells(_LEADING, Member._master_tick),
    },
    StockControllers: dict.fromkeys(State, Member._under_stock_controllers),
    NextBrokerId: {State.NAMELESS: Member._apply},
    BrokerIdTaken: {},  # the next tick requests another one
    BrokerIdApplied: {State.NAMELESS: Member._named},
    NotRegistered: _cells((State.UNREGISTERED, *_KNOWN), Member._apply_again),
    BrokerIdLost: _cells((State.UNREGISTERED, *_KNOWN), Member._lose_id),
    Disowned: _cells((State.UNREGISTERED, *_KNOWN), Member._refuse),
    Registered: {State.UNREGISTERED: Member._registered, **_cells(_KNOWN, Member._registered_again)},
    Seen: {
        **_cells((State.WAITING, State.SLAVE, *_LEADING), Member._seen),
        **_cells(_TURNING, Member._seen_while_turning),
    },
    RoleTaken: _cells(_TURNING, Member._role_is_taken),
    ConfirmHeard: {State.SLAVE: Member._confirm_heard},
    CutWanted: _cells((State.TURNING_SLAVE, State.SLAVE), Member._cut),
    AlterRefused: _cells(_LEADING, Member._alter_refused),
    ArchiveSettled: _cells(_LEADING, Member._settled),
    MasterSettled: {State.SLAVE: Member._master_settled},
    HandOver: {State.MASTER: Member._begin_hand_over},
    MetadataSynced: {State.HANDING_OVER: Member._metadata_synced},
}
