"""Tests of promotion: it does not wait for the disk, and a crash after it loses no synced record."""

from __future__ import annotations

import random

import pytest

from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from tests.kit.store.replicas import LogLink, RandomMaster, open_store, told
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one, small_config

QUEUES = 60


class SyncRecordingDisk(SimDisk):
    """A disk that records syncs and file allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in {"fdatasync", "fsync_dir", "write_atomic", "sync_file", "create_preallocated"}:
            self.waits.append(name)
        return super().__getattribute__(name)


def slave_of(master: RandomMaster, disk: SimDisk) -> MessageStore:
    slave = MessageStore(small_config(), disk, ManualClock())
    slave.load(following=True)
    LogLink(master, slave, 0).run()
    return slave


@pytest.mark.parametrize("is_at_a_border", [False, True])
def test_promotion_does_not_wait_for_the_disk_with_dirty_queues(is_at_a_border: bool) -> None:
    master, disk = RandomMaster(0), SyncRecordingDisk()
    for queue in range(QUEUES):
        master.put("orders", queue, 10)
    if is_at_a_border:
        master.store.end.roll()
    slave = slave_of(master, disk)
    slave.visibility.flush()
    slave.prepare_to_lead()
    disk.waits.clear()
    slave.lead()
    assert disk.waits == []
    assert slave.checkpoints.checkpointed == 0
    assert put_one(slave, "orders", 0, b"own").queue_offset == 1
    slave.after_flush(slave.visibility.flush())
    again = MessageStore(small_config(), disk.power_cut(), ManualClock())
    again.load()
    assert [again.queues.max_offset("orders", queue) for queue in range(QUEUES)] == [2, *[1] * (QUEUES - 1)]


def test_slave_mark_is_removed_by_first_checkpoint_of_the_master() -> None:
    master, disk = RandomMaster(0), SimDisk()
    master.put("orders", 0, 10)
    slave = slave_of(master, disk)
    slave.after_flush(slave.visibility.flush())
    assert slave.want_checkpoint(slave.max_physical_offset)
    master.put("orders", 0, 10)
    LogLink(master, slave, 0).run()
    slave.lead()
    slave.upkeep()
    slave.after_flush(slave.visibility.flush())
    assert slave._directory.is_following, "the checkpoint was described before the last record came"
    assert slave.want_checkpoint(slave.max_physical_offset)
    slave.upkeep()
    slave.after_flush(slave.visibility.flush())
    assert not slave._directory.is_following


def test_master_deposed_before_a_checkpoint_keeps_the_slave_mark() -> None:
    master, disk = RandomMaster(0), SimDisk()
    master.put("orders", 0, 10)
    slave = slave_of(master, disk)
    slave.lead()
    slave.follow()
    slave.checkpoint()
    slave.after_flush(slave.visibility.flush())
    assert slave._directory.is_following


def test_clean_stop_removes_the_slave_mark() -> None:
    master, disk = RandomMaster(0), SimDisk()
    master.put("orders", 0, 10)
    slave = slave_of(master, disk)
    slave.lead()
    slave.shutdown()
    assert not slave._directory.is_following


@pytest.mark.parametrize("seed", range(24, 64))
def test_power_cut_after_promotion_keeps_all_synced_records(seed: int) -> None:
    """Random traffic before and after the promotion, with and without checkpoints."""
    dice, former = random.Random(seed), RandomMaster(seed)
    former.run(dice.randrange(10, 150))
    to = former.store.reader.record_start(dice.randrange(former.store.max_physical_offset + 1))
    elected = RandomMaster.over(former, to, seed)
    elected.run(dice.randrange(60))
    store = elected.store
    store.after_flush(store.visibility.flush())
    store.queue_changes.save_deletions()
    promised = told(store)
    again = open_store(elected.disk.power_cut(seed), ManualClock(), following=dice.random() < 0.7)
    assert told(again) == promised
    if again.end.is_following:
        again.lead()
    put_one(again, "orders", 0, b"next")
