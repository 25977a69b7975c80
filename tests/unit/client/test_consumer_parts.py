"""The parts of consumers that need no server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neve.client.group.consume_stats import ConsumeStatsTable
from neve.client.group.delivery import DeliveryBuffer, DeliveryQueue
from neve.client.group.failures import Failures
from neve.client.group.offset_store import LocalFileOffsetStore
from neve.client.group.pop_requests import Receipt
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.rebalance import Assignee, Rebalancer, Rounds
from neve.client.group.received import Received
from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.errors import BrokerError, ClientError, ProtocolError

QUEUE = MessageQueue("t", "b0", 0)


def message(offset: int, body: bytes = b"xy") -> Received:
    return Received("t", body, queue_offset=offset)


def taken(buffer: DeliveryBuffer) -> list[int]:
    found = []
    while (one := buffer.take()) is not None:
        found.append(one.queue_offset)
    return found


# ---- delivery queues


def test_delivery_queues_are_served_in_turn() -> None:
    buffer = DeliveryBuffer(lambda: None)
    one, two = DeliveryQueue(), DeliveryQueue()
    buffer.put(one, [message(0), message(1), message(2)])
    buffer.put(two, [message(10)])
    assert (buffer.count, buffer.bytes) == (4, 8)
    assert taken(buffer) == [0, 10, 1, 2]
    assert (buffer.count, buffer.bytes) == (0, 0)


def test_ordered_queue_waits_for_its_message_to_be_settled() -> None:
    buffer = DeliveryBuffer(lambda: None)
    ordered, free = DeliveryQueue(in_order=True), DeliveryQueue()
    buffer.put(ordered, [message(0), message(1)])
    buffer.put(free, [message(10), message(11)])
    assert taken(buffer) == [0, 10, 11]
    buffer.settled(ordered)
    assert taken(buffer) == [1]


def test_closed_delivery_queue_delivers_nothing_until_reopened() -> None:
    buffer = DeliveryBuffer(lambda: None)
    delivery = DeliveryQueue()
    buffer.put(delivery, [message(0)])
    buffer.close(delivery)
    assert taken(buffer) == []
    buffer.put(delivery, [message(1)])
    assert taken(buffer) == []
    buffer.open(delivery)
    assert taken(buffer) == [0, 1]


def test_discarded_messages_release_their_buffer_space() -> None:
    rooms = []
    buffer = DeliveryBuffer(lambda: rooms.append(1))
    delivery = DeliveryQueue()
    buffer.put(delivery, [message(0), message(1)])
    assert [one.queue_offset for one in buffer.discard(delivery)] == [0, 1]
    assert (buffer.count, buffer.bytes, delivery.waiting_bytes, len(rooms)) == (0, 0, 0, 1)
    assert taken(buffer) == []


def test_queue_with_expired_lock_is_not_usable() -> None:
    process_queue = ProcessQueue(QUEUE, 0, in_order=True)
    assert process_queue.is_usable(1e9)
    process_queue.locked_until = 30.0
    assert process_queue.is_usable(29.9)
    assert not process_queue.is_usable(30.0)


# ---- local offsets


async def test_local_offsets_are_loaded_by_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "id" / "g" / "offsets.json"

    store = LocalFileOffsetStore(path)
    await store.load()
    assert await store.read(QUEUE) is None
    await store.write({QUEUE: 5})
    await store.write({QUEUE._replace(queue_id=1): 7})
    again = LocalFileOffsetStore(path)
    await again.load()
    assert (await again.read(QUEUE), await again.read(QUEUE._replace(queue_id=1))) == (5, 7)
    first = '{"brokerName":"b0","queueId":0,"topic":"t"}:5'
    second = '{"brokerName":"b0","queueId":1,"topic":"t"}:7'
    assert path.read_text() == '{"offsetTable":{' + first + "," + second + "}}"  # as RocketMQ's Java client writes it
    assert path.with_name("offsets.json.bak").read_text() == '{"offsetTable":{' + first + "}}"


@pytest.mark.parametrize("content", [None, b"", b'{"offsetTable":{{"brok', b"[]"])
async def test_missing_or_torn_offsets_file_falls_back_to_the_older(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "offsets.json"

    store = LocalFileOffsetStore(path)
    await store.write({QUEUE: 5})
    await store.write({QUEUE: 6})
    path.unlink() if content is None else path.write_bytes(content)
    again = LocalFileOffsetStore(path)
    await again.load()
    assert await again.read(QUEUE) == 5
    path.with_name("offsets.json.bak").write_bytes(b"{")
    if content is not None:
        with pytest.raises(ClientError):
            await again.load()


# ---- receipts


@given(
    st.builds(Receipt, *[st.integers(0, 2**62)] * 4, st.sampled_from("012"), st.just("b-0"), *[st.integers(0, 9)] * 2)
)
def test_receipt_round_trips(receipt: Receipt) -> None:
    assert Receipt.parse(receipt.text) == receipt


def test_receipt_names_the_storage_topic() -> None:
    names = [Receipt.parse(f"7 1000 60000 2 {retry} b 3 9").real_topic("t", "g") for retry in "012"]
    assert names == ["t", "%RETRY%g_t", "%RETRY%g+t"]
    assert Receipt.parse("7 1000 60000 2 0 b 3 9").visible_at == 61000
    for bad in ("", "1 2 3", "a 1 1 1 0 b 1 1"):
        with pytest.raises(ProtocolError):
            Receipt.parse(bad)


# ---- statistics


def test_rates_cover_the_last_minute() -> None:
    table = ConsumeStatsTable()
    table.pulled("t", 30, 0.5, 100.0)
    table.pulled("t", 30, 1.5, 101.0)
    table.consumed("t", 0.25, 101.5)
    table.failed("t", 101.9)
    status = table.status_table(102.0)["t"]
    assert (status["pullRT"], status["pullTPS"], status["consumeRT"], status["consumeFailedMsgs"]) == (1000, 1, 250, 1)
    later = table.status_table(162.0)["t"]
    assert (later["pullTPS"], later["consumeOKTPS"], later["consumeFailedMsgs"]) == (0, 0, 1)


def test_messages_without_a_consumer_cannot_be_settled() -> None:
    assert isinstance(message(0), Message)
    with pytest.raises(ClientError):
        asyncio.run(message(0).ack())


# ---- failures


def test_failing_operation_is_logged_as_warning_once_until_it_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    failures = Failures(lambda: None)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            failures.record("pull of orders", BrokerError(2, "busy"))
        failures.resolve("pull of orders")
        failures.record("pull of orders", BrokerError(2, "busy"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert caplog.records[0].getMessage() == "pull of orders failed, retrying: busy (code 2)"


def test_only_permanent_errors_are_raised_and_each_attempt_raises_once() -> None:
    waked: list[int] = []
    failures = Failures(lambda: waked.append(1))
    failures.record("pull of orders", BrokerError(2, "busy"))
    failures.raise_permanent()
    assert not waked
    for code in (16, 26, 23):
        for _ in range(2):
            failures.record("pull of orders", BrokerError(code, "because"))
            with pytest.raises(BrokerError, match=f"code {code}"):
                failures.raise_permanent()
            failures.raise_permanent()
    assert len(waked) == 6
    failures.record("pull of orders", BrokerError(16, "because"))
    failures.resolve("pull of orders")
    failures.raise_permanent()
    assert failures.latest is None


@pytest.mark.parametrize(
    ("topic", "code", "level"),
    [("%RETRY%g", 17, "INFO"), ("%RETRY%g", 2, "WARNING"), ("orders", 17, "WARNING")],
)
async def test_missing_retry_topic_at_the_first_start_is_no_warning(
    topic: str, code: int, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def share(_: str) -> set[MessageQueue]:
        raise BrokerError(code, "no route")

    failures = Failures(lambda: None)
    assignee = cast(Assignee, SimpleNamespace(held=list))
    rebalancer = Rebalancer(
        cast(Session, SimpleNamespace()), lambda: [topic], share, assignee, Rounds(), failures=failures
    )
    with caplog.at_level(logging.INFO):
        await rebalancer.once()
    assert [record.levelname for record in caplog.records] == [level]
    assert (failures.latest is None) == (level == "INFO")


async def test_error_that_ends_a_task_of_a_consumer_is_raised_by_every_call() -> None:
    waked: list[int] = []
    failures = Failures(lambda: waked.append(1))

    async def fail() -> None:
        raise ZeroDivisionError

    await asyncio.wait({failures.watch(asyncio.create_task(fail()))})
    assert waked
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            failures.raise_permanent()
