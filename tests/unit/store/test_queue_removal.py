"""Tests of topic deletion: the event loop decides without I/O, and a thread removes the files."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.store.message_store import MessageStore
from broker.store.queue_removal import QueueRemoval
from infra import failpoint
from infra.clock import ManualClock
from infra.disk.filesystem import OutOfDescriptors
from infra.failpoint import FailpointError
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one, small_config

QUEUES = 100
ROOT = Path("/store/consumequeue")


class CallRecordingDisk(SimDisk):
    """A disk that records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.synced: list[Path] = []

    def fsync_dir(self, path: Path) -> None:
        self.synced.append(path)
        super().fsync_dir(path)

    def __getattribute__(self, name: str) -> object:
        if name in {"remove", "remove_dir", "fsync_dir", "rename", "write_atomic", "read_at", "fdatasync", "list_dir"}:
            self.calls += 1
        return super().__getattribute__(name)


def opened(disk: SimDisk) -> MessageStore:
    store = MessageStore(small_config(), disk, ManualClock())
    store.load()
    return store


def fill(store: MessageStore, topic: str = "t", queues: int = QUEUES) -> None:
    for queue in range(queues):
        put_one(store, topic, queue)


def remove_all(store: MessageStore) -> None:
    while store.wants_upkeep:
        store.upkeep()


@pytest.mark.parametrize("restart_at_zero", [True, False])
def test_deletion_calls_the_disk_only_on_the_thread(restart_at_zero: bool) -> None:
    disk = CallRecordingDisk()
    store = opened(disk)
    fill(store)
    before = disk.calls
    store.queue_changes.delete_topic("t", restart_at_zero=restart_at_zero)
    assert store.queues.names_of("t") == []
    assert disk.calls == before
    remove_all(store)
    assert not disk.exists(ROOT / "t")
    assert disk.list_dir(Path("/store/consumequeue.removed")) == []


def test_deletion_of_many_queues_syncs_a_constant_number_of_times() -> None:
    disk = CallRecordingDisk()
    store = opened(disk)
    fill(store)
    disk.synced.clear()
    store.queue_changes.delete_topic("t")
    remove_all(store)
    assert len(disk.synced) <= 4
    assert [path for path in disk.synced if ROOT in path.parents] == []


def test_topic_created_again_before_the_removal_keeps_its_messages() -> None:
    disk = SimDisk()
    store = opened(disk)
    fill(store)
    store.queue_changes.delete_topic("t", restart_at_zero=True)
    assert put_one(store, "t", 7, b"new").queue_offset == 0
    assert not store.queues.records.has_unsaved_deletions, "a new queue of the topic needs the deletion on the disk"
    remove_all(store)
    assert disk.list_dir(ROOT / "t") == ["7"]
    for again in (opened(disk.copy()), opened(disk.power_cut())):
        assert again.queues.names_of("t") in ([7], [])
    store.after_flush(store.visibility.flush())
    cut = opened(disk.power_cut())
    assert (cut.queues.names_of("t"), cut.queues.max_offset("t", 7)) == ([7], 1)


def test_queue_created_again_on_a_slave_moves_only_the_deleted_one() -> None:
    disk = SimDisk()
    store = opened(disk)
    fill(store, queues=3)
    below = store.max_physical_offset
    put_one(store, "t", 0, b"new")
    store.queue_changes.delete_topic("t", below=below)
    assert store.queues.names_of("t") == [0]
    assert put_one(store, "t", 1, b"new").queue_offset == 1
    remove_all(store)
    assert disk.list_dir(ROOT / "t") == ["0", "1"]
    again = opened(disk.copy())
    assert [again.queues.max_offset("t", queue) for queue in (0, 1)] == [2, 2]
    assert again.queues.names_of("t") == [0, 1]
    assert again.queues.next_offset("t", 2) == 1


@pytest.mark.parametrize("place", ["store.queues_moved", "store.queue_unlinked"])
@pytest.mark.parametrize("seed", range(5))
def test_power_cut_during_the_removal_resurrects_nothing(place: str, seed: int) -> None:
    disk = SimDisk(seed=seed)
    store = opened(disk)
    fill(store, queues=5)
    put_one(store, "other")
    store.after_flush(store.visibility.flush())
    store.checkpoint()
    store.queue_changes.delete_topic("t")
    with failpoint.armed(place), pytest.raises((FailpointError, OSError, Exception)) as stopped:
        store.upkeep()
    assert "failpoint" in str(stopped.value)
    after = disk.power_cut()
    again = opened(after)
    assert again.queues.names_of("t") == []
    assert again.queues.following_of("t") == dict.fromkeys(range(5), 1)
    assert again.queues.max_offset("other", 0) == 1
    assert put_one(again, "t", 3, b"new").queue_offset == 1
    remove_all(again)
    assert after.list_dir(ROOT / "t") == ["3"]
    assert after.list_dir(Path("/store/consumequeue.removed")) == []


def recreated_and_lost(seed: int) -> SimDisk | None:
    """Return a disk on which the queue file of a recreated topic survived, and its record did not; None if not so."""
    disk = SimDisk()
    store = opened(disk)
    put_one(store, "t")
    store.visibility.flush()
    store.queue_changes.delete_topic("t", restart_at_zero=True)
    remove_all(store)
    end = store.max_physical_offset
    store.checkpoint()
    put_one(store, "t", body=b"x" * 5_000)
    cut = disk.power_cut(seed)
    (path,) = cut.list_dir(ROOT / "t" / "0") or [""]
    has_entry = bool(path) and any(cut.read_at(ROOT / "t" / "0" / path, 0, 20))
    return cut if has_entry and opened(cut.copy()).max_physical_offset == end else None


def test_entry_of_a_lost_record_does_not_reappear_below_a_later_checkpoint() -> None:
    disks = [disk for seed in range(60) if (disk := recreated_and_lost(seed)) is not None]
    assert len(disks) > 3
    for number, disk in enumerate(disks):
        store = opened(disk)
        while store.max_physical_offset < 12_000:
            put_one(store, "u", body=b"y" * 1_000)
        store.visibility.flush()
        store.checkpoint()
        after = opened(disk.power_cut(number))
        assert after.queues.names_of("t") == []


def test_queue_of_a_deleted_topic_is_removed_after_the_log_lost_everything() -> None:
    disk = SimDisk()
    store = opened(disk)
    put_one(store, "t")
    store.queue_changes.delete_topic("t", restart_at_zero=True)
    store.queue_changes.save_deletions()
    cuts = [disk.power_cut(seed) for seed in range(30)]
    empty = [cut for cut in cuts if cut.exists(ROOT / "t" / "0") and opened(cut.copy()).max_physical_offset == 0]
    assert empty
    for cut in empty:
        opened(cut)  # a start that ends before the files are removed
        cut.kill()
        assert opened(cut).queues.names_of("t") == []


def test_removal_is_bounded_per_run_and_finishes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("broker.store.queue_removal._QUEUES_AT_ONCE", 10)
    disk = SimDisk()
    store = opened(disk)
    fill(store, queues=35)
    store.queue_changes.delete_topic("t")
    runs = 0
    while store.wants_upkeep:
        store.upkeep()
        runs += 1
    assert runs == 4
    assert not disk.exists(ROOT / "t")


def test_reading_a_minimum_removes_no_file() -> None:
    """The thread removes the queue files below the start of the log."""
    disk = CallRecordingDisk()
    store = opened(disk)
    for number in range(500):
        put_one(store, "t", 0, b"%d" % number)
    store.end.roll()
    store.after_flush(store.visibility.flush())
    while len(store.reader.segments()) > 1:
        store.take_out(store.reader.segments()[0].base)()
    names = disk.list_dir(ROOT / "t" / "0")
    assert len(names) == 2
    assert store.queues.min_offset("t", 0) == 500
    assert disk.list_dir(ROOT / "t" / "0") == names
    remove_all(store)
    assert disk.list_dir(ROOT / "t" / "0") == names[1:]
    assert opened(disk.copy()).queues.next_offset("t", 0) == 500


def test_deletion_without_descriptors_is_saved_later(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SimDisk()
    store = opened(disk)
    fill(store, queues=3)
    store.queue_changes.delete_topic("t")

    def none_left(path: Path, data: bytes) -> None:
        raise OutOfDescriptors(24, "Too many open files", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_atomic", none_left)
        store.upkeep()
    assert store.end.failure is None
    assert store.queues.records.has_unsaved_deletions
    assert disk.exists(ROOT / "t")
    remove_all(store)
    assert not disk.exists(ROOT / "t")


class ImpatientDisk(SimDisk):
    """A disk that fails a test if a missing file is removed repeatedly."""

    missing = 0

    def remove(self, path: Path) -> None:
        if not self.exists(path):
            self.missing += 1
            assert self.missing < 10, "the removal does not end"
        super().remove(path)


def test_removal_skips_a_missing_file() -> None:
    disk = ImpatientDisk()
    removal = QueueRemoval(small_config(), disk)
    removal.load()
    disk.make_dirs(ROOT / "t" / "0")
    present = ROOT / "t" / "0" / "1"
    disk.append(present, b"entries")
    removal.add_file(ROOT / "t" / "0" / "0")
    removal.add_file(present)
    removal.run(0)
    assert not disk.exists(present)
    assert not removal.is_pending


def test_removal_ignores_manual_changes_of_its_directory() -> None:
    disk, removed = SimDisk(), Path("/store/consumequeue.removed")
    for number in ("1", "2"):
        disk.make_dirs(removed / number / "0")
    disk.append(removed / "README", b"not a queue")
    removal = QueueRemoval(small_config(), disk)
    removal.load()
    disk.remove_dir(removed / "1" / "0")
    disk.remove_dir(removed / "1")
    removal.run(0)
    assert disk.list_dir(removed) == ["README"]
    assert not removal.is_pending
