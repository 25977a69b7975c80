"""Tests of recovery: how a start interprets the files that it finds."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from broker.store.commit_log import CommitLog, LogFile
from broker.store.data_directory import DataDirectory
from broker.store.errors import StoreCorrupt, StoreNotWritable
from broker.store.key_index import KeyIndex
from broker.store.message_store import MessageStore
from broker.store.queue_table import QueueTable
from broker.store.recovery import Recovery
from broker.store.topic_tails import TopicTails
from infra import failpoint
from infra.clock import ManualClock
from infra.disk.filesystem import OutOfDescriptors
from neve.record.codec import decode_record
from tests.kit.store.by_key import by_key
from tests.kit.store.sim_disk import SimDisk

Open = Callable[..., MessageStore]
Put = Callable[..., Any]
CHECKPOINT = Path("/store/checkpoint")


def flush(store: MessageStore) -> None:
    store.after_flush(store.visibility.flush())
    store.upkeep()


def log_file(store: MessageStore, number: int = 0) -> LogFile:
    file = store.log.at(store.reader.segments()[number].base)
    assert file is not None
    return file


def crash(store: MessageStore, disk: SimDisk) -> None:
    """Kill the process but not the machine, so that all pages are kept."""
    store.abandon()


def test_start_after_a_clean_stop_scans_no_records(open_store: Open, put: Put, clock: ManualClock) -> None:
    store = open_store()
    for number in range(300):
        put(store, queue_id=number % 3, keys=f"k{number}")
    store.shutdown()
    again = MessageStore(store.config, store.disk, clock)
    report = again.load()
    assert (report.clean, report.records, report.start) == (True, 0, report.end)
    assert [again.queues.max_offset("t", q) for q in range(3)] == [100] * 3
    assert len(by_key(again, "t", "k5", 5, 0, 1 << 60)) == 1
    assert put(again).queue_offset == 100


def test_start_after_an_unclean_stop_recovers_all_records(
    open_store: Open, put: Put, disk: SimDisk, clock: ManualClock
) -> None:
    store = open_store()
    for number in range(300):
        put(store, queue_id=number % 3, keys=f"k{number}", tags_code=(1 << 40) + number)
    before = store.reader.get("t", 1, 0, 1000, 1 << 20, frozenset({(1 << 40) + 298}))
    topics = store.reader.segments()
    crash(store, disk)
    again = MessageStore(store.config, disk, clock)
    report = again.load()
    assert (report.clean, report.records, report.truncated_bytes, report.reason) == (False, 300, 0, "")
    assert [again.queues.max_offset("t", q) for q in range(3)] == [100] * 3
    assert again.reader.get("t", 1, 0, 1000, 1 << 20, frozenset({(1 << 40) + 298})).count == before.count == 1
    assert len(by_key(again, "t", "k299", 5, 0, 1 << 60)) == 1
    assert again.reader.segments() == topics


def test_recovery_scans_only_records_above_the_checkpoint(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store(checkpoint_bytes=1)
    for number in range(200):
        put(store, keys=f"k{number}")
    flush(store)
    for number in range(200, 210):
        put(store, keys=f"k{number}")
    crash(store, disk)
    again = MessageStore(store.config, disk, ManualClock())
    assert again.load().records == 10
    assert again.queues.max_offset("t", 0) == 210
    for key in ("k0", "k150", "k205"):
        assert len(by_key(again, "t", key, 5, 0, 1 << 60)) == 1
    assert put(again).store_timestamp >= 1_700_000_000_000


def test_flush_syncs_only_the_log(open_store: Open, put: Put, disk: SimDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(checkpoint_bytes=1)
    synced: list[str] = []
    sync = disk.sync_file

    def note(path: Path, file: Any) -> None:
        synced.append(path.parts[2])
        sync(path, file)

    monkeypatch.setattr(disk, "sync_file", note)
    for _ in range(2):
        for queue_id in range(20):
            put(store, queue_id=queue_id)
        store.after_flush(store.visibility.flush())
    assert store.wants_upkeep
    assert synced == ["commitlog", "commitlogcrc"] * 2
    store.upkeep()
    assert synced.count("consumequeue") == 20
    assert store.checkpoints.checkpointed > 0


def test_checkpoint_syncs_the_log_up_to_its_offset(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    put(store)
    assert store.want_checkpoint(store.max_physical_offset)
    store.upkeep()
    assert store.checkpoints.checkpointed == store.max_physical_offset
    again = MessageStore(store.config, disk.power_cut(), ManualClock())
    assert again.load().records == 0
    assert again.queues.max_offset("t", 0) == 1


def test_torn_tail_is_truncated_at_any_byte(put: Put, open_store: Open) -> None:
    """Zero the last record from some byte on, within and at the border of each field of the layout."""
    for kept in (*range(100), 120, -3, -1):
        disk = SimDisk()
        store = open_store(disk)
        for _ in range(3):
            put(store)
        last = put(store, body=b"b" * 40, properties=b"TAGS\x01abc\x02")
        file = log_file(store)
        end = last.physical_offset + last.size
        cut = last.physical_offset + kept if kept >= 0 else end + kept
        file.map[cut:end] = bytes(end - cut)
        crash(store, disk)
        again = open_store(disk)
        assert again.queues.max_offset("t", 0) == 3, kept
        assert again.max_physical_offset == last.physical_offset
        replaced = put(again, body=b"new")
        assert (replaced.queue_offset, replaced.physical_offset) == (3, last.physical_offset)
        assert decode_record(again.reader.get("t", 0, 3, 1, 1).buffers[0]).body == b"new"


@pytest.mark.parametrize("position", [5, 9, 13, 18, 25, 33, 38, 45, 50, 60, 70, 74, 80, 86, 90, 129, 131, 135])
def test_any_flipped_byte_is_detected(open_store: Open, put: Put, disk: SimDisk, position: int) -> None:
    store = open_store()
    put(store)
    hurt = put(store, body=b"b" * 40, properties=b"TAGS\x01abc\x02")
    put(store)
    log_file(store).map[hurt.physical_offset + position] ^= 0x10
    crash(store, disk)
    again = open_store()
    assert again.queues.max_offset("t", 0) == 1
    assert again.max_physical_offset == hurt.physical_offset


def test_stale_record_after_a_truncated_tail_is_not_recovered(open_store: Open, put: Put, disk: SimDisk) -> None:
    """A truncated tail has whole records. A new record of the torn one's size must not make them valid again."""
    store = open_store()
    stored = [put(store, body=b"%04d" % number) for number in range(10)]
    log_file(store).map[stored[4].physical_offset + 90] ^= 0xFF
    crash(store, disk)
    again = open_store()
    assert again.queues.max_offset("t", 0) == 4
    assert put(again, body=b"new!").size == stored[4].size
    crash(again, disk)
    third = open_store()
    assert third.queues.max_offset("t", 0) == 5
    assert decode_record(third.reader.get("t", 0, 4, 1, 1).buffers[0]).body == b"new!"


def test_queue_entries_above_the_log_are_truncated(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    stored = [put(store, queue_id=number % 2) for number in range(20)]
    file = log_file(store)
    file.map[stored[10].physical_offset : file.size] = bytes(file.size - stored[10].physical_offset)
    crash(store, disk)
    again = open_store()
    assert [again.queues.max_offset("t", q) for q in (0, 1)] == [5, 5]
    assert again.reader.get("t", 0, 5, 1, 1).status == "OFFSET_OVERFLOW_ONE"


def test_log_files_above_the_truncation_are_deleted(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    stored = [put(store, body=b"x" * 500) for _ in range(100)]
    assert len(store.reader.segments()) > 3
    log_file(store, 1).map[100] ^= 1
    crash(store, disk)
    again = open_store()
    assert len(again.reader.segments()) == 2
    held = sum(r.physical_offset < 16384 for r in stored)
    assert again.queues.max_offset("t", 0) == held
    assert put(again, body=b"x" * 500).physical_offset == 16384


def test_interrupted_file_allocation_is_dropped(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    put(store)
    crash(store, disk)
    disk.create_preallocated(Path("/store/commitlog/00000000000000016384"), 0)
    again = open_store()
    assert again.queues.max_offset("t", 0) == 1
    again.end.roll()
    assert put(again).physical_offset == 16384


def test_prepared_file_is_not_part_of_the_log(open_store: Open, put: Put) -> None:
    for _ in range(2):
        store = open_store()
        put(store, body=b"x" * 9000)
        flush(store)
        assert store.log.next_is_ready
        assert not store.reader.segments()[-1].sealed
        store.shutdown()
    again = open_store()
    assert put(again).queue_offset == 2
    again.end.roll()
    assert [segment.base for segment in again.reader.segments()] == [0, 16384, 32768]


def test_interrupted_eviction_is_completed(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    for _ in range(300):
        put(store, body=b"x" * 100)
    store.shutdown()
    disk.rename(log_file(store).path, Path("/store/commitlog/00000000000000000000.evicted"))
    again = open_store()
    assert again.min_physical_offset == 16384
    assert not [name for name in disk.list_dir(Path("/store/commitlog")) if name.endswith("evicted")]
    assert again.queues.min_offset("t", 0) > 0


def test_recovery_without_checkpoint_scans_all_records(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    for number in range(200):
        put(store, body=b"x" * 100, queue_id=number % 2)
    flush(store)
    store.take_out(0)()
    minimum = store.queues.min_offset("t", 0)
    store.shutdown()
    disk.remove(CHECKPOINT)
    again = open_store()
    assert (again.queues.min_offset("t", 0), again.queues.max_offset("t", 0)) == (minimum, 100)


def test_contradictory_files_are_refused(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    put(store)
    store.shutdown()
    saved = disk.read(CHECKPOINT)
    newer = msgspec.json.decode(saved) | {"version": 2}
    disk.write_atomic(CHECKPOINT, msgspec.json.encode(newer))
    with pytest.raises(StoreCorrupt, match="has format 2"):
        open_store()
    disk.write_atomic(CHECKPOINT, saved)
    disk.rename(Path("/store/log_uuid"), Path("/store/elsewhere"))
    with pytest.raises(StoreCorrupt, match="log_uuid"):
        open_store()
    disk.rename(Path("/store/elsewhere"), Path("/store/log_uuid"))
    disk.remove(log_file(store).path)
    with pytest.raises(StoreCorrupt, match="gone"):
        open_store()


def test_recovery_loads_log_tails_queues_and_index(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    for number in range(30):
        put(store, queue_id=number % 2, body=bytes(1500), keys=f"k{number}")
    last = put(store, topic="other")
    disk.kill()
    config = store.config
    log, tails, index = CommitLog(config, disk), TopicTails(), KeyIndex(config, disk)
    queues = QueueTable(config, disk, log, tails)
    directory = DataDirectory(config.root, disk)
    found = Recovery(
        config, disk, directory=directory, log=log, tails=tails, queues=queues, index=index
    ).run()  # fmt: skip
    assert (found.log_uuid, found.report.records, found.report.clean) == (store.log_uuid, 31, False)
    assert found.end.physical == found.report.end == store.max_physical_offset
    assert (found.end.file, found.end.last_time) == (log.files[-1], last.store_timestamp)
    assert [(file.base, file.sealed) for file in log.files] == [
        (part.base, part.sealed) for part in store.reader.segments()
    ]
    assert {topic: queues.following_of(topic) for topic in queues.topics()} == store.queues.following()
    assert tails.newest() == last.physical_offset
    assert len([place for place in index.find("t", "k7", 0, 1 << 60) if place is not None]) == 1


def test_full_disk_only_postpones_the_checkpoint(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    put(store)
    disk.capacity = 0
    store.shutdown()
    disk.capacity = 1 << 40
    again = open_store()
    assert again.queues.max_offset("t", 0) == 1


def test_queue_entry_removed_by_recovery_stays_removed_after_its_crash(
    open_store: Open, put: Put, disk: SimDisk, clock: ManualClock
) -> None:
    """A power cut keeps an entry and loses its record. The start that removes the entry crashes; the next succeeds."""
    store = open_store()
    put(store, body=bytes(6000))
    store.shutdown()
    store = open_store()
    put(store)
    cuts = (disk.power_cut(seed) for seed in range(1000))
    path = Path("/store/consumequeue/t/0/00000000000000000000")
    assert disk.exists(path)
    log = log_file(store).path

    def entries(cut: SimDisk) -> int:
        return 2 if any(cut.read_at(path, 20, 20)) else 1

    after = next(cut for cut in cuts if entries(cut) == 2 and not any(cut.read(log)[6100:]))
    with failpoint.armed("store.flush"), contextlib.suppress(StoreNotWritable):
        open_store(after)
    assert entries(after) == 1
    after.kill()
    again = open_store(after)
    put(again, "another", body=bytes(3000))
    again.shutdown()
    for seed in range(20):
        last = open_store(after.power_cut(seed))
        assert last.queues.max_offset("t", 0) == 1
        last.shutdown()


def test_recovery_removes_its_marker_when_complete(open_store: Open, put: Put, disk: SimDisk) -> None:
    """Only a start after an incomplete one syncs every queue."""
    store = open_store()
    put(store)
    flush(store)
    crash(store, disk)
    with failpoint.armed("store.flush"), contextlib.suppress(StoreNotWritable):
        open_store()
    disk.kill()
    assert disk.exists(Path("/store/recovering"))
    open_store()
    assert not disk.exists(Path("/store/recovering"))
    assert disk.exists(Path("/store/abort"))


def test_recovery_keeps_its_marker_until_its_checkpoint_is_written(
    open_store: Open, put: Put, disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    put(store)
    flush(store)
    crash(store, disk)

    def refuse(path: Path) -> None:
        raise OutOfDescriptors(errno.EMFILE, "too many open files", str(path))

    marker = Path("/store/recovering")
    sync = disk.fsync_dir
    with monkeypatch.context() as patch:
        patch.setattr(disk, "fsync_dir", lambda path: refuse(path) if path.name == "consumequeue" else sync(path))
        store = open_store()
        assert store.checkpoints.is_put_off
        assert disk.exists(marker)
        flush(store)
        store.upkeep()
        flush(store)
        assert disk.exists(marker)
    store.upkeep()
    assert not store.checkpoints.is_put_off
    flush(store)
    assert not disk.exists(marker)


def test_record_with_a_zeroed_topic_is_not_recovered(
    open_store: Open, put: Put, disk: SimDisk, clock: ManualClock
) -> None:
    """Head and body are on the kept page. A topic of zeros would create an impossible queue."""
    store = open_store()
    put(store, body=b"kept")
    end = store.max_physical_offset
    head = store.reader.record_at(0) or b""
    before_topic = len(head) - len("t") - 2 - len("kept")
    put(store, topic="rmq_topic", body=bytes(4096 - end - before_topic - 4))
    file = log_file(store)
    page = bytes(file.map[4092:4100])
    assert page.startswith(b"rmq_"), "the page ends inside the topic"
    file.map[4096:8192] = bytes(4096)
    file.crc_map[:] = bytes(len(file.crc_map))
    crash(store, disk)
    report = MessageStore(store.config, disk, clock).load()
    assert (report.records, report.end) == (1, end)


def test_failed_start_never_looks_like_a_clean_stop_after_power_cut(
    open_store: Open, put: Put, disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory sync fails, and a power cut keeps each name independently."""
    store = open_store()
    put(store)
    flush(store)
    crash(store, disk)

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "refused", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "fsync_dir", refuse)
        with pytest.raises(OSError, match="refused"):
            open_store()
    disk.kill()
    for seed in range(20):
        cut = disk.power_cut(seed)
        directory = DataDirectory(Path("/store"), cut)
        assert not directory.begin()
