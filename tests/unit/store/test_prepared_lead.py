"""A promotion: what takes its time is done before, on a thread."""

from __future__ import annotations

import pytest

from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from tests.doubles.sim_disk import SimDisk
from tests.unit.store.conftest import put_one, small_config
from tests.unit.store.replicas import Link, Master

QUEUES = 60


class CountingDisk(SimDisk):
    """Counts the syncs and the files that are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in {"fdatasync", "fsync_dir", "write_atomic", "sync_file", "create_preallocated"}:
            self.waits.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("is_at_a_border", [False, True])
def test_lead_waits_for_no_disk_after_a_prepared_checkpoint(is_at_a_border: bool) -> None:
    master, disk = Master(0), CountingDisk()
    slave = MessageStore(small_config(), disk, ManualClock())
    slave.load(following=True)
    for queue in range(QUEUES):
        master.put("orders", queue, 10)
    if is_at_a_border:
        master.store.roll()
    Link(master, slave, 0).run()
    assert slave.want_checkpoint(slave.max_physical_offset)
    slave.upkeep()
    slave.prepare_to_lead()
    disk.waits.clear()
    slave.lead()
    assert disk.waits == []
    assert put_one(slave, "orders", 0, b"own").queue_offset == 1
    slave.after_flush(slave.flush())
    again = MessageStore(small_config(), disk.power_cut(), ManualClock())
    again.load()
    assert [again.max_offset("orders", queue) for queue in range(QUEUES)] == [2, *[1] * (QUEUES - 1)]


def test_lead_without_preparation_writes_the_checkpoint_itself() -> None:
    master, disk = Master(0), CountingDisk()
    slave = MessageStore(small_config(), disk, ManualClock())
    slave.load(following=True)
    master.put("orders", 0, 10)
    Link(master, slave, 0).run()
    slave.lead()
    assert slave.checkpointed == slave.max_physical_offset
