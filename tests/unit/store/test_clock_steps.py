"""Tests of store times and searches by time around steps of the wall clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from broker.store import reading
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.loop.in_steps import at_once
from neve.record.layout import BORN_HOST_V6
from tests.kit.store.by_key import by_key
from tests.kit.store.sim_disk import SimDisk

Open = Callable[..., MessageStore]
Put = Callable[..., Any]
HOUR = 3_600_000
DAY = 24 * HOUR


def test_store_time_is_constant_while_the_clock_is_slightly_behind(
    open_store: Open, put: Put, clock: ManualClock
) -> None:
    store = open_store()
    first = put(store)
    clock.set_wall(clock.now_ms() - 1000)
    assert put(store).store_timestamp == first.store_timestamp
    clock.advance(1001)
    assert put(store).store_timestamp == first.store_timestamp + 1
    assert store.end.steps_back == 0


def test_store_time_follows_the_clock_after_a_large_step_back(
    open_store: Open, put: Put, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    store, right = open_store(), clock.now_ms()
    clock.set_wall(right + DAY)
    put(store)
    clock.set_wall(right + 1)
    assert put(store).store_timestamp == right + 1
    assert store.end.steps_back == 1
    assert "86400.0 s behind the newest record" in caplog.text
    assert put(store).store_timestamp == right + 1
    assert store.end.steps_back == 1


def stepped(open_store: Open, put: Put, clock: ManualClock, **changes: Any) -> MessageStore:
    """Return a store with a segment of `a` with a time a day ahead and then right times, and a second segment."""
    store, right = open_store(**changes), clock.now_ms()
    put(store, "a")
    clock.set_wall(right + DAY)
    put(store, "b", keys="ahead")
    clock.set_wall(right + HOUR)
    put(store, "a", keys="later")
    store.end.roll()
    put(store, "a")
    store.after_flush(store.visibility.flush())
    return store


@pytest.mark.parametrize("changes", [{}, {"checkpoint_bytes": 1}])
@pytest.mark.parametrize("clean", [True, False])
def test_segment_time_is_the_newest_store_time_in_it(
    open_store: Open, put: Put, clock: ManualClock, disk: SimDisk, clean: bool, changes: dict[str, int]
) -> None:
    right = clock.now_ms()
    store = stepped(open_store, put, clock, **changes)

    def told(of: MessageStore) -> list[tuple[int, int]]:
        return [(segment.newest_store_time, segment.topics["a"][1]) for segment in of.reader.segments()]

    assert told(store) == [(right + DAY, right + DAY), (right + HOUR, right + HOUR)]
    if clean:
        store.shutdown()
        again = open_store(**changes)
    else:
        again = open_store(disk.power_cut(1), **changes)
        assert again.queues.max_offset("a", 0) == 3, "a step back of the clock is no torn end of the log"
    assert told(again)[0] == (right + DAY, right + DAY)
    assert again.end.last_time == right + HOUR


def test_segment_without_table_is_scanned_for_its_newest_time(
    open_store: Open, put: Put, clock: ManualClock, disk: SimDisk
) -> None:
    right = clock.now_ms()
    store = stepped(open_store, put, clock)
    store.shutdown()
    for name in disk.list_dir(Path("/store/commitlogtable")):
        disk.remove(Path("/store/commitlogtable") / name)
    first, _ = open_store().reader.segments()
    assert (first.newest_store_time, first.topics["b"][1]) == (right + DAY, right + DAY)


def test_search_by_time_skips_no_message_from_the_requested_time(
    open_store: Open, put: Put, clock: ManualClock
) -> None:
    """A reader that continues from the result misses no message."""
    store, right = open_store(), clock.now_ms()
    times = []
    for number in range(60):
        ahead = DAY if 20 <= number < 30 else 0
        clock.set_wall(right + number * 1000 + ahead)
        times.append(put(store).store_timestamp)
    store.after_flush(store.visibility.flush())
    for number in (*range(20), *range(30, 60)):
        assert at_once(store.reader.offset_by_time("t", 0, times[number], False)) <= number


V6 = ("2001:db8::1", 4000)


@pytest.mark.parametrize("seed", range(12))
def test_search_by_time_is_exact_where_the_clock_was_set_back(
    open_store: Open, put: Put, clock: ManualClock, disk: SimDisk, seed: int
) -> None:
    """Two queues over several files, also after restarts without the segment tables and after a power cut."""
    random = Random(seed)
    changes = {"checkpoint_bytes": random.choice([1, 2_000, 1 << 30])}
    store, right = open_store(**changes), clock.now_ms()
    times: list[list[int]] = [[], []]

    def check(of: MessageStore) -> None:
        for queue, stored in enumerate(times):
            for wanted in {right - 1, *(time + more for time in stored for more in (-1, 0, 1))}:
                first = next((at for at, time in enumerate(stored) if time >= wanted), len(stored))
                assert at_once(of.reader.offset_by_time("t", queue, wanted, False)) == first
                later = next((at for at, time in enumerate(stored) if time > wanted), len(stored))
                assert at_once(of.reader.offset_by_time("t", queue, wanted, True)) == max(later - 1, 0)

    def more(of: MessageStore) -> None:
        for _ in range(random.randrange(20, 60)):
            step = random.choice([1, 1, 1, 10, 10, 5_000, -3_000, -20_000]) if random.random() < 0.5 else 1
            clock.set_wall(clock.now_ms() + step)
            host = {"born_host": V6, "sys_flag": BORN_HOST_V6} if random.random() < 0.3 else {}
            queue = random.randrange(2)
            times[queue].append(put(of, queue_id=queue, body=b"x" * random.randrange(900), **host).store_timestamp)
            if random.random() < 0.02:
                of.end.roll()
        of.after_flush(of.visibility.flush())

    more(store)
    check(store)
    for number in range(3):
        if number == 2:
            again = open_store(disk.power_cut(seed), **changes)
            check(again)
            return
        store.shutdown()
        if number == 1:
            for name in disk.list_dir(Path("/store/commitlogtable")):
                disk.remove(Path("/store/commitlogtable") / name)
        store = open_store(**changes)
        check(store)
        more(store)
        check(store)


def test_search_above_a_clock_step_reads_no_whole_file(
    open_store: Open, put: Put, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, right = open_store(), clock.now_ms()
    for number in range(60):
        clock.set_wall(right + number * 10_000 + (30_000 if number == 20 else 0))
        put(store)
    store.after_flush(store.visibility.flush())
    read: list[int] = []
    by_reading = reading._first_by_reading

    def counted(file: Any, queue: Any, low: int, stop: int, wanted: int) -> int:
        read.append(wanted)
        return by_reading(file, queue, low, stop, wanted)

    monkeypatch.setattr(reading, "_first_by_reading", counted)
    assert at_once(store.reader.offset_by_time("t", 0, right + 400_000, False)) == 40
    assert read == []
    assert at_once(store.reader.offset_by_time("t", 0, right + 225_000, False)) == 20
    assert len(read) == 1


def test_search_below_a_clock_step_reads_a_bounded_part_in_each_turn(
    open_store: Open, put: Put, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_READ_TOGETHER", 8)
    store, right = open_store(), clock.now_ms()
    for number in range(60):
        clock.set_wall(right + number * 1_000)
        put(store)
    clock.set_wall(right + 30_000)
    put(store)
    store.after_flush(store.visibility.flush())
    search = store.reader.offset_by_time("t", 0, right + 50_000, False)
    turns = sum(1 for _ in search)
    assert turns == 50 // 8
    assert at_once(store.reader.offset_by_time("t", 0, right + 50_000, False)) == 50
    assert at_once(store.reader.offset_by_time("t", 0, right + 58_000, True)) == 58


def test_interrupted_search_restarts_in_a_recreated_topic(
    open_store: Open, put: Put, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_READ_TOGETHER", 8)
    store, right = open_store(), clock.now_ms()
    for number in range(20):
        clock.set_wall(right + number * 1_000)
        put(store)
    clock.set_wall(right)
    put(store)
    store.after_flush(store.visibility.flush())
    search = store.reader.offset_by_time("t", 0, right + 18_000, False)
    next(search)
    store.queue_changes.delete_topic("t", restart_at_zero=True)
    clock.set_wall(right + 19_000)
    put(store)
    store.after_flush(store.visibility.flush())
    assert at_once(search) == 0


def test_key_is_found_in_an_index_file_with_a_future_start_time(open_store: Open, put: Put, clock: ManualClock) -> None:
    store, right = open_store(), clock.now_ms()
    clock.set_wall(right + DAY)
    put(store, keys="ahead")
    clock.set_wall(right + HOUR)
    put(store, keys="later")
    store.after_flush(store.visibility.flush())
    assert len(by_key(store, "t", "later", 10, right, right + 2 * HOUR)) == 1
    assert by_key(store, "t", "ahead", 10, right, right + 2 * HOUR) == []


def test_clock_step_back_does_not_delay_checkpoints(open_store: Open, put: Put, clock: ManualClock) -> None:
    store = open_store(checkpoint_interval=10_000, checkpoint_bytes=1 << 30)
    put(store)
    clock.set_wall(clock.now_ms() - 8 * HOUR)
    clock.advance(10_000)
    end = put(store).physical_offset
    store.after_flush(store.visibility.flush())
    store.upkeep()
    assert store.checkpoints.checkpointed > end
