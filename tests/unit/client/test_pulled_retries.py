"""Tests of the topic %RETRY%group, which a pop consumer pulls, against a fake broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from neve.client import PopConsumer, connect
from neve.client.model import MessageQueue
from tests.kit.cluster.fake_cluster import running
from tests.kit.cluster.pop_broker import RETRY_TOPIC, RetryBroker

RETRY = MessageQueue(RETRY_TOPIC, "b0", 0)


async def offset_of_next(consumer: PopConsumer) -> int:
    message = await consumer.receive()
    assert message is not None
    return message.queue_offset


@asynccontextmanager
async def popping(broker: RetryBroker, **options: Any) -> AsyncIterator[PopConsumer]:
    """Run a pop consumer of a broker."""
    async with (
        running(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.pop_consumer("g", "t", **options) as consumer,
    ):
        yield consumer


async def test_retry_topic_is_pulled_and_other_topics_are_popped() -> None:
    async with popping(RetryBroker(0)) as consumer:
        assert consumer.assigned == [MessageQueue("t", "b0", 0)]
        assert consumer.source.positions(RETRY.topic) == {RETRY: 0}


async def test_only_settled_messages_are_committed_at_close() -> None:
    broker = RetryBroker(3)
    async with popping(broker) as consumer:
        first, second = await consumer.receive(), await consumer.receive()
        assert first is not None
        assert second is not None
        await first.ack()
    assert broker.offsets == {RETRY.topic: 1}


async def test_message_with_a_delay_is_redelivered_after_it() -> None:
    async with popping(RetryBroker(1)) as consumer:
        message = await consumer.receive()
        assert message is not None
        await message.nack(delay=0.01)
        again = await consumer.receive()
        assert again is not None
        assert (again.queue_offset, again.reconsume_times) == (0, 1)


async def test_message_held_beyond_the_hold_limit_is_sent_back() -> None:
    broker = RetryBroker(1)
    async with popping(broker, hold_limit=60) as consumer:
        message = await consumer.receive()
        assert message is not None
        await consumer.source.retries.settlement.expire_overdue(asyncio.get_running_loop().time() + 61)
        await message.nack()
        assert consumer.source.positions(RETRY.topic) == {RETRY: 1}
    assert [sent["offset"] for sent in broker.sent_back] == ["0"]


async def test_pulling_stops_at_the_buffer_limit() -> None:
    async with popping(RetryBroker(100), max_buffered=32) as consumer:
        for offset in range(100):
            assert await offset_of_next(consumer) == offset
            assert consumer.source.buffer.count <= 32 + 32  # the last pull may pass the bound by one batch


async def test_offset_correction_and_reset_are_followed() -> None:
    broker = RetryBroker(60, min_offset=50)
    broker.offsets[RETRY.topic] = 3
    async with popping(broker) as consumer:
        assert await offset_of_next(consumer) == 50
        await consumer.source.reset({RETRY: 57, MessageQueue("t", "b0", 0): 3})
        assert await offset_of_next(consumer) == 57
    assert broker.offsets == {RETRY.topic: 57}
