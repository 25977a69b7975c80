"""Invariants of decisions over all requests to all small broker sets; test_decision tests single rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from dataclasses import replace as changed
from functools import cached_property
from itertools import chain, combinations, product

import pytest
from msgspec.structs import replace

from controller.broker_set import BrokerSet, Member, decode, encode
from controller.decision import (
    AlterSyncStateSet,
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
    Reports,
    Request,
    Rules,
    Scan,
    decide,
)
from neve.remoting.codes import ResponseCode as Code

NOW = 1_000_000
EPOCHS = (2, 5)
STRANGER = 9
LOWER, EQUAL, HIGHER = (1, 9), (2, 5), (2, 6)


@dataclass(frozen=True)
class State:
    value: BrokerSet
    reports: Reports
    rules: Rules

    @cached_property
    def alive(self) -> frozenset[int]:
        return frozenset(broker_id for broker_id in self.value.ids if self.reports[broker_id].connected)

    @cached_property
    def in_sync(self) -> frozenset[int]:
        return frozenset((*self.value.sync_state_set, *self.value.eligible))

    @cached_property
    def is_outdated(self) -> bool:
        return bool(self.value.frozen) or any(report.epochs > self.value.epochs for report in self.reports.values())

    def decided(self, request: Request) -> Decision:
        found = decide(self.value, self.reports, request, NOW, self.rules)
        if isinstance(found, Decision):
            return found
        assert set(found.candidates) <= self.alive
        answers = {
            broker_id: changed(self.reports[broker_id], asked=Asked(True, EPOCHS[0], 100 * broker_id))
            for broker_id in found.candidates
        }
        found = decide(self.value, {**self.reports, **answers}, request, NOW, self.rules)
        assert not isinstance(found, Ask)
        return found


def subsets(ids: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(ids, size) for size in range(len(ids) + 1))


def member(broker_id: int, *, stock: bool, least: int) -> Member:
    if stock:
        return Member(id=broker_id, address=f"h{broker_id}", register_check_code=f"h{broker_id};1")
    return Member(
        id=broker_id,
        address=f"h{broker_id}",
        register_check_code=f"h{broker_id};1",
        incarnation=f"i{broker_id}",
        starts=3,
        process=f"p{broker_id}",
        min_in_sync_replicas=least,
    )


def values(size: int, stock: tuple[bool, ...], least: int) -> Iterator[BrokerSet]:
    """Yield every broker set of this size that the invariants allow and that decisions can reach."""
    ids = tuple(range(1, size + 1))
    members = tuple(member(id, stock=stock[id - 1], least=least) for id in ids)
    new = BrokerSet(cluster="c", name="b", next_broker_id=size + 1, members=members)
    yield new
    for places in product(("sync", "eligible", "unclean", "out"), repeat=size):
        at = {place: tuple(id for id in ids if places[id - 1] == place) for place in ("sync", "eligible", "unclean")}
        for master in (None, *at["sync"]):
            small = master is None or (not stock[master - 1] and len(at["sync"]) < least)
            if at["eligible"] and not small:
                continue
            yield replace(
                new,
                master=master,
                master_epoch=EPOCHS[0],
                sync_state_set_epoch=EPOCHS[1],
                sync_state_set=at["sync"],
                eligible=at["eligible"],
                unclean=at["unclean"],
            )


def states(size: int, stock: tuple[bool, ...], least: int, *, narrow: bool) -> Iterator[State]:
    heard = [EQUAL] if narrow else [LOWER, EQUAL, HIGHER]
    for value in values(size, stock, least):
        for living in product((True, False), repeat=size):
            for epochs, allowed in product(heard, (False,) if narrow else (False, True)):
                reports = {
                    m.id: Report(
                        NOW,
                        connected=living[m.id - 1],
                        max_offset=100 * m.id if value.master_epoch else 0,
                        epoch=0,
                        incarnation=m.incarnation,
                        starts=m.starts,
                        process=m.process,
                        # Only member 1 reports epochs: decisions use the highest ones of all members.
                        master_epoch=epochs[0] if m.id == 1 and value.master_epoch else 0,
                        sync_state_set_epoch=epochs[1] if m.id == 1 and value.master_epoch else 0,
                    )
                    for m in value.members
                }
                yield State(value, reports, Rules(enable_elect_unclean_master=allowed))


def requests(value: BrokerSet) -> Iterator[Request]:
    yield Scan("b")
    yield GetNextBrokerId("c", "b")
    yield GetReplicaInfo("b")
    yield GetSyncStateData("b")
    yield ElectMaster("b")
    yield ApplyBrokerId("c", "b", value.next_broker_id, "new;1")
    for m in value.members:
        yield ApplyBrokerId("c", "b", m.id, m.register_check_code)
        yield ApplyBrokerId("c", "b", m.id, "another;1")
        for born in (
            (m.incarnation, m.starts, m.process),
            (m.incarnation, m.starts + 1, "next"),
            (m.incarnation, m.starts, "copy"),
            ("fresh", 1, "p"),
        ):
            yield RegisterBroker("c", "b", m.id, "moved", *born, min_in_sync_replicas=m.min_in_sync_replicas)
    for broker_id in (*value.ids, STRANGER):
        yield ElectMaster("b", broker_id)
        yield ElectMaster("b", broker_id, designate=True)
    master, (epoch, based_on) = value.master or 1, value.epochs
    for wanted in subsets((*value.ids, STRANGER)):
        yield AlterSyncStateSet("b", master, epoch, wanted, based_on, "r")
    yield AlterSyncStateSet("b", STRANGER, epoch, value.ids, based_on)
    yield AlterSyncStateSet("b", master, epoch - 1, value.ids, based_on)
    yield AlterSyncStateSet("b", master, epoch, value.ids, based_on - 1)
    for ids in subsets(value.ids):
        for living in (False, True):
            yield CleanBrokerData("b", ";".join(map(str, ids)), living)


def holds(state: State, request: Request) -> None:
    """Assert every invariant that a single decision could break."""
    old, decision = state.value, state.decided(request)
    answer, new = decision.answer, decision.broker_set or old
    refused = answer.code != Code.SUCCESS
    if decision.removed:
        assert isinstance(request, CleanBrokerData) and not refused
        return

    # Epochs never decrease. Each has at most one master and one SyncStateSet.
    assert new.epochs >= old.epochs
    assert new.master == old.master or new.master_epoch > old.master_epoch
    assert new.sync_state_set == old.sync_state_set or new.sync_state_set_epoch > old.sync_state_set_epoch

    # A refused request changes nothing, except that it may freeze an outdated set or clear a dead master.
    if refused and new != old:
        cleared = replace(old, master=None, master_epoch=old.master_epoch + 1)
        assert new == replace(old, frozen=new.frozen) or (
            new == cleared and answer.code == Code.CONTROLLER_MASTER_NOT_AVAILABLE and old.master not in state.alive
        )

    by_operator = isinstance(request, ElectMaster) and request.designate
    if state.is_outdated and not by_operator and not isinstance(request, CleanBrokerData):
        # Brokers may still join, so that an operator can designate one.
        starts = isinstance(request, RegisterBroker | ApplyBrokerId)
        who = {"members": new.members, "next_broker_id": new.next_broker_id} if starts else {}
        assert replace(new, frozen=None) == replace(old, frozen=None, **who)

    elected = new.master is not None and new.master_epoch > old.master_epoch
    if elected:
        assert isinstance(request, ElectMaster | Scan)
        assert new.master in state.alive
        assert new.sync_state_set == (new.master,)
        assert new.unclean == ()
        assert set(decision.notify) == state.alive
        assert (answer.master, answer.master_epoch) == (new.master, new.master_epoch)
        assert old.master not in state.alive or by_operator
        first = old.master_epoch == 0
        if not (first or by_operator):
            assert new.master in state.in_sync or (
                not state.in_sync and old.unclean and set(old.unclean) <= state.alive
            )
            if not state.in_sync:
                assert new.master == max(state.alive)  # its log is the longest, see `states`
        elif by_operator and new.master not in state.in_sync and not first and not state.is_outdated:
            forced = state.rules.enable_elect_unclean_master and not any(m.is_stock for m in old.members)
            assert forced or not (state.in_sync or old.unclean)

    # A member becomes trusted only by an alteration of its master or by an election.
    trusted = {*new.sync_state_set, *new.eligible} - state.in_sync
    assert trusted <= ({new.master} if elected else set()) | (
        set(request.sync_state_set) if isinstance(request, AlterSyncStateSet) else set()
    )
    if isinstance(request, AlterSyncStateSet) and not refused:
        assert new.master == old.master == request.master
        assert new.sync_state_set == old.sync_state_set or set(new.sync_state_set) <= state.alive
        assert answer.sync_state_set_epoch == new.sync_state_set_epoch
        keeper = old.member(old.master)
        assert keeper is not None
        assert len(new.sync_state_set) >= min(len(old.sync_state_set), keeper.min_in_sync_replicas)

    # A member that may have lost acknowledged records is out of the set and recorded as unclean.
    if isinstance(request, RegisterBroker) and request.incarnation == "fresh" and not refused and not state.is_outdated:
        assert request.broker_id not in (*new.sync_state_set, *new.eligible)
        assert state.in_sync - {*new.sync_state_set, *new.eligible} <= set(new.unclean)

    # If the set is large enough for the master to acknowledge, no other member is eligible.
    master = new.member(new.master)
    if master is not None and len(new.sync_state_set) >= master.min_in_sync_replicas:
        assert new.eligible == ()

    # An unclean mark disappears only by an election, an alteration, or an operator who cleans.
    if not (elected or isinstance(request, CleanBrokerData | AlterSyncStateSet)):
        assert set(old.unclean) <= set(new.unclean)

    # A live master is deposed only by an operator, or by its own registration after a restart.
    if new.master != old.master and old.master in state.alive:
        assert by_operator or (
            isinstance(request, RegisterBroker | CleanBrokerData) and str(old.master) in str(request)
        )
    if isinstance(request, GetNextBrokerId | GetReplicaInfo | GetSyncStateData):
        assert new == old


SMALL = [
    pytest.param(1, (False,), 1, False, id="one"),
    pytest.param(1, (True,), 1, False, id="one of Apache's"),
    *(
        pytest.param(2, stock, least, False, id=f"two, {stock.count(True)} of Apache's, at least {least}")
        for stock, least in product(((False, False), (True, False), (True, True)), (1, 2))
    ),
    pytest.param(3, (False, False, False), 1, True, id="three, at least 1"),
    pytest.param(3, (False, False, False), 2, True, id="three, at least 2"),
    pytest.param(3, (False, True, False), 2, True, id="three, one of Apache's, at least 2"),
]


@pytest.mark.parametrize(("size", "stock", "least", "narrow"), SMALL)
def test_no_request_breaks_an_invariant_in_any_state(
    size: int, stock: tuple[bool, ...], least: int, narrow: bool
) -> None:
    seen = 0
    for state in states(size, stock, least, narrow=narrow):
        for request in requests(state.value):
            try:
                holds(state, request)
            except AssertionError as error:
                raise AssertionError(f"{request}\nin {state.value}\nwith alive {sorted(state.alive)}") from error
            seen += 1
    assert seen > 500


@pytest.mark.parametrize(("size", "stock", "least", "narrow"), SMALL)
def test_second_scan_changes_nothing(size: int, stock: tuple[bool, ...], least: int, narrow: bool) -> None:
    for state in states(size, stock, least, narrow=narrow):
        first = state.decided(Scan("b"))
        after = changed_value(state, first)
        again = after.decided(Scan("b"))
        assert again.broker_set is None, (state.value, first, again)
        if after.value.master in after.alive:
            assert after.decided(ElectMaster("b", after.value.ids[0])).answer.code in (
                Code.CONTROLLER_MASTER_STILL_EXIST,
                Code.CONTROLLER_ELECT_MASTER_FAILED,
            )


@pytest.mark.parametrize("stock", [False, True])
def test_register_value_round_trips(stock: bool) -> None:
    for value in values(3, (stock, False, stock), 2):
        assert decode(encode(value)) == value


def changed_value(state: State, decision: Decision) -> State:
    return State(decision.broker_set or state.value, state.reports, state.rules)


def test_scan_elects_a_master_if_an_in_sync_member_is_alive() -> None:
    for state in states(3, (False, False, False), 2, narrow=True):
        if state.in_sync & state.alive:
            after = changed_value(state, state.decided(Scan("b")))
            assert after.value.master in state.alive, state.value
