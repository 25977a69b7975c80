"""The asyncio client: `async with connect("127.0.0.1:9876") as client: await client.send("topic", b"body")`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from neve.client.admin import Admin
from neve.client.allocation import Allocation
from neve.client.consumer import Consumer, ConsumerSettings
from neve.client.model import (
    BrokerInfo,
    ConsumeStats,
    Message,
    MessageQueue,
    PullResult,
    QueueStats,
    SendResult,
    TopicConfig,
)
from neve.client.options import ClientOptions
from neve.client.producer import Producer, Queue
from neve.client.pull import TOOLS_GROUP, Puller, Subscription
from neve.client.queue_selector import OrderKey
from neve.client.request_reply import Requests
from neve.client.route import TopicRoute
from neve.client.session import Session
from neve.client.transaction import Check, Checks, TransactionProducer

Topics = str | Iterable[str] | Mapping[str, str | Subscription]


def connect(namesrv: str, *, options: ClientOptions | None = None, **changes: Any) -> AsyncClient:
    """A client of the cluster behind these name servers (`host:port`, several joined by `;`).

    It connects when entered (`async with`) or started. `changes` are fields of `ClientOptions`.
    """
    return AsyncClient(namesrv, replace(options or ClientOptions(), **changes))


class AsyncClient:
    """Sends, reads, joins groups, administers. One is enough for a process; it may be shared by all tasks of a loop.

    Every call ends within its timeout. Errors are `NeveError`s: `BrokerError` (refused, with a code),
    `UnknownOutcome` (may have happened), `ConnectionFailed` (did not happen), `ClientError` (your arguments),
    `ProtocolError` (the peer talks nonsense).
    """

    def __init__(self, namesrv: str, options: ClientOptions) -> None:
        self._namesrv, self._options = namesrv, options
        self._session = Session(namesrv, options)
        self._producer = Producer(self._session)
        self._puller = Puller(self._session)
        self._admin = Admin(self._session)
        self._requests = Requests(self._session, self._producer)
        self._checks = Checks(self._session)
        self._consumers: list[Consumer] = []

    # ---- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Reaches a name server; `async with` does it."""
        await self._session.start()

    async def close(self) -> None:
        """Closes all consumers, leaves all groups and closes the connections."""
        for consumer in self._consumers:
            await consumer.close()
        await self._checks.close()
        await self._session.close()

    @property
    def client_id(self) -> str:
        return self._session.client_id

    # ---- sending

    async def send(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        delay_level: int = 0,
        delay: float | None = None,
        deliver_at_ms: int | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> SendResult:
        """Sends one message and waits until a broker has stored it.

        Args:
            keys: words to find the message by.
            queue: to which queue; a number means the queue of that number on any of the topic's brokers, a function
                picks one of the topic's queues for the message.
            order_key: messages with the same key go to the same queue, the one that RocketMQ's
                SelectMessageQueueByHash takes; await one before the next is sent to keep their order.
            delay_level: deliver after 1 s, 5 s, 10 s, 30 s, 1 m … (1..18).
            delay: deliver after so many seconds.
            deliver_at_ms: deliver at that time, in ms since 1970. With this or `delay` the result has a `recall_handle`
                that takes the message back.

        Raises:
            BrokerError: refused.
            UnknownOutcome: no broker confirmed it, and at least one may have stored it.
            ClientError: what no broker would take: a name, a property, an empty body, one over `max_message_size`.
        """
        return await self._producer.send(
            topic,
            body,
            tags=tags,
            keys=keys,
            properties=properties,
            queue=queue,
            order_key=order_key,
            delay_level=delay_level,
            delay=delay,
            deliver_at_ms=deliver_at_ms,
            flag=flag,
            timeout=timeout,
        )

    def send_async(self, topic: str, body: bytes | str, **arguments: Any) -> asyncio.Task[SendResult]:
        """As `send`, at once and beside the caller; await the task for the result.

        Another broker is tried after silence and broken connections; a broker's refusal is final, as in Java's client.
        """
        return asyncio.create_task(self._producer.send(topic, body, **{"retry_on": (), **arguments}))

    async def send_oneway(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Sends and asks for no answer: it may be lost without a trace."""
        await self._producer.send_oneway(
            topic,
            body,
            tags=tags,
            keys=keys,
            properties=properties,
            queue=queue,
            order_key=order_key,
            flag=flag,
            timeout=timeout,
        )

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[bytes | str | Message],
        *,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        """Sends several messages of one topic to one queue, with neighbouring offsets, in one request."""
        return await self._producer.send_batch(topic, messages, queue=queue, order_key=order_key, timeout=timeout)

    async def recall(self, topic: str, handle: str, *, timeout: float | None = None) -> str:
        """Takes back a message that was sent with `delay` or `deliver_at_ms` and is not delivered yet; its id.

        `handle` is the `recall_handle` of its SendResult. A recall in the second of the delivery may come too late.

        Raises:
            BrokerError: NO_PERMISSION (Apache's broker needs `recallMessageEnable=true`), TOPIC_NOT_EXIST, or
                ILLEGAL_OPERATION when the time is past or the handle is not this broker's.
        """
        return await self._producer.recall(topic, handle, timeout=timeout)

    def transaction_producer(self, group: str, *, check: Check) -> TransactionProducer:
        """A producer of transactional messages; enter it to join its group.

        Args:
            group: not the group of ordinary sends. Every member must be able to answer for every other.
            check: called with a message whose end the broker does not know, at any time, also for transactions of
                members that are gone; returns, or awaits, a LocalTransactionState. Its error counts as UNKNOWN.
        """
        return TransactionProducer(self._session, self._producer, self._checks, group, check)

    # ---- request and reply

    async def request(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        flag: int = 0,
        timeout: float = 5.0,
    ) -> Message:
        """Sends a message and waits for the reply of whoever consumes it.

        Raises:
            UnknownOutcome: no reply within `timeout` seconds; the message may have been consumed all the same.
            BrokerError: the message was refused.
        """
        return await self._requests.request(
            topic,
            body,
            tags=tags,
            keys=keys,
            properties=properties,
            queue=queue,
            order_key=order_key,
            flag=flag,
            timeout=timeout,
        )

    async def reply(
        self,
        request: Message,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        """Answers a consumed message that was sent with `request`.

        Raises:
            ClientError: it was not.
            BrokerError: the asker is gone (SYSTEM_ERROR).
        """
        return await self._requests.reply(request, body, tags=tags, keys=keys, properties=properties, timeout=timeout)

    # ---- consuming in a group

    def consumer(
        self,
        group: str,
        topics: Topics,
        *,
        start: str | int = "last",
        auto_ack: bool = True,
        in_order: bool = False,
        broadcast: bool = False,
        allocation: str | Allocation = "average",
        pull_batch: int = 32,
        max_buffered: int = 1000,
        max_buffered_per_queue: int = 1000,
        max_buffered_bytes: int = 64 << 20,
        long_poll: float = 15.0,
        max_redeliveries: int | None = None,
        pause_after_nack: float = 1.0,
        offsets_directory: str | Path | None = None,
    ) -> Consumer:
        """A member of a group; enter it to join.

        Args:
            topics: a name, names, or {name: "*" | "TagA || TagB" | Subscription}.
            start: where a group without a stored offset begins: `first`, `last`, or ms since 1970.
            auto_ack: asking for the next message, or leaving the `with` block unharmed, acks the one before;
                else call `await message.ack()`.
            in_order: each queue has one reader in the group (locked at its broker) and one message in hand at a time;
                a nack repeats the message after `pause_after_nack` seconds, before any other of its queue.
            broadcast: every member reads every queue; offsets are kept in a file below `offsets_directory`
                (default `~/.rocketmq_offsets`), there are no retries.
            allocation: `average`, `circular`, `consistent_hash`, or one made with `neve.client.allocation`; the same
                for all members.
            max_buffered: no more is pulled while so many messages wait for the application; `max_buffered_bytes`
                likewise, and `max_buffered_per_queue` for each queue.
            max_redeliveries: after so many nacks a message goes to %DLQ%group; 16, in order without end.

        Raises:
            ClientError: an argument is out of its range.
        """
        settings = ConsumerSettings(
            start=start,
            auto_ack=auto_ack,
            in_order=in_order,
            broadcast=broadcast,
            allocation=allocation,
            pull_batch=pull_batch,
            max_buffered=max_buffered,
            max_buffered_per_queue=max_buffered_per_queue,
            max_buffered_bytes=max_buffered_bytes,
            long_poll=long_poll,
            max_redeliveries=max_redeliveries,
            pause_after_nack=pause_after_nack,
            offsets_directory=offsets_directory,
        )
        consumer = Consumer(self._session, group, _subscriptions(topics), settings)
        self._consumers = [*(known for known in self._consumers if not known.is_closed), consumer]
        return consumer

    # ---- reading by offset

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The topic's queues to read from, sorted."""
        return await self._puller.queues(topic)

    async def pull(
        self,
        topic: str,
        queue: int | MessageQueue,
        offset: int,
        max_count: int = 32,
        *,
        expression: str | Subscription = "*",
        group: str = TOOLS_GROUP,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> PullResult:
        """Up to `max_count` messages of one queue from `offset` on; `wait` seconds for the first when there is none."""
        target = await self._puller.resolve(topic, queue)
        wanted = _subscription(expression)
        return await self._puller.pull(
            target, offset, max_count, group=group, subscription=wanted, wait=wait, timeout=timeout
        )

    def reader(
        self,
        topic: str,
        *,
        start: str | int = "first",
        queue: int | MessageQueue | None = None,
        expression: str | Subscription = "*",
    ) -> AsyncIterator[Message]:
        """The topic's messages, queue by queue, up to each queue's end as it is when the reader comes to it."""
        return self._puller.read(topic, start=start, queue=queue, subscription=_subscription(expression))

    async def min_offset(self, topic: str, queue: int | MessageQueue) -> int:
        return await self._puller.min_offset(await self._puller.resolve(topic, queue))

    async def max_offset(self, topic: str, queue: int | MessageQueue) -> int:
        """The offset that the next message will get."""
        return await self._puller.max_offset(await self._puller.resolve(topic, queue))

    async def offset_by_time(self, topic: str, queue: int | MessageQueue, time_ms: int) -> int:
        """The first offset that was stored at `time_ms` or later."""
        return await self._puller.offset_by_time(await self._puller.resolve(topic, queue), time_ms)

    async def committed(self, group: str, topic: str, queue: int | MessageQueue) -> int | None:
        """The next offset that the group will read; None if it has none."""
        return await self._puller.committed(group, await self._puller.resolve(topic, queue))

    async def commit(self, group: str, topic: str, queue: int | MessageQueue, offset: int) -> None:
        await self._puller.commit(group, await self._puller.resolve(topic, queue), offset)

    # ---- administration

    async def create_topic(
        self,
        name: str,
        queues: int = 8,
        attributes: Mapping[str, str | None] | None = None,
        *,
        perm: int = 6,
        broker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Creates or changes a topic on all masters; an attribute of None is removed."""
        await self._admin.create_topic(name, queues, attributes, perm=perm, broker=broker, timeout=timeout)

    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        await self._admin.delete_topic(name, timeout=timeout)

    async def topic_config(self, name: str, *, broker: str | None = None) -> TopicConfig:
        return await self._admin.topic_config(name, broker=broker)

    async def topic_route(self, name: str) -> TopicRoute:
        return await self._admin.topic_route(name)

    async def topic_list(self) -> list[str]:
        return await self._admin.topic_list()

    async def topic_stats(self, name: str) -> dict[MessageQueue, QueueStats]:
        return await self._admin.topic_stats(name)

    async def consume_stats(self, group: str, topic: str) -> dict[MessageQueue, ConsumeStats]:
        return await self._admin.consume_stats(group, topic)

    async def cluster_info(self) -> dict[str, BrokerInfo]:
        return await self._admin.cluster_info()

    async def view_message(self, msg_id: str, topic: str | None = None) -> Message:
        return await self._admin.view_message(msg_id, topic)

    async def query_messages(self, topic: str, key: str, *, max_count: int = 32) -> list[Message]:
        return await self._admin.query_messages(topic, key, max_count=max_count)


def _subscription(expression: str | Subscription) -> Subscription:
    return expression if isinstance(expression, Subscription) else Subscription(expression)


def _subscriptions(topics: Topics) -> dict[str, Subscription]:
    if isinstance(topics, str):
        return {topics: Subscription()}
    if isinstance(topics, Mapping):
        return {topic: _subscription(expression) for topic, expression in topics.items()}
    return {topic: Subscription() for topic in topics}
