"""A member's life in its broker set: pure. Events go in, what has to be done comes out; `_TABLE`: which counts when.

  state           appends  acknowledges  reads       leaves it when
  NAMELESS        -        -             -           it has an id
  UNREGISTERED    -        -             -           a controller knows this life of it
  WAITING         -        -             <= confirm  there is a master, itself or another
  TURNING_MASTER  -        -             -           all steps of the change are done
  MASTER          yes      <= confirm    <= confirm  the set has another epoch; a hand-over begins
  HANDING_OVER    -        <= confirm    <= confirm  the set has another epoch, or the hand-over surely came to nothing
  TURNING_SLAVE   -        -             -           all steps of the change are done
  SLAVE           -        -             <= confirm  the set has another master, or its master another epoch
  REFUSED         -        -             -           never: an operator has it begin anew, with an empty directory

Rules, each of which guards an interleaving:

- A role is taken of a pair (masterEpoch, syncStateSetEpoch) that is not below any known before, in former lives too:
  the pair is on the disk before the first step. No epoch is taken up twice, nor by a later life: its last bytes may be
  lost here and be with others, and two different logs would bear one name.
- Whose id a controller gave to another directory, as its register was set back, is nobody until it has a new one.
- Who is to be master by an epoch that a former life has taken up asks to be elected anew. Apache's controller does
  not, as long as it takes the former life for this one: so this one is silent until the other is taken for dead.
- Who has no log of the set that is to exist never asks to be its first master: the register may be lost, and those that
  have the log away. An operator's word makes it one.
- A role is this member's if id and address are: a copy of its directory has the same id.
- A master that is told of another epoch answers nobody from that instant on, before anything else is done. A slave that
  becomes master closes its connection to the former one first: what that one acknowledges needs it.
- What is heard while a change of role is under way waits for its end; of several the newest counts.
- A 1001 whose answer is lost is asked again, unless who joins by it has gone: then the present set is asked for, and
  the epoch that this makes settles what became of the first.
- After a hand-over that came to nothing the master goes on only when a 1004 that was asked later shows its own epoch.
- Nothing below the own confirm is cut, where an acknowledgement waits for the set.

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
    """See the head of this file."""

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
    """What is configured; times in seconds."""

    confirm: ConfirmRules
    acknowledges_from_memory: bool = True  # ASYNC_FLUSH: after a crash this member may lack what it acknowledged
    is_alone: bool = False  # the set has no other member
    set_exists: bool = False  # there was a master: where no controller knows of one, its register is lost
    heartbeat_every: float = 1.0
    ask_again_after: float = 1.0  # what was not answered
    poll_every: float = 1.0  # 1004, when nothing is wanted: an async master has to hear somebody in `cut_off_after`
    register_every: float = 5.0  # 1003, while all is well: a late one of a former life may have come after this life's
    save_confirm_every: float = 1.0
    hand_over_within: float = 1.0


def begin_life(saved: Saved, new_incarnation: str, rules: MemberRules, *, is_copy: bool = False) -> Saved:
    """What a start writes down before it does anything else.

    `is_copy`: the directory is not where it was, it is a backup or a copy of it. The other one may live, and may have
    acknowledged more: this one is a new member, with what it has.
    """
    if is_copy:
        saved = msgspec.structs.replace(saved, broker_id=0, check_code="", incarnation="", starts=0)
    may_lack = not saved.clean and rules.acknowledges_from_memory
    incarnation = new_incarnation if may_lack or not saved.incarnation else saved.incarnation
    return msgspec.structs.replace(saved, incarnation=incarnation, starts=saved.starts + 1, clean=False)


@dataclass(slots=True)
class _HandOver:
    """Under way: the log and the tables are brought to the target, then it is designated, then its role is seen."""

    target: int
    until: float
    metadata_synced: bool = False
    is_asked: bool = False  # 1002: from here on another may be master
    ask: int = 0  # the first 1004 that was asked after the time was up; 0: none yet


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
        """`saved` is what `begin_life` made and is on the disk.

        `check_code`: address;millis, of a directory that has none yet.
        """
        self.rules = rules
        self.saved = saved if saved.check_code else msgspec.structs.replace(saved, check_code=check_code)
        self.process, self.address = process, address
        known = frozenset(saved.sync_state_set)
        self.view = View(saved.master_epoch, saved.sync_state_set_epoch, known)  # the newest
        self.role = self.view  # the one under which it acts
        self.confirming: Confirm | None = None  # while it is master: who has what
        self._used_epoch = saved.master_epoch  # by former lives, or as master in this one
        self._confirm = saved.confirm
        self._end = 0
        self._confirm_of = confirm_of
        self._due: dict[type, float] = {}
        self._asks = 0
        self._altering: Alter | None = None  # the last that was asked for
        self._requests = 0
        self._hand_over: _HandOver | None = None
        self._is_under_stock = False  # Apache's controller elects
        self.state = State.UNREGISTERED if saved.broker_id else State.NAMELESS

    # ---- what its broker asks

    @property
    def broker_id(self) -> int:
        """0: none yet."""
        return self.saved.broker_id

    @property
    def check_code(self) -> str:
        """With which this directory takes ids."""
        return self.saved.check_code

    @property
    def life(self) -> Life:
        """As it is registered, and told to a master."""
        return Life(self.saved.broker_id, self.saved.incarnation, self.saved.starts, self.process)

    @property
    def confirm(self) -> int:
        """What is safe as far as this member knows; what readers see."""
        return self._confirm if self.confirming is None else self.confirming.value

    def may_append(self, now: float) -> bool:
        """Asked before each append."""
        confirming = self.confirming
        if self.state is not State.MASTER or confirming is None:
            return False
        return confirming.may_append() and not confirming.is_cut_off(now)

    def acknowledged(self, now: float) -> int:
        """Below this a record may be acknowledged; -1: nothing may."""
        return -1 if self.confirming is None else self.confirming.acknowledged(now)

    @property
    def is_readable(self) -> bool:
        """Whether pulls are answered, up to `confirm`."""
        return self.state in (State.WAITING, State.MASTER, State.HANDING_OVER, State.SLAVE)

    @property
    def hands_over_to(self) -> int | None:
        """Which member; None: it does not."""
        return None if self._hand_over is None else self._hand_over.target

    @property
    def is_in_sync(self) -> bool:
        """Whether what it lacks is surely not there: only then a reader is told of an end of a queue."""
        return self.broker_id in self.view.sync_state_set

    @property
    def is_to_join(self) -> bool:
        """Whether it has no part yet of the set that is to exist, and nobody knows a master of that."""
        view = self.view
        return self.rules.set_exists and view.master is None and view.master_epoch == 0

    @property
    def may_lack_archived(self) -> bool:
        """Of a master: it was not, or perhaps not, elected from those who have all that the archive names."""
        return self.saved.may_lack_archived

    def end_life(self) -> Saved:
        """What a stop writes down last, when the log is synced."""
        return msgspec.structs.replace(self._saved_now(), clean=True)

    # ---- what happens

    def happens(self, event: Event, now: float) -> list[Action]:
        """What has to be done, in this order, each action whole before the next one."""
        handler = _TABLE[type(event)].get(self.state)
        return [] if handler is None else handler(self, event, now)

    # -- until a controller knows it

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
        """The register was set back to before it joined: its id is its own as long as nobody else has it."""
        if not self._is_due(NotRegistered, now, self.rules.ask_again_after):
            return []
        return [ApplyBrokerId(self.broker_id, self.check_code), Register(self.life, self.check_code)]

    def _lose_id(self, event: BrokerIdLost, now: float) -> list[Action]:
        """What is here stays, and is a new member's: it counts as nobody that it was."""
        if event.broker_id != self.broker_id:
            return []  # what a slow answer says of a former id
        self._step_down()
        self.state = State.NAMELESS
        if self.view.master == self.broker_id:  # it was itself, or is the other one, whose address is not told here
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

    # -- the set's news

    def _seen(self, event: Seen, now: float) -> list[Action]:
        view = event.view
        if view.pair < self.view.pair:
            return []  # what a slow answer says
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
        """Also who is in sync by it. By an election alone nobody comes to have anything: in sync with a master of its
        own, or with nobody's, a member has what is archived only if it was so before. In sync with another it has what
        that one has: all that is archived, and where queues go on above it, if its log says that that is so."""
        known, self.view = self.view, view
        may_lack = self.may_lack_archived
        if self.broker_id in view.sync_state_set:
            if view.master not in (None, self.broker_id):
                may_lack = self.saved.settled_in != view.master_epoch
            elif not _has_stayed_in_sync(self.broker_id, known, view):
                may_lack = True
        self.saved = msgspec.structs.replace(self.saved, may_lack_archived=may_lack)

    def _seen_as_master(self, event: Seen, actions: list[Action], now: float) -> list[Action]:
        """`Confirm` says whether this member is the master still; if not, it answers nobody from here on."""
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
        """From here on nobody is acknowledged."""
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
        """By the newest view, in a state that waits for one or in which another master is followed."""
        view = self.view
        is_own = view.master == self.broker_id
        if is_own and view.master_address != self.address:
            return []  # another process has this id: a copy of the directory, or what it was copied from
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
        """Its log has gone on above all that the archive names."""
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
        # An `async` master's confirm is its own end: what it has alone is cut off and kept, that is what the mode says.
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
        """What the SSS should be."""
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

    # -- hand-over

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

    # -- what every state that is registered does

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
        """Whether who elects takes this life for another one, that is master, and would do so for ever."""
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
    """Whether a member that is in sync by `view` is so by more than an election: what elects puts it there alone.

    An election moves both epochs, the end of a reign the master's, any other change of the set the set's alone.
    """
    changes = view.sync_state_set_epoch - known.sync_state_set_epoch
    if view.master == broker_id and view.master_epoch > known.master_epoch:
        return changes == 1 and broker_id in known.sync_state_set
    return changes == 0 or view.master_epoch <= known.master_epoch + 1


# ---- which event counts in which state; where there is no cell, it changes nothing

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
    BrokerIdTaken: {},  # the next tick asks for another one
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
