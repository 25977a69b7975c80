"""A member of a group against a fake broker: locks, redelivery, limits, offset resets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from neve.client import connect
from neve.client.group import settlement
from neve.client.model import MessageQueue
from neve.errors import BrokerError
from neve.record.properties import bytes_to_properties
from neve.remoting.body import dumps
from neve.remoting.command import RemotingCommand
from tests.kit.cluster.fake_cluster import sends
from tests.kit.cluster.group_broker import GroupBroker, record

QUEUE = MessageQueue("t", "b0", 0)
RETRY = MessageQueue("%RETRY%g", "b0", 0)


# ---- locks


async def test_queue_with_refused_lock_is_not_read(fake_cluster: Any) -> None:
    broker = GroupBroker(5)
    broker.locks_are = "refused"
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest", in_order=True) as consumer,
    ):
        assert (consumer.assigned, broker.pulls) == ([], [])
        broker.locks_are = "granted"
        assert await consumer.receive() is not None


async def test_queue_locked_by_another_member_is_dropped_without_a_commit(fake_cluster: Any) -> None:
    broker = GroupBroker(5)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest", in_order=True) as consumer,
    ):
        message = await consumer.receive()
        assert message is not None
        broker.locks_are = "refused"
        broker.offsets["t"] = 3  # committed by the other member
        await consumer.source.renew_locks()
        assert consumer.assigned == []
        await message.ack()
        assert broker.offsets["t"] == 3
        broker.locks_are = "granted"
        following = await consumer.receive()
        assert following is not None
        assert following.queue_offset == 3


async def test_lock_stays_valid_until_expiry_if_its_renewal_fails(fake_cluster: Any) -> None:
    broker = GroupBroker(5)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest", in_order=True) as consumer,
    ):
        await anext(consumer)
        broker.locks_are = "failing"
        await consumer.source.renew_locks()
        await anext(consumer)
        process_queue = consumer.source.fetcher.assigned[QUEUE]
        process_queue.locked_until = asyncio.get_running_loop().time()  # as after 30 s
        assert await consumer.receive(0.05) is None
        assert consumer.assigned == [QUEUE]
        broker.locks_are = "granted"
        await (
            consumer.source.renew_locks()
        )  # after expiry, others may have held the lock, so consumption restarts at the stored offset
        following = await consumer.receive()
        assert following is not None
        assert following.receipt is not process_queue


async def test_ordered_consumer_releases_its_locks(fake_cluster: Any) -> None:
    broker = GroupBroker(0)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", in_order=True):
            assert broker.unlocked == []
        assert {queue["topic"] for queue in broker.unlocked} == {"t", "%RETRY%g"}


# ---- redelivery


async def test_last_nack_in_order_needs_no_route_of_the_retry_topic(fake_cluster: Any) -> None:
    """Name servers may not have the route of %RETRY%g yet, so the copy is sent to the broker of the message."""

    broker = GroupBroker(2)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
    ):
        cluster.unknown_topics = {"%RETRY%g", "TBW102"}
        in_order: dict[str, Any] = {"in_order": True, "max_redeliveries": 0}
        async with client.consumer("g", "t", start="earliest", **in_order) as consumer:
            first = await consumer.receive()
            assert first is not None
            await first.nack()
            (copy,) = sends(cluster.brokers[0])
            assert (copy.ext["b"], copy.ext["e"]) == ("%RETRY%g", "0")
            following = await consumer.receive()
            assert following is not None
            assert following.queue_offset == 1
        with pytest.raises(BrokerError) as caught:
            await client.send_to_group(first, "g")
        assert caught.value.code == 17, "an administrator's message creates no group"


async def test_retry_copy_has_its_origin_properties(fake_cluster: Any) -> None:
    broker = GroupBroker(1)
    broker.refused = {36}
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", start="earliest", max_redeliveries=9) as consumer:
            message = await consumer.receive()
            assert message is not None
            await message.nack()
            assert consumer.position(QUEUE) == 1
        (copy,) = [request for request in cluster.brokers[0].requests if request.code == 310]
        properties = bytes_to_properties(copy.ext["i"].encode())
        assert (copy.ext["b"], copy.ext["j"], copy.ext["l"], copy.body) == ("%RETRY%g", "1", "9", b"x" * 10)
        assert properties == {
            "TAGS": "even", "UNIQ_KEY": "key0", "RETRY_TOPIC": "t", "DELAY": "3", "ORIGIN_MESSAGE_ID": "key0",
        }  # fmt: skip


async def test_message_that_cannot_be_sent_back_is_redelivered_locally(
    fake_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settlement, "_LOCAL_REDELIVERY_S", 0.01)

    broker = GroupBroker(1)
    broker.refused = {36, 310}
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", start="earliest") as consumer:
            message = await consumer.receive()
            assert message is not None
            await message.nack()
            assert consumer.position(QUEUE) == 0
            again = await consumer.receive()
            assert again is not None
            assert (again.queue_offset, again.reconsume_times) == (0, 1)
            await again.ack()
        assert broker.offsets["t"] == 1


# ---- offsets and limits


async def test_start_offset_of_a_new_group_is_committed_at_once(fake_cluster: Any) -> None:
    """Otherwise, the group would start at the end again after a restart and skip messages."""

    broker = GroupBroker(50)
    async with fake_cluster(broker) as cluster, connect(cluster.namesrv.address) as client:
        async with client.consumer("g", "t", start="latest"):
            pass
        assert broker.offsets == {"t": 50, "%RETRY%g": 0}


async def test_fetching_of_a_queue_stops_at_its_buffer_limit(fake_cluster: Any) -> None:
    broker = GroupBroker(1000)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest", pull_batch=10, max_buffered_per_queue=20) as consumer,
    ):
        for _ in range(50):  # round trips, in which all thousand could have been fetched
            await client.admin.topic_route("t")
        assert broker.pulls == [0, 10]
        for offset in range(100):
            message = await consumer.receive()
            assert message is not None
            assert message.queue_offset == offset
            assert max(broker.pulls) <= offset + 1 + 20
    async with (
        fake_cluster(GroupBroker(1000)) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest", pull_batch=10, max_buffered_bytes=150) as consumer,
    ):
        assert await consumer.receive() is not None
        assert consumer.source.fetcher.buffer.bytes <= 150 + 100


async def test_offset_reset_accepts_the_list_form_of_cpp_tools(fake_cluster: Any) -> None:
    broker = GroupBroker(100)
    async with (
        fake_cluster(broker) as cluster,
        connect(cluster.namesrv.address) as client,
        client.consumer("g", "t", start="earliest") as consumer,
    ):
        assert await consumer.receive() is not None
        body = dumps({"offsetTable": [{"topic": "t", "brokerName": "b0", "queueId": 0, "offset": 70}]})
        cluster.brokers[0].push(RemotingCommand(220, 5, 2, ext={"group": "g", "topic": "t"}, body=body))
        while consumer.position(QUEUE) < 70:
            await client.admin.topic_route("t")
        assert broker.offsets["t"] == 70


async def test_direct_consume_request_to_lite_pull_consumer_is_refused(fake_cluster: Any) -> None:
    async with (
        fake_cluster(GroupBroker(0)) as cluster,
        connect(cluster.namesrv.address) as client,
        client.lite_pull_consumer("g") as consumer,
    ):
        await consumer.subscribe("t")
        server = cluster.brokers[0]
        server.push(RemotingCommand(309, 77, 0, ext={"consumerGroup": "g", "brokerName": "b0"}, body=record(0)))
        while not (answers := [r for r in server.requests if r.is_response and r.opaque == 77]):
            await client.admin.topic_list()
        assert answers[0].code == 1
