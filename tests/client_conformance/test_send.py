"""Plain sending: acknowledged messages are read back, from either broker."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from neve.client import AsyncClient, Message
from neve.client.send.queue_selector import select_by_hash
from neve.errors import BrokerError, ClientError


def test_sent_message_is_read_back(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        sent = await client.send(topic, b"body", tags="A", keys=["k"], properties={"colour": "red"}, queue=1)
        (got,) = (await client.pull(topic, 1, 0, wait=10)).messages
        assert (got.body, got.tags, got.keys, got.properties["colour"]) == (b"body", "A", ("k",), "red")
        assert (got.msg_id, got.queue, got.queue_offset) == (sent.msg_id, sent.queue, sent.queue_offset)

    run(work)


def test_messages_of_an_order_key_share_a_queue_in_order(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        queues = await client.queues(topic)
        for number in range(12):
            sent = await client.send(topic, f"{number}", order_key=f"order-{number % 3}")
            assert sent.queue == select_by_hash(f"order-{number % 3}")(queues, Message(topic, b""))
        last = await client.send(topic, b"last", queue=lambda queues, message: queues[len(message.body) - 1])
        assert last.queue == queues[3]
        await client.send_oneway(topic, b"oneway", order_key=2)
        found: dict[int, list[int]] = {}
        for queue in queues:
            bodies = [m.body.decode() for m in (await client.pull(topic, queue, 0, wait=2)).messages]
            for number in (int(body) for body in bodies if body.isdigit()):
                found.setdefault(number % 3, []).append(number)
        assert found == {key: list(range(key, 12, 3)) for key in range(3)}

    run(work)


def test_message_rejected_by_the_client_is_not_sent(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for wrong in ({"body": b""}, {"body": b"x" * 1001}, {"body": b"x", "properties": {"KEYS": "k"}}):
            with pytest.raises(ClientError):
                await client.send(topic, **wrong)
        with pytest.raises(ClientError):
            await client.send(f"{topic} ", b"x")
        assert [await client.max_offset(topic, queue) for queue in await client.queues(topic)] == [0]

    run(work, queues=1, max_message_size=1000)


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd"])
def test_large_body_is_compressed_and_read_back_unchanged(run: Callable[..., None], kind: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        body = bytes(range(256)) * 400
        await client.send(topic, body)
        (got,) = (await client.pull(topic, 0, 0, wait=10)).messages
        assert got.body == body

    run(work, queues=1, compress_type=kind)


def test_delayed_message_is_delivered_when_due(run: Callable[..., None]) -> None:
    """Delivery may be up to one second early, because timers have a resolution of one second."""

    async def work(client: AsyncClient, topic: str) -> None:
        began_ms = time.time_ns() // 1_000_000
        by_level = await client.send(topic, b"level", delay_level=1)
        by_delay = await client.send(topic, b"delay", delay=2)
        by_time = await client.send(topic, b"time", deliver_at=began_ms + 2500)
        assert not by_level.recall_handle and by_delay.recall_handle and by_time.recall_handle
        arrived: dict[bytes, int] = {}
        at = 0
        while len(arrived) < 3:
            result = await client.pull(topic, 0, at, wait=10)
            arrived |= {message.body: message.store_timestamp - began_ms for message in result.messages}
            at = result.next_offset
        assert arrived[b"level"] >= 1000
        assert arrived[b"delay"] >= 1000
        assert arrived[b"time"] >= 1500

    run(work, queues=1)


def test_recalled_message_is_not_delivered(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        recalled = await client.send(topic, b"never", delay=4)
        kept = await client.send(topic, b"kept", delay=4)
        assert recalled.recall_handle is not None
        assert await client.recall(topic, recalled.recall_handle) == recalled.msg_id
        result = await client.pull(topic, 0, 0, wait=20, timeout=30)
        assert [message.msg_id for message in result.messages] == [kept.msg_id]
        assert (await client.max_offset(topic, 0)) == 1
        with pytest.raises(BrokerError):
            await client.recall(topic, recalled.recall_handle)  # Its delivery time has passed.
        with pytest.raises(ClientError):
            await client.recall(topic, "no handle")

    run(work, queues=1)


def test_message_object_is_sent_unchanged(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        message = Message(topic, b"x", "T", ("k", "l"), {"colour": "red"}, 5)
        sent = await client.send(message, queue=0)
        await client.send_async(message, queue=0)
        result = await client.pull(topic, sent.queue, sent.queue_offset, 1, wait=10)
        (found,) = result.messages
        assert (found.body, found.tags, found.keys, found.flag) == (b"x", "T", ("k", "l"), 5)
        assert (found.properties["colour"], found.msg_id) == ("red", sent.msg_id)

    run(work)


def test_message_is_delivered_at_a_datetime(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        began = datetime.now(UTC)
        sent = await client.send(topic, b"later", queue=0, deliver_at=began + timedelta(seconds=2))
        assert sent.recall_handle
        result = await client.pull(topic, 0, 0, wait=15)
        assert [message.body for message in result.messages] == [b"later"]
        assert datetime.now(UTC) - began > timedelta(seconds=1)

    run(work)
