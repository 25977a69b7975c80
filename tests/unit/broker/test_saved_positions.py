"""Saved progress never exceeds the fsynced log: progress made during an fsync belongs to the next save."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.intake.flusher import Flusher
from broker.intake.log_writer import LogWriter
from broker.pop.pop_book import PopBook, revive_log
from broker.pop.pop_log import PopCheckPoint
from broker.store.config import SYNC_FLUSH, StoreConfig
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.waiting.schedule_message import ScheduleMessage
from infra.clock import ManualClock
from infra.loop.supervisor import Faults
from neve.record.codec import iter_records
from neve.remoting.names import SCHEDULE_TOPIC
from tests.kit.store.sim_disk import SimDisk

ROOT = Path("/store")
SECOND = 1000


class GatedSyncDisk(SimDisk):
    """A disk whose chosen fsync completes its work and then waits until it is released."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed=seed)
        self.armed = False
        self.inside, self.go = threading.Event(), threading.Event()

    def sync_file(self, path: Path, file: Any) -> None:
        super().sync_file(path, file)
        if self.armed:
            self.armed = False
            self.inside.set()
            assert self.go.wait(30)


class ProgressStore:
    """The parts of a broker that save progress. A second world over the same disk is the next start."""

    def __init__(self, disk: SimDisk, clock: ManualClock) -> None:
        self.disk, self.clock = disk, clock
        config = StoreConfig(
            ROOT, commit_log_file_size=1 << 16, flush_disk_type=SYNC_FLUSH, index_slots=64, index_entries=100
        )
        self.store = MessageStore(config, disk, clock)
        self.store.load()
        disk.make_dirs(ROOT / "config")
        self.flusher = Flusher(
            self.store, clock, interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults()
        )
        sync_log = self.flusher.flush_now
        self.offsets = ConsumerOffsetManager(disk, ROOT / "config" / "consumerOffset.json", sync_log)
        writer = LogWriter(self.store)
        self.schedule = ScheduleMessage(
            self.store,
            writer,
            clock,
            [SECOND],
            disk,
            ROOT / "config" / "delayOffset.json",
            sync_log,
            Faults(),
            read_queues=lambda topic: 8,
        )
        path = ROOT / "config" / "popState.json"
        self.pops = PopBook(self.store, writer, self.offsets, clock, disk, path, revive_log("c"), sync_log)
        for part in (self.offsets, self.schedule, self.pops):
            part.load()

    def delay(self, body: bytes) -> None:
        self.store.put(
            SCHEDULE_TOPIC, 0, body, b"REAL_TOPIC\x01orders\x02REAL_QID\x010\x02",
            flag=0, sys_flag=0, born_timestamp=0, born_host=("10.0.0.1", 1),
        )  # fmt: skip

    def delivered(self) -> list[bytes]:
        self.store.after_flush(self.store.visibility.flush())
        got = self.store.reader.get("orders", 0, 0, 32, 1 << 20)
        return [record.body for buffer in got.buffers for record in iter_records(buffer)]


async def save_while(world: ProgressStore, save: Callable[[], Awaitable[None]], act: Callable[[], None]) -> None:
    """Save, and call `act` when the fsync of the log has completed but has not returned yet."""
    disk = world.disk
    assert isinstance(disk, GatedSyncDisk)
    flushing = asyncio.create_task(world.flusher.run())
    disk.armed = True
    saving = asyncio.ensure_future(save())
    assert await asyncio.to_thread(disk.inside.wait, 30)
    act()
    disk.go.set()
    await saving
    flushing.cancel()
    world.flusher.close()


@pytest.mark.parametrize("seed", range(10))
async def test_delayed_message_delivered_during_an_fsync_survives_a_power_cut(seed: int) -> None:
    clock = ManualClock()
    world = ProgressStore(GatedSyncDisk(seed), clock)
    world.delay(b"first")
    clock.advance(SECOND // 2)
    world.delay(b"second")
    world.store.after_flush(world.store.visibility.flush())  # both are acknowledged now
    clock.advance(SECOND // 2)
    assert world.schedule.deliver_due() == 1

    def deliver_the_second() -> None:
        clock.advance(SECOND // 2)
        assert world.schedule.deliver_due() == 1

    await save_while(world, world.schedule.file.save, deliver_the_second)

    after = ProgressStore(world.disk.power_cut(seed), clock)
    after.schedule.deliver_due()
    assert set(after.delivered()) == {b"first", b"second"}


async def test_saved_committed_offset_is_not_above_the_fsynced_log() -> None:
    world = ProgressStore(GatedSyncDisk(1), ManualClock())
    world.offsets.commit("g", "orders", 0, 5)
    world.delay(b"something to sync")
    save = world.offsets.file.save
    await save_while(world, save, lambda: world.offsets.commit("g", "orders", 0, 6))
    assert world.offsets.file.dirty

    after = ProgressStore(world.disk.power_cut(1), world.clock)
    assert after.offsets.query("g", "orders", 0) == 5


async def test_log_behind_the_pop_image_is_kept_until_the_next_image_is_saved() -> None:
    world = ProgressStore(GatedSyncDisk(1), ManualClock())
    for number in range(2):
        world.store.put("t", 0, b"%d" % number, b"", flag=0, sys_flag=0, born_timestamp=0, born_host=("10.0.0.1", 1))
    world.store.after_flush(world.store.visibility.flush())
    now = world.clock.now_ms()
    world.pops.open("g", "t", 0, 0)
    world.pops.record(PopCheckPoint("g", "t", 0, 1, now, now + SECOND, False, [0]))
    world.store.after_flush(world.store.visibility.flush())
    needed: list[int | None] = []

    def pop_another() -> None:
        needed.append(world.pops.oldest_needed_physical())
        world.pops.record(PopCheckPoint("g", "t", 0, 2, now, now + SECOND, False, [1]))

    world.delay(b"something to sync")
    await save_while(world, world.pops.save, pop_another)
    assert needed != [None]

    after = ProgressStore(world.disk.power_cut(1), world.clock)
    queue = after.pops.find("g", "t", 0)
    assert queue is not None
    assert 0 in queue.flights
