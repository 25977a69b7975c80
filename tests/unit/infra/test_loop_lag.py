"""Test of LoopLag: the longest pause of the event loop is reported once."""

from __future__ import annotations

import asyncio
import time

from infra.observe.loop_lag import PERIOD_S, LoopLag


def test_blocked_loop_is_measured_and_reported_once() -> None:
    async def run() -> tuple[float, float]:
        pause = LoopLag()
        pause.start()
        block_until = time.monotonic() + 3 * PERIOD_S
        while time.monotonic() < block_until:
            pass
        while (seen := pause.take()) == 0.0:
            await asyncio.to_thread(int)  # let the loop's timer run
        pause.stop()
        return seen, pause.take()

    seen, after = asyncio.run(asyncio.wait_for(run(), 10))
    assert seen >= PERIOD_S
    assert after == 0.0
