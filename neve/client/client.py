"""The asyncio client: `async with connect("127.0.0.1:9876") as client: await client.send("topic", b"body")`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self, TypeVar

from neve.client.admin import Admin
from neve.client.consumers.factory import Consumers, subscription
from neve.client.group.in_work import Asker, current_asker
from neve.client.group.pop_requests import set_request_mode
from neve.client.group.pull import TOOLS_GROUP, Puller, Subscription
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
from neve.client.net.route import TopicRoute
from neve.client.net.session import Session
from neve.client.options import ClientOptions
from neve.client.send.producer import Producer, Queue
from neve.client.send.queue_selector import OrderKey
from neve.client.send.request_reply import Requests
from neve.client.send.transaction import Check, Checks, TransactionProducer
from neve.client.trace.sender import TraceSender

T = TypeVar("T")


def connect(namesrv: str, *, options: ClientOptions | None = None, **changes: Any) -> AsyncClient:
    """A client of the cluster behind these name servers (`host:port`, several joined by `;`).

    It connects when entered (`async with`) or started. `changes` are fields of `ClientOptions`.
    """
    return AsyncClient(namesrv, replace(options or ClientOptions(), **changes))


class AsyncClient:
    """Sends, reads, joins groups, administers. One is enough for a process; it may be shared by all tasks of a loop.

    Every call ends within its `timeout`, or where it takes none within that of the options; a `pull` has its `wait` and
    15 s more, a query by key or id the time of the options for each broker.

    Errors are `NeveError`s: `BrokerError` (refused, with a code), `UnknownOutcome` (may have happened),
    `ConnectionFailed` (did not happen), `ClientError` (your arguments), `ProtocolError` (the peer talks nonsense).
    """

    def __init__(self, namesrv: str, options: ClientOptions) -> None:
        self._options = options
        self._session = Session(namesrv, options)
        self._producer = Producer(self._session)
        self._puller = Puller(self._session)
        self._admin = Admin(self._session)
        self._requests = Requests(self._session, self._producer)
        self._checks = Checks(self._session)
        self._consumers = Consumers(self._session)
        traces = self._session.traces
        self._trace_sender = None if traces is None else TraceSender(self._session, self._producer, traces)
        self.consumer = self._consumers.consumer
        self.pop_consumer = self._consumers.pop_consumer
        self.lite_pull_consumer = self._consumers.lite_pull_consumer

    # ---- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Reaches a name server; `async with` does it."""
        await self._session.start()
        if self._trace_sender is not None:
            self._session.spawn(self._trace_sender.forever(), "traces")

    def close(self) -> Coroutine[Any, Any, None]:
        """Closes all consumers, leaves all groups and closes the connections."""
        return self._close(current_asker())

    async def _close(self, closer: Asker) -> None:
        await self._consumers.close(closer)
        await self._checks.close()
        if self._trace_sender is not None:
            await self._trace_sender.close()
        await self._session.close()

    @property
    def client_id(self) -> str:
        return self._session.client_id

    @property
    def traces_dropped(self) -> int:
        """How many traces found the buffer full or could not be sent."""
        return 0 if self._session.traces is None else self._session.traces.dropped

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
        sending = self._producer.send_oneway(
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
        await self._session.within(timeout, sending)

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
        return await self._session.within(timeout, self._producer.recall(topic, handle, timeout=timeout))

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

    # ---- consuming in a group: `consumer`, `pop_consumer`, `lite_pull_consumer` are those of `Consumers`

    async def set_request_mode(self, group: str, topic: str, mode: str, *, share_queues: int = -1) -> None:
        """How brokers divide the topic among the group's popping members.

        Args:
            mode: `PULL`, each queue to one member; or `POP`, every member pops from all queues.
            share_queues: with POP, from so many queues of other members; -1 from all.
        """
        await self._session.within(None, set_request_mode(self._session, group, topic, mode, share_queues))

    # ---- reading by offset

    async def queues(self, topic: str) -> list[MessageQueue]:
        """The topic's queues to read from, sorted."""
        return await self._session.within(None, self._puller.queues(topic))

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
        limit = self._puller.limit(wait, timeout)

        async def pull() -> PullResult:
            target = await self._puller.resolve(topic, queue)
            return await self._puller.pull(
                target, offset, max_count, group=group, subscription=subscription(expression), wait=wait, timeout=limit
            )

        return await self._session.within(limit, pull())

    def reader(
        self,
        topic: str,
        *,
        start: str | int = "first",
        queue: int | MessageQueue | None = None,
        expression: str | Subscription = "*",
    ) -> AsyncIterator[Message]:
        """The topic's messages, queue by queue, up to each queue's end as it is when the reader comes to it."""
        return self._puller.read(topic, start=start, queue=queue, subscription=subscription(expression))

    async def min_offset(self, topic: str, queue: int | MessageQueue) -> int:
        return await self._at(topic, queue, self._puller.min_offset)

    async def max_offset(self, topic: str, queue: int | MessageQueue) -> int:
        """The offset that the next message will get."""
        return await self._at(topic, queue, self._puller.max_offset)

    async def offset_by_time(self, topic: str, queue: int | MessageQueue, time_ms: int) -> int:
        """The first offset that was stored at `time_ms` or later."""
        return await self._at(topic, queue, lambda target: self._puller.offset_by_time(target, time_ms))

    async def committed(self, group: str, topic: str, queue: int | MessageQueue) -> int | None:
        """The next offset that the group will read; None if it has none."""
        return await self._at(topic, queue, lambda target: self._puller.committed(group, target))

    async def commit(self, group: str, topic: str, queue: int | MessageQueue, offset: int) -> None:
        await self._at(topic, queue, lambda target: self._puller.commit(group, target, offset))

    async def _at(self, topic: str, queue: int | MessageQueue, work: Callable[[MessageQueue], Awaitable[T]]) -> T:
        """`work` with the queue that is meant, within the time of a call."""

        async def inside() -> T:
            return await work(await self._puller.resolve(topic, queue))

        return await self._session.within(None, inside())

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
        creating = self._admin.create_topic(name, queues, attributes, perm=perm, broker=broker, timeout=timeout)
        await self._session.within(timeout, creating)

    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        await self._session.within(timeout, self._admin.delete_topic(name, timeout=timeout))

    async def topic_config(self, name: str, *, broker: str | None = None) -> TopicConfig:
        return await self._session.within(None, self._admin.topic_config(name, broker=broker))

    async def topic_route(self, name: str) -> TopicRoute:
        return await self._session.within(None, self._admin.topic_route(name))

    async def topic_list(self) -> list[str]:
        return await self._session.within(None, self._admin.topic_list())

    async def topic_stats(self, name: str) -> dict[MessageQueue, QueueStats]:
        return await self._session.within(None, self._admin.topic_stats(name))

    async def consume_stats(self, group: str, topic: str) -> dict[MessageQueue, ConsumeStats]:
        return await self._session.within(None, self._admin.consume_stats(group, topic))

    async def cluster_info(self) -> dict[str, BrokerInfo]:
        return await self._session.within(None, self._admin.cluster_info())

    async def broker_config(self, broker: str) -> dict[str, str]:
        """The configuration in force of a broker, by name."""
        return await self._admin.broker_config(broker)

    async def view_message(self, msg_id: str, topic: str | None = None) -> Message:
        return await self._admin.view_message(msg_id, topic)

    async def query_messages(self, topic: str, key: str, *, max_count: int = 32) -> list[Message]:
        return await self._admin.query_messages(topic, key, max_count=max_count)
