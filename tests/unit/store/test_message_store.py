"""Tests of appends, reads, visibility and the lifecycle interface of the store."""

from __future__ import annotations

import errno
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.store import reading
from broker.store.errors import MessageIllegal, StoreError, StoreFull, StoreLocked, StoreNotWritable
from broker.store.message_store import MessageStore
from broker.store.topic_tails import TopicTail
from infra.clock import ManualClock
from infra.disk.filesystem import DiskFull
from infra.loop.in_steps import at_once
from infra.process import collector
from neve.record.codec import decode_record, iter_records
from tests.kit.store.by_key import by_key
from tests.kit.store.sim_disk import SimDisk

Open = Callable[..., MessageStore]
Put = Callable[..., Any]


def bodies(store: MessageStore, queue_id: int = 0, topic: str = "t") -> list[bytes]:
    """Return the bodies that a reader of a queue sees from its minimum on."""
    found: list[bytes] = []
    offset = store.queues.min_offset(topic, queue_id)
    while True:
        result = store.reader.get(topic, queue_id, offset, 32, 1 << 20)
        if result.status != "FOUND":
            return found
        for buffer in result.buffers:
            for record in iter_records(buffer):
                assert record.queue_offset == offset
                offset += 1
                found.append(record.body)
        assert offset == result.next_offset


def test_stored_record_reads_back_field_by_field(open_store: Open, put: Put, clock: ManualClock) -> None:
    store = open_store(store_host=("10.9.8.7", 10911))
    stored = put(
        store,
        body=b"hello",
        properties=b"TAGS\x01a\x02",
        flag=7,
        sys_flag=1,
        born_timestamp=99,
        reconsume_times=3,
        prepared_transaction_offset=12,
    )
    record = decode_record(store.reader.get("t", 0, 0, 1, 100).buffers[0])
    assert (record.body, record.topic, record.properties) == (b"hello", "t", {"TAGS": "a"})
    assert (record.flag, record.sys_flag, record.born_timestamp) == (7, 1, 99)
    assert (record.reconsume_times, record.prepared_transaction_offset) == (3, 12)
    assert (record.born_host, record.store_host) == ("10.1.2.3:4000", "10.9.8.7:10911")
    assert (record.physical_offset, record.size) == (stored.physical_offset, stored.size)
    assert record.store_timestamp == stored.store_timestamp == clock.now_ms()


def test_ipv6_hosts_and_long_topics(open_store: Open, put: Put) -> None:
    store = open_store(store_host=("2001:db8::1", 10911))
    put(store, topic="x" * 200, born_host=("2001:db8::2", 5))
    record = decode_record(store.reader.get("x" * 200, 0, 0, 1, 100).buffers[0])
    assert (record.topic, record.born_host, record.sys_flag) == ("x" * 200, "[2001:db8::2]:5", 0x30)
    assert store.reader.store_time("x" * 200, 0, 0) == record.store_timestamp


def test_offsets_are_dense_across_rolls_and_queue_files(open_store: Open, put: Put) -> None:
    store = open_store()
    expected = [f"{number}".encode() * 20 for number in range(1000)]
    for number, body in enumerate(expected):
        assert put(store, body=body).queue_offset == number
    assert len(store.reader.segments()) > 3
    assert bodies(store) == expected


def test_adjacent_records_are_read_as_one_slice(open_store: Open, put: Put) -> None:
    store = open_store()
    for _ in range(10):
        put(store)
    result = store.reader.get("t", 0, 2, 5, 1 << 20)
    assert (result.count, len(result.buffers), result.next_offset) == (5, 1, 7)


def test_read_outside_the_queue_returns_the_next_offset(open_store: Open, put: Put) -> None:
    store = open_store()
    assert store.reader.get("t", 0, 5, 1, 1).status == "NO_MESSAGE_IN_QUEUE"
    for _ in range(4):
        put(store, tags_code=5)
    store.queue_changes.set_min_offset("t", 0, 2)
    seen = [
        (store.reader.get("t", 0, at, 1, 1).status, store.reader.get("t", 0, at, 1, 1).next_offset)
        for at in (1, 2, 4, 9)
    ]
    assert seen == [("OFFSET_TOO_SMALL", 2), ("FOUND", 3), ("OFFSET_OVERFLOW_ONE", 4), ("OFFSET_OVERFLOW_BADLY", 4)]
    nothing = store.reader.get("t", 0, 2, 10, 100, frozenset({6}))
    assert (nothing.status, nothing.next_offset) == ("NO_MATCHED_MESSAGE", 4)


def test_read_returns_one_message_of_any_size(open_store: Open, put: Put) -> None:
    store = open_store()
    put(store, body=b"x" * 4000)
    put(store)
    result = store.reader.get("t", 0, 0, 10, 100)
    assert (result.count, result.next_offset) == (1, 1)


def test_queue_entry_beyond_the_log_file_is_refused(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    for _ in range(3):
        put(store)
    entries = disk.map(Path("/store/consumequeue/t/0/00000000000000000000"), 4096)
    entries[20 + 8 : 20 + 12] = (1 << 20).to_bytes(4, "big")
    assert store.reader.get("t", 0, 0, 1, 1 << 22).count == 1
    for count in (1, 2):
        with pytest.raises(StoreError, match="more than the log's file has"):
            store.reader.get("t", 0, 1, count, 1 << 22)


def test_tags_filter_messages(open_store: Open, put: Put) -> None:
    store = open_store()
    for number in range(60):
        put(store, body=b"%d" % number, tags_code=number % 3)
    one = store.reader.get("t", 0, 0, 5, 1 << 20, frozenset({1}))
    assert [r.body for b in one.buffers for r in iter_records(b)] == [b"1", b"4", b"7", b"10", b"13"]
    assert one.next_offset == 16
    two = store.reader.get("t", 0, 0, 100, 1 << 20, frozenset({0, 2}))
    assert (two.count, two.next_offset) == (40, 60)


def test_sync_flush_hides_until_flushed(open_store: Open, put: Put) -> None:
    store = open_store(flush_disk_type="SYNC_FLUSH")
    woken: list[tuple[object, ...]] = []
    store.visibility.subscribe(
        lambda shown: woken.extend((queue.topic, queue.queue_id, *rest) for queue, *rest in shown)
    )
    first = put(store, tags_code=4)
    assert store.queues.max_offset("t", 0) == 0
    assert store.reader.record_at(first.physical_offset) is None
    flushed = store.visibility.flush()
    put(store)
    store.after_flush(flushed)
    assert (store.queues.max_offset("t", 0), woken) == (1, [("t", 0, 0, 4)])
    assert store.visibility.confirmed == first.physical_offset + first.size
    assert store.visibility.is_dirty
    store.after_flush(store.visibility.flush())
    assert store.queues.max_offset("t", 0) == 2


def test_failed_sync_stops_the_store_permanently(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store(flush_disk_type="SYNC_FLUSH")
    put(store)
    disk.fail_sync = lambda _path: True
    with pytest.raises(StoreNotWritable):
        store.visibility.flush()
    disk.fail_sync = lambda _path: False
    with pytest.raises(StoreNotWritable):
        store.visibility.flush()
    with pytest.raises(StoreNotWritable):
        put(store)
    assert store.queues.max_offset("t", 0) == 0
    assert store.end.failure is not None


def test_search_by_time_finds_first_and_last_message(open_store: Open, put: Put, clock: ManualClock) -> None:
    store = open_store()
    times = []
    for _ in range(6):
        times += [put(store).store_timestamp, put(store).store_timestamp]  # two messages share each time
        clock.advance(10)

    def at(timestamp: int) -> tuple[int, int]:
        lower = at_once(store.reader.offset_by_time("t", 0, timestamp, upper=False))
        return lower, at_once(store.reader.offset_by_time("t", 0, timestamp, upper=True))

    assert at(times[4]) == (4, 5)
    assert at(times[4] + 3) == (6, 5)
    assert at(times[0] - 1) == (0, 0)
    assert at(times[-1] + 1) == (12, 11)
    assert at_once(store.reader.offset_by_time("unknown", 0, 1, upper=False)) == 0


def test_key_query_spans_index_files(open_store: Open, put: Put, clock: ManualClock, disk: SimDisk) -> None:
    store = open_store()
    for number in range(300):  # more keys than one index file holds
        put(store, body=b"%d" % number, keys=f"k{number} shared", unique_key=f"u{number}")
        clock.advance(1000)
    long = 1 << 60
    for key in ("k7", "u7"):
        assert [decode_record(raw).body for raw in by_key(store, "t", key, 10, 0, long)] == [b"7"]
    newest = [decode_record(raw).body for raw in by_key(store, "t", "shared", 3, 0, long)]
    assert newest == [b"299", b"298", b"297"]
    assert by_key(store, "other", "k7", 10, 0, long) == []
    assert by_key(store, "t", "k7", 10, clock.now_ms(), long) == []
    assert len(disk.list_dir(Path("/store/index"))) > 1


def test_full_disk_refuses_appends_and_the_store_recovers(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store(flush_disk_type="ASYNC_FLUSH")
    put(store, body=b"x" * 8000)
    disk.capacity = disk.capacity - disk.room(Path("/")).available
    with pytest.raises(StoreFull, match="no room for the next CommitLog file"):
        for _ in range(3):
            put(store, body=b"x" * 8000)
    with pytest.raises(StoreFull):
        put(store, queue_id=1)
    before = store.queues.max_offset("t", 0)
    assert store.reader.get("t", 0, 0, 1, 1).status == "FOUND"
    disk.capacity = 1 << 40
    assert put(store, body=b"x" * 8000).queue_offset == before
    assert put(store, queue_id=1).queue_offset == 0


def test_oversized_message_or_invalid_name_is_illegal(open_store: Open, put: Put) -> None:
    store = open_store()
    for refused in ({"body": b"x" * 17_000}, {"properties": b"x" * 40_000}, {"topic": "a/../b"}, {"topic": "x" * 256}):
        with pytest.raises(MessageIllegal):
            put(store, **refused)
    assert put(store).queue_offset == 0


def test_data_directory_is_locked_by_one_broker(open_store: Open) -> None:
    store = open_store()
    with pytest.raises(StoreLocked, match="another broker uses"):
        open_store()
    store.shutdown()
    open_store().shutdown()


def test_eviction_raises_the_minimum_offset(open_store: Open, put: Put) -> None:
    store = open_store()
    for number in range(400):
        put(store, body=b"x" * 100, queue_id=number % 2)
    put(store, topic="early")
    store.after_flush(store.visibility.flush())
    kept = store.reader.get("t", 0, 0, 1, 1).buffers[0]
    for segment in store.reader.segments()[:2]:
        store.take_out(segment.base)()
    minimum = store.queues.min_offset("t", 0)
    assert minimum > 0
    assert (
        decode_record(store.reader.get("t", 0, minimum, 1, 1).buffers[0]).physical_offset >= store.min_physical_offset
    )
    assert store.reader.get("t", 0, 0, 1, 1).status == "OFFSET_TOO_SMALL"
    assert decode_record(kept).queue_offset == 0  # the buffer of a reader outlives the file
    with pytest.raises(StoreError):
        store.take_out(store.reader.segments()[-1].base)
    store.shutdown()
    again = open_store()
    assert (again.queues.min_offset("t", 0), again.queues.max_offset("t", 0)) == (minimum, 200)


def test_segments_list_their_topics(open_store: Open, put: Put, clock: ManualClock) -> None:
    store = open_store()
    put(store, topic="a")
    clock.advance(5)
    last_b = put(store, topic="b")
    store.end.roll()
    clock.advance(5)
    put(store, topic="a")
    first, second = store.reader.segments()
    assert first.sealed and not second.sealed
    assert first.topics["b"] == (last_b.physical_offset, last_b.store_timestamp)
    assert set(first.topics) == {"a", "b"} and set(second.topics) == {"a"}
    assert (first.newest_store_time, second.newest_store_time) == (last_b.store_timestamp, clock.now_ms())
    store.shutdown()
    tables = Path("/store/commitlogtable")
    for path in (tables / name for name in store.disk.list_dir(tables)):
        store.disk.remove(path)  # the table is rebuilt from the records
    again = open_store()
    assert [(s.base, s.topics, s.newest_store_time) for s in again.reader.segments()] == [
        (s.base, s.topics, s.newest_store_time) for s in (first, second)
    ]


def test_entries_of_a_range(open_store: Open, put: Put) -> None:
    store = open_store()
    stored = [put(store, body=b"x" * 50, queue_id=n % 2, tags_code=n) for n in range(500)]
    segment = store.reader.segments()[1]
    runs = store.reader.entries("t", segment.base, segment.end)
    inside = [r for r in stored if segment.base <= r.physical_offset < segment.end]
    assert sorted(o for run in runs.values() for o in run.physical.tolist()) == [r.physical_offset for r in inside]
    run = runs[1]
    assert run.first_offset == next(r.queue_offset for r in stored[1::2] if r in inside)
    assert run.tags.tolist() == [2 * (run.first_offset + i) + 1 for i in range(len(run.tags))]
    assert store.reader.files(segment.base, segment.end) == [
        ("/store/commitlog/00000000000000016384", segment.base, 16384)
    ]


def test_queue_continues_above_its_archive(open_store: Open, put: Put) -> None:
    store = open_store()
    put(store)
    store.queue_changes.create_queue_at("t", 0, 100)
    store.queue_changes.create_queue_at("new", 3, 50)
    assert (store.queues.min_offset("new", 3), store.queues.max_offset("new", 3)) == (50, 50)
    assert put(store).queue_offset == 100
    assert put(store, topic="new", queue_id=3).queue_offset == 50
    assert store.reader.get("t", 0, 0, 10, 1000).next_offset == 1
    hole = store.reader.get("t", 0, 1, 10, 1000)
    assert (hole.status, hole.next_offset) == ("OFFSET_FOUND_NULL", 100)


def test_log_restarts_at_a_given_offset(open_store: Open, put: Put) -> None:
    store = open_store()
    put(store)
    store.restart_log_at(1_000_000)
    assert put(store).physical_offset == 1_000_000
    assert bodies(store) == [b"body"] * 2
    store.shutdown()
    again = open_store()
    assert again.log_uuid == store.log_uuid
    assert put(again).queue_offset == 2
    with pytest.raises(StoreError):
        again.restart_log_at(5)


def test_recreated_topic_continues_above_its_old_offsets(open_store: Open, put: Put) -> None:
    store = open_store()
    for _ in range(5):
        put(store, keys="k")
    store.queue_changes.delete_topic("t")
    assert store.queues.names() == {}
    assert by_key(store, "t", "k", 10, 0, 1 << 60) == []
    assert put(store).queue_offset == 5
    assert (store.queues.min_offset("t", 0), store.queues.max_offset("t", 0)) == (5, 6)
    store.shutdown()
    again = open_store()
    assert (again.queues.min_offset("t", 0), again.queues.max_offset("t", 0)) == (5, 6)


@pytest.mark.parametrize("restart_at_zero", [True, False])
def test_deletion_refused_by_the_disk_leaves_the_topic_to_the_next_start(
    open_store: Open, put: Put, disk: SimDisk, restart_at_zero: bool
) -> None:
    """Until the deletion is durable, no queue is created and no file is removed."""
    store = open_store()
    for number in range(5):
        put(store, body=b"%d" % number)
    put(store, "other")
    assert store.queue_changes.hide_below("t", {0: 1})
    store.queue_changes.save()
    room, disk.capacity = disk.capacity, 0
    store.queue_changes.delete_topic("t", restart_at_zero=restart_at_zero)
    with pytest.raises(StoreFull):
        put(store)
    with pytest.raises(StoreNotWritable):
        store.upkeep()
    disk.capacity = room
    with pytest.raises(StoreNotWritable):
        put(store, "other")
    store.shutdown()
    again = open_store()
    assert (bodies(again), again.queues.records.ended()) == ([b"1", b"2", b"3", b"4"], {})
    again.queue_changes.delete_topic("t", restart_at_zero=restart_at_zero)
    assert put(again).queue_offset == (0 if restart_at_zero else 5)


def test_topic_restarted_at_zero_shows_no_old_messages(open_store: Open, put: Put) -> None:
    store = open_store()
    for _ in range(5):
        put(store, keys="k", body=b"old")
    store.queue_changes.delete_topic("t", restart_at_zero=True)
    assert put(store, keys="k", body=b"new").queue_offset == 0
    assert (bodies(store), len(by_key(store, "t", "k", 10, 0, 1 << 60))) == ([b"new"], 1)
    assert [len(run.physical) for run in store.reader.entries("t", 0, 1 << 60).values()] == [1]
    store.shutdown()
    again = open_store()
    assert (bodies(again), len(by_key(again, "t", "k", 10, 0, 1 << 60))) == ([b"new"], 1)
    assert put(again).queue_offset == 1


@pytest.mark.parametrize("kill", [True, False])
def test_deleted_topic_is_forgotten_once_its_records_are_evicted(
    open_store: Open, put: Put, disk: SimDisk, kill: bool
) -> None:
    store = open_store()
    for name in ("t", "u"):
        for _ in range(5):
            put(store, name, keys="k")
    store.queue_changes.delete_topic("t")
    store.queue_changes.delete_topic("u")
    store.end.roll()
    put(store, "other")
    store.after_flush(store.visibility.flush())
    store.upkeep()
    assert store.queue_changes.image_without(["t", "u"]) is None, "the log has records of them"
    store.take_out(0)()
    assert put(store, "u").queue_offset == 5
    image = store.queue_changes.image_without(["t"])
    assert image is not None
    room, disk.capacity = disk.capacity, 0
    with pytest.raises(DiskFull):
        store.queues.records.write(image)
    disk.capacity = room
    assert store.queues.records.deleted() == ["t", "u"]
    image = store.queue_changes.image_without(["t", "u", "other", "none"])
    assert image is not None
    store.queues.records.write(image)
    assert (store.queue_changes.forget_deleted(image), store.queues.records.deleted()) == (1, ["u"])
    store.after_flush(store.visibility.flush())
    if kill:
        disk.kill()
    else:
        store.shutdown()
    again = open_store()
    assert (again.queues.records.deleted(), again.queues.deleted_up_to("t")) == (["u"], 0)
    assert (again.queues.next_offset("t", 0), again.queues.next_offset("u", 0)) == (0, 6)
    assert put(again, body=b"new").queue_offset == 0
    assert (bodies(again), by_key(again, "t", "k", 10, 0, 1 << 60)) == ([b"new"], [])
    assert len(bodies(again, topic="u")) == 1


def with_a_deleted_topic(store: MessageStore, put: Put) -> None:
    """Delete topic `t` with 5 messages and evict its records."""
    for _ in range(5):
        put(store, "t")
    store.queue_changes.delete_topic("t")
    store.end.roll()
    put(store, "other")
    store.after_flush(store.visibility.flush())
    store.upkeep()
    store.take_out(0)()


@pytest.mark.parametrize("is_written", [False, True])
def test_topic_recreated_while_being_forgotten_keeps_its_offsets(
    open_store: Open, put: Put, disk: SimDisk, is_written: bool
) -> None:
    store = open_store()
    with_a_deleted_topic(store, put)
    image = store.queue_changes.image_without(["t"])
    assert image is not None
    if is_written:
        store.queues.records.write(image)
    assert put(store, "t").queue_offset == 5
    state = json.loads(disk.read(store.config.root / "queue_state"))
    assert state["ended"] == {"t": {"0": 5}}, "before its first record can be in the log"
    store.queues.records.write(image)
    assert (store.queue_changes.forget_deleted(image), store.queues.records.deleted()) == (0, ["t"])
    store.after_flush(store.visibility.flush())
    again = open_store(disk.power_cut())
    assert (again.queues.records.deleted(), again.queues.next_offset("t", 0)) == (["t"], 6)


def test_unwritten_image_forgets_no_topic(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    put(store, "u")
    store.queue_changes.delete_topic("u")
    with_a_deleted_topic(store, put)
    assert store.queue_changes.image_without(["t"]) is not None  # not written
    image = store.queue_changes.image_without(["u"])
    assert image is not None
    store.queues.records.write(image)
    assert (store.queue_changes.forget_deleted(image), store.queues.records.deleted()) == (1, ["t"])
    store.shutdown()
    assert open_store().queues.records.deleted() == ["t"]


def test_prepared_files_are_used(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    put(store)
    store.prepare_next()
    disk.capacity = 0  # an allocation would fail
    store.end.roll()
    assert put(store).physical_offset == 16384


def test_mapped_queue_files_are_bounded(open_store: Open, put: Put) -> None:
    store = open_store(mapped_queue_files=4)
    for number in range(60):
        put(store, queue_id=number % 20, body=b"%d" % number)
        assert store.queues.mapped_files <= 5
    for queue_id in range(20):
        assert bodies(store, queue_id) == [b"%d" % n for n in range(queue_id, 60, 20)]


def test_scan_of_all_queues_does_not_evict_mappings_in_use(
    open_store: Open, put: Put, disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admin requests, scrapes and the archive scan tens of thousands of queues."""
    store = open_store(mapped_queue_files=4)
    for number in range(60):
        put(store, queue_id=number % 20, body=b"%d" % number)
    in_use = (3, 7)
    for queue_id in in_use:
        put(store, queue_id=queue_id)
    mapped: list[Path] = []
    real = disk.map

    def counted(path: Path, size: int) -> Any:
        mapped.append(path)
        return real(path, size)

    monkeypatch.setattr(disk, "map", counted)
    for queue_id in range(20):
        assert store.reader.store_time("t", queue_id, 2) > 0
        assert store.reader.entry("t", queue_id, 1) is not None
        assert store.queues.min_offset("t", queue_id) == 0
    taken = store.reader.entries("t", 0, store.max_physical_offset)
    assert {queue_id: len(run.sizes) for queue_id, run in taken.items()} == {
        queue_id: 4 if queue_id in in_use else 3 for queue_id in range(20)
    }
    for queue_id in in_use:
        put(store, queue_id=queue_id)
    assert mapped == []
    assert bodies(store, 0) == [b"0", b"20", b"40"]
    assert len(mapped) == 1, "who reads it comes again"


def test_read_of_a_truncated_queue_file_is_refused(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store(mapped_queue_files=1)
    for queue_id in (0, 1):
        put(store, queue_id=queue_id)
    queue = store.queue_for("t", 0)
    with Path(disk.open_path(queue.files[0].path)).open("r+b") as file:
        file.truncate(10)
    with pytest.raises(OSError, match="shorter than its 1 entries"):
        store.reader.store_time("t", 0, 0)


def test_log_opens_after_a_crash_right_after_an_eviction(
    open_store: Open, put: Put, disk: SimDisk, clock: ManualClock
) -> None:
    """If the last checkpoint is in the evicted file, another one is written first."""
    store = open_store()
    put(store)
    store.end.roll()
    put(store, body=b"kept")
    store.after_flush(store.visibility.flush())
    assert store.checkpoints.checkpointed < store.reader.segments()[0].end
    store.take_out(0)()
    again = MessageStore(store.config, disk.power_cut(), clock)
    again.load()
    assert again.queues.min_offset("t", 0) == 1
    assert put(again).queue_offset == 2


@pytest.mark.parametrize("filled", [0, 9000])
def test_eviction_on_full_disk_uses_the_space_of_the_prepared_file(
    open_store: Open, put: Put, disk: SimDisk, monkeypatch: pytest.MonkeyPatch, filled: int
) -> None:
    """Also if the active file is so full that upkeep would prepare the next one at once."""
    store = open_store()
    write, may_give_up = disk.write_atomic, True

    def write_if_there_is_room(path: Path, data: bytes) -> None:
        if path.name == "checkpoint" and (store.log.next_is_ready or not may_give_up):
            raise OSError(errno.ENOSPC, "no space")
        write(path, data)

    def fill_one() -> None:
        put(store)
        store.end.roll()
        put(store, body=bytes(filled))
        store.prepare_next()
        store.after_flush(store.visibility.flush())

    monkeypatch.setattr(disk, "write_atomic", write_if_there_is_room)
    fill_one()
    store.take_out(0)()
    assert len(store.reader.segments()) == 1
    may_give_up = False
    fill_one()
    with pytest.raises(StoreFull):
        store.take_out(store.reader.segments()[0].base)()


class NotWalked(dict[Any, Any]):
    """A table that allows lookups of one queue, but no iteration."""

    def __iter__(self) -> Any:
        raise AssertionError("the queues of all topics were gone through")

    items = values = keys = __iter__


def test_entries_of_a_topic_are_found_without_scanning_all_topics(open_store: Open, put: Put) -> None:
    store = open_store()
    for topic in ("a", "b", "a"):
        put(store, topic=topic)
    store.queues.by_name = NotWalked(store.queues.by_name)
    assert {
        queue: len(run.sizes) for queue, run in store.reader.entries("a", 0, store.max_physical_offset).items()
    } == {0: 2}
    assert store.reader.entries("none", 0, store.max_physical_offset) == {}


@pytest.mark.parametrize("most", [1, 3, 7, 1000])
def test_entries_in_slices_are_the_same_entries(open_store: Open, put: Put, most: int) -> None:
    store = open_store()
    for number in range(40):
        put(store, "t", number % 3)
    store.after_flush(store.visibility.flush())
    whole = store.reader.entries("t", 0, store.max_physical_offset)
    slices = [
        piece for piece in store.reader.entry_slices("t", 0, store.max_physical_offset, most) if piece is not None
    ]
    assert max(len(piece.run.sizes) for piece in slices) <= most
    together = reading.joined(slices)
    assert together.keys() == whole.keys() == {0, 1, 2}
    for queue, run in together.items():
        assert run.first_offset == 0
        assert run.physical.tolist() == whole[queue].physical.tolist()
        assert run.tags.tolist() == whole[queue].tags.tolist()


class CountedTails(dict[str, TopicTail]):
    """A table of tails that counts its reads."""

    looked_at = 0

    def __getitem__(self, topic: str) -> TopicTail:
        self.looked_at += 1
        return super().__getitem__(topic)

    def items(self) -> Any:
        self.looked_at += len(self)
        return super().items()


def test_active_segment_topics_skip_unchanged_tails(open_store: Open, put: Put) -> None:
    store = open_store(commit_log_file_size=1 << 20)
    for number in range(200):
        put(store, f"topic-{number}")
    assert len(store.reader.segments()[-1].topics) == 200
    assert store.want_checkpoint(store.max_physical_offset)
    tails = store._tails._tails = CountedTails(store._tails._tails)
    last = put(store, "topic-7").physical_offset
    assert store.reader.segments()[-1].topics["topic-7"][0] == last
    assert tails.looked_at <= 2


def test_topics_of_a_new_segment_are_listed_without_a_full_scan(open_store: Open, put: Put) -> None:
    store = open_store(commit_log_file_size=1 << 20)
    for number in range(200):
        put(store, f"topic-{number}")
    assert len(store.reader.segments()[-1].topics) == 200
    assert store.want_checkpoint(store.max_physical_offset)
    tails = store._tails._tails = CountedTails(store._tails._tails)
    store.end.roll()
    put(store, "topic-7")
    assert store.reader.segments()[-1].topics.keys() == {"topic-7"}
    assert len(store.reader.segments()[0].topics) == 200
    assert tails.looked_at <= 4


def test_topic_table_is_not_tracked_by_the_garbage_collector(
    open_store: Open, put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_alone: list[int] = []
    store = open_store()
    monkeypatch.setattr(collector, "freeze_new", lambda: left_alone.append(1))
    put(store, "one")
    store.reader.segments()
    assert left_alone == []
    for number in range(1_100):
        store._tails.touch(f"topic-{number}", number, 1)
    store.reader.segments()
    assert left_alone == [1]


def test_only_written_topics_get_a_new_segment_row(open_store: Open, put: Put) -> None:
    store = open_store(commit_log_file_size=1 << 20)
    for number in range(200):
        put(store, f"topic-{number}")
    before = store.reader.segments()[-1].topics
    put(store, "topic-7")
    after = store.reader.segments()[-1].topics
    assert [topic for topic in before if after[topic] is not before[topic]] == ["topic-7"]


@pytest.mark.parametrize("seed", range(20))
def test_segment_topics_equal_a_full_scan(open_store: Open, put: Put, clock: ManualClock, seed: int) -> None:
    def walked() -> dict[str, tuple[int, int]]:
        base = store.newest_segment_base
        return {
            topic: (tail.physical_offset, max(tail.store_time, store.end.high_time))
            for topic, tail in store._tails._tails.items()
            if tail.physical_offset >= base
        }

    store, chosen = open_store(checkpoint_interval=50), random.Random(seed)
    for step in range(400):
        match chosen.randrange(12):
            case 0:
                clock.advance(60)
            case 1:
                store.after_flush(store.visibility.flush())
                store.upkeep()
            case 2:
                store.queue_changes.delete_topic(f"t{chosen.randrange(8)}", restart_at_zero=chosen.random() < 0.5)
            case 3 if step % 5 == 0:
                clock.set_wall(clock.now_ms() - chosen.choice((10, 60_000)))
            case 4 if step % 10 == 0:
                store.shutdown()
                store = open_store(checkpoint_interval=50)
            case 5 if step % 10 == 0:
                store.end.roll()
            case _:
                put(store, f"t{chosen.randrange(8)}", chosen.randrange(3))
        if chosen.random() < 0.4:
            assert store.end.topics() == walked()
