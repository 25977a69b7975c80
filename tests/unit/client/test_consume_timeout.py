"""Tests of the consume timeout: messages held for too long are sent back, as by RocketMQ clients."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import pytest

from neve.client import AsyncClient, Consumer, connect
from neve.client.model import MessageQueue
from neve.errors import ClientError
from neve.remoting.command import RemotingCommand
from tests.kit.cluster.fake_cluster import Answer
from tests.kit.cluster.group_broker import GroupBroker

QUEUE = MessageQueue("t", "b0", 0)
LEFT_ALONE_S = 900.0  # Java's 15 minutes


async def pass_time(consumer: Consumer, seconds: float) -> None:
    """Run the timeout job as at `seconds` from now."""
    await consumer.source.settlement.expire_overdue(asyncio.get_running_loop().time() + seconds)


async def held(consumer: Consumer, count: int) -> list[Any]:
    return [await consumer.receive() for _ in range(count)]


def by_hand(client: AsyncClient, **options: Any) -> Consumer:
    return client.consumer("g", "t", start="earliest", **options)


async def test_message_owned_for_15_minutes_is_sent_back(fake_cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    broker = GroupBroker(3)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with by_hand(client) as consumer:
            stuck, done, _ = await held(consumer, 3)
            await done.ack()
            await pass_time(consumer, LEFT_ALONE_S - 1)
            assert (broker.sent_back, consumer.position(QUEUE)) == ([], 0)
            await pass_time(consumer, LEFT_ALONE_S + 1)
            assert consumer.position(QUEUE) == 3
            assert [(sent["offset"], sent["delayLevel"]) for sent in broker.sent_back] == [("0", "3"), ("200", "3")]
        assert broker.offsets["t"] == 3
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any(re.match(f"not settled in time, .*{stuck.msg_id}.*consume_timeout_s=900", line) for line in said)


@pytest.mark.parametrize("settle", ["ack", "nack"])
async def test_settling_an_expired_message_is_logged_and_ignored(
    fake_cluster: Any, caplog: pytest.LogCaptureFixture, settle: str
) -> None:
    broker = GroupBroker(2)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        by_hand(client) as consumer,
    ):
        (stuck,) = await held(consumer, 1)
        await pass_time(consumer, LEFT_ALONE_S + 1)
        caplog.clear()
        await (stuck.ack() if settle == "ack" else stuck.nack())
        assert (len(broker.sent_back), consumer.position(QUEUE)) == (1, 1)
        assert [(r.levelname, "settled too late" in r.getMessage()) for r in caplog.records] == [("WARNING", True)]
        (following,) = await held(consumer, 1)
        await following.ack()
        assert consumer.position(QUEUE) == 2


async def test_buffered_messages_and_later_offsets_do_not_expire(fake_cluster: Any) -> None:
    broker = GroupBroker(9)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        by_hand(client) as consumer,
    ):
        await held(consumer, 1)
        process_queue = consumer.source.fetcher.assigned[QUEUE]
        process_queue.give_back(0)  # offset 0 is buffered again, which blocks offset 1
        await held(consumer, 1)
        await pass_time(consumer, LEFT_ALONE_S + 1)
        assert (broker.sent_back, consumer.position(QUEUE), process_queue.unacked) == ([], 0, 9)


async def test_message_that_the_broker_refuses_to_take_back_keeps_its_owner(fake_cluster: Any) -> None:
    broker = GroupBroker(1)
    broker.refused = {36, 310}
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        by_hand(client, consume_timeout=60) as consumer,
    ):
        (stuck,) = await held(consumer, 1)
        await pass_time(consumer, 61)
        assert consumer.position(QUEUE) == 0
        await stuck.ack()
        assert consumer.position(QUEUE) == 1


async def test_message_with_pending_nack_is_not_sent_back_again(fake_cluster: Any) -> None:
    broker = GroupBroker(1)

    def slow(request: RemotingCommand) -> Answer:
        answer = broker(request)
        return None if request.code == 36 else answer

    async with (
        fake_cluster(slow) as cluster,
        connect(cluster.namesrv.address) as client,
        by_hand(client) as consumer,
    ):
        (message,) = await held(consumer, 1)
        nack = asyncio.create_task(message.nack())
        while not broker.sent_back:
            await client.admin.topic_route("t")
        await pass_time(consumer, LEFT_ALONE_S + 1)
        assert len(broker.sent_back) == 1
        nack.cancel()


@pytest.mark.parametrize("in_order", [False, True])
async def test_consume_timeout_applies_only_without_order(fake_cluster: Any, in_order: bool) -> None:
    broker = GroupBroker(1)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        by_hand(client, in_order=in_order, consume_timeout=0.01) as consumer,
    ):
        await held(consumer, 1)
        if in_order:
            assert await consumer.receive(0.1) is None
            assert (broker.sent_back, consumer.position(QUEUE)) == ([], 0)
        else:
            while consumer.position(QUEUE) == 0:
                await client.admin.topic_route("t")
            assert len(broker.sent_back) == 1


async def test_expired_broadcast_message_is_skipped(fake_cluster: Any, tmp_path: Any) -> None:
    broker = GroupBroker(1)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        by_hand(client, broadcast=True, offsets_directory=tmp_path) as consumer,
    ):
        await held(consumer, 1)
        await pass_time(consumer, LEFT_ALONE_S + 1)
        assert (broker.sent_back, consumer.position(QUEUE)) == ([], 1)


async def test_consume_timeout_of_zero_is_refused(fake_cluster: Any) -> None:
    async with fake_cluster() as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ClientError):
            by_hand(client, consume_timeout=0)
