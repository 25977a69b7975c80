"""Group consumers: retry, dead letters, order, filters, broadcasting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from neve import BrokerError, connect
from neve.client import AsyncClient, Consumer, Received, Subscription
from neve.client.group.queue_locks import QueueLocks
from tests.kit.clock.waiting import until
from tests.kit.cluster.routes import is_routed

Run = Callable[..., None]
RECEIVE_S = 30


async def receive(consumer: Consumer, count: int) -> list[Received]:
    """Return the next messages, not acknowledged."""
    found: list[Received] = []
    while len(found) < count:
        message = await consumer.receive(RECEIVE_S)
        assert message is not None, f"{len(found)} of {count} messages came"
        found.append(message)
    return found


# ---- retry and dead letters


def test_message_nacked_too_often_becomes_a_dead_letter(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with client.consumer(unique, topic, start="earliest", max_redeliveries=1) as consumer:
            sent = await client.send(topic, b"poison", tags="T", keys=["k"], properties={"colour": "red"})
            (first,) = await receive(consumer, 1)
            await first.nack(delay_level=1)
            (again,) = await receive(consumer, 1)
            assert (again.topic, again.body, again.tags, again.reconsume_times) == (topic, b"poison", "T", 1)
            assert again.properties["colour"] == "red"
            await again.nack(delay_level=1)
        async with client.consumer(f"{unique}-dlq", f"%DLQ%{unique}", start="earliest") as dead:
            (message,) = await receive(dead, 1)
            assert (message.body, message.msg_id, message.keys) == (b"poison", sent.msg_id, ("k",))

    run(work)


def test_message_that_cannot_be_sent_back_is_copied(run: Run, unique: str) -> None:
    """The broker refuses CONSUMER_SEND_MSG_BACK when it has no message at that offset."""

    async def work(client: AsyncClient, topic: str) -> None:
        async with client.consumer(unique, topic, start="earliest") as consumer:
            sent = await client.send(topic, b"lost its place", keys=["k"])
            (message,) = await receive(consumer, 1)
            await is_routed(client, f"%RETRY%{unique}", 1)
            await replace(message, physical_offset=1 << 40).nack(delay_level=-1)
            assert consumer.position(sent.queue) == message.queue_offset + 1
        async with client.consumer(f"{unique}-dlq", f"%DLQ%{unique}", start="earliest") as dead:
            (copy,) = await receive(dead, 1)
            assert (copy.body, copy.msg_id, copy.keys) == (b"lost its place", sent.msg_id, ("k",))
            assert copy.properties["RETRY_TOPIC"] == topic

    run(work)


def test_message_is_redelivered_to_a_handler_that_raised(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        seen: list[tuple[bytes, int]] = []
        done = asyncio.Event()

        async def handle(message: Received) -> None:
            seen.append((message.body, message.reconsume_times))
            if message.reconsume_times == 0 and message.body == b"3":
                raise ZeroDivisionError
            if len(seen) == 11:
                done.set()

        consumer = client.consumer(unique, topic, start="earliest", max_redeliveries=5)
        async with consumer:
            running = asyncio.create_task(consumer.run(handle, workers=4, delay_level=1))
            for number in range(10):
                await client.send(topic, str(number))
            await done.wait()
        await running
        assert sorted(seen) == sorted([(str(n).encode(), 0) for n in range(10)] + [(b"3", 1)])

        async def lags_nowhere() -> bool:
            return not sum(queue.lag for queue in (await client.admin.consume_stats(unique, topic)).values())

        await until(lags_nowhere, "the broker has the positions")  # The offsets are sent without an answer.

    run(work)


def test_message_owned_beyond_the_consume_timeout_is_sent_back(run: Run, unique: str) -> None:
    """Without redeliveries left it becomes a dead letter at once, otherwise it is redelivered after 10 s (level 3)."""

    async def work(client: AsyncClient, topic: str) -> None:
        async with client.consumer(
            unique, topic, start="earliest", consume_timeout=0.3, max_redeliveries=0
        ) as consumer:
            sent = await client.send(topic, b"held", keys=["k"], queue=0)
            (held,) = await receive(consumer, 1)

            async def is_taken_back() -> bool:
                return consumer.position(sent.queue) == sent.queue_offset + 1

            await until(is_taken_back, "the message is taken back")
            await held.nack(delay_level=1)  # Has no effect.
            await held.ack()
            await client.send(topic, b"next", queue=0)
            (following,) = await receive(consumer, 1)
            assert following.body == b"next"
            await following.ack()
        async with client.consumer(f"{unique}-dlq", f"%DLQ%{unique}", start="earliest") as dead:
            (message,) = await receive(dead, 1)
            assert (message.body, message.msg_id, message.keys) == (b"held", sent.msg_id, ("k",))
            assert await dead.receive(0.2) is None

    run(work)


# ---- in order


def test_nacked_message_in_order_is_redelivered_before_the_next(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(4):
            await client.send(topic, str(number), queue=2)
        async with client.consumer(unique, topic, start="earliest", in_order=True, pause_after_nack=0.05) as consumer:
            (zero,) = await receive(consumer, 1)
            assert await consumer.receive(0.2) is None  # Only one message is delivered at a time.
            await zero.ack()
            seen: list[tuple[bytes, int]] = []
            while len(seen) < 5:
                (message,) = await receive(consumer, 1)
                seen.append((message.body, message.reconsume_times))
                if message.body == b"1" and message.reconsume_times < 2:
                    await message.nack()
                else:
                    await message.ack()
            assert seen == [(b"1", 0), (b"1", 1), (b"1", 2), (b"2", 0), (b"3", 0)]

    run(work)


def test_message_repeated_too_often_in_order_becomes_a_dead_letter(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(2):
            await client.send(topic, str(number), queue=0)
        async with client.consumer(
            unique, topic, start="earliest", in_order=True, pause_after_nack=0.05, max_redeliveries=1
        ) as consumer:
            for times in (0, 1):
                (message,) = await receive(consumer, 1)
                assert (message.body, message.reconsume_times) == (b"0", times)
                await message.nack()
            (message,) = await receive(consumer, 1)
            assert message.body == b"1"
            await message.ack()
        async with client.consumer(f"{unique}-dlq", f"%DLQ%{unique}", start="earliest") as dead:
            assert [message.body for message in await receive(dead, 1)] == [b"0"]

    run(work)


def test_ordered_queue_is_reassigned_only_after_its_message_is_settled(run: Run, unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(8):
            await client.send(topic, str(number), queue=number % 4)
        async with client.consumer(unique, topic, start="earliest", in_order=True) as one:
            held = await receive(one, 4)
            async with (
                connect(server.namesrv) as other_client,
                other_client.consumer(unique, topic, start="earliest", in_order=True) as other,
            ):
                assert await other.receive(1.5) is None
                for message in held:
                    await message.ack()

                async def is_shared() -> bool:
                    return len(one.assigned) == 2 and len(other.assigned) == 2

                await until(is_shared, "two queues each")
                bodies = [message.body for consumer in (one, other) for message in await receive(consumer, 2)]
                assert sorted(bodies) == [b"4", b"5", b"6", b"7"]

    run(work)


def test_in_order_members_lock_their_queues_at_the_broker(run: Run, unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with connect(server.namesrv) as stranger:
            await stranger.queues(topic)
            locks = QueueLocks(stranger._session, unique)
            queues = await stranger.queues(topic)
            async with client.consumer(unique, topic, start="earliest", in_order=True) as consumer:
                assert consumer.assigned == queues
                assert await locks.lock(queues) == (set(), set())
            assert await locks.lock(queues) == (set(queues), set())
            await locks.unlock(queues)

    run(work)


# ---- filters


def test_sql_selects_by_property(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(6):
            colour = "red" if number % 2 else "blue"
            await client.send(topic, str(number), properties={"size": str(number), "colour": colour}, queue=0)
        wanted = Subscription.sql("size > 1 AND colour = 'red'")
        async with client.consumer(unique, {topic: wanted}, start="earliest") as consumer:
            assert [message.body for message in await receive(consumer, 2)] == [b"3", b"5"]

    run(work)


def test_invalid_sql_expression_is_rejected_at_start(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        consumer = client.consumer(unique, {topic: Subscription.sql("size >")})
        with pytest.raises(BrokerError) as caught:
            await consumer.start()
        assert caught.value.code == 23
        async with client.consumer(unique, topic):  # The group is free again.
            pass

    run(work)


def test_tags_of_the_same_hash_are_distinguished(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for tag in ("Aa", "BB", "C"):  # "Aa" and "BB" have the same hash in Java.
            await client.send(topic, tag, tags=tag, queue=0)
        async with client.consumer(unique, {topic: "BB||C"}, start="earliest") as consumer:
            assert [message.body for message in await receive(consumer, 2)] == [b"BB", b"C"]

    run(work)


# ---- broadcasting


def test_broadcast_member_receives_all_and_resumes_at_its_offset(
    run: Run, unique: str, server: Any, tmp_path: Path
) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        options: dict[str, Any] = {"start": "earliest", "broadcast": True}
        async with (
            connect(server.namesrv) as other_client,
            client.consumer(unique, topic, offsets_directory=tmp_path / "one", **options) as one,
            other_client.consumer(unique, topic, offsets_directory=tmp_path / "two", **options) as two,
        ):
            for number in range(8):
                await client.send(topic, str(number))
            for member in (one, two):
                bodies = sorted([(await anext(member)).body for _ in range(8)])
                assert bodies == [str(number).encode() for number in range(8)]
        await client.send(topic, b"later")
        async with client.consumer(unique, topic, offsets_directory=tmp_path / "one", **options) as again:
            assert [message.body for message in await receive(again, 1)] == [b"later"]

    run(work)


# ---- flow


def test_paused_queue_delivers_nothing_until_resumed(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with client.consumer(unique, topic, start="earliest") as consumer:
            await consumer.pause(consumer.assigned)
            await client.send(topic, b"x")
            assert await consumer.receive(0.5) is None
            await consumer.resume(consumer.assigned)
            assert [message.body for message in await receive(consumer, 1)] == [b"x"]

    run(work)


# ---- ownership


def test_message_block_acknowledges_or_has_the_message_redelivered(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        sent = await client.send(topic, b"x", queue=0)
        async with client.consumer(unique, topic, start="earliest", in_order=True, pause_after_nack=0.05) as consumer:
            (message,) = await receive(consumer, 1)
            with pytest.raises(ZeroDivisionError):
                async with message:
                    raise ZeroDivisionError
            (again,) = await receive(consumer, 1)
            assert (again.msg_id, again.reconsume_times) == (sent.msg_id, 1)
            async with again:
                assert consumer.position(sent.queue) == sent.queue_offset
            assert consumer.position(sent.queue) == sent.queue_offset + 1

    run(work)


def test_iteration_acknowledges_and_receive_does_not(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(4):
            await client.send(topic, str(number), queue=0)
        async with client.consumer(unique, topic, start="earliest") as consumer:
            (queue, *_) = consumer.assigned
            (zero,) = await receive(consumer, 1)
            for offset in (1, 2):
                assert (await anext(consumer)).queue_offset == offset
            assert consumer.position(queue) == 0
            await zero.ack()
            assert consumer.position(queue) == 2
        assert await client.committed(unique, topic, queue) == 3

    run(work)


# ---- offsets


def test_consumer_seeks_by_offset_time_and_bounds(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(6):
            await client.send(topic, str(number), queue=number % 2)
        async with client.consumer(unique, topic, start="earliest") as consumer:
            found = await receive(consumer, 6)
            zero, one = (next(m.queue for m in found if m.queue and m.queue.queue_id == number) for number in (0, 1))
            await consumer.seek(zero, 2)
            assert [message.body for message in await receive(consumer, 1)] == [b"4"]
            await consumer.seek_to_beginning()
            assert sorted(message.body for message in await receive(consumer, 6)) == [b"%d" % n for n in range(6)]
            await consumer.seek_to_beginning(one)
            assert [message.body for message in await receive(consumer, 3)] == [b"1", b"3", b"5"]
            await consumer.seek_to_end()
            assert (consumer.position(zero), consumer.position(one)) == (3, 3)
            began = datetime.fromtimestamp(min(message.store_timestamp for message in found) / 1000, UTC)
            assert await consumer.offset_by_time(zero, began) == 0
            await consumer.seek_to_time(began, zero)
            assert [message.body for message in await receive(consumer, 3)] == [b"0", b"2", b"4"]
            await consumer.seek_to_time(began)
            assert len(await receive(consumer, 6)) == 6
            await consumer.seek_to_end()
            await consumer.commit()
            assert (await consumer.committed(zero), await consumer.committed(one)) == (3, 3)

    run(work)


def test_reader_begins_at_a_datetime(run: Run) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(topic, b"before", queue=0)
        result = await client.pull(topic, 0, 0, wait=10)
        border = result.messages[0].store_timestamp + 1
        await until(lambda: time.time() * 1000 > border + 1, "the next message is later")
        await client.send(topic, b"behind", queue=0)
        start = datetime.fromtimestamp(border / 1000, UTC)

        async def is_found() -> bool:
            return [message.body async for message in client.reader(topic, start=start)] == [b"behind"]

        await until(is_found, "the message behind the border is visible")

    run(work)


# ---- permanent errors


def test_consumer_of_an_unreadable_topic_raises(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with client.consumer(unique, topic, start="earliest", long_poll=1.0) as consumer:
            await client.admin.create_topic(topic, perm=2)
            with pytest.raises(BrokerError) as caught:
                await consumer.receive(RECEIVE_S)
            assert caught.value.code == 16

    # A route that is read again would take the queues from the consumer before it asks for them.
    run(work, route_interval=3600.0)
