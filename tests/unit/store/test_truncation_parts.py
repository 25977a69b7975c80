"""A cut of a slave's log: the event loop does not wait for the copy of the tail."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.store.errors import StoreNotWritable
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import ManualClock
from infra.loop.in_steps import run_beside
from tests.doubles.sim_disk import SimDisk
from tests.unit.store.conftest import small_config
from tests.unit.store.replicas import Link, Master


class CountingDisk(SimDisk):
    """Counts the bytes that are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def append(self, path: Path, data: bytes) -> None:
        self.copied += len(data)
        super().append(path, data)


def opened(disk: SimDisk) -> MessageStore:
    store = MessageStore(small_config(), disk, ManualClock())
    store.load(following=True)
    return store


def followed(disk: SimDisk, queues: int) -> tuple[MessageStore, int]:
    """A slave with messages in many queues, and where it parts from its master."""
    master, slave = Master(0), opened(disk)
    for queue in range(queues):
        master.put("orders", queue, 10)
    shared = master.store.max_physical_offset
    for queue in range(queues):
        master.put("orders", queue, 10)
    Link(master, slave, 0).run()
    return slave, shared


def test_cut_copies_the_tail_only_on_the_thread() -> None:
    disk = CountingDisk()
    slave, shared = followed(disk, 60)
    tail, on_threads = slave.max_physical_offset - shared, 0

    async def run(part: Callable[[], object]) -> None:
        nonlocal on_threads
        begun = disk.copied
        part()
        on_threads += disk.copied - begun

    assert asyncio.run(run_beside(slave.truncation(shared, epoch=1, floor=shared), run)) is not None
    assert slave.max_physical_offset == shared
    assert [slave.max_offset("orders", queue) for queue in range(60)] == [1] * 60
    assert tail // 2 < on_threads == disk.copied


@pytest.mark.parametrize("place", ["store.truncate", "store.checkpoint", "store.flush"])
@pytest.mark.parametrize("seed", range(4))
def test_power_cut_during_a_cut_ends_at_either_end(place: str, seed: int) -> None:
    disk = SimDisk(seed=seed)
    slave, shared = followed(disk, 8)
    slave.after_flush(slave.flush())
    end = slave.max_physical_offset
    parts = slave.truncation(shared, epoch=1, floor=shared)
    with failpoint.armed(place, nth=1), pytest.raises(Exception, match="failpoint"):
        while True:
            next(parts)()
    again = opened(disk.power_cut())
    assert again.max_physical_offset in (shared, end)
    messages = 1 if again.max_physical_offset == shared else 2
    assert [again.max_offset("orders", queue) for queue in range(8)] == [messages] * 8


def test_cancelled_cut_runs_to_its_end() -> None:
    disk = SimDisk()
    slave, shared = followed(disk, 8)
    begun, may_go_on = threading.Event(), threading.Event()

    async def run(part: Callable[[], object]) -> None:
        begun.set()
        await asyncio.to_thread(may_go_on.wait, 60)
        await asyncio.to_thread(part)

    async def main() -> None:
        cut = asyncio.create_task(run_beside(slave.truncation(shared, epoch=1, floor=shared), run))
        while not begun.is_set():
            await asyncio.sleep(0)
        cut.cancel()
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await cut

    asyncio.run(main())
    assert slave.max_physical_offset == shared
    assert slave.is_following
    assert opened(disk.copy()).max_physical_offset == shared


class UnsyncedDecision(SimDisk):
    """The decision gets its name, and the sync of the directory fails."""

    def write_atomic(self, path: Path, data: bytes) -> None:
        super().write_atomic(path, data)
        if path.name == "truncation":
            raise OSError(errno.EIO, "Input/output error", str(path))


def test_store_takes_nothing_after_a_decision_of_unknown_outcome() -> None:
    disk = UnsyncedDecision()
    slave, shared = followed(disk, 8)
    with pytest.raises(StoreNotWritable):
        slave.truncate(shared, epoch=1, floor=shared)
    with pytest.raises(StoreNotWritable):
        slave.lead()
    assert opened(disk.copy()).max_physical_offset == shared
