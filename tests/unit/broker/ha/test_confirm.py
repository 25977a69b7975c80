"""Which offsets a master may acknowledge. Each test is an interleaving that could lose an acknowledged message."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from broker.ha.confirm import (
    COURTED_FOR,
    LEFT_ALONE_FOR,
    TICK,
    Confirm,
    ConfirmRules,
    HeldBack,
    ReplicationMode,
    SyncStateSet,
    Waiting,
)

A, B, C = 1, 2, 3
SYNC = ConfirmRules(ReplicationMode.SYNC, min_in_sync=2)
AVAILABLE = ConfirmRules(ReplicationMode.SYNC_AVAILABLE)
ASYNC = ConfirmRules(ReplicationMode.ASYNC)


def sss(epoch: int, *members: int) -> SyncStateSet:
    return SyncStateSet(epoch, frozenset(members))


def group(*members: int) -> frozenset[int] | None:
    return frozenset(members)


def master(
    *members: int, rules: ConfirmRules = AVAILABLE, own_end: int = 0, confirm: int = 0, alone: bool = False
) -> Confirm:
    """Return the confirm state of A, elected for epoch 7 with its log ending at `own_end`, and an SSS of epoch 5."""
    return Confirm(
        rules,
        A,
        7,
        sss(5, A, *members),
        epoch_start=own_end,
        own_end=own_end,
        confirm=confirm,
        now=0.0,
        is_alone=alone,
    )


def ticks(confirm: Confirm, begin: float, seconds: int) -> frozenset[int] | None:
    """Return the set that it asks for after a number of ticks without a request."""
    for second in range(seconds):
        assert confirm.wish(begin + second * TICK) is None
    return confirm.wish(begin + seconds * TICK)


def connect(confirm: Confirm, member: int, end: int, now: float = 0.0) -> object:
    connection = object()
    confirm.connected(member, connection, now)
    assert confirm.reported(member, connection, end, now)
    return connection


def with_b(rules: ConfirmRules = AVAILABLE, *members: int) -> tuple[Confirm, object]:
    """Return the confirm state of master A with B in sync at 1000."""
    confirm = master(B, *members, rules=rules, own_end=1000)
    connection = connect(confirm, B, 1000)
    for member in members:
        connect(confirm, member, 1000)
    assert confirm.value == 1000
    return confirm, connection


# -- which members count


def test_confirm_is_the_lowest_end_of_the_sync_state_set() -> None:
    confirm = master(B, C)
    b, c = connect(confirm, B, 0), connect(confirm, C, 0)
    confirm.appended(300)
    assert confirm.value == 0
    confirm.reported(B, b, 300, 1.0)
    assert confirm.value == 0
    confirm.reported(C, c, 200, 1.0)
    assert confirm.value == 200
    confirm.reported(C, c, 300, 1.0)
    assert confirm.value == 300


def test_acknowledgement_needs_every_in_sync_member_and_not_a_quorum() -> None:
    """A and C have the message, C dies, the set becomes {A, B}, A dies: B must have it."""
    confirm, b = with_b(AVAILABLE, C)
    confirm.appended(1100)
    c = connect(confirm, C, 1100)
    confirm.disconnected(C, c, 1.0)
    assert confirm.read(7, sss(6, A, B), 2.0)
    assert confirm.value == 1000
    confirm.reported(B, b, 1100, 3.0)
    assert confirm.value == 1100


def test_member_outside_the_sync_state_set_neither_holds_nor_moves_confirm() -> None:
    confirm, b = with_b()
    c = connect(confirm, C, 0)
    confirm.appended(1100)
    confirm.reported(C, c, 1100, 1.0)
    assert confirm.value == 1000
    confirm.reported(B, b, 1100, 1.0)
    assert confirm.value == 1100


def test_disconnected_in_sync_member_holds_confirm() -> None:
    """An isolated master must not acknowledge alone, whatever its slaves had when they were last connected."""
    confirm, b = with_b()
    confirm.disconnected(B, b, 1.0)
    confirm.appended(1100)
    assert confirm.value == 1000
    assert confirm.held(1.0) == (HeldBack.AWAY, B)


def test_report_on_an_older_connection_is_ignored() -> None:
    """The member may have lost its memory in between."""
    confirm, old = with_b(AVAILABLE, C)
    c = connect(confirm, C, 1000)
    new = object()
    confirm.appended(1100)
    confirm.reported(B, old, 1100, 1.0)
    confirm.connected(B, new, 1.0)
    confirm.reported(C, c, 1100, 1.0)
    assert confirm.value == 1000
    assert confirm.held(1.0) == (HeldBack.SILENT, B)
    assert not confirm.reported(B, old, 1100, 1.0), "late bytes of the old connection"
    assert confirm.value == 1000
    confirm.reported(B, new, 1100, 2.0)
    assert confirm.value == 1100


def test_end_of_an_older_connection_keeps_the_present_one() -> None:
    confirm, old = with_b()
    new = connect(confirm, B, 1000)
    confirm.disconnected(B, old, 1.0)
    confirm.appended(1100)
    confirm.reported(B, new, 1100, 1.0)
    assert confirm.value == 1100


def test_confirm_never_decreases() -> None:
    confirm, _ = with_b()
    connect(confirm, B, 900)
    assert confirm.value == 1000
    confirm.appended(1100)
    assert confirm.value == 1000


@pytest.mark.parametrize("end", [1101, 999])
def test_report_above_the_log_end_or_below_an_earlier_report_is_refused(end: int) -> None:
    confirm, b = with_b()
    confirm.appended(1100)
    assert not confirm.reported(B, b, end, 1.0)
    assert confirm.value == 1000


def test_lone_master_confirms_its_whole_log() -> None:
    confirm = master()
    confirm.appended(70)
    assert confirm.value == 70
    assert confirm.held(0.0) == (HeldBack.NOTHING, 0)


# -- while a change is pending


def test_pending_grow_counts_the_new_member_already() -> None:
    """The grow was applied and its answer lost: A would acknowledge alone, and B be elected."""
    confirm = master(own_end=1000)
    b = connect(confirm, B, 1000)
    assert confirm.wish(0.0) == group(A, B)
    confirm.asked({A, B})
    confirm.appended(1100)
    assert confirm.value == 1000
    confirm.reported(B, b, 1100, 1.0)
    assert confirm.value == 1100


def test_grow_of_unknown_outcome_counts_until_its_epoch_is_read() -> None:
    confirm = master(own_end=1000)
    b = connect(confirm, B, 1000)
    confirm.asked({A, B})
    confirm.appended(1100)
    confirm.disconnected(B, b, 1.0)
    assert confirm.read(7, sss(5, A), 2.0), "what was read before it was applied says nothing"
    assert (confirm.value, confirm.is_altering) == (1000, True)
    assert confirm.read(7, sss(6, A, B), 3.0)
    assert (confirm.value, confirm.is_altering) == (1000, False)
    assert confirm.held(3.0) == (HeldBack.AWAY, B)


def test_pending_shrink_still_counts_the_leaving_member() -> None:
    """The request did not arrive: B is a member and may be elected."""
    confirm, b = with_b()
    confirm.disconnected(B, b, 1.0)
    assert ticks(confirm, 1.0, 4) == group(A)
    confirm.asked({A})
    confirm.appended(1100)
    assert confirm.value == 1000
    assert confirm.read(7, sss(6, A), 10.0)
    assert confirm.value == 1100


def test_refused_change_has_no_effect() -> None:
    confirm = master(own_end=1000)
    b = connect(confirm, B, 1000)
    confirm.asked({A, B})
    confirm.disconnected(B, b, 1.0)
    confirm.appended(1100)
    confirm.refused({A, B}, 5)
    assert (confirm.value, confirm.is_altering) == (1100, False)


def test_change_requested_twice_is_refused_only_if_both_requests_are() -> None:
    """The first request is still in flight."""
    confirm = master(own_end=1000)
    b = connect(confirm, B, 1000)
    confirm.asked({A, B})
    confirm.asked({A, B})
    confirm.disconnected(B, b, 1.0)
    confirm.appended(1100)
    confirm.refused({A, B}, 5)
    assert (confirm.value, confirm.is_altering) == (1000, True)
    confirm.refused({A, B}, 5)
    assert (confirm.value, confirm.is_altering) == (1100, False)


def test_late_refusal_of_an_older_change_does_not_end_the_pending_one() -> None:
    confirm = master(own_end=1000)
    b = connect(confirm, B, 1000)
    assert confirm.asked({A, B}) == 5
    assert confirm.read(7, sss(6, A), 1.0)
    assert confirm.asked({A, B}) == 6
    confirm.disconnected(B, b, 1.0)
    confirm.appended(1100)
    confirm.refused({A, B}, 5)
    assert (confirm.value, confirm.is_altering) == (1000, True)


def test_each_of_several_changes_from_one_epoch_may_be_in_force() -> None:
    confirm = master(own_end=1000)
    b, c = connect(confirm, B, 1000), connect(confirm, C, 1000)
    confirm.asked({A, B})
    confirm.asked({A, C})
    confirm.appended(1100)
    confirm.reported(B, b, 1100, 1.0)
    assert confirm.value == 1000
    confirm.reported(C, c, 1100, 1.0)
    assert confirm.value == 1100


def test_slave_that_fell_behind_confirm_cannot_be_requested() -> None:
    confirm = master(own_end=1000)
    connection = object()
    confirm.connected(B, connection, 0.0)
    confirm.reported(B, connection, 1000, 30.0)
    assert confirm.wish(30.0) == group(A, B)
    confirm.appended(1100)
    with pytest.raises(AssertionError):
        confirm.asked({A, B})


def test_no_second_change_is_requested_while_one_is_pending() -> None:
    confirm = master(own_end=1000)
    connect(confirm, B, 1000)
    confirm.asked({A, B})
    connect(confirm, C, 1000)
    assert confirm.wish(1.0) is None


# -- sync-state sets that are read


def test_older_sync_state_set_is_ignored() -> None:
    confirm, _ = with_b()
    assert confirm.read(7, sss(4, A), 1.0)
    assert confirm.read(6, sss(9, A), 1.0), "of the epoch before this master"
    confirm.appended(1100)
    assert confirm.value == 1000


def test_master_that_reads_of_a_newer_master_stops_acknowledging() -> None:
    confirm, b = with_b()
    assert not confirm.read(8, sss(6, B), 1.0)
    confirm.appended(1100)
    confirm.reported(B, b, 1100, 1.0)
    assert (confirm.value, confirm.acknowledged(1.0), confirm.may_append()) == (1000, -1, False)
    assert confirm.held(1.0) == (HeldBack.FENCED, 0)
    assert confirm.wish(9.0) is None


def test_master_outside_its_own_set_stops_acknowledging() -> None:
    confirm, _ = with_b()
    assert not confirm.read(7, sss(6, B), 1.0)
    assert confirm.acknowledged(1.0) == -1


def test_different_sets_of_one_epoch_stop_the_master() -> None:
    """The controller's state was restored from a backup."""
    confirm, _ = with_b()
    assert not confirm.read(7, sss(5, A, C), 1.0)
    assert confirm.acknowledged(1.0) == -1


def test_apache_controller_removes_a_member_without_a_new_epoch() -> None:
    """After `mqadmin cleanBrokerMetadata` the master stops waiting for the removed member and stays the master."""
    confirm = master(B, C, rules=SYNC)
    confirm.connected(B, "b", 0.0)
    confirm.reported(B, "b", 0, 0.0)
    confirm.asked(frozenset((A, B)))  # refused from now on: that is the set already
    assert confirm.read(7, sss(5, A, B), 1.0, forgets_in_place=True)
    assert not confirm.is_altering
    confirm.appended(10)
    confirm.reported(B, "b", 10, 1.5)
    assert confirm.value == 10
    assert confirm.read(7, sss(5, A, B, C), 2.0, forgets_in_place=True), "what a slow answer says"
    assert confirm.sync_state_set == sss(5, A, B)
    assert not confirm.read(7, sss(5, A, C), 3.0, forgets_in_place=True), "a register that was set back"
    assert confirm.acknowledged(3.0) == -1


def test_neve_controller_uses_a_new_epoch_for_each_set() -> None:
    confirm = master(B, C, rules=SYNC)
    assert not confirm.read(7, sss(5, A, B), 1.0)
    assert confirm.acknowledged(1.0) == -1


def test_member_removed_by_the_controller_no_longer_holds_confirm() -> None:
    confirm, b = with_b()
    confirm.disconnected(B, b, 1.0)
    confirm.appended(1100)
    assert confirm.read(7, sss(6, A), 2.0)
    assert confirm.value == 1100


# -- too few in-sync replicas


def test_confirm_does_not_advance_while_the_set_is_too_small() -> None:
    """Otherwise: shrunk to {A}, acknowledged on one copy, A's disk dies."""
    confirm, _ = with_b(SYNC)
    assert confirm.read(7, sss(6, A), 1.0)
    assert not confirm.may_append()
    confirm.appended(1100)
    assert confirm.value == 1000
    assert confirm.held(1.0) == (HeldBack.TOO_FEW, 0)


def test_sync_never_requests_a_set_below_its_minimum() -> None:
    confirm, b = with_b(SYNC)
    confirm.disconnected(B, b, 1.0)
    assert confirm.wish(60.0) is None
    with pytest.raises(AssertionError):
        confirm.asked({A})


def test_sync_removes_the_member_that_disconnected_first() -> None:
    confirm, b = with_b(SYNC, C)
    c = connect(confirm, C, 1000)
    confirm.disconnected(C, c, 1.0)
    confirm.disconnected(B, b, 2.0)
    assert ticks(confirm, 1.0, 4) == group(A, B)


def test_sync_replaces_a_disconnected_member_by_a_new_one() -> None:
    confirm, b = with_b(SYNC)
    connect(confirm, C, 1000)
    confirm.disconnected(B, b, 1.0)
    wishes = [confirm.wish(float(now)) for now in range(1, 6)]
    assert wishes == [group(A, B, C)] * 4 + [group(A, C)]


def test_first_sync_master_confirms_nothing_before_the_grow_is_read() -> None:
    confirm = master(rules=SYNC, own_end=100, confirm=40)
    b = connect(confirm, B, 100)
    assert (confirm.value, confirm.may_append()) == (40, False)
    confirm.asked({A, B})
    assert confirm.value == 40
    assert confirm.read(7, sss(6, A, B), 1.0)
    assert (confirm.value, confirm.may_append()) == (100, True)
    confirm.appended(200)
    confirm.reported(B, b, 200, 1.0)
    assert confirm.value == 200


@pytest.mark.parametrize(("replication", "least"), [(ReplicationMode.SYNC, 1), (ReplicationMode.SYNC_AVAILABLE, 0)])
def test_minimum_without_a_guarantee_is_refused(replication: ReplicationMode, least: int) -> None:
    with pytest.raises(ValueError, match="minInSyncReplicas"):
        ConfirmRules(replication, min_in_sync=least)


# -- joining and leaving


def test_slave_joins_only_with_the_confirmed_log_and_the_epoch_start() -> None:
    confirm = master(rules=SYNC, own_end=1000, confirm=900)
    b = connect(confirm, B, 900)
    assert confirm.wish(0.0) is None, "it lacks the begin of this epoch"
    confirm.reported(B, b, 1000, 0.5)
    assert confirm.wish(0.5) == group(A, B)


def test_learner_never_joins_the_set() -> None:
    confirm = master(own_end=1000)
    connection = object()
    confirm.connected(B, connection, 0.0, is_learner=True)
    confirm.reported(B, connection, 1000, 0.0)
    assert confirm.wish(0.0) is None


def test_silent_slave_leaves_after_the_timeout() -> None:
    confirm, _ = with_b()
    confirm.appended(1100)
    assert [confirm.wish(now) for now in (1.0, 2.0, 3.0)] == [None, None, None]
    assert confirm.wish(4.0) == group(A)


def test_idle_slave_with_the_whole_log_stays_in_sync() -> None:
    confirm, b = with_b()
    assert {confirm.wish(float(now)) for now in range(60)} == {None}
    confirm.appended(1100)
    assert confirm.wish(60.0) is None
    assert confirm.wish(61.0) is None
    confirm.reported(B, b, 1100, 61.5)
    assert {confirm.wish(float(now)) for now in range(62, 90)} == {None}


def test_slave_that_keeps_pace_stays_although_it_always_lags_a_little() -> None:
    confirm, b = with_b()
    for second in range(1, 60):
        confirm.appended(1000 + 100 * second)
        confirm.reported(B, b, 1000 + 100 * (second - 1), float(second))
        assert confirm.wish(float(second)) is None


def test_slave_that_falls_further_and_further_behind_leaves() -> None:
    confirm, b = with_b()
    wishes = []
    for second in range(1, 20):
        confirm.appended(1000 + 1000 * second)
        confirm.reported(B, b, 1000 + 10 * second, float(second))
        wishes.append(confirm.wish(float(second)))
    assert group(A) in wishes


def test_member_that_lost_confirmed_bytes_leaves_at_once() -> None:
    confirm, _ = with_b()
    connect(confirm, B, 900)
    assert confirm.wish(0.1) == group(A)


def test_suspended_master_does_not_count_its_own_pause_as_slave_silence() -> None:
    confirm, _ = with_b()
    assert confirm.wish(1.0) is None
    confirm.appended(1100)
    assert confirm.wish(31.0) is None, "stopped for 30 s and woken"
    assert [confirm.wish(now) for now in (32.0, 33.0)] == [None, None]
    assert confirm.wish(34.5) == group(A)


def test_lone_busy_master_waits_a_round_trip_for_a_nearly_caught_up_slave() -> None:
    """Otherwise a slave that is always one message behind would never be in sync."""
    confirm = master(own_end=1000)
    b = connect(confirm, B, 0)
    confirm.appended(1100)
    assert confirm.value == 1100
    confirm.reported(B, b, 1000, 0.2)
    assert confirm.wish(0.2) is None
    confirm.appended(1200)
    assert confirm.value == 1100, "it waits"
    confirm.reported(B, b, 1100, 0.3)
    assert confirm.wish(0.3) == group(A, B)
    confirm.asked({A, B})
    confirm.appended(1300)
    assert confirm.value == 1100
    assert confirm.read(7, sss(6, A, B), 0.4)
    confirm.reported(B, b, 1300, 0.5)
    assert confirm.value == 1300


def test_wait_for_a_nearly_caught_up_slave_ends_after_a_time_limit() -> None:
    confirm = master(own_end=1000)
    b = connect(confirm, B, 0)
    confirm.appended(1100)
    confirm.reported(B, b, 1000, 0.5)
    confirm.appended(1200)
    assert confirm.value == 1100
    now = 0.5
    while now < 0.5 + COURTED_FOR:
        now += TICK
        assert confirm.wish(now) is None
    assert confirm.value == 1200
    confirm.reported(B, b, 1190, now)
    confirm.appended(1300)
    assert confirm.value == 1300, "not again so soon"
    later = now + LEFT_ALONE_FOR
    confirm.reported(B, b, 1299, later - 0.5)
    confirm.appended(1400)
    confirm.reported(B, b, 1300, later)
    confirm.appended(1500)
    assert confirm.value == 1400


def test_wait_for_a_nearly_caught_up_slave_ends_when_it_disconnects() -> None:
    confirm = master(own_end=1000)
    b = connect(confirm, B, 0)
    confirm.appended(1100)
    confirm.reported(B, b, 1000, 0.5)
    confirm.appended(1200)
    assert confirm.value == 1100
    confirm.disconnected(B, b, 0.6)
    assert confirm.value == 1200


def test_slave_that_is_far_behind_is_not_waited_for() -> None:
    confirm = master(own_end=1000)
    b = connect(confirm, B, 0)
    confirm.appended(1100)
    confirm.reported(B, b, 1000, 60.0)
    confirm.appended(1200)
    assert confirm.value == 1200


# -- async


def test_async_confirms_the_masters_whole_log() -> None:
    confirm = master(B, rules=ASYNC)
    confirm.appended(500)
    assert (confirm.value, confirm.acknowledged(1.0)) == (500, 500)


def test_async_master_stops_acknowledging_without_controllers_and_slaves() -> None:
    """Another master may have been elected, and no other log would have the acknowledged messages."""
    confirm = master(B, rules=ASYNC)
    b = connect(confirm, B, 0)
    confirm.controller_answered(3.0)
    assert confirm.acknowledged(13.0) == 0
    assert confirm.acknowledged(13.1) == -1
    assert confirm.held(13.1) == (HeldBack.CUT_OFF, 0)
    confirm.reported(B, b, 0, 20.0)
    assert confirm.acknowledged(30.0) == 0
    assert confirm.acknowledged(30.1) == -1
    confirm.controller_answered(31.0)
    assert confirm.acknowledged(31.0) == 0


def test_async_single_member_needs_no_controller() -> None:
    confirm = master(rules=ASYNC, alone=True)
    confirm.appended(500)
    assert confirm.acknowledged(1e6) == 500


def test_async_slave_joins_when_caught_up_and_leaves_when_it_falls_behind() -> None:
    confirm = master(rules=ASYNC, own_end=1000)
    b = connect(confirm, B, 0)
    confirm.appended(1100)
    assert confirm.wish(0.5) is None
    confirm.reported(B, b, 1000, 1.0)
    confirm.appended(1200)
    assert confirm.wish(1.0) == group(A, B)
    confirm.asked({A, B})
    assert confirm.read(7, sss(6, A, B), 1.1)
    assert [confirm.wish(float(now)) for now in (2, 3, 4)] == [None, None, None]
    assert confirm.wish(5.0) == group(A)


# -- fsynced offsets


def test_archivable_limit_is_fsynced_on_every_in_sync_replica() -> None:
    confirm = master(B, C, own_end=1000)
    assert confirm.synced(1000) == -1
    b, c = connect(confirm, B, 1000), connect(confirm, C, 1000)
    assert confirm.synced(1000) == -1, "a stock member does not tell"
    confirm.reported(B, b, 1000, 1.0, synced=700)
    confirm.reported(C, c, 1000, 1.0, synced=800)
    assert confirm.synced(1000) == 700
    assert confirm.synced(600) == 600


def test_archivable_limit_is_at_most_the_confirmed_offset() -> None:
    confirm = master(B, own_end=1000, confirm=400)
    b = connect(confirm, B, 1000)
    confirm.reported(B, b, 1000, 1.0, synced=1000)
    assert confirm.archivable(1000) == 1000
    sync = master(rules=SYNC, own_end=1000, confirm=400)
    assert (sync.synced(1000), sync.archivable(1000)) == (1000, 400), "one alone confirms nothing"


def test_async_slave_that_lacks_archived_messages_does_not_join() -> None:
    """If it were elected, only the archive would have these messages."""
    confirm = master(rules=ASYNC, own_end=1000)
    b = connect(confirm, B, 900)
    confirm.appended(2000)
    confirm.reported(B, b, 1000, 1.0)  # the log end when it connected: it has caught up
    assert confirm.wish(1.0) == group(A, B)
    assert confirm.archivable(1800) == 1800
    assert confirm.wish(1.5) is None
    confirm.reported(B, b, 1900, 2.0)
    assert confirm.wish(2.0) == group(A, B)
    confirm.asked({A, B})
    assert confirm.archivable(2000) == -1, "it counts from here on, and has synced nothing that is known"
    confirm.reported(B, b, 1950, 2.5, synced=1900)
    assert confirm.archivable(2000) == 1900


# -- waiting requests


def test_waiting_requests_are_released_by_confirm_or_by_their_timeout() -> None:
    waiting = Waiting[str](timeout=3.0)
    waiting.add(200, "second", 0.0)
    waiting.add(100, "first", 0.0)
    waiting.add(300, "third", 1.0)
    assert list(waiting.reached(99)) == []
    assert list(waiting.reached(200)) == ["first", "second"]
    assert list(waiting.overdue(3.9)) == []
    assert list(waiting.overdue(4.0)) == ["third"]
    assert list(waiting.reached(1000)) == []
    assert len(waiting) == 0


def test_waiting_requests_are_all_released_when_the_master_is_deposed() -> None:
    waiting = Waiting[int](timeout=3.0)
    for end in (5, 3, 9):
        waiting.add(end, end, 0.0)
    assert list(waiting.reached(3)) == [3]
    assert list(waiting.all()) == [5, 9]
    assert (list(waiting.reached(99)), list(waiting.overdue(99.0)), len(waiting)) == ([], [], 0)


# -- against a model of several logs


@dataclass
class _Slave:
    log: int = 0
    connection: object | None = None
    acks: list[tuple[object, int]] = field(default_factory=list)  # in flight


class _World:
    """One master, two slaves that lose connections, and a controller whose answers get lost or arrive late.

    Every member that the controller could elect has all confirmed bytes.
    """

    def __init__(self, seed: int, rules: ConfirmRules) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.register = sss(5, A)
        self.confirm = master(rules=rules)
        self.slaves = {B: _Slave(), C: _Slave()}
        self.requests: list[tuple[int, frozenset[int]]] = []  # pending 1001: base epoch, requested set
        self.answers: list[Callable[[], None]] = []
        self.asked = frozenset({A})
        self.end = self.least = 0
        self.doings = [
            *(self.append, self.copy, self.deliver, self.catch_up, self.ask, self.answer) * 3,
            *(
                self.time_passes,
                self.connect,
                self.disconnect,
                self.lose_memory,
                self.ask_again,
                self.decide,
                self.read,
            ),
        ]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.random.choice(self.doings)()
            self.check()

    def check(self) -> None:
        assert self.least <= self.confirm.value <= self.end
        self.least = self.confirm.value
        for member in self.register.members - {A}:
            assert self.slaves[member].log >= self.confirm.value

    @property
    def member(self) -> int:
        return self.random.choice((B, C))

    def time_passes(self) -> None:
        self.now += self.random.choice((0.01, 0.2, 1.0, 4.0))

    def append(self) -> None:
        if self.confirm.may_append():
            self.end += self.random.randint(1, 3)
            self.confirm.appended(self.end)

    def connect(self, member: int = 0) -> None:
        member = member or self.member
        slave = self.slaves[member]
        slave.connection = object()
        self.confirm.connected(member, slave.connection, self.now)
        slave.acks.append((slave.connection, slave.log))

    def disconnect(self, member: int = 0) -> None:
        member = member or self.member
        slave = self.slaves[member]
        if slave.connection is not None:
            self.confirm.disconnected(member, slave.connection, self.now)
            slave.connection = None

    def copy(self, member: int = 0, size: int = 0) -> None:
        slave = self.slaves[member or self.member]
        if slave.connection is not None:
            slave.log = min(slave.log + (size or self.random.randint(1, 4)), self.end)
            slave.acks.append((slave.connection, slave.log))

    def deliver(self, member: int = 0) -> None:
        member = member or self.member
        acks = self.slaves[member].acks
        if acks:
            connection, end = acks.pop(0)
            self.confirm.reported(member, connection, end, self.now)

    def catch_up(self) -> None:
        member = self.member
        if self.slaves[member].connection is None:
            self.connect(member)
        self.copy(member, self.end)
        while self.slaves[member].acks:
            self.deliver(member)

    def lose_memory(self) -> None:
        """Restart a member as a new incarnation: its registration removes it from the set before it may connect.

        Old bytes may arrive late. The epoch advances even if the member was not in the set, because a pending request
        1001 may have named its former incarnation.
        """
        member = self.member
        self.disconnect(member)
        self.slaves[member].log = max(self.slaves[member].log - self.random.randint(1, 5), 0)
        self.register = SyncStateSet(self.register.epoch + 1, self.register.members - {member})

    def ask(self) -> None:
        wanted = self.confirm.wish(self.now)
        if wanted is not None:
            self.asked = wanted
            self.requests.append((self.confirm.asked(wanted), wanted))

    def ask_again(self) -> None:
        if self.confirm.is_altering and self.confirm.allows(self.asked):
            self.requests.append((self.confirm.asked(self.asked), self.asked))

    def decide(self) -> None:
        if not self.requests:
            return
        based, wanted = self.requests.pop(self.random.randrange(len(self.requests)))
        refuses, is_lost = self.random.random() < 0.3, self.random.random() < 0.5
        if based == self.register.epoch and not refuses:
            self.register = SyncStateSet(based + 1, wanted)
        elif based == self.register.epoch and not is_lost:
            self.answers.append(lambda: self.confirm.refused(wanted, based))
        if not is_lost:
            self.read()

    def read(self) -> None:
        seen = self.register
        self.answers.append(lambda: self.believe(seen))

    def believe(self, seen: SyncStateSet) -> None:
        assert self.confirm.read(7, seen, self.now)

    def answer(self) -> None:
        if self.answers:
            self.answers.pop(self.random.randrange(len(self.answers)))()


@pytest.mark.parametrize("rules", [SYNC, AVAILABLE], ids=["sync", "sync-available"])
def test_every_electable_member_has_the_confirmed_log_under_any_losses(rules: ConfirmRules) -> None:
    confirmed = 0
    for seed in range(600):
        world = _World(seed, rules)
        try:
            world.run(120)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        confirmed += world.confirm.value > 0
    assert confirmed > 100, "the walks lead somewhere"
