"""Tests of restored stores: they continue where another store ended and never reuse an offset."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from broker.store.data_directory import clear_store
from broker.store.errors import StoreNotWritable
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import ManualClock
from infra.failpoint import FailpointError
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one, small_config

ROOT = small_config().root
LOG_START = 1 << 41
FOLLOWING = {"t": {0: 10_000_008, 3: 10_000_000}, "u": {1: 10_000_400}}  # 400 * 20 = 8000: at the end of a queue file
ENDED = {"gone": {0: 77}}


def opened(disk: SimDisk) -> MessageStore:
    store = MessageStore(small_config(), disk, ManualClock())
    store.load()
    return store


def restore(store: MessageStore) -> None:
    if store.max_physical_offset < LOG_START:
        store.restart_log_at(LOG_START)
    store.queue_changes.restore_queues(FOLLOWING, ENDED)


def check(store: MessageStore) -> None:
    for topic, ends in FOLLOWING.items():
        for queue_id, end in ends.items():
            assert store.queues.following()[topic][queue_id] >= end
            assert store.queues.min_offset(topic, queue_id) >= end, "nothing below is local: it is read cold"
            stored = put_one(store, topic, queue_id)
            assert stored.queue_offset >= end
            assert stored.physical_offset >= LOG_START
    assert put_one(store, "gone", 0).queue_offset >= 77


def test_restored_store_continues_above_and_restarts() -> None:
    disk = SimDisk()
    store = opened(disk)
    restore(store)
    assert store.queues.following() == {**FOLLOWING, **ENDED}
    restore(store)  # idempotent
    assert store.queues.following() == {**FOLLOWING, **ENDED}
    check(store)
    store.shutdown()
    again = opened(disk)
    assert again.queues.following()["t"][0] == 10_000_009
    check(again)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("place", ["store.roll", "store.checkpoint", "none"])
def test_restore_after_a_power_cut_is_repeated(place: str, seed: int) -> None:
    for nth in range(1, 4):
        disk = SimDisk(seed=seed)
        store = opened(disk)
        try:
            with failpoint.armed(place, nth=nth):
                restore(store)
        except (FailpointError, StoreNotWritable):
            disk = disk.power_cut()
            clear_store(ROOT, disk)
            disk = disk.power_cut()
            clear_store(ROOT, disk)  # the clearing may be interrupted, too
            store = opened(disk)
            restore(store)
        disk = disk.power_cut()  # after the restore, its result is durable
        store = opened(disk)
        check(store)
        store.after_flush(store.visibility.flush())
        again = opened(disk.power_cut())
        check(again)


def queue_files(disk: SimDisk) -> list[str]:
    root = ROOT / "consumequeue"
    topics = disk.list_dir(root)
    return [f"{topic}/{queue}" for topic in topics for queue in disk.list_dir(root / topic)]


def test_restored_empty_queues_need_no_files_and_two_checkpoints() -> None:
    disk = SimDisk()
    store = opened(disk)
    store.restart_log_at(LOG_START)
    following = {f"topic-{number}": dict.fromkeys(range(8), 10_000_000) for number in range(100)}
    with failpoint.armed("store.checkpoint", nth=4):  # the fourth checkpoint would raise
        store.queue_changes.restore_queues(following, {})
    assert queue_files(disk) == []
    again = opened(disk.power_cut())
    assert again.queues.following() == following
    assert put_one(again, "topic-7", 3).queue_offset == 10_000_000
    assert (again.queues.min_offset("topic-7", 3), again.queues.max_offset("topic-7", 4)) == (10_000_000, 10_000_000)


def test_unsaved_queue_start_is_discarded_and_can_be_repeated() -> None:
    """The broker continues and retries: a start only in memory would lead to reused offsets after a restart."""

    class FullForStates(SimDisk):
        is_full = False

        def write_atomic(self, path: Path, data: bytes) -> None:
            if self.is_full and path.name == "queue_state":
                raise OSError(errno.ENOSPC, "full")
            super().write_atomic(path, data)

    disk = FullForStates()
    store = opened(disk)
    put_one(store, "t", 1)
    store.restart_log_at(LOG_START)
    following = {"t": {0: 500, 1: 700}, "u": {0: 600}}
    disk.is_full = True
    with pytest.raises(OSError, match="full"):
        store.queue_changes.create_queues_at(following)
    disk.is_full = False
    assert store.queues.following() == {"t": {1: 1}}
    store.queue_changes.create_queues_at(following)
    again = opened(disk.power_cut())
    assert again.queues.following() == following


def test_deleted_topic_without_files_keeps_its_next_offsets() -> None:
    disk = SimDisk()
    store = opened(disk)
    restore(store)
    put_one(store, "t", 0)
    store.queue_changes.delete_topic("u")
    store.queue_changes.delete_topic("t")
    store.upkeep()
    assert queue_files(disk) == []
    again = opened(disk.power_cut())
    assert again.queues.following()["u"] == {1: 10_000_400}
    assert again.queues.following()["t"] == {0: 10_000_009, 3: 10_000_000}
    assert again.queues.names() == {}
    assert put_one(again, "u", 1).queue_offset == 10_000_400


def test_raised_queues_of_a_deleted_topic_continue_where_they_ended() -> None:
    store = opened(SimDisk())
    put_one(store, "t", 0)
    store.queue_changes.raise_queues({"t": {0: 9}}, record_end=store.max_physical_offset)
    assert b'"raised":{"t":{"0":[[9,' in image(store)
    store.queue_changes.delete_topic("t")
    assert store.queues.records.ended() == {"t": {0: 9}}
    assert b'"raised":{}' in image(store)


def test_saved_queue_start_is_dropped_after_its_first_durable_message() -> None:
    disk = SimDisk()
    store = opened(disk)
    restore(store)
    for topic, queue_id in (("t", 0), ("t", 3), ("u", 1)):
        put_one(store, topic, queue_id)
    store.after_flush(store.visibility.flush())
    disk = disk.power_cut()
    unsafe = opened(disk)  # the log has the message, but the queue file may be lost
    assert b'"begins":{}' not in image(unsafe)
    assert unsafe.queues.following()["t"][0] == 10_000_009
    unsafe.shutdown()
    again = opened(disk)
    assert b'"begins":{}' in image(again)
    assert again.queues.following()["t"][0] == 10_000_009


def test_start_finds_queue_ends_with_few_mapped_files() -> None:
    disk = SimDisk()
    store = opened(disk)
    counts = {0: 1, 1: 99, 2: 100, 3: 101, 4: 200, 5: 450}  # a file has 400
    for queue_id, count in counts.items():
        for _ in range(count):
            put_one(store, "t", queue_id)
    store.shutdown()
    disk = disk.power_cut()
    again = MessageStore(small_config(), disk, ManualClock())
    again.load()
    assert {queue_id: again.queues.max_offset("t", queue_id) for queue_id in counts} == counts
    assert again.queues.mapped_files == 4, "those of a hundred and more: their files are searched"
    assert [put_one(again, "t", queue_id).queue_offset for queue_id in counts] == list(counts.values())


def image(store: MessageStore) -> bytes:
    return store.queue_changes.image().data
