"""A job's call that timed out never runs later: the job has reported it as failed."""

from __future__ import annotations

import asyncio
import threading

import pytest

from broker.archiving import environment
from broker.archiving.environment import AskLoop


def test_call_that_timed_out_never_runs_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_TIMEOUT_S", 0.01)
    ran: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        ask, failed = AskLoop(loop), threading.Event()

        def job() -> None:
            with pytest.raises(TimeoutError):
                ask.call(lambda: ran.append("too late"))
            failed.set()

        thread = threading.Thread(target=job)
        thread.start()
        assert failed.wait(30)  # the loop is busy until the job has failed
        thread.join()
        await asyncio.sleep(0)

    asyncio.run(main())
    assert ran == []


async def test_call_that_runs_at_its_timeout_returns_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_TIMEOUT_S", 0.05)

    ask = AskLoop(asyncio.get_running_loop())
    begun = threading.Event()

    def slow() -> str:
        begun.set()
        threading.Event().wait(0.2)
        return "done"

    assert await asyncio.to_thread(ask.call, slow) == "done"
    assert begun.is_set()


async def test_call_whose_work_times_out_raises_the_works_error() -> None:
    def work() -> None:
        raise TimeoutError("of the work")

    with pytest.raises(TimeoutError, match="of the work"):
        await asyncio.to_thread(AskLoop(asyncio.get_running_loop()).call, work)


async def test_wait_that_timed_out_cancels_the_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_TIMEOUT_S", 0.05)

    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        await asyncio.to_thread(AskLoop(asyncio.get_running_loop()).wait, work())
    async with asyncio.timeout(30):
        await cancelled.wait()
