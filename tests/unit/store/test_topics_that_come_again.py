"""Tests of slaves of an Apache master, where a recreated topic starts at offset 0, visible only in the log."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker.store.errors import LogMismatch
from broker.store.message_store import MessageStore
from neve.record.codec import iter_records
from tests.unit.store.master_and_slave import QUEUES, TOPIC, MasterAndSlave


def bodies(store: MessageStore, queue: int, topic: str = TOPIC) -> list[tuple[int, bytes]]:
    """Return offset and body of all visible messages of a queue."""
    found, offset = list[tuple[int, bytes]](), store.queues.min_offset(topic, queue)
    while offset < store.queues.max_offset(topic, queue):
        got = store.reader.get(topic, queue, offset, 100, 1 << 20)
        found += [(record.queue_offset, record.body) for buffer in got.buffers for record in iter_records(buffer)]
        assert got.next_offset > offset
        offset = got.next_offset
    return found


def assert_same(pair: MasterAndSlave) -> None:
    for queue in range(QUEUES):
        assert bodies(pair.slave, queue) == bodies(pair.master, queue), f"queue {queue}"
        assert pair.slave.queues.next_offset(TOPIC, queue) == pair.master.queues.next_offset(TOPIC, queue), (
            f"queue {queue}"
        )
    assert bodies(pair.slave, 0, "other") == bodies(pair.master, 0, "other")


def test_recreated_topic_shows_only_its_new_messages_from_zero() -> None:
    pair = MasterAndSlave()
    for number in range(5):
        pair.put(0, b"old %d" % number)
        pair.put(1, b"old %d" % number)
        pair.put(0, b"kept", "other")
    pair.pass_on()
    pair.recreate()
    pair.put(1, b"new")
    pair.pass_on()
    assert bodies(pair.slave, 1) == [(0, b"new")]
    assert pair.slave.queues.next_offset(TOPIC, 0) == 0, "it ended before what is new"
    pair.put(0, b"new")
    pair.pass_on()
    assert_same(pair)


def test_queue_with_new_messages_of_a_recreated_topic_keeps_them() -> None:
    """The queue had no old messages, so nothing in the log marks its restart."""
    pair = MasterAndSlave()
    for number in range(5):
        pair.put(0, b"old %d" % number)
    pair.recreate()
    pair.put(1, b"new")
    pair.put(1, b"newer")
    pair.put(0, b"new")
    pair.put(2, b"new")
    pair.pass_on()
    assert_same(pair)
    assert bodies(pair.slave, 1) == [(0, b"new"), (1, b"newer")]


def test_queue_with_the_last_old_message_restarts_after_the_others() -> None:
    pair = MasterAndSlave()
    pair.put(0, b"old")
    pair.put(1, b"old, and the last")
    pair.recreate()
    pair.put(0, b"new")
    pair.pass_on()
    assert bodies(pair.slave, 0) == [(0, b"new")]
    pair.put(1, b"new")
    pair.pass_on()
    assert_same(pair)


@pytest.mark.parametrize("end", [MasterAndSlave.kill, MasterAndSlave.power_cut])
@pytest.mark.parametrize("seed", range(12))
def test_slave_equals_its_master_after_restarts_and_crashes(seed: int, end: Callable[[MasterAndSlave], None]) -> None:
    pair = MasterAndSlave(seed)
    dice = pair.dice
    for number in range(250):
        match dice.randrange(30):
            case 0:
                pair.recreate()
            case 1:
                pair.pass_on(dice.randrange(2000))
                end(pair)
            case 2:
                pair.slave.after_flush(pair.slave.visibility.flush())
                pair.slave.upkeep()
            case 3:
                pair.put(0, b"%d" % number, "other")
            case _:
                pair.put(dice.randrange(QUEUES), b"%d" % number)
        pair.pass_on(dice.randrange(400))
    for queue in range(QUEUES):
        pair.put(queue, b"last")  # otherwise, a queue that has not restarted still has its old messages
    pair.pass_on()
    assert_same(pair)
    end(pair)
    pair.pass_on()
    assert_same(pair)


def test_repeated_or_lower_nonzero_offset_is_refused() -> None:
    pair = MasterAndSlave(may=False)
    pair.put(0, b"old")
    pair.recreate()
    pair.put(0, b"new")
    with pytest.raises(LogMismatch, match="offset 0 of 't', queue 0, which has all below 1 already"):
        pair.pass_on()

    pair = MasterAndSlave()
    for _ in range(3):
        pair.put(0)
    pair.pass_on()
    pair.recreate()
    pair.master.queue_changes.create_queue_at(TOPIC, 0, 1)
    pair.put(0)
    with pytest.raises(LogMismatch, match="offset 1 of 't', queue 0, which has all below 3 already"):
        pair.pass_on()
