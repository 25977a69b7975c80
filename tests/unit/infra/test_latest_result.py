"""Tests of LatestResult: callers share a run, and a slow run returns the last result."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from infra.clock import ManualClock
from infra.observe.latest_result import AgedResult, LatestResult


class Looks:
    """Runs that end when a test sets their result."""

    def __init__(self) -> None:
        self.firsts: list[bool] = []
        self.ends: list[asyncio.Future[int]] = []

    def __call__(self, is_first: bool) -> Coroutine[Any, Any, int]:
        self.firsts.append(is_first)
        self.ends.append(asyncio.get_running_loop().create_future())
        return self._look(self.ends[-1])

    @staticmethod
    async def _look(end: asyncio.Future[int]) -> int:
        return await end


async def turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_concurrent_callers_share_the_first_run() -> None:
    looks = Looks()
    last = LatestResult("look", looks, ManualClock(), wait_s=0.0)
    asking = [asyncio.create_task(last.get()) for _ in range(3)]
    await turn()
    assert (looks.firsts, any(one.done() for one in asking)) == ([True], False)
    looks.ends[0].set_result(7)
    assert [(await one).found for one in asking] == [7, 7, 7]


async def test_slow_run_returns_the_last_result_with_its_age() -> None:
    looks, clock = Looks(), ManualClock()
    last = LatestResult("look", looks, clock, wait_s=0.01)
    first = asyncio.create_task(last.get())
    await turn()
    clock.advance(2_000)
    looks.ends[0].set_result(1)
    assert await first == AgedResult(1, 2.0), "since it began"
    clock.advance(5_000)
    assert await last.get() == AgedResult(1, 7.0)
    assert await last.get() == AgedResult(1, 7.0)
    assert looks.firsts == [True, False], "the same one"
    looks.ends[1].set_result(2)
    await turn()
    clock.advance(1_000)
    third = asyncio.create_task(last.get())
    await turn()
    looks.ends[2].set_result(3)
    assert await third == AgedResult(3, 0.0), "who has not to wait for long gets what is there now"


async def test_cancelled_caller_does_not_cancel_the_run_but_close_does() -> None:
    looks = Looks()
    last = LatestResult("look", looks, ManualClock())
    gone, stays = (asyncio.create_task(last.get()) for _ in range(2))
    await turn()
    gone.cancel()
    await turn()
    looks.ends[0].set_result(1)
    assert (await stays).found == 1
    again = asyncio.create_task(last.get())
    await turn()
    last.close()
    with pytest.raises(asyncio.CancelledError):
        await again


async def test_failed_run_is_raised_and_the_next_call_runs_again() -> None:
    looks = Looks()
    last = LatestResult("look", looks, ManualClock())
    failing = asyncio.create_task(last.get())
    await turn()
    looks.ends[0].set_exception(OSError("unreadable"))
    with pytest.raises(OSError, match="unreadable"):
        await failing
    again = asyncio.create_task(last.get())
    await turn()
    looks.ends[1].set_result(4)
    assert (await again).found == 4
    assert looks.firsts == [True, True]
