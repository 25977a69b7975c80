"""Neve's client against Neve's servers, or with NEVE_TEST_NAMESRV against any cluster that speaks the protocol."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from neve import BrokerError, connect
from neve.client import AsyncClient, Consumer, Message, PullStatus, sync
from tests.kit.clock.waiting import until

DEADLINE = 60
RECEIVE = 20


def run(namesrv: str, work: Callable[[AsyncClient, str], Awaitable[None]], queues: int = 4) -> None:
    """Run `work` with a client and a new topic."""

    async def inside() -> None:
        topic = f"client-{uuid.uuid4().hex[:8]}"
        async with asyncio.timeout(DEADLINE), connect(namesrv) as client:
            await client.admin.create_topic(topic, queues)
            await until_routed(client, topic)
            await work(client, topic)

    asyncio.run(inside())


async def until_routed(client: AsyncClient, topic: str) -> None:
    async def has_route() -> bool:
        try:
            return bool((await client.admin.topic_route(topic)).write_queues)
        except BrokerError:
            return False

    await until(has_route)


async def until_visible(client: AsyncClient, topic: str, count: int) -> None:
    """Wait until a message is readable; Apache's broker answers the sender slightly earlier."""

    async def are_visible() -> bool:
        return sum([await client.max_offset(topic, queue) for queue in await client.queues(topic)]) == count

    await until(are_visible)


async def receive(consumer: Consumer, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        message = await consumer.receive(RECEIVE)
        assert message is not None, f"{len(messages)} of {count} messages came"
        messages.append(message)
        await message.ack()
    return messages


def test_sent_messages_are_read_back(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        result = await client.send(topic, "hällo", tags="A", keys="k1 k2", properties={"x": "ü"}, flag=3, queue=2)
        assert (result.status, result.queue.queue_id, result.queue_offset) == ("SEND_OK", 2, 0)
        pulled = await client.pull(topic, 2, 0, wait=10)
        (message,) = pulled.messages
        assert (message.topic, message.body.decode(), message.tags, message.keys) == (topic, "hällo", "A", ("k1", "k2"))
        assert (message.properties["x"], message.flag, message.queue) == ("ü", 3, result.queue)
        assert (message.msg_id, message.offset_msg_id) == (result.msg_id, result.offset_msg_id)
        assert (pulled.status, pulled.next_offset, pulled.min_offset, pulled.max_offset) == (PullStatus.FOUND, 1, 0, 1)
        assert (await client.admin.view_message(result.offset_msg_id)).body == message.body

        async def is_indexed() -> bool:
            return bool(await client.admin.query_messages(topic, "k2"))

        await until(is_indexed)
        assert (await client.admin.view_message(result.msg_id, topic)).offset_msg_id == result.offset_msg_id

    run(namesrv, work)


def test_large_bodies_batches_and_concurrent_sends_are_read_back(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(topic, b"z" * 100_000, queue=0)
        batch = await client.send_batch(topic, [b"1", Message(topic, b"2", tags="T"), "3"], queue=0)
        assert (batch.queue_offset, len(batch.msg_id.split(",")), len(batch.offset_msg_id.split(","))) == (1, 3, 3)
        await asyncio.gather(*(client.send_async(topic, f"{number}") for number in range(200)))
        await until_visible(client, topic, 204)
        messages = [message async for message in client.reader(topic)]
        assert len(messages) == 204
        first = [message.body async for message in client.reader(topic, queue=0)][:4]
        assert first == [b"z" * 100_000, b"1", b"2", b"3"]
        stats = await client.admin.topic_stats(topic)
        assert sum(queue.max_offset for queue in stats.values()) == 204

    run(namesrv, work)


def test_oneway_message_is_stored(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send_oneway(topic, b"x", queue=1)
        result = await client.pull(topic, 1, 0, wait=10)
        assert [message.body for message in result.messages] == [b"x"]

    run(namesrv, work)


def test_pull_reports_offsets_out_of_range(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        before = int(time.time() * 1000)
        for number in range(3):
            await client.send(topic, str(number), queue=0)
        await until_visible(client, topic, 3)
        assert (await client.pull(topic, 0, 3)).status is PullStatus.NO_NEW_MESSAGE
        beyond = await client.pull(topic, 0, 99)
        assert (beyond.status, beyond.next_offset) == (PullStatus.OFFSET_ILLEGAL, 3)
        filtered = await client.pull(topic, 0, 0, expression="nobody")
        assert (filtered.status, filtered.next_offset) == (PullStatus.NO_MATCHED_MESSAGE, 3)
        assert (await client.min_offset(topic, 0), await client.max_offset(topic, 0)) == (0, 3)
        assert await client.offset_by_time(topic, 0, before - 1000) == 0
        assert await client.offset_by_time(topic, 0, before + 3_600_000) == 3

    run(namesrv, work)


def test_a_pull_waits_for_the_next_message(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        waiting = asyncio.create_task(client.pull(topic, 0, 0, wait=15))
        await client.max_offset(topic, 0)
        assert not waiting.done()
        began = time.monotonic()
        await client.send(topic, b"now", queue=0)
        assert [message.body for message in (await waiting).messages] == [b"now"]
        assert time.monotonic() - began < 5

    run(namesrv, work)


def test_group_reads_each_message_once_and_resumes_at_its_offset(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        group = f"G-{topic}"
        for number in range(50):
            await client.send(topic, str(number))
        async with client.consumer(group, topic, start="earliest") as consumer:
            assert len(consumer.assigned) == 4
            bodies = {int(message.body) for message in await receive(consumer, 50)}
            assert bodies == set(range(50))
            left = await client.admin.consume_stats(group, topic)
            assert len(left) == 4
        await client.send(topic, b"later", queue=1)
        async with client.consumer(group, topic, start="earliest") as consumer:
            assert [message.body for message in await receive(consumer, 1)] == [b"later"]
        assert sum(queue.lag for queue in (await client.admin.consume_stats(group, topic)).values()) == 0

    run(namesrv, work)


def test_unacknowledged_message_is_redelivered(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(3):
            await client.send(topic, str(number), queue=0)
        async with client.consumer(f"G-{topic}", topic, start="earliest") as consumer:
            first = await consumer.receive(RECEIVE)
            second = await consumer.receive(RECEIVE)
            assert first is not None and second is not None
            await second.ack()
        async with client.consumer(f"G-{topic}", topic, start="earliest") as consumer:
            assert [message.body for message in await receive(consumer, 3)] == [b"0", b"1", b"2"]

    run(namesrv, work)


def test_nacked_message_is_redelivered(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with client.consumer(f"G-{topic}", topic, start="earliest") as consumer:
            await client.send(topic, b"twice", tags="T")
            message = await consumer.receive(RECEIVE)
            assert message is not None
            await message.nack(delay_level=1)
            (again,) = await receive(consumer, 1)
            assert (again.topic, again.body, again.tags, again.reconsume_times) == (topic, b"twice", "T", 1)
            assert again.msg_id == message.msg_id

    run(namesrv, work)


def test_tags_filter_messages(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for tag in ("A", "B", "C", "A"):
            await client.send(topic, tag, tags=tag, queue=0)
        await client.send(topic, b"none", queue=0)
        async with client.consumer(f"G-{topic}", {topic: "A || C"}, start="earliest") as consumer:
            assert [message.tags for message in await receive(consumer, 3)] == ["A", "C", "A"]

    run(namesrv, work)


@pytest.mark.parametrize("allocation", ["average", "circular"])
def test_members_share_the_queues_of_a_topic(namesrv: str, allocation: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        group = f"G-{topic}"
        async with client.consumer(group, topic, allocation=allocation) as one:
            assert len(one.assigned) == 4
            async with (
                connect(namesrv) as other_client,
                other_client.consumer(group, topic, allocation=allocation) as other,
            ):

                async def is_shared() -> bool:
                    return len(one.assigned) == 2 and len(other.assigned) == 2

                await until(is_shared)
                assert not set(one.assigned) & set(other.assigned)

            async def is_alone() -> bool:
                return len(one.assigned) == 4

            await until(is_alone)

    run(namesrv, work)


def test_consumer_seeks_by_offset_and_time(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(5):
            await client.send(topic, str(number))
        async with client.consumer(f"G-{topic}", topic, start="latest") as consumer:
            (queue,) = consumer.assigned
            await consumer.seek(queue, 3)
            assert [m.body for m in await receive(consumer, 2)] == [b"3", b"4"]
            await consumer.seek_to_time(0)
            assert [m.body for m in await receive(consumer, 5)] == [b"0", b"1", b"2", b"3", b"4"]
            await consumer.seek_to_end()
            await client.send(topic, b"5")
            assert [m.body for m in await receive(consumer, 1)] == [b"5"]
            await consumer.commit()
            assert await client.committed(consumer.group, topic, queue) == 6

    run(namesrv, work, queues=1)


def test_delayed_message_is_delivered_after_its_delay(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        began = time.time()
        await client.send(topic, b"late", delay_level=1, queue=0)
        result = await client.pull(topic, 0, 0, wait=10)
        assert [message.body for message in result.messages] == [b"late"]
        assert time.time() - began > 0.9

    run(namesrv, work)


def test_topics_are_created_changed_and_deleted(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        config = await client.admin.topic_config(topic)
        assert (config.name, config.read_queues, config.write_queues, config.perm) == (topic, 4, 4, 6)
        await client.admin.create_topic(topic, 6)

        async def is_wider() -> bool:
            return len((await client.admin.topic_route(topic)).read_queues) == 6

        await until(is_wider)
        assert topic in await client.admin.topic_list()
        assert all(info.addresses[0] for info in (await client.admin.cluster_info()).values())
        await client.admin.delete_topic(topic)
        with pytest.raises(BrokerError) as caught:
            await client.admin.topic_route(topic)
        assert caught.value.code == 17

    run(namesrv, work)


def test_first_send_creates_the_topic(namesrv: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(f"{topic}-auto", b"x")
        await until_routed(client, f"{topic}-auto")
        await until_visible(client, f"{topic}-auto", 1)
        assert [m.body async for m in client.reader(f"{topic}-auto")] == [b"x"]

    run(namesrv, work)


def test_synchronous_client_sends_and_reads(namesrv: str) -> None:
    topic = f"client-{uuid.uuid4().hex[:8]}"
    with sync.connect(namesrv) as client:
        client.send(topic, b"0")
        assert client.send_async(topic, b"1").result(RECEIVE).status == "SEND_OK"
        seen = []
        with client.consumer(f"G-{topic}", topic, start="earliest") as consumer:
            for message in consumer:
                seen.append(message.body)
                if len(seen) == 2:
                    break
        assert sorted(seen) == [b"0", b"1"]
        assert sum(queue.lag for queue in client.admin.consume_stats(f"G-{topic}", topic).values()) == 0
        assert len(list(client.reader(topic))) == 2


def test_client_survives_a_killed_broker(neve_up: Any, tmp_path: Any) -> None:
    """Every message confirmed before the kill is readable after a restart on the same data."""

    async def before(namesrv: str) -> None:
        async with asyncio.timeout(DEADLINE), connect(namesrv) as client:
            for number in range(20):
                await client.send("survivors", str(number), queue=0)

    async def after(namesrv: str) -> list[bytes]:
        async with asyncio.timeout(DEADLINE), connect(namesrv) as client:
            await until_routed(client, "survivors")
            return [message.body async for message in client.reader("survivors", queue=0)]

    with neve_up(tmp_path) as neve:
        asyncio.run(before(neve.namesrv))
        neve.kill()
    with neve_up(tmp_path) as neve:
        assert asyncio.run(after(neve.namesrv)) == [str(number).encode() for number in range(20)]
        assert neve.stop() == 0
