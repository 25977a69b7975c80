"""Tests of the topic %RETRY%group, which a pop consumer pulls, against a fake broker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from neve.client import PopConsumer, connect
from neve.client.model import MessageQueue
from tests.kit.cluster.fake_cluster import run
from tests.kit.cluster.pop_broker import RETRY_TOPIC, RetryBroker

RETRY = MessageQueue(RETRY_TOPIC, "b0", 0)


async def offset_of_next(consumer: PopConsumer) -> int:
    message = await consumer.receive()
    assert message is not None
    return message.queue_offset


@pytest.fixture
def popping(fake_cluster: Any) -> Callable[..., None]:
    """Return a function that runs `work(consumer)` with a pop consumer of a broker."""

    def start(broker: RetryBroker, work: Callable[[PopConsumer], Awaitable[None]], **options: Any) -> None:
        async def inside() -> None:
            async with (
                fake_cluster(broker) as cluster,
                connect(cluster.namesrv.address) as client,
                client.pop_consumer("g", "t", **options) as consumer,
            ):
                await work(consumer)

        run(inside)

    return start


def test_retry_topic_is_pulled_and_other_topics_are_popped(popping: Any) -> None:
    async def work(consumer: PopConsumer) -> None:
        assert consumer.assigned == [MessageQueue("t", "b0", 0)]
        assert consumer.source.positions(RETRY.topic) == {RETRY: 0}

    popping(RetryBroker(0), work)


def test_only_settled_messages_are_committed_at_close(popping: Any) -> None:
    async def work(consumer: PopConsumer) -> None:
        first, second = await consumer.receive(), await consumer.receive()
        assert first is not None
        assert second is not None
        await first.ack()

    broker = RetryBroker(3)
    popping(broker, work)
    assert broker.offsets == {RETRY.topic: 1}


def test_message_with_a_delay_is_redelivered_after_it(popping: Any) -> None:
    async def work(consumer: PopConsumer) -> None:
        message = await consumer.receive()
        assert message is not None
        await message.nack(delay=0.01)
        again = await consumer.receive()
        assert again is not None
        assert (again.queue_offset, again.reconsume_times) == (0, 1)

    popping(RetryBroker(1), work)


def test_message_held_beyond_the_hold_limit_is_sent_back(popping: Any) -> None:
    async def work(consumer: PopConsumer) -> None:
        message = await consumer.receive()
        assert message is not None
        await consumer.source.retries.settlement.expire_overdue(asyncio.get_running_loop().time() + 61)
        await message.nack()
        assert consumer.source.positions(RETRY.topic) == {RETRY: 1}

    broker = RetryBroker(1)
    popping(broker, work, hold_limit=60)
    assert [sent["offset"] for sent in broker.sent_back] == ["0"]


def test_pulling_stops_at_the_buffer_limit(popping: Any) -> None:
    async def work(consumer: PopConsumer) -> None:
        for offset in range(100):
            assert await offset_of_next(consumer) == offset
            assert consumer.source.buffer.count <= 32 + 32  # the last pull may pass the bound by one batch

    popping(RetryBroker(100), work, max_buffered=32)


def test_offset_correction_and_reset_are_followed(popping: Any) -> None:
    async def work(consumer: PopConsumer) -> None:
        assert await offset_of_next(consumer) == 50
        await consumer.source.reset({RETRY: 57, MessageQueue("t", "b0", 0): 3})
        assert await offset_of_next(consumer) == 57

    broker = RetryBroker(60, min_offset=50)
    broker.offsets[RETRY.topic] = 3
    popping(broker, work)
    assert broker.offsets == {RETRY.topic: 57}
