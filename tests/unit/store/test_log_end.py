"""Tests of the log end: its states, and the offset of the next record in each."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.store.commit_log import CommitLog
from broker.store.errors import StoreFull, StoreNotWritable
from broker.store.layout import END_SIZE
from broker.store.log_end import MOVES, EndState, LogEnd
from broker.store.message_store import MessageStore
from broker.store.topic_tails import TopicTails
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import small_config

Open = Callable[..., MessageStore]
Put = Callable[..., Any]
CLOSED, OPEN, OWING, FOLLOWING, FAILED = EndState


def end_of_an_empty_log() -> LogEnd:
    config, disk = small_config(), SimDisk()
    disk.make_dirs(config.root)
    log = CommitLog(config, disk)
    log.open()
    end = LogEnd(config, log, TopicTails())
    end.adopt(None, 0, last_time=0, high_time=0)
    return end


def no_room() -> None:
    raise StoreFull("no room")


# How each state is reached, and how it is requested.
REACH: dict[EndState, list[Callable[[LogEnd], None]]] = {
    CLOSED: [],
    OPEN: [LogEnd.open],
    OWING: [LogEnd.open, lambda end: end.put_first(no_room)],
    FOLLOWING: [LogEnd.follow],
    FAILED: [LogEnd.open, lambda end: end.fail(OSError("the disk is gone"))],
}
ASK: dict[EndState, Callable[[LogEnd], None]] = {
    CLOSED: LogEnd.close,
    OPEN: LogEnd.open,
    OWING: lambda end: end.put_first(no_room),
    FOLLOWING: LogEnd.follow,
    FAILED: lambda end: end.fail(OSError("another")),
}


def state_of(end: LogEnd) -> EndState:
    """Return the state that an append sees."""
    try:
        end.check_writable()
    except StoreNotWritable:
        if end.is_following:
            return FOLLOWING
        return FAILED if end.failure is not None else CLOSED
    try:
        end.make_room(100)
    except StoreFull:
        return OWING
    return OPEN


@pytest.mark.parametrize("state", EndState)
def test_each_state_is_reachable_and_seen_by_an_append(state: EndState) -> None:
    end = end_of_an_empty_log()
    for step in REACH[state]:
        step(end)
    assert end.limit == -1, "nothing is in the log: even an open end has to make its file"
    assert state_of(end) is state
    assert (end.limit >= 0) == (state is OPEN)


@pytest.mark.parametrize("wanted", EndState)
@pytest.mark.parametrize("state", EndState)
def test_every_state_decides_every_requested_state(state: EndState, wanted: EndState) -> None:
    end, becomes = end_of_an_empty_log(), MOVES[state][wanted]
    for step in REACH[state]:
        step(end)
    if state is CLOSED and wanted is OWING:  # a closed log has no pending first record
        ASK[wanted](end)
        assert state_of(end) is CLOSED
    elif state is FOLLOWING and wanted is OWING:
        with pytest.raises(StoreNotWritable, match="slave"):
            ASK[wanted](end)
        assert state_of(end) is FOLLOWING
    elif becomes is None:
        with pytest.raises(AssertionError):
            ASK[wanted](end)
    else:
        ASK[wanted](end)
        assert state_of(end) is becomes


def test_first_failure_is_reported() -> None:
    end = end_of_an_empty_log()
    end.open()
    first = OSError("first")
    for error in (first, OSError("second")):
        end.fail(error)
    assert end.failure is first


@pytest.mark.parametrize("seed", range(5))
def test_next_record_is_stored_at_the_log_end(open_store: Open, put: Put, disk: SimDisk, seed: int) -> None:
    chosen, store = random.Random(seed), open_store()
    for _ in range(120):
        match chosen.randrange(8):
            case 0:
                store.end.roll()
            case 1:
                store.restart_log_at(store.max_physical_offset + chosen.randrange(1, 40_000))
            case 2:
                disk.kill()
                store = open_store()
            case _:
                before, newest = store.max_physical_offset, store.newest_segment_base
                stored = put(store, body=bytes(chosen.randrange(6000)))
                assert store.max_physical_offset == stored.physical_offset + stored.size
                rolled = store.newest_segment_base > newest
                assert stored.physical_offset == (store.newest_segment_base if rolled else before)
        file = store.log.at(store.newest_segment_base)
        assert file is None or file.base <= store.max_physical_offset <= file.end - END_SIZE


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("flush_disk_type", ["ASYNC_FLUSH", "SYNC_FLUSH"])
def test_readers_are_notified_once_in_order_of_durable_messages(
    open_store: Open, put: Put, seed: int, flush_disk_type: str
) -> None:
    chosen, store = random.Random(seed), open_store(flush_disk_type=flush_disk_type)
    stored: list[tuple[int, int]] = []  # queue, offset
    heard: list[tuple[int, int]] = []
    ends: dict[tuple[int, int], int] = {}
    store.visibility.subscribe(lambda shown: heard.extend((queue.queue_id, offset) for queue, offset, _ in shown))
    flushing: list[int] = []
    for _ in range(200):
        match chosen.randrange(6):
            case 0:
                flushing.append(store.visibility.flush())
            case 1 if flushing:
                store.after_flush(flushing.pop(0))
            case 2:
                store.end.roll()
            case _:
                queue_id = chosen.randrange(3)
                place = put(store, queue_id=queue_id)
                stored.append((queue_id, place.queue_offset))
                ends[stored[-1]] = place.physical_offset + place.size
        assert heard == stored[: len(heard)]
        if flush_disk_type == "SYNC_FLUSH":
            assert all(ends[one] <= store.visibility.flushed for one in heard)
            assert store.visibility.confirmed <= store.visibility.flushed
        else:
            assert heard == stored
        assert store.visibility.confirmed <= store.max_physical_offset
        for queue_id in range(3):
            assert store.queues.max_offset("t", queue_id) == sum(queue == queue_id for queue, _ in heard)


def test_closed_store_refuses_appends_and_keeps_its_files(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    put(store)
    store.shutdown()
    files = disk.list_dir(Path("/store/commitlog"))
    with pytest.raises(StoreNotWritable, match="not open"):
        put(store)
    assert disk.list_dir(Path("/store/commitlog")) == files
