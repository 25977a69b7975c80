from __future__ import annotations

import asyncio

import pytest

from infra.loop.supervisor import FAILING_RUNS, HANGING_S, Supervisor
from tests.kit.clock.waiting import until


async def test_failing_periodic_task_continues_and_is_counted() -> None:
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


async def test_tasks_are_awaited_and_bounded() -> None:
    supervisor = Supervisor("test", limit=1)
    never = asyncio.Event()

    async def asynchronous() -> None:
        await never.wait()

    task = supervisor.every("one", 1, asynchronous, first_s=0)
    with pytest.raises(RuntimeError, match="already"):
        supervisor.spawn("two", asynchronous)
    await supervisor.stop()
    assert task.cancelled()


async def test_repeatedly_failing_task_is_in_trouble_until_a_run_succeeds() -> None:
    supervisor = Supervisor("test")
    broken = True
    worked = asyncio.Event()
    troubles_before: list[int] = []

    def work() -> None:
        troubles_before.append(len(supervisor.troubles()))
        if broken:
            raise OSError("no more open files")
        worked.set()

    supervisor.every("work", 0.001, work, first_s=0)
    await until(lambda: len(troubles_before) > FAILING_RUNS)
    assert troubles_before[: FAILING_RUNS + 1] == [0] * FAILING_RUNS + [1]
    (trouble,) = supervisor.troubles()
    assert (trouble.task, trouble.kind) == ("work", "failing")
    assert "no more open files" in trouble.text
    broken = False
    await worked.wait()
    await until(lambda: not supervisor.troubles())
    await supervisor.stop()


async def test_hanging_and_ended_tasks_are_in_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor("test")
    ended: list[BaseException | None] = []

    async def hang() -> None:
        await asyncio.Event().wait()

    async def end() -> None:
        raise OSError("gone")

    supervisor.every("hangs", 1, hang, first_s=0)
    supervisor.vital("ends", end, ended.append)
    await until(lambda: bool(ended))
    assert isinstance(ended[0], OSError)
    assert [(each.task, each.kind) for each in supervisor.troubles()] == [("ends", "ended")]
    loop = asyncio.get_running_loop()
    later = loop.time() + HANGING_S + 1
    monkeypatch.setattr(loop, "time", lambda: later)
    assert [(each.task, each.kind) for each in supervisor.troubles()] == [("ends", "ended"), ("hangs", "hanging")]
    monkeypatch.undo()
    await supervisor.stop()


async def test_kept_task_is_restarted_after_every_kind_of_end() -> None:
    """The task ends by an error, a cancellation from inside, or a return."""

    supervisor = Supervisor("test")
    lives: list[int] = []
    alive = asyncio.Event()

    async def live() -> None:
        lives.append(len(lives))
        match len(lives):
            case 1:
                raise OSError("once")
            case 2:
                raise asyncio.CancelledError
        alive.set()
        await asyncio.Event().wait()

    supervisor.keep("lives", live)
    async with asyncio.timeout(20):
        await alive.wait()
    assert supervisor.failures == {"lives": 2}
    await supervisor.stop()
    assert not len(supervisor)


async def test_stop_does_not_wait_for_a_hanging_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.loop.supervisor._STOP_S", 0.01)

    supervisor = Supervisor("test")
    go, begun = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        begun.set()
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    task = supervisor.spawn("stubborn", stubborn)
    await begun.wait()
    async with asyncio.timeout(20):
        await supervisor.stop()
    assert not task.done()
    go.set()
    await asyncio.wait([task])
