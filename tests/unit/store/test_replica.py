"""Tests of replication: a slave has its master's bytes, entries, keys and offsets for any split of the stream."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import Any

import pytest

from broker.store.config import ASYNC_FLUSH, SYNC_FLUSH
from broker.store.errors import LogMismatch, StoreFull, StoreNotWritable
from broker.store.layout import end_record
from infra.clock import ManualClock
from infra.disk.filesystem import DiskFull
from neve.record.codec import encode_record
from tests.kit.store.by_key import by_key
from tests.kit.store.replicas import LogLink, RandomMaster, assert_same, log_of, open_store
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one

STEPS = 250


@pytest.mark.parametrize("seed", range(8))
def test_slave_store_equals_its_master(seed: int) -> None:
    master, disk, clock = RandomMaster(seed), SimDisk(), ManualClock()
    slave = open_store(disk, clock, following=True)
    for _ in range(3):
        master.run(STEPS)
        LogLink(master, slave, seed, padding=bool(seed % 2)).run()
        assert_same(slave, master.store)


@pytest.mark.parametrize("seed", range(8))
def test_crashed_slave_catches_up_with_its_master(seed: int) -> None:
    """A kill loses nothing and a power cut only unsynced bytes. The rest equals the master's log."""
    dice, master, disk = random.Random(seed), RandomMaster(seed), SimDisk(seed=seed)
    slave = open_store(disk, ManualClock(), following=True, checkpoint_bytes=20_000)
    for _ in range(8):
        master.run(80)
        link = LogLink(master, slave, dice.randrange(1 << 30))
        for _ in range(dice.randrange(60)):
            link.pass_on(dice.choice((1, 100, 3000)))
            if dice.random() < 0.2:
                slave.after_flush(slave.visibility.flush())
                slave.upkeep()
        end, synced = slave.max_physical_offset, slave.visibility.flushed
        if dice.random() < 0.5:
            disk.kill()
        else:
            disk, end = disk.power_cut(), synced
        slave = open_store(disk, ManualClock(), following=True, checkpoint_bytes=20_000)
        assert slave.max_physical_offset >= end
        theirs = b"".join(data for _, data in log_of(master.store))
        assert b"".join(data for _, data in log_of(slave)) == theirs[: sum(len(data) for _, data in log_of(slave))]
    LogLink(master, slave, seed).run()
    assert_same(slave, master.store)


@pytest.mark.parametrize("seed", range(6))
def test_promoted_slave_has_slaves_of_its_own(seed: int) -> None:
    """Its clock is behind by a moment or hours, and a restart of its slave does not truncate because of that."""
    dice, first = random.Random(seed), RandomMaster(seed)
    first.run(STEPS)
    second = RandomMaster(seed + 100)
    second.store.follow()
    LogLink(first, second.store, seed).run()
    second.clock.set_wall(first.clock.now_ms() - dice.choice((1, 700, 3_600_000)))
    second.store.lead()
    second.deletions += first.deletions
    second.run(STEPS)
    disk = SimDisk()
    third = open_store(disk, ManualClock(), following=True)
    for steps in (STEPS, 0):
        second.run(steps)
        LogLink(second, third, seed).run()
        disk.kill()
        third = open_store(disk, ManualClock(), following=True)
        assert_same(third, second.store)
    disk.kill()
    alone = open_store(disk, second.clock)
    assert_same(alone, second.store)
    put_one(alone, "orders")
    assert alone.max_physical_offset > second.store.max_physical_offset


# -- foreign data


def record(at: int, offset: int, time: int, body: bytes = b"body", **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "topic": b"t", "body": body, "properties": b"KEYS\x01k\x02", "queue_id": 0, "flag": 0, "queue_offset": offset,
        "physical_offset": at, "sys_flag": 0, "born_timestamp": 1, "born_host": ("10.0.0.1", 1),
        "store_timestamp": time, "store_host": ("10.0.0.2", 1),
    }  # fmt: skip
    return encode_record(**(values | changes))


def test_small_store_time_step_back_does_not_end_the_log(disk: SimDisk, clock: ManualClock) -> None:
    """This happens at a failover between masters with different clocks."""
    store, times = open_store(disk, clock, following=True), [10_000, 9_500, 10_001, 9_999, 5_000, 20_000]
    for offset, time in enumerate(times):
        at = store.max_physical_offset
        store.replica.append(record(at, offset, time), at)
    store.after_flush(store.visibility.flush())
    before = store.reader.segments()
    for following in (True, True, False):
        disk = disk.power_cut()
        store = open_store(disk, clock, following=following)
        assert store.queues.max_offset("t", 0) == len(times)
        assert store.reader.segments() == before
        assert store.reader.segments()[-1].newest_store_time == 20_000
        assert [store.reader.store_time("t", 0, offset) for offset in range(len(times))] == times


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes((data[place] ^ 0x10,)) + data[place + 1 :]


# Size, magic, body CRC, physical offset, body length, body, lengths of topic and properties.
@pytest.mark.parametrize("place", [0, 1, 3, 4, 7, 8, 11, 28, 35, 84, 87, 88, 91, 92, 94, 95])
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_damaged_bytes_are_refused_and_records_before_them_kept(
    disk: SimDisk, clock: ManualClock, place: int, size: int
) -> None:
    store = open_store(disk, clock, following=True)
    good = [record(0, 0, 1)]
    good += [record(len(good[0]) * number, number, 1) for number in range(1, 4)]
    each = len(good[0])
    bad = flipped(good[2], place)
    stream = good[0] + good[1] + bad + good[3] + bytes(20_000)

    def send() -> None:
        begin = store.replica.next_offset
        rest = stream[begin:]
        for start in range(0, len(rest), size):
            store.replica.append(rest[start : start + size], begin + start)

    for _ in range(2):  # a new connection sends the same bytes
        with pytest.raises(LogMismatch, match=rf"at {2 * each} the master sent"):
            send()
        assert (store.max_physical_offset, store.replica.next_offset) == (2 * each, 2 * each)
        assert store.queues.max_offset("t", 0) == 2
    disk.kill()
    store = open_store(disk, clock, following=True)
    assert (store.max_physical_offset, store.queues.max_offset("t", 0)) == (2 * each, 2)
    store.replica.append(good[2] + good[3], 2 * each)
    assert store.queues.max_offset("t", 0) == 4


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (record(0, 0, 1, queue_id=-1), "not a name that can be stored"),
        (record(0, 0, 1, topic=b"../up"), "not a name that can be stored"),
        (record(0, 0, 1, topic=b""), "not a name that can be stored"),
        (record(0, 0, 1, body=bytes(16_300)), "are left in the file"),
        (end_record(1 << 20), "files of the same size"),
        (end_record(16_384 - 8), "files of the same size"),
    ],
)
def test_invalid_replica_data_is_refused_with_its_reason(
    disk: SimDisk, clock: ManualClock, wrong: bytes, why: str
) -> None:
    store = open_store(disk, clock, following=True)
    with pytest.raises(LogMismatch, match=why):
        store.replica.append(wrong + bytes(200), 0)
    assert (store.max_physical_offset, store.queues.topics()) == (0, [])


def test_replica_data_is_accepted_only_at_its_next_offset_or_log_end(disk: SimDisk, clock: ManualClock) -> None:
    store, data = open_store(disk, clock, following=True), record(0, 0, 1)
    end = len(data)
    store.replica.append(data + record(end, 1, 1)[:50], 0)
    assert (store.max_physical_offset, store.replica.next_offset) == (end, end + 50)
    for at in (0, end - 1, end + 49, end + 51, 1 << 40):
        with pytest.raises(LogMismatch, match=f"the log that ends at {end}"):
            store.replica.append(record(at, 1, 1), at)
    with pytest.raises(LogMismatch, match="inside a file"):
        store.replica.continue_at(1 << 20)
    store.replica.append(record(end, 1, 1), end)
    assert store.queues.max_offset("t", 0) == 2


def test_record_in_many_pieces_is_assembled_once(disk: SimDisk, clock: ManualClock) -> None:
    """The record is not part of the log before its last byte has arrived."""
    store = open_store(disk, clock, following=True, commit_log_file_size=1 << 20)
    data = record(0, 0, 1, body=bytes(900_000))
    data += record(len(data), 1, 1)
    for start in range(0, 900_000, 1000):
        store.replica.append(data[start : start + 1000], start)
        assert store.max_physical_offset == 0
    disk.kill()
    store = open_store(disk, clock, following=True, commit_log_file_size=1 << 20)
    assert (store.replica.next_offset, store.max_physical_offset) == (0, 0)
    store.replica.append(data, 0)
    assert store.queues.max_offset("t", 0) == 2


def test_existing_queue_entry_is_not_overwritten(disk: SimDisk, clock: ManualClock) -> None:
    store, first = open_store(disk, clock, following=True), record(0, 5, 1)
    store.replica.append(first, 0)
    for offset in (0, 5):
        with pytest.raises(LogMismatch, match="which has all below 6 already"):
            store.replica.append(record(len(first), offset, 1), len(first))
    store.replica.append(record(len(first), 9, 1), len(first))
    assert (store.queues.min_offset("t", 0), store.queues.next_offset("t", 0), store.reader.entry("t", 0, 7)) == (
        5,
        10,
        None,
    )


def test_queue_raised_by_a_lost_message_accepts_a_lower_offset(disk: SimDisk, clock: ManualClock) -> None:
    store, first = open_store(disk, clock, following=True), record(0, 0, 1)
    store.replica.append(first, 0)
    store.after_flush(store.visibility.flush())
    store.upkeep()
    store.replica.append(record(len(first), 70, 1), len(first))
    for seed in range(20):
        cut = disk.power_cut(seed)
        again = open_store(cut, clock, following=True)
        if again.max_physical_offset == len(first):
            again.replica.append(record(len(first), 30, 1), len(first))
            assert (again.queues.next_offset("t", 0), again.reader.entry("t", 0, 30) is None) == (31, False)


def test_failed_replica_write_keeps_nothing_of_the_batch(disk: SimDisk, clock: ManualClock) -> None:
    store, first = open_store(disk, clock, following=True), record(0, 0, 1)
    store.replica.append(first, 0)
    disk.fail_write = lambda _path: True
    with pytest.raises(StoreNotWritable, match="a write to the log failed"):
        store.replica.append(record(len(first), 1, 1) + record(2 * len(first), 2, 1), len(first))
    assert (store.max_physical_offset, store.queues.next_offset("t", 0)) == (len(first), 1)
    assert store.visibility.is_dirty, "the flusher hears of it"


@pytest.mark.parametrize("short_of", ["commitlog/", "consumequeue/"])
def test_slave_resumes_after_a_full_disk(disk: SimDisk, clock: ManualClock, short_of: str) -> None:
    master = RandomMaster(3)
    master.run(STEPS)
    slave = open_store(disk, clock, following=True)
    link, refused = LogLink(master, slave, 1), 0
    create = disk.create_preallocated
    is_full = True

    def unless_full(path: Any, size: int, **options: Any) -> None:
        if is_full and short_of in str(path):
            raise DiskFull(errno.ENOSPC, "no space left on device", str(path))
        create(path, size, **options)

    disk.create_preallocated = unless_full  # type: ignore[method-assign]
    going = True
    while going:
        end = slave.max_physical_offset
        try:
            going = link.pass_on(2000)
        except StoreFull:
            refused, is_full = refused + 1, False
        else:
            is_full |= slave.max_physical_offset > end
    assert refused > 3
    assert_same(slave, master.store)


def test_late_topic_deletion_keeps_later_messages_on_a_slave(disk: SimDisk, clock: ManualClock) -> None:
    master = RandomMaster(0)
    for queue in (0, 1):
        for _ in range(5):
            master.put("orders", queue, 10)
    deleted_at = master.store.max_physical_offset
    master.store.queue_changes.delete_topic("orders")
    for _ in range(3):
        master.put("orders", 0, 10)
    slave = open_store(disk, clock, following=True)
    LogLink(master, slave, 0).run()
    slave.queue_changes.delete_topic("orders", below=deleted_at)
    slave.queue_changes.save_deletions()
    for _ in range(2):
        assert slave.queues.names() == {"orders": [0]}
        assert (slave.queues.min_offset("orders", 0), slave.queues.max_offset("orders", 0)) == (5, 8)
        assert slave.queues.next_offset("orders", 1) == 5
        assert slave.queues.records.ended() == {"orders": {0: 5, 1: 5}}, "an archive has to hide it of either"
        assert_same(slave, master.store)
        disk.kill()
        slave = open_store(disk, clock, following=True)


def test_deleted_topic_offsets_are_not_reused_in_a_broker_set(disk: SimDisk, clock: ManualClock) -> None:
    """Otherwise, a member that deletes after the next message would have two messages of one offset."""
    master, slave = RandomMaster(0), open_store(disk, clock, following=True, confirmed=0)
    master.store.visibility.join_set(0)
    for _ in range(3):
        master.put("orders", 0, 10)
    deleted_at = master.store.max_physical_offset
    master.store.visibility.confirm(deleted_at)
    master.store.queue_changes.delete_topic("orders", restart_at_zero=True)
    master.put("orders", 0, 10)
    LogLink(master, slave, 0).run()
    slave.visibility.confirm(slave.max_physical_offset)
    master.store.visibility.confirm(slave.max_physical_offset)
    slave.queue_changes.delete_topic("orders", restart_at_zero=True, below=deleted_at)
    slave.queue_changes.save_deletions()
    assert (slave.queues.min_offset("orders", 0), slave.queues.max_offset("orders", 0)) == (3, 4)
    assert_same(slave, master.store)


def test_slave_continues_queues_without_records_at_the_masters_ends(disk: SimDisk, clock: ManualClock) -> None:
    """The master has evicted their records. Without their ends, this slave would reuse the offsets as master."""
    master = RandomMaster(0)
    for topic, queue in (("orders", 0), ("payments", 1), ("käse", 0)):
        for _ in range(4):
            master.put(topic, queue, 10)
    master.store.end.roll()
    master.store.after_flush(master.store.visibility.flush())
    master.store.take_out(0)()
    master.put("orders", 0, 10)
    slave = open_store(disk, clock, following=True)
    LogLink(master, slave, 0).run()
    assert slave.min_physical_offset == master.store.min_physical_offset > 0
    ends = {
        topic: {queue: master.store.queues.next_offset(topic, queue)}
        for topic, (queue,) in master.store.queues.names().items()
    }
    log_end = master.store.max_physical_offset
    for _ in range(2):
        slave.queue_changes.begin_queues(ends, log_end)
        following = [slave.queues.next_offset(*queue) for queue in (("orders", 0), ("payments", 1), ("käse", 0))]
        assert following == [5, 4, 4]
        assert (slave.queues.min_offset("payments", 1), slave.queues.max_offset("payments", 1)) == (4, 4)
        disk.kill()
        slave = open_store(disk, clock, following=True)
    slave.lead()
    assert put_one(slave, "payments", 1).queue_offset == 4
    assert put_one(slave, "orders", 0).queue_offset == 5
    assert put_one(slave, "käse", 0).queue_offset == 4


def test_ends_of_deleted_queues_are_saved_only_if_they_are_new(
    disk: SimDisk, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    slave, writes = open_store(disk, clock, following=True), list[str]()
    write_atomic = disk.write_atomic

    def noted(path: Path, data: bytes) -> None:
        writes.append(path.name)
        write_atomic(path, data)

    monkeypatch.setattr(disk, "write_atomic", noted)
    for ends in ({0: 7}, {0: 7}, {0: 7, 1: 3}, {}):
        slave.queue_changes.remember_ended({"orders": ends} if ends else {})
    assert writes == ["queue_state"] * 2
    again = open_store(disk.power_cut(), clock, following=True)
    assert again.queues.records.ended() == {"orders": {0: 7, 1: 3}}


def test_topic_deleted_after_its_ends_were_sent_is_not_restored(disk: SimDisk, clock: ManualClock) -> None:
    master, slave = RandomMaster(0), open_store(disk, clock, following=True)
    master.put("orders", 0, 10)
    log_end = master.store.max_physical_offset
    master.put("payments", 0, 10)
    LogLink(master, slave, 0).run()
    slave.queue_changes.delete_topic("orders", below=slave.max_physical_offset)
    slave.queue_changes.save_deletions()
    slave.queue_changes.begin_queues({"orders": {0: 1}}, log_end)
    assert slave.queues.names() == {"payments": [0]}
    assert slave.queues.next_offset("orders", 0) == 1


# -- visibility


@pytest.mark.parametrize("flush_disk_type", [ASYNC_FLUSH, SYNC_FLUSH])
@pytest.mark.parametrize("seed", range(4))
def test_slave_shows_confirmed_messages_and_notifies_once(seed: int, flush_disk_type: str) -> None:
    dice, master = random.Random(seed), RandomMaster(seed)
    slave = open_store(SimDisk(), ManualClock(), following=True, flush_disk_type=flush_disk_type)
    slave.visibility.join_set(0)
    heard: list[tuple[str, int, int]] = []
    slave.visibility.subscribe(
        lambda shown: heard.extend((queue.topic, queue.queue_id, offset) for queue, offset, _ in shown)
    )
    seen, confirmed = 0, 0
    link = LogLink(master, slave, seed)
    for _ in range(150):
        if dice.random() < 0.2:
            master.run(10)
        link.pass_on(dice.choice((100, 3000, 20_000)))
        if dice.random() < 0.4:
            slave.after_flush(slave.visibility.flush())
        if dice.random() < 0.5:
            confirmed = max(confirmed, dice.randrange(slave.max_physical_offset + 1))
            slave.visibility.confirm(confirmed)
        bound = min(confirmed, slave.visibility.flushed if flush_disk_type == SYNC_FLUSH else confirmed)
        assert slave.visibility.confirmed <= bound
        for topic, queues in slave.queues.names().items():
            for queue in queues:
                last = slave.reader.entry(topic, queue, slave.queues.max_offset(topic, queue) - 1)
                assert last is None or last[0] + last[1] <= bound
                following = slave.queues.by_name[topic, queue].entry(slave.queues.max_offset(topic, queue))
                assert following is None or following[0] + following[1] > bound, "what is confirmed is shown"
        seen = max(seen, len(heard))
    assert len(heard) == len(set(heard)) or master.deletions
    slave.after_flush(slave.visibility.flush())
    slave.visibility.confirm(slave.max_physical_offset)
    assert all(slave.queues.max_offset(topic, queue) == slave.queues.next_offset(topic, queue)
               for topic, queues in slave.queues.names().items() for queue in queues)  # fmt: skip


def test_master_shows_confirmed_messages_in_a_set_and_all_when_alone(open_store: Any, put: Any) -> None:
    store = open_store()
    first = put(store)
    store.visibility.join_set(0)
    assert store.queues.max_offset("t", 0) == 1, "what was shown stays so"
    second, third = put(store), put(store)
    assert (store.queues.max_offset("t", 0), store.queues.next_offset("t", 0)) == (1, 3)
    assert store.reader.record_at(second.physical_offset) is None
    store.visibility.confirm(third.physical_offset)
    store.visibility.confirm(first.physical_offset)
    assert store.queues.max_offset("t", 0) == 2
    store.visibility.leave_set()
    assert store.queues.max_offset("t", 0) == 3
    put(store)
    assert store.queues.max_offset("t", 0) == 4


def test_slave_indexes_unique_key_without_trailing_separator() -> None:
    """RocketMQ stores properties without the last separator."""
    master, disk = RandomMaster(0), SimDisk()
    slave = open_store(disk, ManualClock(), following=True)
    put_one(master.store, "a", 0, b"body", properties=b"UNIQ_KEY\x01ABCDEF0123", unique_key="ABCDEF0123")
    LogLink(master, slave, 0).run()
    for store in (master.store, slave):
        assert len(by_key(store, "a", "ABCDEF0123", 64, 0, 1 << 60)) == 1
