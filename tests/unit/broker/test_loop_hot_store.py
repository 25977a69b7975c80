"""What job threads ask of the store costs the loop no sync."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from broker.archiving.ask_loop import AskLoop
from broker.archiving.hot_store import LoopHotStore
from broker.intake.flusher import Flusher
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.message_store import MessageStore
from broker.store.queue_table import QueueTable
from infra.clock import ManualClock
from infra.supervisor import Faults
from tests.doubles.counted import Counted
from tests.doubles.sim_disk import SimDisk

QUEUES = 100


class NotingDisk(SimDisk):
    """Which thread writes which table."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, int]] = []

    def write_atomic(self, path: Path, data: bytes) -> None:
        self.written.append((path.name, threading.get_ident()))
        super().write_atomic(path, data)


class Synced:
    """A flusher: nothing waits for the disk."""

    flushed_offset = 0

    async def flush_now(self) -> None: ...

    async def upkeep_now(self) -> None:
        raise AssertionError("nobody asks")


class SavedPins:
    """Whose tables are written down; it has no `reappend`: nobody may ask for it."""

    async def save(self) -> None:
        await asyncio.sleep(0)


def store_on(disk: SimDisk, clock: ManualClock) -> MessageStore:
    config = StoreConfig(Path("/store"), commit_log_file_size=1 << 20, index_slots=64, index_entries=100)
    store = MessageStore(config, disk, clock)
    store.load()
    return store


def put(store: MessageStore, queue_id: int) -> None:
    store.put("t", queue_id, b"m", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))


def test_the_minimums_that_a_ttl_raises_are_one_write_beside_the_loop() -> None:
    async def main() -> None:
        disk, clock = NotingDisk(), ManualClock()
        store = store_on(disk, clock)
        for queue_id in range(QUEUES):
            put(store, queue_id)
        flusher = Flusher(store, clock, interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
        flushing = asyncio.create_task(flusher.run())
        ask = AskLoop(asyncio.get_running_loop())
        nothing_waits: Any = None
        hot = LoopHotStore(store, nothing_waits, ask, flusher, lambda: 0.1)
        disk.written.clear()
        before = dict.fromkeys(("t", "gone"), clock.now_ms() + 1)
        await asyncio.to_thread(hot.flush)
        await asyncio.to_thread(hot.expire_below, {"t": dict.fromkeys(range(QUEUES), 1), "gone": {0: 1}}, before)
        writers = [thread for name, thread in disk.written if name == "queue_state"]
        assert len(writers) == 1
        assert writers[0] != threading.get_ident()
        flushing.cancel()
        flusher.close()

        after = store_on(disk.power_cut(), clock)
        for queue_id in range(QUEUES):
            assert after.min_offset("t", queue_id) == after.max_offset("t", queue_id) == 1

    asyncio.run(main())


def counted(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> Counted:
    counter = Counted(getattr(kind, name))

    def method(*args: Any) -> Any:
        return counter(*args)

    monkeypatch.setattr(kind, name, method)
    return counter


def test_the_queues_of_one_topic_are_looked_at_in_slices_whether_they_have_anything_or_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        clock, queues = ManualClock(), 500
        store = store_on(SimDisk(), clock)
        for queue_id in range(queues):
            put(store, queue_id)
        begin = store.max_physical_offset
        for queue_id in (3, 400):
            put(store, queue_id)
        looks = counted(ConsumeQueue, "first_at", monkeypatch)
        not_asked: Any = None
        hot = LoopHotStore(store, not_asked, AskLoop(asyncio.get_running_loop()), not_asked, lambda: 0.1)
        found = await asyncio.to_thread(hot.entries, "t", begin, store.max_physical_offset)
        assert found.keys() == {3, 400}
        assert looks.all >= 2 * queues
        assert looks.most <= 2 * 64

        minimums = counted(QueueTable, "minimum", monkeypatch)
        synced: Any = Synced()
        hot = LoopHotStore(store, not_asked, AskLoop(asyncio.get_running_loop()), synced, lambda: 0.1)
        rising = {"t": dict.fromkeys(range(queues), 1)}
        await asyncio.to_thread(hot.expire_below, rising, {"t": clock.now_ms() + 1})
        assert minimums.all >= queues
        assert minimums.most <= 64
        assert [store.min_offset("t", queue_id) for queue_id in range(queues)] == [1] * queues

    asyncio.run(main())


def test_an_older_image_of_the_queues_state_never_replaces_a_newer_one() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = store_on(disk, clock)
    put(store, 0)
    store.after_flush(store.flush())
    older = store.queue_state_image()
    store.set_min_offset("t", 0, 1)
    store.write_queue_state(older)
    assert store_on(disk.power_cut(), clock).min_offset("t", 0) == 1


def test_a_slaves_segments_are_neither_ended_nor_emptied_by_its_own_jobs() -> None:
    async def main() -> None:
        clock = ManualClock()
        store = store_on(SimDisk(), clock)
        put(store, 0)
        store.follow()
        flusher = Flusher(store, clock, interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
        ask = AskLoop(asyncio.get_running_loop())
        saved: Any = SavedPins()
        hot = LoopHotStore(store, saved, ask, flusher, lambda: 0.1)
        assert not await asyncio.to_thread(hot.roll)
        await asyncio.to_thread(hot.reappend_waiting, store.max_physical_offset)
        assert [segment.sealed for segment in store.segments()] == [False]

    asyncio.run(main())
