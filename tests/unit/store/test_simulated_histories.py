"""Regression tests of defects in the local store that the storage simulation found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.loop.in_steps import at_once
from tests.kit.store.sim_disk import SimDisk

Open = Callable[..., MessageStore]
Put = Callable[..., Any]


def flush(store: MessageStore) -> None:
    store.after_flush(store.visibility.flush())
    store.upkeep()


def test_search_by_time_works_in_a_queue_that_was_never_read(open_store: Open, put: Put, clock: ManualClock) -> None:
    store = open_store()
    put(store)
    assert store.queues.min_offset("t", 0) == 0
    for _ in range(3):
        clock.advance(1000)
        put(store)
    assert at_once(store.reader.offset_by_time("t", 0, clock.now_ms() - 60_000, False)) == 0, (
        "all would be taken for expired"
    )
    assert at_once(store.reader.offset_by_time("t", 0, clock.now_ms() - 1000, False)) == 2


def test_records_recovered_after_a_kill_survive_a_power_cut(
    open_store: Open, put: Put, disk: SimDisk, clock: ManualClock
) -> None:
    store = open_store()
    for _ in range(6):
        put(store, body=b"x" * 5000)  # two files are full and not synced
    disk.kill()
    again = MessageStore(store.config, disk, clock)
    assert again.load().records == 6
    for seed in range(6):
        last = MessageStore(store.config, disk.power_cut(seed), clock)
        last.load()
        found = last.reader.get("t", 0, 0, 32, 1 << 20)
        assert b"".join(found.buffers).count(b"x" * 5000) == 6


def test_topic_is_deleted_after_a_power_cut_lost_a_queue_file(open_store: Open, put: Put) -> None:
    store = open_store()
    put(store)
    store.disk.make_dirs(Path("/store/consumequeue/t/1"))
    store.queue_changes.delete_topic("t")
    store.upkeep()
    assert not store.disk.exists(Path("/store/consumequeue/t"))


def test_message_after_a_power_cut_is_not_hidden_as_deleted(
    open_store: Open, put: Put, disk: SimDisk, clock: ManualClock
) -> None:
    store = open_store()
    put(store, topic="t")
    flush(store)
    put(store, topic="other", body=b"x" * 9000)
    store.queue_changes.delete_topic("t")
    store.queue_changes.save_deletions()
    cut = disk.power_cut(seed=2)
    again = MessageStore(store.config, cut, clock)
    again.load()
    assert again.max_physical_offset < store.max_physical_offset, "the seed lets the last message survive"
    put(again, topic="t", body=b"new")
    assert again.queues.min_offset("t", 0) == 1
    assert again.reader.get("t", 0, 1, 1, 1 << 20).status == "FOUND"
    flush(again)
    last = MessageStore(store.config, cut.power_cut(), clock)
    last.load()
    assert last.reader.get("t", 0, 1, 1, 1 << 20).status == "FOUND"


def test_entry_in_an_evicted_file_is_none(open_store: Open, put: Put) -> None:
    store = open_store()
    for _ in range(6):
        put(store, body=b"x" * 5000)
    flush(store)
    end = store.max_physical_offset
    assert store.reader.entries("t", 0, end)[0].first_offset == 0
    store.take_out(0)()
    held = store.reader.entries("t", 0, end)[0]
    assert held.physical[0] == store.min_physical_offset
    assert held.first_offset == store.queues.min_offset("t", 0)


def test_queue_is_synced_after_an_eviction_of_its_old_file(open_store: Open, put: Put, clock: ManualClock) -> None:
    store = open_store(queue_first_step=100, queue_file_size=100)  # five entries a file
    for _ in range(14):
        put(store, body=b"x" * 2000)
    store.checkpoint()
    store.take_out(0)()
    assert store.queues.min_offset("t", 0) == 7, "the first queue file goes"
    put(store, body=b"x" * 2000)
    assert {queue.topic for queue in store.queues._dirty} == {"t"}


def test_store_time_of_a_hidden_message_is_returned(open_store: Open, put: Put, clock: ManualClock) -> None:
    """An archive round needs the time to put the message under its day."""
    store = open_store()
    put(store)
    put(store)
    store.queue_changes.set_min_offset("t", 0, 1)
    assert store.reader.store_time("t", 0, 0) == clock.now_ms()


def test_queue_raised_above_its_archive_can_be_archived(open_store: Open, put: Put) -> None:
    """In an older copy of the log, messages below the hole are hidden and must not block further rounds."""
    store = open_store()
    put(store)
    store.queue_changes.create_queue_at("t", 0, 5)
    store.queue_changes.set_min_offset("t", 0, 5)
    put(store)
    flush(store)
    assert store.reader.entries("t", 0, store.max_physical_offset)[0].first_offset == 5


def test_record_without_last_page_and_crc_ends_the_log(
    open_store: Open, put: Put, disk: SimDisk, clock: ManualClock
) -> None:
    store = open_store()
    put(store)
    flush(store)
    begin = put(store, body=b"x" * 100, keys="k" * 40).physical_offset
    end = store.max_physical_offset
    file = store.log.at(begin)
    assert file is not None
    file.map[end - 20 : end] = bytes(20)
    file.crc_map[16 : len(file.crc_map)] = bytes(len(file.crc_map) - 16)
    disk.kill()
    again = MessageStore(store.config, disk, clock)
    report = again.load()
    assert (report.end, report.reason.endswith("record CRC differs")) == (begin, True)
