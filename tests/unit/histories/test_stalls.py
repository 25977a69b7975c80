"""A loop that nobody runs is noted, with how long; one that runs is not."""

from __future__ import annotations

import asyncio
import threading

from tests.histories.history import Event, Stall
from tests.histories.stalls import stalls_noted, stood_still_ms
from tests.waiting import until


def test_a_loop_that_stands_still_is_noted_with_when_and_how_long() -> None:
    async def scenario() -> None:
        history: list[Event] = []
        with stalls_noted(history):
            threading.Event().wait(1.0)  # as a machine that runs somebody else
            await until(lambda: bool(history), "it is noted")
        stall = history[0]
        assert isinstance(stall, Stall)
        assert stall.lasted >= 900
        assert stood_still_ms(history, stall.at) >= 900
        assert stood_still_ms(history, stall.at + stall.lasted + 60_000) == 0

    asyncio.run(scenario())
