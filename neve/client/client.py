"""The asyncio client: `async with connect("127.0.0.1:9876") as client: await client.send("topic", b"body")`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from neve.client.admin import Admin
from neve.client.consumers.lite_pull import LitePullConsumer
from neve.client.consumers.open_consumers import OpenConsumers
from neve.client.consumers.poll_source import LitePullSettings
from neve.client.consumers.pop import PopConsumer
from neve.client.consumers.pop_source import PopSettings
from neve.client.consumers.push import Consumer
from neve.client.group.allocation import Allocation
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.ownership import Owner, current_owner
from neve.client.group.pop_requests import POP_BATCH_MAX, set_request_mode
from neve.client.group.pull import (
    MAX_BYTES,
    TOOLS_GROUP,
    Puller,
    StoredPull,
    Subscription,
    Topics,
    inflated_result,
    subscription,
    subscriptions,
)
from neve.client.group.send_back import SendBack
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
from neve.client.send.batch_sender import BatchLimits, BatchSender
from neve.client.send.draft import sending, target_queue
from neve.client.send.producer import Producer
from neve.client.send.queue_selector import OrderKey, Queue
from neve.client.send.request_reply import Requests, reply_topic
from neve.client.send.trace_sender import TraceSender
from neve.client.send.transaction import Check, Checks, TransactionProducer
from neve.client.times import Start, Time, time_ms
from neve.client.trace.recorder import Traces
from neve.client.validators import check_group
from neve.errors import ConnectionFailed

_REDELIVERIES = 16  # RocketMQ's default of a group
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
        self._traces = traces = Traces(self._session.next_unique_key, options.now_ms) if options.trace else None
        self._producer = Producer(self._session, traces)
        self._puller = Puller(self._session)
        self._admin = Admin(self._session)
        self._requests = Requests(self._session, self._producer)
        self._checks = Checks(self._session, traces)
        self._consumers = OpenConsumers()
        self._trace_sender = None if traces is None else TraceSender(self._session, self._producer, traces)

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
        return self._close(current_owner())

    async def _close(self, closer: Owner) -> None:
        async with AsyncExitStack() as stack:  # from the last to the first, whichever of them fails
            stack.push_async_callback(self._session.close)
            if self._trace_sender is not None:
                stack.push_async_callback(self._trace_sender.close)
            stack.push_async_callback(self._checks.close)
            stack.push_async_callback(self._consumers.close, closer)

    @property
    def options(self) -> ClientOptions:
        return self._options

    @property
    def client_id(self) -> str:
        return self._session.client_id

    @property
    def traces_dropped(self) -> int:
        """How many traces found the buffer full or could not be sent."""
        return 0 if self._traces is None else self._traces.dropped

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
        what = sending(
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
        return await self._producer.send(what)

    def send_async(self, topic: str, body: bytes | str, **arguments: Any) -> asyncio.Task[SendResult]:
        """As `send`, at once and beside the caller; await the task for the result.

        Another broker is tried after silence and broken connections; a broker's refusal is final, as in Java's client.
        """

        async def send() -> SendResult:
            return await self._producer.send(sending(topic, body, **arguments), retry_on=())

        return asyncio.create_task(send())

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
        """Sends and asks for no answer: it may be lost without a trace.

        Raises:
            ConnectionFailed: it was not sent.
        """
        what = sending(
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
        await self._session.within(timeout, self._producer.send_oneway(what), too_late=ConnectionFailed)

    def batch_sender(self, **limits: Any) -> BatchSender:
        """For many messages: they are packed into batches, and several of these are on their way at a time.

        `put` them as they come, `flush` at the end. `limits` are fields of `BatchLimits`: `messages` and `size` (bytes)
        of a batch, `in_flight`, and `patience`, the seconds for which a batch is sent again while no broker can be
        reached, all are busy, or no answer came within `attempt_timeout` seconds.

        A batch without an answer may be stored twice: `repeated` counts such messages, and a warning is logged.
        """
        return BatchSender(self._session, self._producer, BatchLimits(**limits))

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
        target = target_queue(queue, order_key)
        return await self._producer.send_batch(topic, messages, queue=target, timeout=timeout)

    async def send_to_group(self, message: Message, group: str, *, timeout: float | None = None) -> None:
        """Sends a stored message again to one group, at once, by a copy in its retry topic; its id stays.

        Raises:
            BrokerError: TOPIC_NOT_EXIST: the group has no retry topic, no consumer of it was ever there.
        """
        check_group(group)
        copying = SendBack(self._session, group, _REDELIVERIES).send_copy(message, 0, delayed=False)
        await self._session.within(timeout, copying)

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
        what = sending(
            topic,
            body,
            tags=tags,
            keys=keys,
            properties=properties,
            queue=queue,
            order_key=order_key,
            flag=flag,
        )
        return await self._requests.request(what, timeout)

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
            BrokerError: the owner is gone (SYSTEM_ERROR).
        """
        topic = reply_topic(request)
        what = sending(topic, body, tags=tags, keys=keys, properties=properties, timeout=timeout)
        return await self._requests.reply(request, what)

    # ---- consuming in a group

    def consumer(
        self,
        group: str,
        topics: Topics,
        *,
        start: Start = "latest",
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
        consume_timeout: float = 900.0,
        close_timeout: float = 15.0,
        offsets_directory: str | Path | None = None,
    ) -> Consumer:
        """A member of a group; enter it to join.

        Args:
            topics: a name, names, or {name: "*" | "TagA || TagB" | Subscription}.
            start: where a group without a stored offset begins: `first`, `last`, or ms since 1970.
            auto_ack: asking for the next message, or leaving the `with` block unharmed, acks the one that the same
                task (or thread) got before; else call `await message.ack()`.
            in_order: each queue has one reader in the group (locked at its broker) and one message in hand at a time;
                a nack repeats the message after `pause_after_nack` seconds, before any other of its queue.
            broadcast: every member reads every queue; offsets are kept in a file below `offsets_directory`
                (default `~/.rocketmq_offsets`), there are no retries.
            allocation: `average`, `circular`, `consistent_hash`, or one made with `neve.client.group.allocation`;
                the same for all members.
            max_buffered: no more is pulled while so many messages wait for the application; `max_buffered_bytes`
                likewise, and `max_buffered_per_queue` for each queue.
            max_redeliveries: after so many nacks a message goes to %DLQ%group; 16, in order without end.
            consume_timeout: seconds after which a message that was not settled is taken back and delivered again, so
                that the queue's offset can go on; settling it then has no effect. Not in order.
            close_timeout: seconds that closing waits for what is in work: for handlers of `run`, and for other tasks
                and threads that have not settled what they got. What is not settled by then comes again.

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
            consume_timeout=consume_timeout,
            close_timeout=close_timeout,
            offsets_directory=offsets_directory,
        )
        return self._consumers.keep(Consumer(self._session, group, subscriptions(topics), settings, self._traces))

    def pop_consumer(
        self,
        group: str,
        topics: Topics,
        *,
        start: Literal["earliest", "latest"] = "latest",
        auto_ack: bool = True,
        in_order: bool = False,
        invisible: float = 60.0,
        hold_limit: float = 3600.0,
        close_timeout: float = 15.0,
        pop_batch: int = POP_BATCH_MAX,
        max_buffered: int = 96,
        long_poll: float = 15.0,
        max_redeliveries: int = 16,
    ) -> PopConsumer:
        """A member of a group that pops: the broker hands each message to one member for a while; enter it to join.

        Args:
            start: where a group that never popped here begins: `first` or `last`.
            in_order: no more of a queue until all that was popped from it is settled.
            invisible: seconds that a message is this member's own; renewed as long as it is held, so it is only the
                wait before others get what a dead member held.
            hold_limit: seconds after which a held message is renewed no more, or sent back if it was pulled from
                %RETRY%group.
            max_redeliveries: after so many a nack sends the message to %DLQ%group.
            topics, auto_ack, max_buffered, close_timeout: as of `consumer`.

        Raises:
            ClientError: an argument is out of its range.
        """
        settings = PopSettings(
            start=start,
            auto_ack=auto_ack,
            in_order=in_order,
            invisible=invisible,
            hold_limit=hold_limit,
            close_timeout=close_timeout,
            pop_batch=pop_batch,
            max_buffered=max_buffered,
            long_poll=long_poll,
            max_redeliveries=max_redeliveries,
        )
        return self._consumers.keep(PopConsumer(self._session, group, subscriptions(topics), settings, self._traces))

    def lite_pull_consumer(
        self,
        group: str,
        *,
        start: Start = "latest",
        auto_commit: bool = True,
        allocation: str | Allocation = "average",
        pull_batch: int = 10,
        max_buffered: int = 1000,
        long_poll: float = 20.0,
    ) -> LitePullConsumer:
        """A consumer that is asked: enter it, `subscribe` or `assign`, then `poll`.

        Args:
            auto_commit: a poll means that the messages of the poll before are done with; else call `commit`.
            start, allocation, max_buffered: as of `consumer`.

        Raises:
            ClientError: an argument is out of its range.
        """
        settings = LitePullSettings(
            start=start,
            auto_commit=auto_commit,
            allocation=allocation,
            pull_batch=pull_batch,
            max_buffered=max_buffered,
            long_poll=long_poll,
        )
        return self._consumers.keep(LitePullConsumer(self._session, group, settings, self._traces))

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
            wanted = subscription(expression)
            return inflated_result(
                await self._puller.pull(
                    target, offset, max_count, group=group, subscription=wanted, wait=wait, timeout=limit
                )
            )

        return await self._session.within(limit, pull())

    async def pull_records(
        self,
        queue: MessageQueue,
        offset: int,
        max_count: int = 32,
        *,
        expression: str | Subscription = "*",
        group: str = TOOLS_GROUP,
        wait: float = 0.0,
        timeout: float | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> StoredPull:
        """As `pull`, with the records as the broker stores them: for who copies them, or looks at few of their fields.

        Args:
            max_bytes: of records in one answer; a broker may give fewer.
        """
        limit = self._puller.limit(wait, timeout)
        wanted = subscription(expression)
        pulling = self._puller.pull_records(
            queue, offset, max_count, group=group, wanted=wanted, wait=wait, timeout=limit, max_bytes=max_bytes
        )
        return await self._session.within(limit, pulling)

    def reader(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        queue: int | MessageQueue | None = None,
        expression: str | Subscription = "*",
    ) -> AsyncIterator[Message]:
        """The topic's messages, queue by queue, up to each queue's end as it is when the reader comes to it.

        Args:
            start: `first`, or ms since 1970: from the messages stored then. What comes from now on is a consumer's.

        Raises:
            ClientError: `start` is neither.
        """
        return self._puller.read(topic, start=start, queue=queue, subscription=subscription(expression))

    async def min_offset(self, topic: str, queue: int | MessageQueue) -> int:
        return await self._at(topic, queue, self._puller.min_offset)

    async def max_offset(self, topic: str, queue: int | MessageQueue) -> int:
        """The offset that the next message will get."""
        return await self._at(topic, queue, self._puller.max_offset)

    async def offset_by_time(self, topic: str, queue: int | MessageQueue, when: Time) -> int:
        """Return the offset of the first message that was stored at `when` or later.

        Apache RocketMQ's brokers assume that store times are in order; after a step of the clock they may return a
        later offset.
        """
        at = time_ms(when)
        return await self._at(topic, queue, lambda target: self._puller.offset_by_time(target, at))

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
        queues: int | None = None,
        attributes: Mapping[str, str | None] | None = None,
        *,
        perm: int | None = None,
        broker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Create a topic on all masters, or change it; an attribute of None is removed.

        Where the topic exists, arguments that are not given keep their present values. A new topic gets 8 queues to
        read and to write.

        Raises:
            ClientError: the topic has more queues to read than `queues`; nothing is changed.
        """
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
        return await self._session.within(None, self._admin.broker_config(broker))

    async def view_message(self, msg_id: str, topic: str | None = None) -> Message:
        return await self._admin.view_message(msg_id, topic)

    async def query_messages(self, topic: str, key: str, *, max_count: int = 32) -> list[Message]:
        return await self._admin.query_messages(topic, key, max_count=max_count)
