from __future__ import annotations

import asyncio

import pytest

from infra.supervisor import Supervisor


def test_a_failing_loop_goes_on_and_is_counted() -> None:
    async def body() -> None:
        supervisor = Supervisor("test")
        done = asyncio.Event()
        runs: list[int] = []

        def work() -> None:
            runs.append(len(runs))
            if len(runs) == 1:
                raise ValueError("once")
            done.set()

        supervisor.every("work", 0.001, work, first_s=0)
        async with asyncio.timeout(5):
            await done.wait()
        assert supervisor.failures == {"work": 1}
        await supervisor.stop()
        assert len(supervisor) == 0

    asyncio.run(body())


def test_tasks_are_awaited_and_bounded() -> None:
    async def body() -> None:
        supervisor = Supervisor("test", limit=1)
        never = asyncio.Event()

        async def asynchronous() -> None:
            await never.wait()

        task = supervisor.every("one", 1, asynchronous, first_s=0)
        with pytest.raises(RuntimeError, match="already"):
            supervisor.spawn("two", asynchronous())
        await supervisor.stop()
        assert task.cancelled()

    asyncio.run(body())
