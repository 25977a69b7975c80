"""A member's state machine, event by event. Whole broker sets: tests/simulation/replicas."""

from __future__ import annotations

import msgspec
import pytest

from broker.ha.confirm import Confirm, ConfirmRules, ReplicationMode
from broker.ha.member import Member, State
from broker.ha.member_events import (
    Action,
    Alter,
    AlterRefused,
    ApplyBrokerId,
    AskNextBrokerId,
    AskReplicaInfo,
    BeginEpoch,
    BrokerIdApplied,
    BrokerIdLost,
    BrokerIdTaken,
    ConfirmReceived,
    DropSlaves,
    Elect,
    EndRoleChange,
    Follow,
    Heartbeat,
    Life,
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
    TruncationRequested,
    View,
    Withdraw,
)
from broker.ha.member_record import begin_life
from broker.ha.member_rules import MemberRules

SYNC = MemberRules(confirm=ConfirmRules(ReplicationMode.SYNC, 2))
AVAILABLE = MemberRules(confirm=ConfirmRules(ReplicationMode.SYNC_AVAILABLE, 1))
ASYNC = MemberRules(confirm=ConfirmRules(ReplicationMode.ASYNC, 1))
END = 1000


def _view(master: int | None, epoch: int, set_epoch: int, *members: int) -> View:
    return View(epoch, set_epoch, frozenset(members), master, f"h{master}:10911" if master else "")


def _member(rules: MemberRules = SYNC, saved: SavedMember | None = None) -> Member:
    known = saved if saved is not None else SavedMember(broker_id=1, incarnation="i1", starts=3)
    member = Member(rules, process="p1", address="h1:10911")
    member.begin(known, "h1;1")
    return member


def _slave(rules: MemberRules = SYNC, epoch: int = 1, confirm: int = 0) -> Member:
    member = _member(rules, SavedMember(broker_id=1, incarnation="i1", starts=3, confirm=confirm))
    member.happens(Registered(_view(2, epoch, epoch, 1, 2)), 0.0)
    member.happens(RoleTaken(epoch, END), 0.1)
    assert member.state is State.SLAVE
    return member


def _master(
    rules: MemberRules = SYNC, *, members: tuple[int, ...] = (1, 2), now: float = 0.0
) -> tuple[Member, Confirm]:
    member = _member(rules)
    member.happens(Registered(_view(1, 1, 1, *members)), now)
    member.happens(RoleTaken(1, END), now)
    assert member.state is State.MASTER and member.confirming is not None
    return member, member.confirming


def _kinds(actions: list[Action]) -> list[type]:
    return [type(action) for action in actions]


def _only(kind: type, actions: list[Action]) -> Action:
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, actions
    return found[0]


# ---- start


def test_start_after_a_crash_is_a_new_incarnation_if_memory_was_acked() -> None:
    crashed = SavedMember(broker_id=1, incarnation="old", starts=3, clean=False)
    assert begin_life(crashed, "new", SYNC).incarnation == "new"
    assert begin_life(msgspec.structs.replace(crashed, clean=True), "new", SYNC).incarnation == "old"
    from_disk = msgspec.structs.replace(SYNC, acknowledges_from_memory=False)
    assert begin_life(crashed, "new", from_disk).incarnation == "old"


def test_copied_directory_is_a_new_member_with_the_copied_state() -> None:
    from_disk = msgspec.structs.replace(SYNC, acknowledges_from_memory=False)
    saved = SavedMember(broker_id=1, incarnation="old", starts=3, master_epoch=4, confirm=900)
    copied = begin_life(saved, "new", from_disk, is_copy=True)
    assert (copied.broker_id, copied.incarnation, copied.starts) == (0, "new", 1)
    assert (copied.master_epoch, copied.confirm) == (4, 900)


def test_every_start_is_counted_and_unclean_until_it_stops() -> None:
    begun = begin_life(SavedMember(broker_id=1, incarnation="old", starts=3), "new", SYNC)
    assert (begun.starts, begun.clean) == (4, False)
    assert _member(saved=begun).end_life().clean


def test_new_member_saves_its_broker_id_before_it_registers() -> None:
    member = _member(saved=SavedMember(incarnation="i", starts=1))
    assert member.happens(Tick(0), 0.0) == [AskNextBrokerId()]
    assert member.happens(NextBrokerId(7), 0.1) == [ApplyBrokerId(7, "h1;1")]
    assert member.happens(BrokerIdTaken(), 0.2) == []
    assert member.happens(Tick(0), 1.2) == [AskNextBrokerId()]
    actions = member.happens(BrokerIdApplied(7), 1.3)
    assert _kinds(actions) == [Save, Register]
    assert member.broker_id == 7 and member.record.life == Life(7, "i", 1, "p1")


def test_unregistered_member_neither_serves_reads_nor_follows() -> None:
    member = _member()
    assert member.happens(SetSeen(_view(2, 1, 1, 2)), 0.0) == []
    assert member.state is State.UNREGISTERED and not member.is_readable


def test_former_master_sends_apache_no_heartbeat_until_it_is_deposed() -> None:
    member = _member(saved=SavedMember(broker_id=1, incarnation="i1", starts=3, master_epoch=4, sync_state_set_epoch=7))
    member.happens(StockControllers(), 0.0)
    member.happens(Tick(END), 0.0)
    former = _view(1, 4, 7, 1, 2)
    assert _kinds(member.happens(Registered(former), 0.1)) == [Withdraw], "no heartbeat"
    for now in (1.0, 2.2, 4.9):  # it only asks for the replica info
        assert set(_kinds(member.happens(Tick(END), now))) <= {AskReplicaInfo}
        assert _kinds(member.happens(SetSeen(former), now)) == []
    nobody = View(4, 7, frozenset((1, 2)))
    assert _kinds(member.happens(SetSeen(nobody), 5.0)) == [Elect]
    assert Heartbeat in _kinds(member.happens(Tick(END), 5.1))
    assert _kinds(member.happens(SetSeen(_view(1, 5, 8, 1)), 5.2))[-1] is EndRoleChange
    assert Heartbeat in _kinds(member.happens(Tick(END), 6.2)), "while it turns, too"


def test_restarted_master_asks_neves_controller_for_an_election() -> None:
    member = _member(saved=SavedMember(broker_id=1, incarnation="i1", starts=3, master_epoch=4, sync_state_set_epoch=7))
    member.happens(Tick(END), 0.0)
    assert _kinds(member.happens(Registered(_view(1, 4, 7, 1, 2)), 0.1)) == [Heartbeat, Elect]


def test_registration_is_repeated_after_a_former_incarnations_late_one() -> None:
    member = _slave()
    assert Register(member.record.life, "h1;1") in member.happens(Tick(END), 5.5)
    assert Follow(3, "h3:10911", 2) in member.happens(Registered(_view(3, 2, 2, 3)), 5.6)


@pytest.mark.parametrize("state", [State.UNREGISTERED, State.MASTER])
def test_unknown_member_applies_for_its_id_and_registers_again(state: State) -> None:
    member = _member() if state is State.UNREGISTERED else _master()[0]
    again = [ApplyBrokerId(1, "h1;1"), Register(member.record.life, "h1;1")]
    assert member.happens(NotRegistered(), 1.0) == again
    assert member.happens(NotRegistered(), 1.5) == []
    assert member.happens(NotRegistered(), 2.0) == again
    assert member.state is state


@pytest.mark.parametrize("state", [State.UNREGISTERED, State.SLAVE, State.MASTER])
def test_member_that_lost_its_id_stops_acking_and_keeps_its_data(state: State) -> None:
    member = _master()[0] if state is State.MASTER else _slave() if state is State.SLAVE else _member()
    assert member.happens(BrokerIdLost(7), 1.0) == []  # a slow answer that names a former id
    assert member.state is state
    pair, confirm = member.record.view.pair, member.confirm
    actions = member.happens(BrokerIdLost(1), 1.1)
    assert _kinds(actions) == [StopAcknowledging, StopFollowing, DropSlaves, Save, AskNextBrokerId]
    assert member.acknowledged(1.1) == -1 and not member.may_append(1.1) and not member.is_readable
    saved = member.record.saved
    assert actions[3] == Save(saved)
    assert (saved.broker_id, saved.check_code, saved.incarnation, saved.starts) == (0, "h1;1", "i1", 3)
    assert ((saved.master_epoch, saved.sync_state_set_epoch), saved.confirm) == (pair, confirm)
    assert member.happens(NextBrokerId(7), 1.2) == [ApplyBrokerId(7, "h1;1")]
    assert Register(Life(7, "i1", 3, "p1"), "h1;1") in member.happens(BrokerIdApplied(7), 9.0)


def test_master_that_lost_its_id_does_not_follow_its_own_former_id() -> None:
    member, _ = _master()
    member.happens(BrokerIdLost(1), 1.0)
    member.happens(BrokerIdApplied(7), 2.0)
    member.happens(Registered(None), 3.0)
    assert _kinds(member.happens(Tick(END), 4.0)).count(Follow) == 0
    assert member.state is State.WAITING
    assert Follow(2, "h2:10911", 2) in member.happens(SetSeen(_view(2, 2, 2, 2)), 5.0)


def test_refused_application_does_not_take_away_an_id() -> None:
    """A controller without state refuses every application, not only those for another member's id."""
    member, _ = _master()
    assert member.happens(BrokerIdTaken(), 1.0) == []
    assert (member.state, member.broker_id) == (State.MASTER, 1)


def test_check_code_is_constant_for_a_directory_and_new_for_a_copy() -> None:
    born = _member(saved=SavedMember(incarnation="i", starts=1)).end_life()
    again = begin_life(born, "new", SYNC)
    for saved, code in ((again, "h1;1"), (begin_life(born, "new", SYNC, is_copy=True), "h1;2")):
        member = Member(SYNC, process="p2", address="h1:10911")
        member.begin(saved, "h1;2")
        assert member.record.saved.check_code == code


def test_disowned_member_stops_all_activity() -> None:
    member, _ = _master()
    assert _kinds(member.happens(Superseded("a copy"), 1.0)) == [
        StopAcknowledging,
        StopFollowing,
        DropSlaves,
        NotifyOperator,
    ]
    assert member.acknowledged(1.0) == -1 and not member.may_append(1.0) and not member.is_readable
    assert member.happens(Tick(END), 9.0) == []


# ---- roles


def test_epoch_pair_is_saved_before_the_first_step_of_a_role() -> None:
    member = _member()
    actions = member.happens(Registered(_view(1, 4, 9, 1)), 0.0)
    kinds = _kinds(actions)
    assert kinds.index(Save) < kinds.index(StopFollowing) < kinds.index(BeginEpoch) < kinds.index(EndRoleChange)
    save = _only(Save, actions)
    assert isinstance(save, Save)
    assert (save.saved.master_epoch, save.saved.sync_state_set_epoch) == (4, 9)


def test_slave_that_becomes_master_stops_following_first() -> None:
    member = _slave()
    kinds = _kinds(member.happens(SetSeen(_view(1, 2, 2, 1)), 1.0))
    assert kinds[:3] == [Save, StopFollowing, DropSlaves]
    assert member.acknowledged(1.0) == -1


def test_restarted_member_does_not_resume_an_epoch_of_a_former_life() -> None:
    member = _member(saved=SavedMember(broker_id=1, incarnation="i", starts=4, master_epoch=5, sync_state_set_epoch=8))
    assert _kinds(member.happens(Registered(_view(1, 5, 8, 1, 2)), 0.0)) == [Heartbeat, Elect]
    assert member.state is State.WAITING
    assert BeginEpoch in _kinds(member.happens(SetSeen(_view(1, 6, 9, 1)), 0.5))


def test_master_that_reads_another_set_of_its_epoch_stops_leading() -> None:
    member, _ = _master()
    member.happens(SetSeen(_view(1, 1, 1, 1, 3)), 1.0)
    assert member.state is State.WAITING and member.acknowledged(1.0) == -1
    assert BeginEpoch not in _kinds(member.happens(Tick(END), 3.0))


def test_role_of_another_process_with_the_same_id_is_not_taken() -> None:
    elsewhere = msgspec.structs.replace(_view(1, 2, 3, 1, 2), master_address="h9:10911")
    member = _slave()
    assert BeginEpoch not in _kinds(member.happens(SetSeen(elsewhere), 1.0))
    assert member.acknowledged(1.0) == -1
    leading, _ = _master()
    assert StopAcknowledging() in leading.happens(SetSeen(msgspec.structs.replace(elsewhere, master_epoch=1)), 1.0)
    assert leading.acknowledged(1.0) == -1


def test_deposed_master_acknowledges_nothing_from_that_instant_on() -> None:
    member, confirming = _master()
    confirming.connected(2, "c", 0.0)
    confirming.reported(2, "c", END, 0.1)
    assert member.acknowledged(0.1) == END
    actions = member.happens(SetSeen(_view(2, 2, 2, 2)), 0.2)
    assert member.acknowledged(0.2) == -1 and not member.may_append(0.2)
    assert _kinds(actions)[:2] == [StopAcknowledging, DropSlaves]
    assert Follow(2, "h2:10911", 2) in actions


def test_view_of_an_older_epoch_is_ignored() -> None:
    member = _slave(epoch=3)
    assert member.happens(SetSeen(_view(1, 2, 9, 1)), 1.0) == []
    assert member.state is State.SLAVE


def test_role_change_during_another_waits_and_the_newest_wins() -> None:
    member = _member()
    member.happens(Registered(_view(1, 1, 1, 1)), 0.0)
    assert _kinds(member.happens(SetSeen(_view(2, 2, 2, 2)), 0.1)) == [Save]
    assert _kinds(member.happens(SetSeen(_view(3, 3, 3, 3)), 0.2)) == [Save]
    assert member.state is State.TURNING_MASTER
    actions = member.happens(RoleTaken(1, END), 0.3)
    assert Follow(3, "h3:10911", 3) in actions
    assert member.acknowledged(0.3) == -1


def test_reelected_master_begins_a_new_epoch() -> None:
    member, _ = _master()
    actions = member.happens(SetSeen(_view(1, 3, 5, 1)), 1.0)
    assert BeginEpoch(3) in actions and StopAcknowledging() in actions
    assert member.state is State.TURNING_MASTER


def test_member_without_a_master_repeats_its_election_request() -> None:
    member = _member()
    assert Elect() in member.happens(Registered(_view(None, 2, 2, 1, 2)), 0.0)
    assert Elect() not in member.happens(Tick(END), 0.5)
    assert Elect() in member.happens(Tick(END), 1.5)


def test_slave_keeps_following_while_the_controller_has_no_master() -> None:
    member = _slave()
    actions = member.happens(SetSeen(_view(None, 2, 1, 1, 2)), 1.0)
    assert StopFollowing not in _kinds(actions) and Elect() in actions
    assert member.state is State.SLAVE


# ---- a slave's log


def test_slave_refuses_to_truncate_below_its_confirmed_offset() -> None:
    member = _slave(confirm=800)
    actions = member.happens(TruncationRequested(700, floor=800), 1.0)
    assert Truncate not in _kinds(actions) and NotifyOperator in _kinds(actions)
    assert member.state is State.REFUSED and not member.is_readable
    assert member.happens(Registered(_view(2, 1, 1, 2)), 2.1) == []
    assert member.confirm == 800


def test_unconfirmed_tail_of_an_async_master_is_truncated() -> None:
    assert _slave(ASYNC, confirm=800).happens(TruncationRequested(700, floor=800), 1.0) == [Truncate(700)]


def test_confirmed_offset_never_decreases_and_is_saved() -> None:
    member = _slave()
    member.happens(ConfirmReceived(500), 1.0)
    member.happens(ConfirmReceived(300), 1.1)
    assert member.confirm == 500
    save = _only(Save, member.happens(Tick(END), 5.0))
    assert isinstance(save, Save) and save.saved.confirm == 500


# ---- the sync state set


def _grows(member: Member, confirming: Confirm, now: float) -> Alter:
    confirming.connected(2, "c", now)
    confirming.reported(2, "c", END, now)
    alter = _only(Alter, member.happens(Tick(END), now))
    assert isinstance(alter, Alter)
    return alter


def test_slave_with_the_confirmed_log_is_requested_for_the_set() -> None:
    member, confirming = _master(members=(1,))
    alter = _grows(member, confirming, 1.0)
    assert alter.members == (1, 2)
    assert (alter.master_epoch, alter.sync_state_set_epoch) == (1, 1)


def test_unanswered_change_is_repeated_with_the_same_request_id() -> None:
    member, confirming = _master(members=(1,))
    alter = _grows(member, confirming, 1.0)
    assert Alter not in _kinds(member.happens(Tick(END), 1.5))
    assert _only(Alter, member.happens(Tick(END), 2.5)) == alter


def test_change_for_a_disconnected_member_is_settled_by_a_new_request() -> None:
    member, confirming = _master(members=(1,))
    alter = _grows(member, confirming, 1.0)
    confirming.disconnected(2, "c", 1.5)
    settling = _only(Alter, member.happens(Tick(END), 2.5))
    assert isinstance(settling, Alter) and settling.request_id != alter.request_id
    assert settling.members == (1,)
    assert confirming.is_altering
    member.happens(SetSeen(_view(1, 1, 2, 1)), 2.6)
    assert not confirming.is_altering


def test_change_is_over_when_each_attempt_was_refused() -> None:
    member, confirming = _master(members=(1,))
    alter = _grows(member, confirming, 1.0)
    member.happens(Tick(END), 2.5)
    member.happens(AlterRefused(alter.request_id), 2.6)
    assert confirming.is_altering
    assert AskReplicaInfo in _kinds(member.happens(AlterRefused(alter.request_id), 2.7))
    assert not confirming.is_altering


def test_change_refused_for_a_moved_epoch_may_have_been_applied() -> None:
    member, confirming = _master(members=(1,))
    alter = _grows(member, confirming, 1.0)
    member.happens(AlterRefused(alter.request_id, has_moved=True), 1.1)
    assert confirming.is_altering


# ---- switchover


def _handing_over(now: float = 1.0) -> tuple[Member, Confirm]:
    member, confirming = _master()
    confirming.connected(2, "c", now)
    confirming.reported(2, "c", END - 100, now)
    assert member.happens(Switchover(2), now) == [SyncMetadata()]
    return member, confirming


def test_switchover_stops_appends_and_waits_for_tables_and_log() -> None:
    member, confirming = _handing_over()
    assert not member.may_append(1.0)
    assert Elect not in _kinds(member.happens(MetadataSynced(), 1.1))
    confirming.reported(2, "c", END, 1.2)
    assert _only(Elect, member.happens(Tick(END), 1.3)) == Elect(2)


def test_switchover_to_a_member_out_of_sync_is_refused() -> None:
    member, _ = _master()
    assert _kinds(member.happens(Switchover(3), 1.0)) == [NotifyOperator]
    assert member.may_append(1.0)


def test_switchover_that_is_not_requested_in_time_is_abandoned() -> None:
    member, _ = _handing_over()
    member.happens(Tick(END), 2.5)
    assert member.state is State.MASTER and member.may_append(2.5)


def test_master_resumes_after_a_switchover_only_on_a_later_answer() -> None:
    member, confirming = _handing_over()
    member.happens(MetadataSynced(), 1.1)
    confirming.reported(2, "c", END, 1.2)
    member.happens(Tick(END), 1.3)
    own = _view(1, 1, 1, 1, 2)
    asked = _only(AskReplicaInfo, member.happens(Tick(END), 2.2))
    assert isinstance(asked, AskReplicaInfo)
    member.happens(SetSeen(own, asked.ask - 1), 2.6)
    assert not member.may_append(2.6)
    member.happens(SetSeen(own, asked.ask), 2.7)
    assert member.may_append(2.7)


# ---- idle


@pytest.mark.parametrize("build", [_slave, lambda: _master()[0]])
def test_registered_member_sends_and_polls_at_a_fixed_rate(build: object) -> None:
    assert callable(build)
    member = build()
    kinds = [kind for step in range(1, 41) for kind in _kinds(member.happens(Tick(END), 10.0 + step / 4))]
    assert kinds.count(Heartbeat) == 10
    assert kinds.count(AskReplicaInfo) == 10
    assert kinds.count(Register) == 2


# ---- an existing set that the controller does not know

EXISTS = msgspec.structs.replace(SYNC, set_exists=True)


def test_empty_member_of_an_existing_set_never_asks_to_be_elected() -> None:
    """The controller lost its state, and the members with the set's log are away."""
    member = _member(EXISTS)
    kinds = _kinds(member.happens(Registered(_view(None, 0, 0)), 0.0))
    kinds += [kind for step in range(1, 41) for kind in _kinds(member.happens(Tick(0), step / 4))]
    assert Elect not in kinds and kinds.count(AskReplicaInfo) == 10
    assert member.is_to_join
    assert Follow in _kinds(member.happens(SetSeen(_view(2, 3, 4, 2)), 11.0))
    assert not member.is_to_join


def test_empty_member_of_an_existing_set_becomes_master_by_force() -> None:
    member = _member(EXISTS)
    member.happens(Registered(_view(None, 0, 0)), 0.0)
    member.happens(SetSeen(_view(1, 1, 1, 1)), 0.5)
    assert member.state is State.TURNING_MASTER


def test_member_with_the_sets_log_asks_for_an_election() -> None:
    member = _member(EXISTS, SavedMember(broker_id=1, master_epoch=3, sync_state_set_epoch=3, sync_state_set=(1, 2)))
    assert Elect in _kinds(member.happens(Registered(_view(None, 4, 3, 1, 2)), 0.0))
    former = _member(EXISTS, SavedMember(broker_id=1, master_epoch=3, sync_state_set_epoch=3, sync_state_set=(1, 2)))
    former.happens(Registered(_view(None, 0, 0)), 0.0)
    assert Elect in _kinds(former.happens(Tick(END), 2.0)), "the controller says why it elects nobody"


# ---- the archive and elections


def _turning_master(member: Member, view: View) -> SavedMember:
    """Elect the member and return what it has saved before its first step in the new term."""
    actions = member.happens(SetSeen(view), 1.0)
    assert member.state is State.TURNING_MASTER
    saved = _only(Save, actions)
    assert isinstance(saved, Save) and actions[0] is saved
    return saved.saved


def _settled(member: Member) -> Member:
    """Report to the member that its master's archive is settled."""
    written = _only(Save, member.happens(MasterSettled(member.role.master_epoch), 0.5))
    assert isinstance(written, Save) and not written.saved.may_lack_archived
    return member


def test_in_sync_slave_of_a_settled_master_has_all_archived_messages() -> None:
    member = _settled(_slave())
    assert not _turning_master(member, _view(1, 2, 2, 1)).may_lack_archived


@pytest.mark.parametrize(
    ("elected", "why"),
    [
        (_view(1, 2, 3, 1), "the set may have gone on without it since it looked last"),
        (_view(1, 3, 3, 1), "another one was master in between"),
    ],
)
def test_member_elected_from_an_unseen_set_may_lack_archived_messages(elected: View, why: str) -> None:
    assert _turning_master(_settled(_slave()), elected).may_lack_archived, why


def test_member_elected_while_it_turns_slave_may_lack_archived_messages() -> None:
    member = _member(AVAILABLE)
    member.happens(Registered(_view(2, 2, 2, 2)), 0.0)
    assert member.state is State.TURNING_SLAVE
    member.happens(SetSeen(_view(1, 3, 3, 1)), 0.1)
    assert member.record.is_in_sync
    assert member.record.may_lack_archived


def test_member_may_lack_archived_messages_until_its_own_term_settles() -> None:
    saved = _turning_master(_slave(AVAILABLE), _view(1, 3, 3, 1))
    member = _member(AVAILABLE, saved)
    member.happens(Registered(_view(None, 4, 3, 1)), 0.0)
    assert _turning_master(member, _view(1, 5, 4, 1)).may_lack_archived
    member.happens(RoleTaken(5, END), 1.1)
    assert member.happens(SettledArchive(4), 1.2) == [], "of another reign"
    written = _only(Save, member.happens(SettledArchive(5), 1.2))
    assert isinstance(written, Save) and not written.saved.may_lack_archived
    assert not member.record.may_lack_archived


def test_member_that_missed_an_election_may_lack_archived_messages() -> None:
    member = _member(AVAILABLE, SavedMember(broker_id=1, master_epoch=1, sync_state_set_epoch=1, sync_state_set=(1, 2)))
    member.happens(Registered(_view(None, 3, 2, 1)), 0.0)
    assert member.record.is_in_sync
    assert _turning_master(member, _view(1, 4, 3, 1)).may_lack_archived


def test_former_sole_master_has_all_archived_messages_at_its_next_start() -> None:
    """A set that starts while its archive is away must serve."""
    saved = SavedMember(broker_id=1, master_epoch=1, sync_state_set_epoch=1, sync_state_set=(1,))
    member = _member(AVAILABLE, saved)
    member.happens(Registered(None), 0.0)
    assert not _turning_master(member, _view(1, 3, 2, 1)).may_lack_archived


def test_end_of_a_term_is_not_taken_for_another_election() -> None:
    member = _settled(_slave())
    member.happens(SetSeen(_view(None, 2, 1, 1, 2)), 0.6)
    assert not _turning_master(member, _view(1, 3, 2, 1)).may_lack_archived


def test_slave_has_archived_messages_once_in_sync_and_its_master_settles() -> None:
    member = _member(saved=SavedMember(broker_id=1, may_lack_archived=True))
    member.happens(Registered(_view(2, 7, 7, 2)), 0.0)
    member.happens(RoleTaken(7, END), 0.1)
    member.happens(SetSeen(_view(2, 7, 8, 1, 2)), 0.2)
    assert member.record.may_lack_archived, "that master may wait for its archive still"
    assert member.happens(MasterSettled(6), 0.3) == [], "of another reign"
    _settled(member)
    assert member.happens(MasterSettled(7), 0.6) == [], "said again"


def test_slave_of_a_settled_master_has_archived_messages_once_in_sync() -> None:
    member = _member(saved=SavedMember(broker_id=1, may_lack_archived=True))
    member.happens(Registered(_view(2, 7, 7, 2)), 0.0)
    member.happens(RoleTaken(7, END), 0.1)
    written = _only(Save, member.happens(MasterSettled(7), 0.2))
    assert isinstance(written, Save) and written.saved.may_lack_archived, "not in sync it may lack anything"
    again = _member(saved=written.saved)
    again.happens(Registered(_view(2, 7, 8, 1, 2)), 0.0)
    assert not again.record.may_lack_archived, "it is known in the next life"


def test_slave_elected_before_its_master_settled_may_lack_messages() -> None:
    """How long it was in sync does not matter."""
    member = _slave()
    member.happens(SetSeen(_view(2, 1, 2, 1, 2, 3)), 0.5)
    assert _turning_master(member, _view(1, 2, 3, 1)).may_lack_archived


def test_settled_archive_of_a_former_master_does_not_count_for_the_next() -> None:
    """The next one may lack archived messages, and its slave may have truncated them."""
    member = _settled(_slave(AVAILABLE))
    member.happens(SetSeen(_view(3, 2, 2, 3)), 0.6)
    member.happens(RoleTaken(2, END), 0.7)
    member.happens(SetSeen(_view(3, 2, 3, 1, 3)), 0.8)
    assert _turning_master(member, _view(1, 3, 4, 1)).may_lack_archived
