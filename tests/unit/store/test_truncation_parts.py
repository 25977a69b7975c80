"""Tests of the steps of a truncation: the event loop does not wait for files, and may read but not write."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from typing_extensions import override

from broker.store.errors import NotThisTurn, StoreNotWritable, TruncationRunning
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.loop.in_steps import run_beside
from tests.kit.clock.turns import CALLS_IN_A_TURN, calls_in_turns
from tests.kit.store.replicas import LogLink, RandomMaster
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import small_config
from tests.unit.store.short_records import record


class CopyCountingDisk(SimDisk):
    """A disk that counts the copied bytes."""

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
    """Return a slave with messages in many queues, and the offset where its log diverges."""
    master, slave = RandomMaster(0), opened(disk)
    for queue in range(queues):
        master.put("orders", queue, 10)
    shared = master.store.max_physical_offset
    for queue in range(queues):
        master.put("orders", queue, 10)
    LogLink(master, slave, 0).run()
    return slave, shared


def test_truncation_copies_the_tail_only_on_the_thread() -> None:
    disk = CopyCountingDisk()
    slave, shared = followed(disk, 60)
    tail, on_threads = slave.max_physical_offset - shared, 0

    async def run(part: Callable[[], object]) -> None:
        nonlocal on_threads
        begun = disk.copied
        part()
        on_threads += disk.copied - begun

    assert asyncio.run(run_beside(slave.truncation(shared, epoch=1, floor=shared), run)) is not None
    assert slave.max_physical_offset == shared
    assert [slave.queues.max_offset("orders", queue) for queue in range(60)] == [1] * 60
    assert tail // 2 < on_threads == disk.copied


@pytest.mark.parametrize("place", ["store.truncate", "store.checkpoint", "store.flush"])
@pytest.mark.parametrize("seed", range(4))
def test_power_cut_during_truncation_keeps_old_or_new_log_end(place: str, seed: int) -> None:
    disk = SimDisk(seed=seed)
    slave, shared = followed(disk, 8)
    slave.after_flush(slave.visibility.flush())
    end = slave.max_physical_offset
    parts = slave.truncation(shared, epoch=1, floor=shared)
    with failpoint.armed(place, nth=1), pytest.raises(Exception, match="failpoint"):
        while True:
            next(parts)()
    again = opened(disk.power_cut())
    assert again.max_physical_offset in (shared, end)
    messages = 1 if again.max_physical_offset == shared else 2
    assert [again.queues.max_offset("orders", queue) for queue in range(8)] == [messages] * 8


async def test_cancelled_truncation_is_completed() -> None:
    disk = SimDisk()
    slave, shared = followed(disk, 8)
    begun, may_go_on = threading.Event(), threading.Event()

    async def run(part: Callable[[], object]) -> None:
        begun.set()
        await asyncio.to_thread(may_go_on.wait, 60)
        await asyncio.to_thread(part)

    cut = asyncio.create_task(run_beside(slave.truncation(shared, epoch=1, floor=shared), run))
    while not begun.is_set():
        await asyncio.sleep(0)
    cut.cancel()
    may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await cut
    assert slave.max_physical_offset == shared
    assert slave.end.is_following
    assert opened(disk.copy()).max_physical_offset == shared


class UnsyncedDecision(SimDisk):
    """A disk on which the truncation file is created, but the directory sync fails."""

    def write_atomic(self, path: Path, data: bytes) -> None:
        super().write_atomic(path, data)
        if path.name == "truncation":
            raise OSError(errno.EIO, "Input/output error", str(path))


def test_store_refuses_writes_after_a_truncation_of_unknown_outcome() -> None:
    disk = UnsyncedDecision()
    slave, shared = followed(disk, 8)
    with pytest.raises(StoreNotWritable):
        slave.truncate(shared, epoch=1, floor=shared)
    with pytest.raises(StoreNotWritable):
        slave.lead()
    assert opened(disk.copy()).max_physical_offset == shared


# -- turns of the loop


class WatchedDisk(RealDisk):
    """A disk that records calls made outside the thread parts."""

    def __init__(self) -> None:
        self.is_watched, self.in_turns = False, list[str]()
        super().__init__()

    @override
    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_") and name not in {"is_watched", "in_turns"} and self.is_watched:
            self.in_turns.append(name)
        return super().__getattribute__(name)


@pytest.fixture
def memory_directory(tmp_path: Path) -> Iterator[Path]:
    """Return a directory in /dev/shm if there is one: ten thousand queues on a disk would take a minute."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as directory:
        yield Path(directory)


def with_many_queues(root: Path, disk: RealDisk, queues: int) -> tuple[MessageStore, int]:
    """Return a slave with three visible messages in each queue, and the offset of the second ones."""
    config = small_config(root=root, commit_log_file_size=4 << 20, index_enabled=False, mapped_queue_files=1_000)
    slave, size = MessageStore(config, disk, ManualClock()), len(record(0, 0))
    slave.load(following=True)
    for offset in range(3):
        at = slave.max_physical_offset
        data = b"".join(record(at + number * size, offset, queue_id=number) for number in range(queues))
        slave.replica.append(data, at)
    return slave, queues * size


def test_truncation_turns_touch_no_file_and_not_every_queue(memory_directory: Path) -> None:
    queues, disk = 10_000, WatchedDisk()
    slave, shared = with_many_queues(memory_directory, disk, queues)

    def watch(is_watched: bool) -> None:
        disk.is_watched = is_watched

    turns = calls_in_turns(slave.truncation(shared, epoch=1, floor=shared), watch)
    assert slave.max_physical_offset == shared
    assert [slave.queues.max_offset("t", queue) for queue in range(queues)] == [1] * queues
    assert disk.in_turns == []
    assert max(turns) < CALLS_IN_A_TURN, turns
    slave.abandon()


# -- between the steps


def in_steps(slave: MessageStore, shared: int, between: Callable[[], None]) -> None:
    """Run a truncation, and call `between` before each thread part and before the first turn after it."""
    parts = slave.truncation(shared, epoch=1, floor=shared)
    while (part := next(parts, None)) is not None:
        between()
        part()
        between()


def test_readers_see_the_store_below_the_truncation_meanwhile() -> None:
    slave, shared = followed(SimDisk(), 8)
    ends = list[int]()

    def look() -> None:
        ends.append(slave.queues.max_offset("orders", 0))
        for queue in range(8):
            end = slave.queues.max_offset("orders", queue)
            found = slave.reader.get("orders", queue, 0, 10, 1 << 20)
            assert found.count == end and sum(map(len, found.buffers)) > 0
            assert [slave.reader.entry("orders", queue, offset) is not None for offset in range(3)] == [
                True,
                end == 2,
                False,
            ]
            assert slave.queues.min_offset("orders", queue) == 0

    in_steps(slave, shared, look)
    assert ends == sorted(ends, reverse=True)
    assert (ends[0], ends[-1]) == (2, 1)


def test_store_refuses_every_change_while_its_files_are_recovered() -> None:
    slave, shared = followed(SimDisk(), 8)
    slave.after_flush(slave.visibility.flush())
    slave.checkpoint()
    changes: list[Callable[[], object]] = [
        lambda: slave.queue_changes.hide_below("orders", {0: 1}),
        lambda: slave.queue_changes.set_erased("orders", 0, slave.queues.records.erased_of("orders", 0), ()),
        lambda: slave.queue_changes.delete_topic("orders"),
        lambda: slave.queue_changes.raise_queues({"orders": {0: 100}}),
        lambda: slave.queue_changes.begin_queues({"orders": {9: 100}}, shared),
        lambda: slave.queue_changes.remember_ended({"gone": {0: 100}}),
        lambda: slave.want_checkpoint(slave.max_physical_offset + 1),
        lambda: slave.take_out(0),
        slave.checkpoint,
        slave.queue_changes.save,
        slave.queue_changes.image,
    ]
    ended, refused = list[bool](), 0

    def change() -> None:
        nonlocal refused
        try:
            slave.truncations.check_whole()
        except TruncationRunning:
            refused += 1
            slave.truncations.when_whole(lambda: ended.append(True))
            for one in changes:
                with pytest.raises(StoreNotWritable):
                    one()
            with pytest.raises(StoreNotWritable):
                slave.replica.append(b"", slave.max_physical_offset)
            assert not ended

    in_steps(slave, shared, change)
    assert len(ended) == refused >= 2
    slave.truncations.check_whole()
    assert slave.queue_changes.hide_below("orders", {0: 1})


@pytest.mark.parametrize("seed", range(3))
def test_store_threads_do_not_disturb_a_truncation(seed: int) -> None:
    """Sync, upkeep and file preparation run at every step. Then the slave follows its master again and recovers."""
    master, disk = RandomMaster(seed), SimDisk(seed=seed)
    slave = opened(disk)
    master.deletes = False
    master.run(80)
    shared = master.store.max_physical_offset
    elected = RandomMaster.over(master, shared, seed + 1)
    master.run(40)
    LogLink(master, slave, seed).run()
    elected.run(60)

    def disturb() -> None:
        slave.after_flush(slave.visibility.flush())
        slave.upkeep()
        slave.prepare_next()

    in_steps(slave, shared, disturb)
    disturb()
    assert slave.max_physical_offset == slave.visibility.flushed == shared
    LogLink(elected, slave, seed).run()
    disturb()
    for store in (slave, opened(disk.power_cut())):
        assert store.queues.following() == elected.store.queues.following()
        assert store.max_physical_offset == elected.store.max_physical_offset


def test_unexpected_error_in_a_truncation_stops_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    slave, shared = followed(disk, 8)

    def wrong(_: MessageStore) -> None:
        raise AssertionError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(MessageStore, "_recover", wrong)
        with pytest.raises(AssertionError, match="a defect"):
            slave.truncate(shared, epoch=1, floor=shared)
    assert "a defect" in str(slave.end.failure)
    slave.truncations.check_whole()
    with pytest.raises(StoreNotWritable, match="a defect"):
        slave.visibility.flush()
    assert opened(disk.copy()).max_physical_offset == shared


def test_budget_of_new_queue_files_holds_after_a_truncation() -> None:
    slave, shared = followed(SimDisk(), 2)
    slave.truncate(shared, epoch=1, floor=shared)
    slave.lead()
    slave.queues.file_budget.left = 1
    queue = slave.queue_for("orders", 8)
    queue.map = None
    with pytest.raises(NotThisTurn):
        queue.make_room()


async def test_periodic_work_does_not_wait_for_a_truncation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task that waits for a minute is reported as hanging."""
    slave, shared = followed(SimDisk(), 8)
    begun, may_end, recover = threading.Event(), threading.Event(), MessageStore._recover

    def slow(self: MessageStore) -> Any:
        begun.set()
        assert may_end.wait(60)
        return recover(self)

    monkeypatch.setattr(MessageStore, "_recover", slow)

    cut = asyncio.create_task(run_beside(slave.truncation(shared, epoch=1, floor=shared), asyncio.to_thread))
    try:
        await asyncio.to_thread(begun.wait, 60)
        await asyncio.wait_for(asyncio.to_thread(slave.prepare_next), 30)
        slave.after_flush(await asyncio.wait_for(asyncio.to_thread(slave.visibility.flush), 30))
        assert not slave.wants_upkeep
        assert not cut.done()
    finally:
        may_end.set()
    assert await cut is not None
    assert slave.max_physical_offset == shared
