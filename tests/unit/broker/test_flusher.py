"""A disk whose fsync fails: no send is acknowledged, and each waiting caller gets the error."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from broker.intake.flusher import Flusher, WaitingSend
from infra.clock import ManualClock, SystemClock
from infra.loop.supervisor import Faults


class BrokenStore:
    """A store whose first flush fails."""

    is_dirty = True
    wants_upkeep = False
    max_physical_offset = 10

    @property
    def visibility(self) -> BrokenStore:
        return self

    def flush(self) -> int:
        raise OSError("Input/output error")


async def test_failed_fsync_is_raised_to_waiting_and_later_callers() -> None:
    failures: list[BaseException] = []
    store: Any = BrokenStore()
    flusher = Flusher(store, SystemClock(), interval_ms=lambda: 60_000, on_failure=failures.append, faults=Faults())
    async with asyncio.timeout(20):
        waiting = asyncio.create_task(flusher.flush_now())
        await flusher.run()
        with pytest.raises(RuntimeError, match="flush failed"):
            await waiting
        with pytest.raises(RuntimeError, match="flush failed"):
            await flusher.flush_now()
    assert [str(failure) for failure in failures] == ["Input/output error"]
    flusher.close()


class SoundStore:
    """A store whose flushes work. While it is `broken`, the steps after a flush fail. Its upkeep waits for an event."""

    def __init__(self) -> None:
        self.visibility, self.is_dirty = self, True
        self.max_physical_offset = 10
        self.broken = True
        self.followed = 0
        self.wants_upkeep = False
        self.kept_up = 0
        self.upkeep_begun, self.upkeep_may_end = threading.Event(), threading.Event()

    def flush(self) -> int:
        return self.max_physical_offset

    def after_flush(self, offset: int) -> None:
        if self.broken:
            raise OSError("Too many open files")
        self.followed += 1

    def upkeep(self) -> None:
        self.wants_upkeep = False
        self.upkeep_begun.set()
        assert self.upkeep_may_end.wait(30)
        self.kept_up += 1
        if self.broken:
            raise OSError("Input/output error")


class Peer:
    """A connection that collects sent bytes."""

    def __init__(self) -> None:
        self.got: list[bytes] = []

    def send_raw(self, data: bytes) -> None:
        self.got.append(data)


def spoilt(code: int) -> bytes:
    raise ValueError("a header of 70000 bytes")


async def test_failure_after_an_fsync_neither_stops_flushes_nor_loses_answers() -> None:
    store: Any = SoundStore()
    faults = Faults()
    flusher = Flusher(store, SystemClock(), interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=faults)
    peer: Any = Peer()
    for render in (spoilt, lambda code: b"first"):
        flusher.wait(WaitingSend(10, peer, 1e18, render))
    running = asyncio.create_task(flusher.run())
    async with asyncio.timeout(20):
        await flusher.flush_now()
        assert peer.got == [b"first"]
        assert faults.counts == {"what follows a flush": 1, "the answer to a send": 1}
        store.broken, store.max_physical_offset = False, 20
        flusher.wait(WaitingSend(20, peer, 1e18, lambda code: b"second"))
        await flusher.flush_now()
    assert (peer.got, store.followed, running.done()) == ([b"first", b"second"], 1, False)
    running.cancel()
    flusher.close()


async def test_late_answer_that_cannot_be_rendered_delays_no_other() -> None:
    store: Any = SoundStore()
    clock = ManualClock()
    flusher = Flusher(store, clock, interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
    peer: Any = Peer()
    for render in (spoilt, lambda code: b"late %d" % code):
        flusher.wait(WaitingSend(10, peer, 1.0, render))
    clock.advance(2000)
    flusher.check_deadlines()
    assert peer.got == [b"late 10"]
    flusher.close()


async def test_sends_do_not_wait_for_a_checkpoint() -> None:
    """A checkpoint fsyncs each written queue: thousands of files."""

    store: Any = SoundStore()
    store.broken, store.wants_upkeep = False, True
    flusher = Flusher(store, SystemClock(), interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
    peer: Any = Peer()
    running = asyncio.create_task(flusher.run())
    async with asyncio.timeout(20):
        await flusher.flush_now()
        assert await asyncio.to_thread(store.upkeep_begun.wait, 20)
        flusher.wait(WaitingSend(10, peer, 1e18, lambda code: b"acknowledged"))
        await flusher.flush_now()
        assert (peer.got, store.kept_up) == ([b"acknowledged"], 0)
        waiting = asyncio.create_task(flusher.upkeep_now())
        store.upkeep_may_end.set()
        await waiting
        assert store.kept_up == 1
    running.cancel()
    flusher.close()


async def test_checkpoint_whose_fsync_failed_counts_as_a_failed_fsync() -> None:
    store: Any = SoundStore()
    store.wants_upkeep = True
    failures: list[BaseException] = []
    flusher = Flusher(store, SystemClock(), interval_ms=lambda: 60_000, on_failure=failures.append, faults=Faults())
    running = asyncio.create_task(flusher.run())
    store.upkeep_may_end.set()
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="flush failed"):
            await flusher.upkeep_now()
        with pytest.raises(RuntimeError, match="flush failed"):
            await flusher.flush_now()
    assert [str(failure) for failure in failures] == ["Input/output error"]
    running.cancel()
    flusher.close()


async def test_fsync_that_could_not_start_is_retried_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of file descriptors. An immediate retry would occupy the event loop."""

    store: Any = SoundStore()
    store.broken = False
    reached = iter([0, 0, 10])
    monkeypatch.setattr(store, "flush", lambda: next(reached))
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    flusher = Flusher(store, SystemClock(), interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
    running = asyncio.create_task(flusher.run())
    with monkeypatch.context() as patch:
        patch.setattr("broker.intake.flusher.asyncio.sleep", pause)
        async with asyncio.timeout(20):
            await flusher.flush_now()
    assert len(pauses) == 2
    running.cancel()
    flusher.close()


class CutStore(SoundStore):
    """A slave's store whose log is truncated during a flush."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def flush(self) -> int:
        synced, self.max_physical_offset = self.max_physical_offset, 4
        return synced


async def test_waiter_for_truncated_bytes_gets_an_error_and_the_next_is_served() -> None:
    store: Any = CutStore()
    flusher = Flusher(store, SystemClock(), interval_ms=lambda: 60_000, on_failure=lambda _: None, faults=Faults())
    flushing = asyncio.create_task(flusher.run())
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match="was truncated"):
            await flusher.flush_now()
        assert flusher.flushed_offset == 4
        await flusher.flush_now()
    flushing.cancel()
    flusher.close()
