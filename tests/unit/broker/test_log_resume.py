"""A promoted member resumes above its archive in small steps, and a power cut between any two loses nothing."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from broker.archiving import log_resume
from broker.archiving.log_resume import resume_log_above
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.disk.filesystem import FileWriter
from infra.loop.in_steps import SLICE
from neve.archive.catalog.catalog import Catalog
from tests.kit.clock.turns import CALLS_IN_A_TURN, calls_in_turns
from tests.kit.store.replicas import LogLink, RandomMaster
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one, small_config
from tests.simulation.process import drive, make_environment
from tiered.journal.ownership import ResumePoint

RESUME_AT = 1_000_000
QUEUE_NEXT = {("t", 0): 400, ("t", 1): 77, ("t", 2): 2, ("u", 0): 500, ("new", 0): 60, ("new", 5): 9}
MACHINE: Any = make_environment(None, None, lambda: False)  # type: ignore[arg-type]


class CutNow(BaseException):
    """The power is cut, before a change of the disk."""


class CuttingDisk(SimDisk):
    """A disk that cuts the power before its n-th change, and may refuse changes at all."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed=seed)
        self.left: int | None = None
        self.is_on_loop = False
        self.created = 0

    def _changes(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise CutNow
            self.left -= 1

    def _waits(self) -> None:
        assert not self.is_on_loop, "the event loop waits for the disk"
        self._changes()

    def create_preallocated(self, path: Path, size: int, *, sync: bool = True) -> None:
        self._waits() if sync else self._changes()
        self.created += 1
        super().create_preallocated(path, size, sync=sync)

    def write_atomic(self, path: Path, data: bytes) -> None:
        self._waits()
        super().write_atomic(path, data)

    def fdatasync(self, path: Path) -> None:
        self._waits()
        super().fdatasync(path)

    def fsync_dir(self, path: Path) -> None:
        self._waits()
        super().fsync_dir(path)

    def remove(self, path: Path) -> None:
        self._changes()
        super().remove(path)

    def writer(self, path: Path) -> FileWriter:
        self._changes()
        return super().writer(path)


def opened(disk: SimDisk, *, following: bool = True) -> MessageStore:
    store = MessageStore(small_config(), disk, ManualClock())
    store.load(following=following)
    return store


def of_a_slave(disk: SimDisk, queues: int = 3) -> MessageStore:
    """Return a slave with messages above its last checkpoint."""
    store = opened(disk, following=False)
    for queue in range(queues):
        for _ in range(3):
            put_one(store, "t", queue)
    put_one(store, "u", 0)
    store.after_flush(store.visibility.flush())
    store.follow()
    return store


def resume_log(store: MessageStore, resume_at: int | None) -> dict[str, dict[int, int]]:
    return drive(resume_log_above(store, ResumePoint(True, 1, resume_at, QUEUE_NEXT), Catalog(), MACHINE))


def check(store: MessageStore, resume_at: int | None) -> None:
    for (topic, queue), following in QUEUE_NEXT.items():
        stored = put_one(store, topic, queue)
        assert stored.queue_offset >= following, "an archived offset is assigned again"
        assert stored.physical_offset >= (resume_at or 0)


@pytest.mark.parametrize("resume_at", [None, RESUME_AT])
def test_power_cut_at_each_step_of_resuming_loses_nothing(resume_at: int | None) -> None:
    """The next start finds a slave's log with all records, or one that has resumed, and can resume again."""
    changes = is_cut = 0
    while changes == 0 or is_cut:
        disk = CuttingDisk(seed=changes)
        store = of_a_slave(disk)
        records, is_cut = list(store.reader.records_from(0)), 0
        disk.left = changes
        try:
            resume_log(store, resume_at)
        except CutNow:
            is_cut = 1
        after = disk.power_cut(seed=random.Random(changes).randrange(1 << 30))
        again = opened(after)
        assert list(again.reader.records_from(0)) == records, f"cut before change {changes}"
        resume_log(again, resume_at)
        again.lead()
        check(again, resume_at)
        again.after_flush(again.visibility.flush())
        check(opened(after.power_cut(), following=False), resume_at)
        changes += 1
    assert changes > 10, "it has many steps"


def test_power_cut_after_resuming_lowers_only_queues_without_a_record() -> None:
    disk = SimDisk()
    store = of_a_slave(disk)
    raised = resume_log(store, None)
    store.queue_changes.remember_raised({"t": {0: raised["t"][0]}}, store.max_physical_offset)
    store.queue_changes.save()
    again = opened(disk.power_cut())
    ends = again.queues.following()
    assert ends["t"][0] >= 400
    assert ends["t"][1] == 3, "its former end, from which the next promotion raises it again"


def test_resumed_member_that_does_not_lead_follows_its_masters_offsets() -> None:
    """The next master, whose queues end lower or higher, decides."""
    master, slave = RandomMaster(0), opened(SimDisk())
    for queue in range(3):
        master.put("t", queue, 10)
    link = LogLink(master, slave, 0)
    link.run()
    resume_log(slave, None)
    assert slave.queues.next_offset("t", 0) >= 400
    for queue in range(3):
        master.put("t", queue, 10)
    link.run()
    assert slave.queues.following()["t"] == master.store.queues.following()["t"]


@pytest.mark.parametrize(("queues", "empty"), [(100, 0), (4, 3_000)])
def test_resuming_does_bounded_work_in_each_turn(queues: int, empty: int) -> None:
    disk = CuttingDisk()
    store = of_a_slave(disk, queues)
    queue_next = {("t", queue): 1_000 for queue in range(queues)}
    queue_next |= {(f"empty-{queue % 50}", queue): 1_000 for queue in range(empty)}
    resume = ResumePoint(True, 1, RESUME_AT, queue_next)
    created: list[int] = []

    def watch(is_on_loop: bool) -> None:
        disk.is_on_loop = is_on_loop
        created.append(disk.created)

    turns = calls_in_turns(log_resume._raise_parts(store, resume, Catalog()), watch)
    turns += calls_in_turns(log_resume._raised_parts(store, queue_next), watch)
    assert all(store.queues.next_offset(*queue) >= 1_000 for queue in queue_next)
    assert max(after - before for before, after in itertools.pairwise(created)) <= SLICE
    if empty:  # the simulated disk alone takes a thousand calls to create a file
        assert max(turns) <= CALLS_IN_A_TURN, turns
