"""Pop consumers and lite pull consumers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from neve import ClientError, connect
from neve.client import AsyncClient, LitePullConsumer, Message, PopConsumer, Received, Subscription, sync
from tests.kit.clock.waiting import until

Run = Callable[..., None]
RECEIVE_S = 30


async def receive(consumer: PopConsumer, count: int) -> list[Received]:
    """Return the next messages, not acknowledged."""
    found: list[Received] = []
    while len(found) < count:
        message = await consumer.receive(RECEIVE_S)
        assert message is not None, f"{len(found)} of {count} messages came"
        found.append(message)
    return found


async def poll(consumer: LitePullConsumer, count: int) -> list[Message]:
    """Return `count` messages from several polls."""
    found: list[Message] = []
    while len(found) < count:
        messages = await consumer.poll(RECEIVE_S, count - len(found))
        assert messages, f"{len(found)} of {count} messages came"
        found += messages
    return found


def bodies(messages: list[Any]) -> list[bytes]:
    return sorted(message.body for message in messages)


# ---- pop


@pytest.mark.parametrize("mode", ["PULL", "POP"])
def test_acknowledged_popped_messages_are_delivered_once(run: Run, unique: str, mode: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        if mode == "POP":
            await client.admin.set_request_mode(unique, topic, mode)
        for number in range(20):
            await client.send(topic, str(number), tags="even" if number % 2 == 0 else "odd")
        async with client.pop_consumer(unique, topic, start="earliest", invisible=10) as consumer:
            messages = await receive(consumer, 20)
            assert bodies(messages) == sorted(str(number).encode() for number in range(20))
            assert {queue.queue_id for queue in consumer.assigned} == ({-1} if mode == "POP" else {0, 1, 2, 3})
            await asyncio.gather(*(message.ack() for message in messages))

        async def is_settled() -> bool:
            return sum(queue.lag for queue in (await client.admin.consume_stats(unique, topic)).values()) == 0

        await until(is_settled, "no lag")
        async with client.pop_consumer(unique, topic, start="earliest") as again:
            await client.send(topic, b"later")
            assert bodies(await receive(again, 1)) == [b"later"]

    run(work)


def test_message_with_a_delay_is_redelivered_and_counted(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with client.pop_consumer(unique, topic, start="earliest") as consumer:
            sent = await client.send(topic, b"x", tags="T", keys=["k"])
            (first,) = await receive(consumer, 1)
            await first.nack(delay=1.0)
            (again,) = await receive(consumer, 1)
            assert (again.topic, again.body, again.msg_id, again.reconsume_times) == (topic, b"x", sent.msg_id, 1)
            await again.nack(delay_level=-1)
        async with client.consumer(f"{unique}-dlq", f"%DLQ%{unique}", start="earliest") as dead:
            message = await dead.receive(RECEIVE_S)
            assert message is not None
            assert (message.body, message.msg_id) == (b"x", sent.msg_id)

    run(work)


def test_invisible_time_is_extended_while_a_message_is_handled(run: Run, unique: str, server: Any) -> None:
    """The handler takes twice the invisible time; another member must not receive the message."""

    async def work(client: AsyncClient, topic: str) -> None:
        await client.admin.set_request_mode(unique, topic, "POP")
        options: dict[str, Any] = {"start": "earliest", "invisible": 1.5}
        async with client.pop_consumer(unique, topic, **options) as consumer:
            await client.send(topic, b"slow", queue=0)
            (message,) = await receive(consumer, 1)
            async with (
                connect(server.namesrv) as other_client,
                other_client.pop_consumer(unique, topic, **options) as other,
            ):
                assert await other.receive(3.2) is None
                await message.ack()
                await client.send(topic, b"next", queue=0)
                both = {asyncio.create_task(one.receive(RECEIVE_S)) for one in (consumer, other)}
                done, waiting = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                for task in waiting:
                    task.cancel()
                (first,) = done
                assert (first.result() or message).body == b"next"

    run(work)


def test_ordered_pop_delivers_one_message_of_a_queue_at_a_time(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(6):
            await client.send(topic, str(number), queue=1)
        async with client.pop_consumer(unique, topic, start="earliest", in_order=True) as consumer:
            (zero,) = await receive(consumer, 1)
            assert (zero.body, await consumer.receive(0.3)) == (b"0", None)
            await zero.ack()
            seen: list[bytes] = []
            while len(seen) < 5:
                (message,) = await receive(consumer, 1)
                seen.append(message.body)
                await message.ack()
            assert seen == [b"1", b"2", b"3", b"4", b"5"]

    run(work)


def test_delayed_message_in_order_is_redelivered_before_the_next(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(4):
            await client.send(topic, str(number), queue=1)
        async with client.pop_consumer(unique, topic, start="earliest", in_order=True) as consumer:
            seen: list[tuple[bytes, int]] = []
            while len(seen) < 5:
                (message,) = await receive(consumer, 1)
                seen.append((message.body, message.reconsume_times))
                if seen == [(b"0", 0), (b"1", 0)]:
                    await message.nack(delay=1.0)
                else:
                    await message.ack()
            assert [body for body, _ in seen] == [b"0", b"1", b"1", b"2", b"3"]
            assert seen[2][1] == 1

    run(work)


def test_pop_selects_by_tag_and_by_sql(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for tag in ("Aa", "BB", "C"):
            await client.send(topic, tag, tags=tag, properties={"size": str(len(tag))}, queue=0)
        async with client.pop_consumer(unique, {topic: "BB || C"}, start="earliest") as consumer:
            assert bodies(await receive(consumer, 2)) == [b"BB", b"C"]
        wanted = Subscription.sql("size = 1")
        async with client.pop_consumer(f"{unique}-sql", {topic: wanted}, start="earliest") as consumer:
            assert bodies(await receive(consumer, 1)) == [b"C"]

    run(work)


def test_pop_consumer_reads_retries_of_the_group_from_its_pulls(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        retry_topic = f"%RETRY%{unique}"
        async with client.consumer(unique, topic, start="earliest") as pulling:
            sent = await client.send(topic, b"pulled", tags="T", keys=["k"])
            failed = await pulling.receive(RECEIVE_S)
            assert failed is not None
            await failed.nack(delay_level=1)
        await client.admin.set_request_mode(unique, topic, "POP")
        async with client.pop_consumer(unique, topic, start="earliest") as popping:
            (again,) = await receive(popping, 1)
            assert (again.topic, again.body, again.msg_id, again.reconsume_times) == (topic, b"pulled", sent.msg_id, 1)
            await again.nack(delay_level=1)
            (third,) = await receive(popping, 1)
            assert (third.msg_id, third.reconsume_times) == (sent.msg_id, 2)
            await client.send(topic, b"popped", tags="T")
            (popped,) = await receive(popping, 1)
            assert (popped.body, popped.reconsume_times) == (b"popped", 0)
            await asyncio.gather(third.ack(), popped.ack())
        (place,) = (await client.admin.consume_stats(unique, retry_topic)).values()
        assert (place.consumer_offset, place.lag) == (2, 0)

    run(work)


# ---- lite pull


def test_assigned_queues_are_polled_repositioned_paused_and_committed(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(6):
            await client.send(topic, str(number), queue=number % 2)
        async with client.lite_pull_consumer(unique, start="earliest", auto_commit=False) as consumer:
            zero, one, *_ = await consumer.queues(topic)
            await consumer.assign([zero])
            assert bodies(await poll(consumer, 3)) == [b"0", b"2", b"4"]
            assert await consumer.poll(0.2) == []
            await consumer.assign([zero, one])
            assert consumer.assigned == [zero, one]
            assert bodies(await poll(consumer, 3)) == [b"1", b"3", b"5"]
            await consumer.seek(one, 1)
            assert [message.body for message in await poll(consumer, 2)] == [b"3", b"5"]
            await consumer.seek_to_beginning(zero)
            await consumer.pause([zero])
            assert await consumer.poll(0.5) == []
            await consumer.resume([zero])
            assert len(await poll(consumer, 3)) == 3
            await consumer.commit()
            assert (await consumer.committed(zero), await consumer.committed(one)) == (3, 3)
            await consumer.commit({zero: 1})
            assert await consumer.committed(zero) == 1
            await consumer.seek_to_end(zero)
            assert consumer.position(zero) == 3
            with pytest.raises(ClientError):
                await consumer.subscribe(topic)

    run(work)


def test_offsets_are_found_by_time(run: Run, unique: str) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(topic, b"old", queue=0)
        async with client.lite_pull_consumer(unique, start="earliest") as consumer:
            zero = (await consumer.queues(topic))[0]
            await consumer.assign([zero])
            (old,) = await poll(consumer, 1)
            while int(time.time() * 1000) <= old.store_timestamp + 1:
                await consumer.committed(zero)
            await client.send(topic, b"new", queue=0)
            (new,) = await poll(consumer, 1)
            assert await consumer.offset_by_time(zero, old.store_timestamp + 1) == 1
            await consumer.seek_to_time(new.store_timestamp, zero)
            assert bodies(await poll(consumer, 1)) == [b"new"]
            await consumer.seek_to_time(0, zero)
            assert bodies(await poll(consumer, 2)) == [b"new", b"old"]

    run(work)


def test_subscribed_members_share_queues_and_resume_at_their_offsets(run: Run, unique: str, server: Any) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with client.lite_pull_consumer(unique, start="earliest") as one:
            await one.subscribe(topic, "A || B")
            assert len(one.assigned) == 4
            async with connect(server.namesrv) as other_client, other_client.lite_pull_consumer(unique) as other:
                await other.subscribe(topic, "A || B")

                async def is_shared() -> bool:
                    return len(one.assigned) == 2 and len(other.assigned) == 2

                await until(is_shared, "two queues each")
            for number, tag in enumerate("ABCA"):
                await client.send(topic, f"{number}{tag}", tags=tag)
            assert bodies(await poll(one, 3)) == [b"0A", b"1B", b"3A"]
        async with client.lite_pull_consumer(unique, start="earliest") as again:
            await again.subscribe(topic, "A || B")
            await client.send(topic, b"later", tags="B")
            assert bodies(await poll(again, 1)) == [b"later"]
            await again.unsubscribe(topic)
            assert again.assigned == []

    run(work)


# ---- without asyncio


def test_synchronous_lite_pull_and_pop_consumers(server: Any, topic: str, unique: str) -> None:
    with sync.connect(server.namesrv) as client:
        for number in range(4):
            client.send(topic, str(number))
        with client.lite_pull_consumer(f"{unique}-lite", start="earliest") as lite:
            lite.assign(lite.queues(topic))
            polled: list[Message] = []
            while len(polled) < 4:
                polled += lite.poll(RECEIVE_S)
            assert bodies(polled) == [b"0", b"1", b"2", b"3"]
        with client.pop_consumer(f"{unique}-pop", topic, start="earliest") as popping:
            popped = [popping.receive(RECEIVE_S) for _ in range(4)]
            assert bodies(popped) == [b"0", b"1", b"2", b"3"]
        seen: list[bytes] = []
        with client.consumer(f"{unique}-push", topic, start="earliest") as consumer:

            def handle(message: sync.Received) -> None:
                seen.append(message.body)
                if len(seen) == 4:
                    consumer.close()

            consumer.run(handle, workers=2)
        assert sorted(seen) == [b"0", b"1", b"2", b"3"]
