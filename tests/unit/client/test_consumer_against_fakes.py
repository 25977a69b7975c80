from __future__ import annotations

from typing import Any

import pytest

from neve.client import connect
from neve.client.model import MessageQueue
from neve.client.times import Start
from neve.errors import ClientError
from neve.remoting.body import dumps_object_keys
from neve.remoting.command import RemotingCommand
from tests.kit.cluster.group_broker import GroupBroker

QUEUE = MessageQueue("t", "b0", 0)


async def offsets(consumer: Any, count: int) -> list[int]:
    """Return the offsets of the next messages of an iteration."""
    return [(await anext(consumer)).queue_offset for _ in range(count)]


@pytest.mark.parametrize(
    ("start", "stored", "first"), [("earliest", None, 10), ("latest", None, 90), (5, None, 10), ("latest", 42, 42)]
)
async def test_group_starts_at_its_configured_or_stored_offset(
    fake_cluster: Any, start: Start, stored: int | None, first: int
) -> None:
    broker = GroupBroker(90, min_offset=10, stored=stored)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start=start) as consumer,
    ):
        assert consumer.assigned == [QUEUE]
        assert consumer.position(QUEUE) == first


async def test_fetching_stops_at_a_full_buffer_and_resumes(fake_cluster: Any) -> None:
    broker = GroupBroker(1000)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", start="earliest", max_buffered=64) as consumer:
            assert await offsets(consumer, 1) == [0]
            assert max(broker.pulls) <= 96
            assert await offsets(consumer, 999) == list(range(1, 1000))
        assert broker.offsets["t"] == 1000


async def test_message_in_progress_is_not_committed_if_the_block_fails(fake_cluster: Any) -> None:
    broker = GroupBroker(5)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.consumer("g", "t", start="earliest") as consumer:
                async for message in consumer:
                    if message.queue_offset == 2:
                        raise ZeroDivisionError
        assert broker.offsets["t"] == 2


async def test_stored_offset_below_the_minimum_is_corrected_and_saved(fake_cluster: Any) -> None:
    broker = GroupBroker(60, min_offset=50, stored=3)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", auto_ack=False) as consumer:
            assert await offsets(consumer, 10) == list(range(50, 60))
        assert broker.offsets["t"] == 50


async def test_offset_reset_drops_buffered_messages(fake_cluster: Any) -> None:
    broker = GroupBroker(100)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", start="earliest") as consumer:
            assert await offsets(consumer, 1) == [0]
            body = dumps_object_keys({"offsetTable": {QUEUE: 70}})
            request = RemotingCommand(220, 5, 2, ext={"group": "g", "topic": "t"}, body=body)
            cluster.brokers[0].push(request)
            while consumer.position(QUEUE) != 70:
                await client.admin.topic_route("t")
            assert await offsets(consumer, 30) == list(range(70, 100))
        assert broker.offsets["t"] == 100


async def test_seek_while_the_buffer_is_full_does_not_stall(fake_cluster: Any) -> None:
    broker = GroupBroker(100)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest", max_buffered=8, auto_ack=False) as consumer,
    ):
        first = await consumer.receive()
        assert first is not None
        await consumer.seek(QUEUE, 40)
        await first.ack()  # has no effect
        assert consumer.position(QUEUE) == 40
        assert await offsets(consumer, 60) == list(range(40, 100))
        with pytest.raises(ClientError):
            await consumer.seek(QUEUE._replace(queue_id=9), 0)


async def test_messages_filtered_by_tag_count_as_consumed(fake_cluster: Any) -> None:
    broker = GroupBroker(10)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", {"t": "even"}, start="earliest") as consumer:
            assert await offsets(consumer, 5) == [0, 2, 4, 6, 8]
        assert broker.offsets["t"] == 10


async def test_nack_sends_back_and_acknowledges(fake_cluster: Any) -> None:
    broker = GroupBroker(3)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", start="earliest") as consumer:
            message = await consumer.receive()
            assert message is not None
            await message.nack(delay_level=4)
            assert consumer.position(QUEUE) == 1
            assert await consumer.receive(0.01) is not None
        (sent,) = broker.sent_back
        assert (sent["offset"], sent["delayLevel"], sent["group"], sent["originTopic"]) == ("0", "4", "g", "t")


async def test_consumer_joins_and_leaves_its_group_once(fake_cluster: Any) -> None:
    broker = GroupBroker(0)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t") as consumer:
            assert await consumer.receive(0.01) is None
            with pytest.raises(ClientError, match="already"):
                await client.consumer("g", "t").start()
        assert [message async for message in consumer] == []
        left = [request.ext for request in cluster.brokers[0].requests if request.code == 35]
        assert [ext["consumerGroup"] for ext in left] == ["g"]
        faulty: list[dict[str, Any]] = [{"allocation": "x"}, {"start": "middle"}]
        for bad in faulty:
            with pytest.raises(ClientError):
                client.consumer("g", "t", **bad)
        with pytest.raises(ClientError):
            client.consumer("g", [])
