"""Tests of single controller decisions; test_every_state checks invariants over all small broker sets."""

from __future__ import annotations

from dataclasses import replace as changed
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from controller.broker_set import BrokerSet, Member
from controller.decision import (
    AlterSyncStateSet,
    Answer,
    ApplyBrokerId,
    Ask,
    Asked,
    CleanBrokerData,
    Decision,
    ElectMaster,
    GetNextBrokerId,
    GetReplicaInfo,
    GetSyncStateData,
    RegisterBroker,
    Report,
    Request,
    Rules,
    Scan,
    decide,
)
from neve.remoting.codes import ResponseCode as Code

A, B, C, STRANGER = 1, 2, 3, 9
NOW = 1_000_000


class DecidedSet:
    """One broker set, the reports of its members, and a controller that stores each decision."""

    def __init__(self, *ids: int, stock: bool = False, least: int = 1) -> None:
        self.rules = Rules()
        self.now_ms = NOW
        self.reports: dict[int, Report] = {}
        self.set: BrokerSet | None = None
        self.told: tuple[int, ...] = ()
        self.asked: tuple[int, ...] = ()
        self.least, self.stock = least, stock
        for broker_id in ids:
            assert self(ApplyBrokerId("c", "b", broker_id, f"h{broker_id}:10911;1")).code == Code.SUCCESS
            self.start(broker_id)

    def __call__(self, request: Request) -> Answer:
        found = self.decide(request)
        if isinstance(found, Ask):
            self.asked = found.candidates
            for broker_id in found.candidates:
                report = self.reports[broker_id]
                self.reports[broker_id] = changed(report, asked=Asked(True, report.epoch, report.max_offset))
            found = self.decide(request)
            self.reports = {broker_id: changed(report, asked=None) for broker_id, report in self.reports.items()}
        assert isinstance(found, Decision)
        self.set = None if found.removed else found.broker_set or self.set
        self.told = found.notify
        return found.answer

    def decide(self, request: Request) -> Decision | Ask:
        return decide(self.set, self.reports, request, self.now_ms, self.rules)

    def start(self, broker_id: int, incarnation: str = "i", starts: int = 1, process: str = "p") -> Answer:
        """Start a broker: register it and, if it is accepted, record a heartbeat."""
        name = "" if self.stock else f"{incarnation}{broker_id}"
        born = (name, 0 if self.stock else starts, "" if self.stock else f"{process}{starts}")
        address = f"h{broker_id}:10911"
        answer = self(RegisterBroker("c", "b", broker_id, address, *born, min_in_sync_replicas=self.least))
        if answer.code == Code.SUCCESS:
            self.record_heartbeat(broker_id, incarnation=name, starts=born[1], process=born[2])
        return answer

    def record_heartbeat(self, broker_id: int, **what: Any) -> None:
        before = self.reports.get(broker_id, Report(0, max_offset=0, epoch=0))
        self.reports[broker_id] = changed(before, **{"heard_ms": self.now_ms, "connected": True, **what})

    def die(self, *ids: int) -> None:
        for broker_id in ids:
            self.reports[broker_id] = changed(self.reports[broker_id], connected=False)

    def elect(self, broker_id: int = -1, *, designate: bool = False) -> Answer:
        return self(ElectMaster("b", broker_id, designate))

    def alter(self, *ids: int, master: int | None = None, epoch: int = 0, based_on: int = 0, id: str = "") -> Answer:
        who = self.value.master if master is None else master
        return self(
            AlterSyncStateSet(
                "b", who or 0, self.value.master_epoch + epoch, ids, self.value.sync_state_set_epoch + based_on, id
            )
        )

    @property
    def value(self) -> BrokerSet:
        assert self.set is not None
        return self.set


def in_sync(*ids: int, stock: bool = False, least: int = 1) -> DecidedSet:
    """Return a world whose first broker is master and whose brokers are all in sync."""
    world = DecidedSet(*ids, stock=stock, least=least)
    assert world.elect(ids[0]).code == Code.SUCCESS
    for count in range(2, len(ids) + 1):
        assert world.alter(*ids[:count]).code == Code.SUCCESS
    return world


def lost(world: DecidedSet) -> DecidedSet:
    """Undo the last two elections in the register, as the restore of a backup does."""
    world.set = replace(world.value, master_epoch=world.value.master_epoch, sync_state_set_epoch=1)
    for broker_id in list(world.reports):
        world.record_heartbeat(broker_id, master_epoch=world.value.master_epoch + 2, sync_state_set_epoch=8)
    return world


# ---- joining


def test_broker_ids_start_at_one_and_are_not_reused() -> None:
    world = DecidedSet()
    assert world(GetNextBrokerId("c", "b")).next_broker_id == 1
    assert world(ApplyBrokerId("c", "b", 2, "h:1;1")).code == Code.CONTROLLER_BROKER_ID_INVALID
    assert world(ApplyBrokerId("c", "b", 1, "h:1;1")).code == Code.SUCCESS
    assert world(ApplyBrokerId("c", "b", 1, "h:1;1")).code == Code.SUCCESS  # the same request, repeated
    assert world(ApplyBrokerId("c", "b", 1, "h:1;2")).code == Code.CONTROLLER_BROKER_ID_INVALID
    assert world(GetNextBrokerId("c", "b")).next_broker_id == 2
    assert world(ApplyBrokerId("c", "b", 7, "h:2;1")).code == Code.SUCCESS
    assert world(GetNextBrokerId("c", "b")).next_broker_id == 8
    assert world(CleanBrokerData("b", "7")).code == Code.SUCCESS
    assert world(GetNextBrokerId("c", "b")).next_broker_id == 8


def test_broker_set_belongs_to_one_cluster_and_has_a_member_limit() -> None:
    world = DecidedSet(A)
    assert world(ApplyBrokerId("other", "b", 2, "h:2;1")).code == Code.CONTROLLER_BROKER_ID_INVALID
    assert world(RegisterBroker("other", "b", A, "h:1")).code == Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
    world.rules = Rules(max_members=1)
    assert world(ApplyBrokerId("c", "b", 2, "h:2;1")).code == Code.CONTROLLER_BROKER_ID_INVALID


def test_non_member_must_apply_for_an_id_before_register_or_elect() -> None:
    world = DecidedSet(A)
    need = Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
    assert world(RegisterBroker("c", "b", STRANGER, "h:9")).code == need
    assert world.elect(STRANGER).code == need
    assert DecidedSet()(ElectMaster("b", A)).code == need
    assert DecidedSet()(RegisterBroker("c", "b", A, "h:1")).code == need


def test_register_broker_updates_address_and_returns_only_a_live_master() -> None:
    world = in_sync(A, B)
    answer = world(RegisterBroker("c", "b", B, "new:10911", "i2", 1, "p1"))
    assert (answer.master, answer.master_address, answer.master_epoch) == (A, "h1:10911", 1)
    assert answer.sync_state_set == (A, B)
    assert world.value.member(B) == replace(world.value.members[1], address="new:10911")
    world.die(A)
    answer = world(RegisterBroker("c", "b", B, "new:10911", "i2", 1, "p1"))
    assert (answer.master, answer.master_epoch, answer.sync_state_set) == (None, None, (A, B))


# ---- incarnations


def test_new_incarnation_leaves_sync_state_set_on_registration() -> None:
    world = in_sync(A, B)
    epochs = world.value.epochs
    world.start(B, incarnation="fresh")  # its log ended at 1000 before the crash and ends at 900 now
    assert world.value.sync_state_set == (A,)
    assert world.value.epochs == (epochs[0], epochs[1] + 1)
    assert world.told == (A,)
    world.die(A)
    assert world.elect(B).code == Code.CONTROLLER_ELECT_MASTER_FAILED


def test_stale_alteration_cannot_readd_a_broker_that_lost_its_memory() -> None:
    """A requested {A, B} while B had all confirmed records. The request arrives after B lost some of them."""
    world = in_sync(A, B)
    assert world.alter(A).code == Code.SUCCESS
    late = AlterSyncStateSet("b", A, world.value.master_epoch, (A, B), world.value.sync_state_set_epoch)
    world.start(B, incarnation="fresh")
    assert world.told == (A,)
    assert world(late).code == Code.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
    assert world.value.sync_state_set == (A,)
    assert world.alter(A, B).code == Code.SUCCESS, "asked for anew, with what it has now"


def test_new_incarnation_leaves_sync_state_set_while_old_one_seems_alive() -> None:
    world = in_sync(A, B)
    assert world.reports[B].connected  # the end of the old process was not detected
    world.start(B, incarnation="fresh")
    assert world.value.sync_state_set == (A,)


def test_master_with_new_incarnation_is_deposed() -> None:
    world = in_sync(A, B)
    world.die(A)
    world.start(A, incarnation="fresh")
    assert (world.value.master, world.value.master_epoch, world.value.sync_state_set) == (None, 2, (B,))
    assert world.elect(A).master == B


def test_clean_restart_stays_in_sync_state_set() -> None:
    world = in_sync(A, B)
    world.die(B)
    assert world.start(B, starts=2).code == Code.SUCCESS
    assert world.value.sync_state_set == (A, B)


def test_restarted_master_is_reelected_in_a_new_epoch() -> None:
    world = in_sync(A)
    world.die(A)
    assert world.start(A, starts=2).master is None
    assert (world.value.master, world.value.sync_state_set) == (None, (A,))
    assert world.elect(A).master_epoch == 3


def test_repeated_registration_of_one_process_changes_nothing() -> None:
    world = in_sync(A, B)
    before = world.value
    assert world.start(A).code == Code.SUCCESS
    assert world.start(B).code == Code.SUCCESS
    assert world.value == before


@pytest.mark.parametrize("starts", [1, 2])
def test_copied_store_directory_is_refused_while_the_original_is_alive(starts: int) -> None:
    world = in_sync(A, B)
    before = world.value
    copy = world.start(B, starts=starts, process="copy")
    assert copy.code == Code.CONTROLLER_INVALID_REQUEST
    assert "copy" in copy.remark
    assert world.value == before


@pytest.mark.parametrize("starts", [1, 9])
def test_unexpected_start_count_removes_broker_from_sync_state_set(starts: int) -> None:
    world = in_sync(A, B)
    world.die(B)
    world.start(B, starts=2)
    world.die(B)
    assert world.start(B, starts=starts).code == Code.SUCCESS
    assert world.value.sync_state_set == (A,)


def test_heartbeat_of_unregistered_process_does_not_make_member_alive() -> None:
    world = in_sync(A, B)
    world.record_heartbeat(B, process="unregistered")
    world.die(A)
    assert world.elect().code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert world.value.master is None


def test_apache_broker_registers_without_incarnation_and_stays_in_sync() -> None:
    world = in_sync(A, B, stock=True)
    before = world.value
    world.die(B)
    world.start(B)
    assert world.value == before


def test_restarted_apache_master_needs_a_new_epoch() -> None:
    """In the old epoch, it would record that the epoch starts at its present log end, and no slave could follow."""
    world = in_sync(A, stock=True)
    world.start(A)
    assert (world.value.master, world.value.sync_state_set) == (None, (A,))
    epoch = world.value.master_epoch
    answer = world.elect(A)
    assert (answer.master, world.value.master_epoch) == (A, epoch + 1)


# ---- all members unclean


def test_all_unclean_members_must_be_alive_before_longest_log_is_elected() -> None:
    world = in_sync(A, B)
    world.die(A, B)
    world.start(A, incarnation="fresh")
    world.record_heartbeat(A, epoch=1, max_offset=900)
    assert world.elect(A).code == Code.CONTROLLER_ELECT_MASTER_FAILED  # B may be clean
    world.start(B, incarnation="fresh")
    world.record_heartbeat(B, epoch=1, max_offset=950)
    assert (world.value.sync_state_set, world.value.unclean) == ((), (A, B))
    world.die(B)
    assert world.elect(A).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    world.record_heartbeat(B)
    assert world.elect(A).master == B
    assert (world.value.sync_state_set, world.value.unclean) == ((B,), ())


def test_member_never_in_sync_is_elected_if_its_log_is_the_longest() -> None:
    world = in_sync(A, B)
    world(ApplyBrokerId("c", "b", C, "h3:10911;1"))
    world.start(C)
    world.record_heartbeat(C, epoch=1, max_offset=980)
    world.die(A, B)
    for broker_id in (A, B):
        world.start(broker_id, incarnation="fresh")
        world.record_heartbeat(broker_id, epoch=1, max_offset=900)
    assert world.elect(A).master == C


def test_election_waits_for_unreachable_unclean_member() -> None:
    world = in_sync(A, B)
    for broker_id in (A, B):
        world.start(broker_id, incarnation="fresh")
    world.record_heartbeat(A, asked=Asked(True, 1, 900))
    world.record_heartbeat(B, asked=Asked(False))
    assert world.elect(A).code == Code.CONTROLLER_ELECT_MASTER_FAILED


def test_operator_designates_shorter_unclean_log_only_if_rules_allow_it() -> None:
    world = in_sync(A, B)
    for broker_id in (A, B):
        world.start(broker_id, incarnation="fresh")
    assert world.elect(A, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    world.rules = Rules(enable_elect_unclean_master=True)
    assert world.elect(A, designate=True).master == A


def test_live_master_readmits_unclean_member_to_sync_state_set() -> None:
    world = in_sync(A, B)
    world.start(B, incarnation="fresh")
    assert B in world.value.unclean
    assert world.alter(A, B).code == Code.SUCCESS
    assert not world.value.unclean


# ---- the first election


def test_first_master_is_the_asking_member_if_every_log_is_empty() -> None:
    world = DecidedSet(A, B)
    answer = world.elect(B)
    assert (answer.code, answer.master, answer.master_address) == (Code.SUCCESS, B, "h2:10911")
    assert (answer.master_epoch, answer.sync_state_set_epoch, answer.sync_state_set) == (1, 1, (B,))
    assert answer.addresses == {A: "h1:10911", B: "h2:10911"}
    assert world.told == (A, B)


def test_first_election_refuses_empty_member_if_another_has_a_log() -> None:
    world = DecidedSet(A, B)
    world.record_heartbeat(B, max_offset=1000)  # epoch 0: it was never in a broker set
    refused = world.elect(A)
    assert refused.code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "designate" in refused.remark
    assert world.elect(B, designate=True).master == B


def test_first_election_waits_for_member_without_heartbeat() -> None:
    world = DecidedSet(A, B)
    del world.reports[B]
    assert world.elect(A).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.elect(A, designate=True).master == A


def test_first_election_is_refused_if_a_non_member_reports_a_log() -> None:
    """After the register was wiped, brokers send heartbeats before they are members again."""
    for hears in (
        lambda world: world.record_heartbeat(STRANGER, max_offset=1000),
        # Under an id that was assigned again, and whose new owner is alive.
        lambda world: setattr(world, "rules", Rules(strangers=(Report(NOW, max_offset=1000, epoch=0),))),
    ):
        world = DecidedSet(A)
        hears(world)
        refused = world.elect(A)
        assert refused.code == Code.CONTROLLER_ELECT_MASTER_FAILED
        assert "ends at 1000" in refused.remark
        assert world.elect(A, designate=True).master == A


def test_stranger_under_a_taken_id_with_higher_epochs_freezes_the_set() -> None:
    stranger = Report(NOW, cluster="c", max_offset=1000, master_epoch=5, sync_state_set_epoch=7)
    world = DecidedSet(A)
    world.rules = Rules(strangers=(changed(stranger, cluster="another"),))
    assert world.elect(A).master == A, "it is no broker of this cluster's"
    world = DecidedSet(A)
    world.rules = Rules(strangers=(stranger,))
    refused = world.elect(A)
    assert refused.code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "a broker whose id is another's knows epochs (5, 7)" in refused.remark
    assert world.value.frozen is not None
    assert world.elect(A, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED, "it does not know them"
    world.record_heartbeat(B, max_offset=1000, epoch=5, master_epoch=5, sync_state_set_epoch=7, incarnation="b")
    assert "designate one of [2]" in world.elect(A, designate=True).remark


def test_new_controller_delays_first_election_unless_member_is_designated() -> None:
    world = DecidedSet(A)
    world.rules = Rules(elects_first_from_ms=NOW + 1)
    assert world.elect(A).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.elect(A, designate=True).master == A
    world = DecidedSet(A)
    world.rules = Rules(elects_first_from_ms=NOW)
    assert world.elect(A).master == A


def test_dead_or_unnamed_broker_does_not_become_first_master() -> None:
    world = DecidedSet(A, B)
    assert world.elect().code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    world.die(A)
    assert world.elect(A).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.elect(A, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.value.master_epoch == 0


# ---- elections


def test_live_master_is_not_replaced() -> None:
    world = in_sync(A, B)
    answer = world.elect(B)
    assert answer.code == Code.CONTROLLER_MASTER_STILL_EXIST
    assert (answer.master, answer.master_epoch, answer.sync_state_set) == (A, 1, (A, B))
    assert world.elect(A, designate=True).code == Code.CONTROLLER_MASTER_STILL_EXIST


def test_dead_master_is_replaced_by_in_sync_member_and_live_are_notified() -> None:
    world = in_sync(A, B, C)
    world.die(A)
    assert world(Scan("b")).master == B
    assert world.value.epochs == (2, 4)
    assert world.told == (B, C)


def test_master_without_heartbeats_is_replaced_after_its_timeout() -> None:
    world = in_sync(A, B)
    world.now_ms += 10_001
    world.record_heartbeat(B)
    assert world(Scan("b")).master == B


def test_out_of_sync_member_is_not_elected() -> None:
    world = in_sync(A, B)
    assert world.alter(A).code == Code.SUCCESS
    world.die(A)
    assert world.elect(B).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.value.master == A  # the request of a broker changes nothing
    assert world.elect(B, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED


def test_dead_master_without_successor_is_cleared_and_its_set_kept() -> None:
    world = in_sync(A, B)
    world.alter(A)
    world.die(A)
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert (world.value.master, world.value.master_epoch, world.value.sync_state_set) == (None, 2, (A,))
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert world.value.master_epoch == 2  # once
    world.record_heartbeat(A)
    assert world(Scan("b")).master == A


def test_scan_changes_nothing_if_no_member_is_alive() -> None:
    world = in_sync(A, B)
    before = world.value
    world.die(A, B)
    assert world(Scan("b")).code == Code.SUCCESS
    assert world.value == before


@pytest.mark.parametrize(
    ("b", "c", "winner"),
    [
        ((2, 100, 9), (1, 900, 1), B),  # the later epoch, however short
        ((1, 1, 1), (1, 2**40, 9), C),  # the longer log, by more than 32 bits
        ((1, 2**33, 9), (1, 1, 1), B),
        ((1, 5, 2), (1, 5, 1), C),  # the lower priority number
        ((1, 5, 2), (1, 5, 2), B),
    ],
)
def test_longest_log_of_the_latest_epoch_wins_the_election(
    b: tuple[int, int, int], c: tuple[int, int, int], winner: int
) -> None:
    world = in_sync(A, B, C)
    world.set = replace(world.value, master_epoch=2)
    world.die(A)
    for broker_id, (epoch, end, priority) in ((B, b), (C, c)):
        world.record_heartbeat(broker_id, epoch=epoch, max_offset=end, priority=priority)
    assert world.elect().master == winner
    assert world.asked == (B, C)


def test_election_compares_candidates_answers_instead_of_heartbeats() -> None:
    world = in_sync(A, B, C)
    world.die(A)
    world.record_heartbeat(B, epoch=1, max_offset=1000, asked=Asked(True, 1, 1000))
    world.record_heartbeat(C, epoch=1, max_offset=10, asked=Asked(True, 1, 1001))  # its heartbeat is a second old
    assert world.elect().master == C


def test_unreachable_candidate_is_not_elected() -> None:
    world = in_sync(A, B, C)
    world.die(A)
    world.record_heartbeat(B, asked=Asked(False))
    world.record_heartbeat(C, asked=Asked(True, 1, 1))
    assert world.elect().master == C
    world.die(C)
    world.record_heartbeat(B, asked=None)
    assert world.elect(B).code == Code.CONTROLLER_ELECT_MASTER_FAILED


def test_lone_apache_candidate_is_elected_without_epoch_query() -> None:
    world = in_sync(A, B, stock=True)
    world.die(A)
    world.record_heartbeat(B, asked=None)
    assert isinstance(world.decide(ElectMaster("b", B)), Decision)
    assert isinstance(in_sync(A, B).decide(ElectMaster("b", B, designate=True)), Ask)  # a neve broker is queried


def test_designated_in_sync_member_replaces_live_master() -> None:
    world = in_sync(A, B)
    answer = world.elect(B, designate=True)
    assert (answer.code, answer.master, answer.master_epoch) == (Code.SUCCESS, B, 2)
    assert world.told == (A, B)


def test_unclean_election_needs_operator_permission_and_no_apache_broker() -> None:
    for stock, allowed, designate in ((True, True, True), (False, False, True), (False, True, False)):
        world = in_sync(A, B, stock=stock)
        world.alter(A)
        world.die(A)
        world.rules = Rules(enable_elect_unclean_master=allowed)
        refused = world.elect(B, designate=designate)
        assert refused.code == Code.CONTROLLER_ELECT_MASTER_FAILED
        assert ("clean up those that are not" in (refused.remark or "")) == (stock and allowed), (
            "what keeps it back is told"
        )
    world = in_sync(A, B)
    world.alter(A)
    world.die(A)
    world.rules = Rules(enable_elect_unclean_master=True)
    assert world.elect(B, designate=True).master == B


def test_new_controller_waits_for_members_without_heartbeat() -> None:
    world = in_sync(A, B)
    heard = dict(world.reports)
    world.rules = Rules(elects_from_ms=NOW + 3000)
    del world.reports[A]
    assert world.elect(B).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert world.value.master == A
    world.reports = heard
    world.die(A)
    assert world.elect(B).master == B  # every member has reported: nothing to wait for
    world = in_sync(A, B)
    world.rules = Rules(elects_from_ms=NOW)
    del world.reports[A]
    assert world.elect(B).master == B


# ---- eligible members


def test_former_set_member_stays_eligible_below_min_in_sync_replicas() -> None:
    world = in_sync(A, B, least=2)
    world.die(A)
    assert world.elect().master == B
    assert (world.value.sync_state_set, world.value.eligible) == ((B,), (A,))  # B cannot acknowledge alone
    world.die(B)
    world.record_heartbeat(A)
    assert world.elect(A).master == A
    assert B in world.value.eligible
    world.record_heartbeat(B)
    assert world.alter(A, B).code == Code.SUCCESS
    assert not world.value.eligible


def test_no_member_stays_eligible_if_master_may_acknowledge_alone() -> None:
    for world in (in_sync(A, B, least=1), in_sync(A, B, stock=True)):
        world.die(A)
        assert world.elect().master == B
        assert world.value.eligible == ()


def test_eligible_member_becomes_unclean_with_new_incarnation() -> None:
    world = in_sync(A, B, least=2)
    world.die(A)
    world.elect()
    world.start(A, incarnation="fresh")
    assert (world.value.eligible, world.value.unclean) == ((), (A,))


# ---- the sync state set


def test_invalid_alterations_are_refused_in_rocketmq_order() -> None:
    world = in_sync(A, B)
    world(ApplyBrokerId("c", "b", C, "h3:10911;1"))
    before = world.value
    failed = Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
    wrong: dict[str, Any] = {"master": B, "epoch": 1, "based_on": 1}
    assert world.alter(A, B, **wrong).code == failed
    assert world.alter(B, STRANGER, **wrong).code == Code.CONTROLLER_INVALID_MASTER
    assert world.alter(B, STRANGER, epoch=1, based_on=1).code == Code.CONTROLLER_FENCED_MASTER_EPOCH
    assert world.alter(B, STRANGER, based_on=1).code == Code.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
    assert world.alter(B, STRANGER).code == Code.CONTROLLER_INVALID_REPLICAS
    assert world.alter(B, C).code == Code.CONTROLLER_BROKER_NOT_ALIVE
    assert world.alter(B).code == failed
    assert DecidedSet()(AlterSyncStateSet("b", A, 1, (A,), 1)).code == failed
    assert world.value == before


def test_repeated_alteration_with_request_id_returns_first_answer() -> None:
    world = in_sync(A, B)
    request = AlterSyncStateSet("b", A, 1, (A,), world.value.sync_state_set_epoch, "r1")
    first = world(request)
    assert first.sync_state_set_epoch == 3
    after = world.value
    assert world(request) == first
    assert world.value == after
    assert world.alter(A, B, id="r2").code == Code.SUCCESS
    assert world(request).code == Code.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH  # a later alteration was stored
    # Without an id, a repetition cannot be recognized.
    plain = AlterSyncStateSet("b", A, 1, (A,), world.value.sync_state_set_epoch)
    assert world(plain).code == Code.SUCCESS
    assert world(plain).code == Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED


def test_sync_state_set_does_not_shrink_below_min_in_sync_replicas() -> None:
    world = in_sync(A, B, C, least=2)
    assert world.alter(A, C).code == Code.SUCCESS
    refused = world.alter(A)
    assert refused.code == Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
    assert "needs 2" in refused.remark
    assert world.value.sync_state_set == (A, C)


def test_unchanged_set_gets_new_epoch_that_fences_older_alteration() -> None:
    world = in_sync(A, B)
    world(ApplyBrokerId("c", "b", C, "h3:10911;1"))
    world.start(C)
    late = AlterSyncStateSet("b", A, 1, (A, B, C), world.value.sync_state_set_epoch, "late")
    world.die(B)  # a dead member may stay in the set, but not enter it
    answer = world.alter(A, B, id="settling")
    assert (answer.code, answer.sync_state_set) == (Code.SUCCESS, (A, B))
    assert world(late).code == Code.CONTROLLER_FENCED_SYNC_STATE_SET_EPOCH
    assert world.alter(A, B).code == Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED  # a RocketMQ request has no id


def test_set_below_min_in_sync_replicas_grows_step_by_step() -> None:
    world = DecidedSet(A, B, C, least=3)
    world.elect(A)
    assert world.alter(A, B).code == Code.SUCCESS
    assert world.alter(A, B, C).code == Code.SUCCESS


# ---- a register that was restored or wiped


def test_restored_register_freezes_set_and_blocks_elections() -> None:
    world = lost(in_sync(A, B))
    world.die(A)
    before = world.value
    refused = world.elect(B)
    assert refused.code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert "restored" in refused.remark
    assert world.value == replace(before, frozen=world.value.frozen)
    frozen = world.value
    for broker_id in world.reports:  # the freeze outlasts the reports
        world.record_heartbeat(broker_id, master_epoch=0, sync_state_set_epoch=0)
    world.die(A)
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert world.alter(A).code == Code.CONTROLLER_ALTER_SYNC_STATE_SET_FAILED
    before = world.value
    answer = world.start(B, incarnation="fresh")  # accepted, so that an operator may designate it, but without a role
    assert (answer.code, answer.master, answer.sync_state_set) == (Code.SUCCESS, None, None)
    assert replace(world.value, members=before.members) == before
    frozen = world.value
    assert world(ApplyBrokerId("c", "b", C, "h3:1;1")).code == Code.SUCCESS  # an id, but no role
    assert replace(world.value, members=frozen.members, next_broker_id=C) == frozen
    assert world(GetReplicaInfo("b")).master == A


def taken(broker_id: int, check_code: str) -> RegisterBroker:
    return RegisterBroker("c", "b", broker_id, "h:1", f"i{check_code}", 1, "p", check_code=check_code)


@pytest.mark.parametrize("frozen", [False, True])
def test_registration_with_wrong_check_code_is_refused(frozen: bool) -> None:
    world = lost(in_sync(A, B)) if frozen else in_sync(A, B)
    world(Scan("b"))
    before = world.value
    assert world(taken(B, "another;1")).code == Code.CONTROLLER_BROKER_ID_INVALID
    assert world.value == before
    assert world(taken(B, "h2:10911;1")).code == Code.SUCCESS


def test_apache_broker_registers_without_check_code() -> None:
    world = in_sync(A, B, stock=True)
    assert world.start(B).code == Code.SUCCESS
    assert world.value.member(B) == Member(id=B, address="h2:10911", register_check_code="h2:10911;1")


def test_member_readmitted_to_frozen_set_owns_its_id() -> None:
    world = lost(in_sync(A, B))
    assert world(taken(C, "mine;1")).code == Code.SUCCESS
    assert world(taken(C, "another;1")).code == Code.CONTROLLER_BROKER_ID_INVALID
    assert world(ApplyBrokerId("c", "b", C, "mine;1")).code == Code.SUCCESS


def test_broker_with_reassigned_id_is_designated_under_a_new_id() -> None:
    world = lost(in_sync(A, B))
    world.record_heartbeat(B, sync_state_set_epoch=9)
    best = world.reports[B]
    assert world(taken(B, "best;1")).code == Code.CONTROLLER_BROKER_ID_INVALID
    assert world(ApplyBrokerId("c", "b", C, "best;1")).code == Code.SUCCESS
    assert world(taken(C, "best;1")).code == Code.SUCCESS
    world.reports[C] = changed(best, incarnation="ibest;1", starts=1, process="p")
    assert world.elect(C, designate=True).master == C


def test_scan_after_suspension_waits_for_heartbeat_timeout_of_master() -> None:
    world = in_sync(A, B)
    world.record_heartbeat(A, timeout_ms=3_000)
    world.now_ms += 60_000
    world.rules = Rules(elects_from_ms=world.now_ms + 10_000, listening_since_ms=world.now_ms)
    world.record_heartbeat(B)
    waits = world(Scan("b"))
    assert waits.code == Code.CONTROLLER_MASTER_NOT_AVAILABLE and "has had no heartbeat of [1]" in waits.remark
    world.now_ms += 2_999
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    world.now_ms += 1
    world.record_heartbeat(B)
    assert world(Scan("b")).master == B


def had(master_epoch: int, sync_state_set_epoch: int, next_broker_id: int = 3) -> Rules:
    """Return the rules of a controller that has read these epochs from the register before."""
    epochs = (master_epoch, sync_state_set_epoch)
    empty = BrokerSet(cluster="c", name="b", next_broker_id=next_broker_id)
    return Rules(had=replace(empty, master_epoch=epochs[0], sync_state_set_epoch=epochs[1]))


def test_register_below_epochs_read_before_freezes_without_broker_reports() -> None:
    world = in_sync(A, B)
    world.die(A)
    master_epoch = world.value.master_epoch + 3
    world.rules = had(master_epoch, 7)
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    frozen = world.value.frozen
    assert frozen is not None and frozen.epochs == (master_epoch, 7) and "this controller has read" in frozen.why
    world.rules = Rules()  # another controller: the freeze is in the register
    assert world.elect(B).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.elect(B, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    world.record_heartbeat(B, master_epoch=master_epoch, sync_state_set_epoch=7)
    assert world.elect(B, designate=True).master_epoch == master_epoch + 1
    world.rules = had(master_epoch, 7)
    assert world.elect(B).code == Code.CONTROLLER_MASTER_STILL_EXIST


@pytest.mark.parametrize("is_request_in_flight", [True, False])
def test_wiped_register_gives_empty_newcomer_no_role_and_no_used_id(is_request_in_flight: bool) -> None:
    """The register was wiped: a broker reports its epochs, or the controller has read the set before."""
    world = DecidedSet()
    if is_request_in_flight:
        world.reports[B] = Report(NOW, max_offset=9, epoch=3, master_epoch=3, sync_state_set_epoch=7)
    else:
        world.rules = had(3, 7)
    assert world(GetNextBrokerId("c", "b")).next_broker_id == 3
    assert world(ApplyBrokerId("c", "b", 3, "new;1")).code == Code.SUCCESS
    assert world(taken(3, "new;1")).master is None
    world.reports[3] = Report(NOW, max_offset=0, incarnation="inew;1", starts=1, process="p")
    assert world.elect(3).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.elect(3, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    # The former members rejoin under their ids, and one that has the highest epochs is designated.
    for broker_id in (A, B):
        assert world(ApplyBrokerId("c", "b", broker_id, f"h{broker_id}:10911;1")).code == Code.SUCCESS
        assert world.start(broker_id).code == Code.SUCCESS
        world.record_heartbeat(broker_id, max_offset=9, epoch=3, master_epoch=3, sync_state_set_epoch=7)
    assert world.elect(A).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    answer = world.elect(B, designate=True)
    assert (answer.master, answer.master_epoch, answer.sync_state_set) == (B, 4, (B,))
    assert world.value.next_broker_id == 4 and world.value.frozen is None


def test_apache_broker_is_designated_by_the_epoch_of_its_log() -> None:
    world = in_sync(A, B, stock=True)
    world.rules = had(4, 9)
    world.record_heartbeat(B, epoch=3)
    world.record_heartbeat(A, epoch=4)
    assert world.elect(B, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    answer = world.elect(A, designate=True)
    assert (answer.master, answer.master_epoch) == (A, 5)


def test_next_broker_id_skips_ids_with_heartbeats() -> None:
    world = lost(in_sync(A, B))
    world.record_heartbeat(5, master_epoch=9, sync_state_set_epoch=9)
    assert world(GetNextBrokerId("c", "b")).next_broker_id == 6
    assert world.elect(A, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    world.rules = changed(world.rules, enable_elect_unclean_master=True)
    assert world.elect(A, designate=True).master == A
    assert world.value.next_broker_id == 6
    world.record_heartbeat(7)
    assert world(ApplyBrokerId("c", "b", 6, "new;1")).code == Code.SUCCESS
    assert world.value.next_broker_id == 8


def test_member_unknown_to_restored_register_rejoins_and_is_designated() -> None:
    world = lost(in_sync(A, B))
    world.die(A, B)
    world.reports[C] = Report(world.now_ms, max_offset=9, epoch=3, master_epoch=9, sync_state_set_epoch=9)
    assert (
        world(RegisterBroker("c", "b", C, "h3:10911", "", 0, "p")).code == Code.CONTROLLER_BROKER_NEED_TO_BE_REGISTERED
    )
    assert world.start(C).code == Code.SUCCESS
    assert (world.value.ids, world.value.next_broker_id) == ((A, B, C), C + 1)
    assert world.elect(C).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.elect(C, designate=True).master == C
    assert world.value.frozen is None


@pytest.mark.parametrize("heard", [{"epoch": 2}, {"asked": Asked(True, 2, 5)}, {"master_epoch": 1}])
def test_report_of_higher_epochs_freezes_the_set(heard: dict[str, Any]) -> None:
    world = in_sync(A, B)
    world.record_heartbeat(B, **({"sync_state_set_epoch": 3} | heard))
    world.die(A)
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    assert world.value.frozen


def test_wiped_register_freezes_new_set_if_a_broker_reports_an_epoch() -> None:
    world = DecidedSet()
    world.record_heartbeat(A, epoch=3, max_offset=1000)
    assert world(ApplyBrokerId("c", "b", 2, "new:1;1")).code == Code.SUCCESS
    assert world.value.frozen is not None
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE


def test_epochs_of_another_cluster_do_not_freeze_the_set() -> None:
    world = in_sync(A, B)
    world.record_heartbeat(STRANGER, cluster="other", master_epoch=9)
    world.die(A)
    assert world.elect(B).master == B
    assert world.value.frozen is None


def test_operator_ends_freeze_by_designating_member_with_highest_epochs() -> None:
    world = lost(in_sync(A, B))
    world.record_heartbeat(B, sync_state_set_epoch=9)
    assert world(Scan("b")).code == Code.CONTROLLER_MASTER_NOT_AVAILABLE
    behind = world.elect(A, designate=True)
    assert (behind.code, world.value.frozen is not None) == (Code.CONTROLLER_ELECT_MASTER_FAILED, True)
    assert "[2]" in behind.remark
    answer = world.elect(B, designate=True)
    told = (answer.master, answer.master_epoch, answer.sync_state_set_epoch)
    assert told == (B, 4, 11), "no election of those in sync, as a member tells by the second step of the last"
    assert (world.value.frozen, world.value.sync_state_set) == (None, (B,))


def test_designation_before_first_heartbeats_asks_operator_to_wait() -> None:
    world = in_sync(A, B)
    world.rules = had(5, 7)
    early = world.elect(A, designate=True)
    assert (early.code, world.value.frozen is not None) == (Code.CONTROLLER_ELECT_MASTER_FAILED, True)
    assert "[]" not in early.remark and "wait for the next heartbeat" in early.remark
    world.record_heartbeat(A, master_epoch=5, sync_state_set_epoch=7)
    assert world.elect(A, designate=True).master == A


def test_highest_reported_epochs_outlive_the_report() -> None:
    world = lost(in_sync(A, B))
    world.record_heartbeat(B, master_epoch=9, sync_state_set_epoch=0)
    world(Scan("b"))
    del world.reports[B]
    assert world.elect(A, designate=True).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    world.record_heartbeat(A, master_epoch=9, sync_state_set_epoch=20)  # learned in the meantime
    assert world.elect(B).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.elect(A, designate=True).master_epoch == 10
    assert world.value.sync_state_set_epoch == 22


# ---- reading


def test_read_requests_return_roles_and_liveness() -> None:
    assert DecidedSet()(GetReplicaInfo("b")).code == Code.CONTROLLER_BROKER_METADATA_NOT_EXIST
    assert DecidedSet()(GetSyncStateData("b")).code == Code.CONTROLLER_BROKER_METADATA_NOT_EXIST
    world = in_sync(A, B)
    world.alter(A)
    world.die(B)
    info = world(GetReplicaInfo("b"))
    assert (info.master, info.master_address, info.master_epoch) == (A, "h1:10911", 1)
    data = world(GetSyncStateData("b"))
    assert data.in_sync is not None and [(r.id, r.alive) for r in data.in_sync] == [(A, True)]
    assert data.not_in_sync is not None and [(r.id, r.alive) for r in data.not_in_sync] == [(B, False)]


# ---- cleaning


def test_clean_refuses_live_unknown_and_malformed_broker_ids() -> None:
    invalid = Code.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    world = in_sync(A, B)
    before = world.value
    for ids in ("", "2", "1;2", "x", "1;;2", "-1"):
        assert world(CleanBrokerData("b", ids)).code == invalid
    assert world(CleanBrokerData("b", "2", cluster="other")).code == invalid
    assert world.value == before
    assert DecidedSet()(CleanBrokerData("b")).code == invalid


def test_cleaned_dead_member_leaves_sync_state_set() -> None:
    world = in_sync(A, B)
    world.die(B)
    assert world(CleanBrokerData("b", "2")).code == Code.SUCCESS
    assert (world.value.ids, world.value.sync_state_set, world.value.epochs) == ((A,), (A,), (1, 3))
    assert world.told == (A,)


def test_clean_of_last_in_sync_member_needs_clean_living() -> None:
    world = in_sync(A, B)
    world.alter(A)
    world.die(A)
    assert world(CleanBrokerData("b", "1")).code == Code.CONTROLLER_INVALID_CLEAN_BROKER_METADATA
    assert world(CleanBrokerData("b", "1", clean_living=True)).code == Code.SUCCESS
    assert (world.value.ids, world.value.master, world.value.sync_state_set) == ((B,), None, ())
    assert world.elect(B).code == Code.CONTROLLER_ELECT_MASTER_FAILED
    assert world.elect(B, designate=True).master == B  # no other member is left that could have more records


def test_clean_removes_set_without_master_or_with_clean_living() -> None:
    world = in_sync(A, B)
    assert world(CleanBrokerData("b", clean_living=True)).code == Code.SUCCESS
    assert world.set is None
    world = DecidedSet(A)
    assert world(CleanBrokerData("b")).code == Code.SUCCESS
    assert world.set is None


def test_broker_set_rejects_invariant_violations() -> None:
    for broken in (
        {"master": C},
        {"sync_state_set": (A, STRANGER)},
        {"eligible": (A,)},
        {"sync_state_set": (B, A)},
        {"next_broker_id": 2},
        {"master_epoch": -1},
        {"members": (Member(id=B, address=""), Member(id=A, address=""))},
    ):
        with pytest.raises((ValueError, msgspec.ValidationError)):
            replace(in_sync(A, B).value, **broken)
