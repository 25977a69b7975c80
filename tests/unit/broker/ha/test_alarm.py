"""An alarm rings once, at the earliest of the requested times, on either event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from broker.ha.alarm import Alarm

LATE = 30.0
LOOPS = [pytest.param(asyncio.new_event_loop, id="asyncio"), pytest.param(uvloop.new_event_loop, id="uvloop")]


@pytest.mark.parametrize("loop", LOOPS)
def test_alarm_rings_once_at_the_earliest_of_immediate_and_later_times(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """On uvloop an immediate callback is no timer and has no time to compare with."""
    rung: list[float] = []

    async def work() -> None:
        running = asyncio.get_running_loop()
        rings = asyncio.Event()

        def ring() -> None:
            rung.append(running.time())
            rings.set()

        alarm = Alarm(running, ring)
        for delays in ((0.0, LATE), (LATE, 0.0), (-1.0, 0.0001, 0.0), (0.0001, LATE)):
            begun = running.time()
            for delay in delays:
                alarm.ring_in(delay)
            await asyncio.wait_for(rings.wait(), LATE)
            assert running.time() - begun < LATE
            rings.clear()
        alarm.ring_in(0.0)
        alarm.stop()
        for _ in range(3):
            await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(work())
    assert len(rung) == 4
