"""Sending many messages in concurrent batches: they are read back complete and in order, from either broker."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pytest

from neve.client import AsyncClient, BatchItem, Message, MessageQueue
from neve.client.send.draft import timing
from neve.client.send.queue_selector import select_by_hash
from neve.errors import ClientError
from tests.kit.clock.waiting import until


async def bodies(client: AsyncClient, topic: str) -> dict[MessageQueue, list[str]]:
    return {
        queue: [message.body.decode() async for message in client.reader(topic, queue=queue)]
        for queue in await client.queues(topic)
    }


def test_batches_store_messages_once_and_keep_the_order_of_each_key(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        sender = client.batch_sender(max_messages=16, in_flight=4)
        for begin in range(0, 600, 100):
            numbers = range(begin, begin + 100)
            await sender.put_all(BatchItem(Message(topic, f"free {n}".encode())) for n in numbers)
            await sender.put_all(BatchItem(Message(topic, f"key {n}".encode()), order_key=n % 3) for n in numbers)
            await sender.put_all(BatchItem(Message(topic, f"queue {n}".encode()), queue=3) for n in numbers)
        await sender.flush()
        assert sender.sent == 1800
        found = await bodies(client, topic)
        told = [body.split() for of_queue in found.values() for body in of_queue]
        assert sorted((kind, int(n)) for kind, n in told) == [
            (kind, n) for kind in ("free", "key", "queue") for n in range(600)
        ]
        queues = sorted(found)
        for key in range(3):
            queue = select_by_hash(key)(queues, Message(topic, b""))
            keyed = [int(body[4:]) for body in found[queue] if body.startswith("key") and int(body[4:]) % 3 == key]
            assert keyed == list(range(key, 600, 3))
        assert numbered(found[queues[3]]) == list(range(600))
        assert all(found[queue] for queue in queues), "what has no lane is spread over all queues"

    run(work)


def numbered(of_queue: Collection[str]) -> list[int]:
    return [int(body.removeprefix("queue ")) for body in of_queue if body.startswith("queue")]


def test_messages_unfit_for_a_batch_are_sent_alone(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        sender = client.batch_sender(max_bytes=10_000)
        large = Message(topic, bytes(range(256)) * 200, properties={"a": "b"})
        soon = Message(topic, b"later")
        await sender.put_all([BatchItem(large), BatchItem(soon, timing=timing(1)), BatchItem(Message(topic, b"small"))])
        await sender.flush()
        assert sender.sent == 3
        found = dict[bytes, str | None]()

        async def are_there() -> bool:
            for queue in await client.queues(topic):
                found.update({m.body: m.properties.get("a") async for m in client.reader(topic, queue=queue)})
            return found.keys() >= {large.body, b"small"}

        await until(are_there, "both in their queues")  # Apache's broker makes acknowledged messages readable later.
        assert found[large.body] == "b"

    run(work)


def test_invalid_message_ends_the_sender_and_earlier_ones_are_counted(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        sender = client.batch_sender(max_messages=2)
        wrong = BatchItem(Message(topic, b"x"), queue=77)
        with pytest.raises(ClientError, match="has no queue 77"):
            await sender.put_all(
                [BatchItem(Message(topic, b"1"), queue=0), BatchItem(Message(topic, b"2"), queue=0), wrong, wrong]
            )
            await sender.flush()
        assert sender.sent == 2
        with pytest.raises(ClientError, match="exclude each other"):
            await client.batch_sender().put_all([BatchItem(Message(topic, b"x"), queue=1, order_key=1)])

    run(work)


def test_deliveries_have_queue_and_offset_of_their_messages(run: Callable[..., None]) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        async with client.batch_sender(max_messages=7) as sender:
            deliveries = [await sender.put(topic, f"{n}", keys=[f"k{n}"]) for n in range(50)]
            deliveries.append(await sender.put(Message(topic, b"alone", properties={"a": "b"}), delay_level=1))
        results = [delivery.result() for delivery in deliveries]
        assert len({one.msg_id for one in results}) == len({one.offset_msg_id for one in results}) == 51
        for number, result in enumerate(results[:50]):
            (message, *_) = (await client.pull(topic, result.queue, result.queue_offset, 1, wait=10)).messages
            assert (message.body, message.msg_id) == (f"{number}".encode(), result.msg_id)
            assert message.offset_msg_id == result.offset_msg_id

    run(work)
