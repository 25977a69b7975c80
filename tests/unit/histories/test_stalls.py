"""Tests of the records of stalls of the event loop and of starved servers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.histories import stalls
from tests.histories.history import Event, Stall, Waited
from tests.histories.stalls import stalls_noted, stood_still_ms, waited_ms, waits_noted
from tests.kit.clock.waiting import until


async def test_stall_of_the_loop_is_recorded_with_time_and_duration() -> None:
    history: list[Event] = []
    with stalls_noted(history):
        threading.Event().wait(1.0)  # like a machine busy with other processes
        await until(lambda: bool(history), "it is noted")
    stall = history[0]
    assert isinstance(stall, Stall)
    assert stall.lasted >= 900
    assert stood_still_ms(history, stall.at) >= 900
    assert stood_still_ms(history, stall.at + stall.lasted + 60_000) == 0


async def test_server_waiting_for_a_processor_is_recorded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = {7: 400, 8: 0}
    monkeypatch.setattr(stalls, "_LOOK_S", 0.01)
    monkeypatch.setattr(stalls, "waited_ms", lambda process: waited[process])

    history: list[Event] = []
    with waits_noted(history, lambda: {"a": [7], "b": list(waited)[1:]}):
        waited[7], waited[8] = 500, 99
        await until(lambda: bool(history), "it is noted")
        waited[9] = 1_000  # a later process of b
        await until(lambda: len(history) == 2, "and again")
    found = [(one.who, one.lasted) for one in history if isinstance(one, Waited)]
    assert found == [("a", 100), ("b", 1_000)], "what came before, and what is little, is no matter"


def test_processor_wait_time_is_read_from_schedstat(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("5000000 1700000000 9\n")
    assert waited_ms(7, tmp_path) == 1_700
    assert waited_ms(8, tmp_path) == 0
    assert len(Path(f"/proc/{os.getpid()}/schedstat").read_text().split()) == 3
