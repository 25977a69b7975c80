"""Tests of broker liveness by heartbeats and connections."""

from __future__ import annotations

import asyncio

import pytest

from controller import liveness as module
from controller.broker_set import Member
from controller.decision import Asked, Report
from controller.liveness import FORGET_MS, Liveness
from infra.clock import ManualClock

OLD, NEW = "old connection", "new connection"


def heard(liveness: Liveness, connection: str = OLD, *, born: str = "", member: Member | None = None) -> bool:
    return liveness.record_heartbeat("b", 1, Report(0, timeout_ms=1000, incarnation=born), connection, member)


def connected(liveness: Liveness) -> bool:
    return liveness.reports("b", {})[1].connected


def test_close_of_a_replaced_connection_keeps_broker_alive() -> None:
    liveness = Liveness(ManualClock())
    heard(liveness, OLD)
    heard(liveness, NEW)
    assert liveness.closed(OLD) == set()
    assert connected(liveness)
    assert liveness.closed(NEW) == {"b"}
    assert not connected(liveness)
    assert liveness.closed(NEW) == set()


def test_broker_is_silent_after_its_heartbeat_timeout() -> None:
    clock = ManualClock()
    liveness = Liveness(clock)
    heard(liveness)
    clock.advance(1000)
    assert liveness.silent() == []
    clock.advance(1)
    assert liveness.silent() == [("b", 1, OLD)]
    liveness.closed(OLD)
    assert liveness.silent() == []
    clock.advance(FORGET_MS)
    liveness.silent()
    assert liveness.reports("b", {}) == {}


def test_stranger_report_is_kept_until_expiry_or_forget() -> None:
    clock = ManualClock()
    liveness = Liveness(clock)
    heard(liveness, born="first")
    assert liveness.strangers("b") == ()
    for epoch in (5, 3):
        assert not liveness.record_heartbeat("b", 1, Report(0, incarnation="second", master_epoch=epoch), NEW, None)
        assert [report.master_epoch for report in liveness.strangers("b")] == [5]
    heard(liveness, born="first")
    assert liveness.strangers("b") != ()
    clock.advance(FORGET_MS + 1)
    heard(liveness, born="first")
    assert liveness.strangers("b") == (), "it has long gone"
    assert not liveness.record_heartbeat("b", 1, Report(0, incarnation="second", master_epoch=5), NEW, None)
    liveness.forget("b", 1)
    assert liveness.strangers("b") == ()


def test_second_process_is_heard_only_if_registered_or_first_is_dead() -> None:
    clock = ManualClock()
    liveness = Liveness(clock)
    assert heard(liveness, born="first")
    assert not heard(liveness, NEW, born="second")
    assert liveness.reports("b", {})[1].incarnation == "first"
    registered = Member(id=1, address="h:1", incarnation="second")
    assert heard(liveness, NEW, born="second", member=registered)
    assert not heard(liveness, OLD, born="first", member=registered)
    clock.advance(1001)
    assert heard(liveness, OLD, born="first", member=registered)


def test_query_answers_appear_only_in_the_requested_reports() -> None:
    liveness = Liveness(ManualClock())
    heard(liveness)
    assert liveness.reports("b", {1: Asked(True, 2, 3), 9: Asked(True)})[1].asked == Asked(True, 2, 3)
    assert liveness.reports("b", {})[1].asked is None
    assert 9 not in liveness.reports("b", {9: Asked(True)})


def test_number_of_sets_and_ids_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (module.MAX_SETS, module.MAX_IDS) == (2_000, 128)
    monkeypatch.setattr(module, "MAX_SETS", 2)
    monkeypatch.setattr(module, "MAX_IDS", 2)
    liveness = Liveness(ManualClock())
    said = Report(0)
    assert [liveness.record_heartbeat("b", broker_id, said, OLD, None) for broker_id in (1, 2, 3, 1)] == [
        True,
        True,
        False,
        True,
    ]
    assert [liveness.record_heartbeat(name, 1, said, OLD, None) for name in ("c", "d", "c")] == [True, False, True]
    liveness.forget("b")
    assert liveness.record_heartbeat("d", 1, said, OLD, None)


def test_broker_heard_by_another_controller_is_alive() -> None:
    clock = ManualClock()
    liveness = Liveness(clock)
    heard(liveness)
    clock.advance(1001)
    told = Report(0, timeout_ms=1000)
    elsewhere = {1: [told], 2: [told]}
    found = liveness.reports("b", {2: Asked(True, 4, 5)}, elsewhere)
    assert {broker_id: (one.connected, one.heard_ms) for broker_id, one in found.items()} == {
        1: (True, 1001),
        2: (True, 1001),
    }
    assert found[2].asked == Asked(True, 4, 5)
    assert liveness.living("b") == {}
    heard(liveness)
    assert set(liveness.living("b")) == {1}
    assert liveness.names() == {"b"}


def test_report_of_registered_process_wins_on_every_controller() -> None:
    liveness = Liveness(ManualClock())
    heard(liveness, born="copy")
    elsewhere = {1: [Report(0, incarnation="true")]}
    for incarnation in ("copy", "true"):
        member = Member(id=1, address="h:1", incarnation=incarnation)
        assert liveness.reports("b", {}, elsewhere, [member])[1].incarnation == incarnation


def test_highest_epochs_of_all_controllers_are_reported() -> None:
    liveness = Liveness(ManualClock())
    heard(liveness)
    higher = Report(0, master_epoch=5, sync_state_set_epoch=7, incarnation="x")
    found = liveness.reports("b", {}, {1: [higher]})[1]
    assert (found.incarnation, found.epochs) == ("", (5, 7))


async def test_until_heard_returns_on_heartbeat_or_timeout() -> None:
    liveness = Liveness(ManualClock())
    await liveness.until_alive("b", 1, 0)
    waiting = [asyncio.create_task(liveness.until_alive("b", 1, 60)) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    heard(liveness)
    await asyncio.gather(*waiting)
    await liveness.until_alive("b", 1, 60)


async def test_waiter_is_woken_after_another_waiter_timed_out() -> None:
    liveness = Liveness(ManualClock())
    patient = asyncio.create_task(liveness.until_alive("b", 1, 60))
    await liveness.until_alive("b", 1, 0.001)
    assert not patient.done()
    heard(liveness)
    async with asyncio.timeout(10):
        await patient
    assert liveness._awaited == {}
