"""The asyncio client: `async with connect("127.0.0.1:9876") as client: await client.send("topic", b"body")`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, Unpack

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
from neve.client.group.pop_requests import POP_BATCH_MAX
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
    Message,
    MessageQueue,
    PullResult,
    SendResult,
)
from neve.client.net.session import Session
from neve.client.options import ClientOptions, OptionChanges
from neve.client.send.batch_sender import BatchLimits, BatchSender
from neve.client.send.draft import send_request, target_queue
from neve.client.send.producer import Producer
from neve.client.send.queue_selector import OrderKey, Queue
from neve.client.send.request_reply import ReplyRequests, reply_topic
from neve.client.send.trace_sender import TraceSender
from neve.client.send.transaction import Check, Checks, TransactionProducer
from neve.client.times import Start, Time, time_ms
from neve.client.trace.recorder import Traces
from neve.client.validators import check_group
from neve.errors import ConnectionFailed

_REDELIVERIES = 16  # RocketMQ's default for a group
T = TypeVar("T")


def connect(namesrv: str, *, options: ClientOptions | None = None, **changes: Unpack[OptionChanges]) -> AsyncClient:
    """Return a client of the cluster of these name servers. `async with` connects it.

    Args:
        namesrv: the name servers, as `host:port`, separated by `;`.
        options: the options; by default `ClientOptions()`.
        **changes: fields of `ClientOptions` that differ from `options`.

    Raises:
        ClientError: no name server is given, or an option is out of range.
    """
    return AsyncClient(namesrv, replace(options or ClientOptions(), **changes))


class AsyncClient:
    """A client of one cluster: it sends, reads, and creates consumers. All tasks of one event loop may share it.

    Every call has a time limit: its `timeout`, or the one of the options. A `pull` may last 15 s longer than its
    `wait`. A query by key or id may last as long as the timeout of the options at each broker.

    All errors are subclasses of `NeveError`: see `neve.errors`.
    """

    def __init__(self, namesrv: str, options: ClientOptions) -> None:
        self._options = options
        self._session = Session(namesrv, options)
        self._traces = traces = Traces(self._session.next_unique_key, options.now_ms) if options.trace else None
        self._producer = Producer(self._session, traces)
        self._puller = Puller(self._session)
        self._admin = Admin(self._session)
        self._requests = ReplyRequests(self._session, self._producer)
        self._checks = Checks(self._session, traces)
        self._consumers = OpenConsumers()
        self._trace_sender = None if traces is None else TraceSender(self._session, self._producer, traces)

    # ---- lifecycle

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Connect to a name server. `async with` does this.

        Raises:
            ConnectionFailed: no name server is reachable.
        """
        await self._session.start()
        if self._trace_sender is not None:
            self._session.spawn(self._trace_sender.forever(), "traces")

    def close(self) -> Coroutine[Any, Any, None]:
        """Close all consumers and transaction producers, leave their groups, and close the connections."""
        return self._close(current_owner())

    async def _close(self, closer: Owner) -> None:
        async with AsyncExitStack() as stack:  # in reverse order, also after an error
            stack.push_async_callback(self._session.close)
            if self._trace_sender is not None:
                stack.push_async_callback(self._trace_sender.close)
            stack.push_async_callback(self._checks.close)
            stack.push_async_callback(self._consumers.close, closer)

    @property
    def options(self) -> ClientOptions:
        """The options of this client."""
        return self._options

    @property
    def admin(self) -> Admin:
        """The administration of topics, groups and messages."""
        return self._admin

    @property
    def client_id(self) -> str:
        """The id by which brokers know this client: its IP address and its instance name."""
        return self._session.client_id

    @property
    def traces_dropped(self) -> int:
        """The number of message traces that were dropped because the buffer was full or a send failed."""
        return 0 if self._traces is None else self._traces.dropped

    # ---- sending

    async def send(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        delay_level: int = 0,
        delay: float | None = None,
        deliver_at: Time | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> SendResult:
        """Send one message, and wait until a broker has stored it.

        After a timeout, a broken connection or a temporary error the message is sent to another broker, so it may be
        stored twice, with one `msg_id`.

        Args:
            topic: the topic, or a `Message`, which brings its own body, tags, keys, properties and flag.
            body: the body; a str is encoded as UTF-8.
            tags: the tag, by which consumers can filter.
            keys: words by which the message can be found, as a sequence or separated by blanks.
            properties: properties of the application.
            queue: the target queue; a number selects that queue on any broker of the topic; a function selects one of
                the topic's queues for the message. By default brokers take turns.
            order_key: messages with one key go to one queue, as by RocketMQ's SelectMessageQueueByHash. To keep their
                order, await one send before the next.
            delay_level: the delay level, 1 to 18 for 1 s, 5 s, 10 s, 30 s, 1 m … 2 h.
            delay: the delay in seconds.
            deliver_at: the time of delivery, a datetime with a time zone or milliseconds since 1970. With this or
                `delay` the result has a `recall_handle`.
            flag: the flag of the message, an integer that RocketMQ stores with it.
            timeout: the time limit in seconds, retries included.

        Raises:
            ClientError: an argument is invalid, or the body is empty or larger than `max_message_size`.
            BrokerError: a broker refused the message, and no other accepted it.
            UnknownOutcome: no broker confirmed the message, and at least one may have stored it.
            ConnectionFailed: no broker was reachable.
        """
        what = send_request(
            topic,
            body,
            tags=tags,
            keys=keys,
            properties=properties,
            queue=queue,
            order_key=order_key,
            delay_level=delay_level,
            delay=delay,
            deliver_at=deliver_at,
            flag=flag,
            timeout=timeout,
        )
        return await self._producer.send(what)

    def send_async(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        delay_level: int = 0,
        delay: float | None = None,
        deliver_at: Time | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> asyncio.Task[SendResult]:
        """Begin to send one message, and return a task with the result.

        Arguments and errors are those of `send`; the task raises the errors. As in Java's client, the message is sent
        to another broker only after a timeout or a broken connection, and an error code of a broker is final.
        """

        async def send() -> SendResult:
            what = send_request(
                topic,
                body,
                tags=tags,
                keys=keys,
                properties=properties,
                queue=queue,
                order_key=order_key,
                delay_level=delay_level,
                delay=delay,
                deliver_at=deliver_at,
                flag=flag,
                timeout=timeout,
            )
            return await self._producer.send(what, retry_on=())

        return asyncio.create_task(send())

    async def send_oneway(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Send one message without waiting for an answer. It may be lost without an error.

        Arguments are those of `send`.

        Raises:
            ClientError: an argument is invalid.
            ConnectionFailed: the message was not sent.
        """
        what = send_request(
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
        await self._session.requests.within(timeout, self._producer.send_oneway(what), too_late=ConnectionFailed)

    def batch_sender(
        self,
        *,
        max_messages: int = 200,
        max_bytes: int = 256 << 10,
        in_flight: int = 8,
        retry_timeout: float = 30.0,
        attempt_timeout: float = 10.0,
    ) -> BatchSender:
        """Return a sender for many messages, which packs them into batches and sends several batches at a time.

        A batch without an answer is sent again, so its messages may be stored twice, with one `msg_id`. `repeated`
        counts these messages, and a warning is logged.

        Args:
            max_messages: the largest number of messages in a batch.
            max_bytes: the largest size of a batch in bytes.
            in_flight: the largest number of batches that are on their way.
            retry_timeout: the time in seconds for which a batch is sent again while no broker is reachable, all are
                busy, or no answer arrives.
            attempt_timeout: the time in seconds to wait for the answer to a batch.

        Raises:
            ClientError: a limit is out of range.
        """
        limits = BatchLimits(
            max_messages=max_messages,
            max_bytes=max_bytes,
            in_flight=in_flight,
            retry_timeout=retry_timeout,
            attempt_timeout=attempt_timeout,
        )
        return BatchSender(self._session, self._producer, limits)

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[bytes | str | Message],
        *,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        """Send several messages of one topic in one request to one queue, where they get consecutive offsets.

        Args:
            topic: the topic.
            messages: bodies, or messages of that topic.
            queue: the target queue; see `send`.
            order_key: see `send`.
            timeout: the time limit in seconds, retries included.

        Returns:
            One result for all: both ids are joined by commas, and `queue_offset` is the first offset.

        Raises:
            ClientError: an argument is invalid, or the batch is larger than `max_message_size`.
            NeveError: as `send`.
        """
        target = target_queue(queue, order_key)
        return await self._producer.send_batch(topic, messages, queue=target, timeout=timeout)

    async def send_to_group(self, message: Message, group: str, *, timeout: float | None = None) -> None:
        """Send a stored message to one group again, at once, as a copy in its retry topic. The copy has the same id.

        Raises:
            BrokerError: TOPIC_NOT_EXIST if the group never had a consumer.
            NeveError: as `send`.
        """
        check_group(group)
        copying = SendBack(self._session, group, _REDELIVERIES).send_copy(message, 0, delayed=False)
        await self._session.requests.within(timeout, copying)

    async def recall(self, topic: str, handle: str, *, timeout: float | None = None) -> str:
        """Cancel a message that was sent with `delay` or `deliver_at`, and return its id.

        A recall within the last second before the delivery may have no effect.

        Args:
            topic: the topic of the message.
            handle: the `recall_handle` of its `SendResult`.
            timeout: the time limit in seconds.

        Raises:
            BrokerError: NO_PERMISSION (Apache's broker needs `recallMessageEnable=true`), TOPIC_NOT_EXIST, or
                ILLEGAL_OPERATION after the delivery, or for a handle of another broker.
        """
        return await self._session.requests.within(timeout, self._producer.recall(topic, handle, timeout=timeout))

    def transaction_producer(self, group: str, *, check: Check) -> TransactionProducer:
        """Return a producer of transactional messages. `async with` joins its group.

        Args:
            group: a producer group other than that of ordinary sends. Every member must be able to check the
                transactions of all others.
            check: a function, or a coroutine function, that returns the LocalTransactionState of a message. Brokers
                ask it at any time for transactions that have not ended. An error counts as UNKNOWN.
        """
        return TransactionProducer(self._session, self._producer, self._checks, group, check)

    # ---- request and reply

    async def request(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: Queue | None = None,
        order_key: OrderKey | None = None,
        flag: int = 0,
        timeout: float = 5.0,
    ) -> Message:
        """Send a message, and return the reply of its consumer.

        Arguments are those of `send`; `timeout` is the time limit for the reply.

        Raises:
            RequestTimeout: no reply arrived in time. The message may have been consumed.
            NeveError: as `send`.
        """
        what = send_request(
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
        """Reply to a consumed message that was sent by `request`.

        Raises:
            ClientError: the message is not a request, or an argument is invalid.
            BrokerError: SYSTEM_ERROR if the requester is gone.
        """
        topic = reply_topic(request)
        what = send_request(topic, body, tags=tags, keys=keys, properties=properties, timeout=timeout)
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
        """Return a consumer that pulls its share of the queues of a group. `async with` joins the group.

        Args:
            group: the consumer group.
            topics: a topic, several topics, or a mapping of topics to tag expressions or `Subscription`s.
            start: where a group without committed offsets begins: "earliest", "latest", a datetime with a time zone,
                or milliseconds since 1970.
            auto_ack: whether `async for` acknowledges a message when the same task or thread takes the next step, or
                leaves the `async with` block without an error.
            in_order: deliver one message of a queue at a time, to one member of the group, which locks the queue. A
                nack redelivers a message before the next one of its queue.
            broadcast: every member reads every queue, stores its offsets in a file, and has no redelivery.
            allocation: "average", "circular", "consistent_hash", or a function of `neve.client.group.allocation`; all
                members must use the same.
            pull_batch: the largest number of messages in a pull.
            max_buffered: the number of messages in the buffer above which nothing is pulled.
            max_buffered_per_queue: the same for each queue.
            max_buffered_bytes: the same in bytes.
            long_poll: the time in seconds that a broker waits for a message.
            max_redeliveries: the redeliveries before a message moves to %DLQ%group; by default 16, and unlimited in
                order.
            pause_after_nack: the delay of a redelivery in order, in seconds.
            consume_timeout: the time in seconds after which an unsettled message is sent back and redelivered. It
                does not apply in order.
            close_timeout: the time in seconds that a close waits for messages that are owned by other tasks, threads
                and handlers.
            offsets_directory: the directory of the offsets of a broadcast consumer; by default `~/.rocketmq_offsets`.

        Raises:
            ClientError: an argument is out of range.
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
        """Return a consumer that pops: the broker hands each message to one member for a while, and tracks it.

        `async with` joins the group.

        Args:
            group: the consumer group.
            topics: as of `consumer`.
            start: where a group that has never popped begins.
            auto_ack: as of `consumer`.
            in_order: pop nothing more from a queue until all messages that were popped from it are settled.
            invisible: the time in seconds that a message belongs to this member. It is renewed while the message is
                owned, so it is only the delay until the messages of a dead member are redelivered.
            hold_limit: the time in seconds after which an owned message is no longer renewed.
            close_timeout: as of `consumer`.
            pop_batch: the largest number of messages in a pop.
            max_buffered: the number of messages in the buffer above which nothing is popped.
            long_poll: the time in seconds that a broker waits for a message.
            max_redeliveries: the redeliveries before a nack moves a message to %DLQ%group.

        Raises:
            ClientError: an argument is out of range.
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
        """Return a consumer that the application polls: enter it, then `subscribe` or `assign`, then `poll`.

        Args:
            group: the consumer group.
            start: as of `consumer`.
            auto_commit: whether positions are committed periodically and at close, or only by `commit`.
            allocation: as of `consumer`.
            pull_batch: the largest number of messages in a pull.
            max_buffered: the number of messages in the buffer above which nothing is pulled.
            long_poll: the time in seconds that a broker waits for a message.

        Raises:
            ClientError: an argument is out of range.
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

    # ---- reading by offset

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the readable queues of a topic, sorted."""
        return await self._session.requests.within(None, self._puller.queues(topic))

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
        """Return messages of one queue from an offset on.

        Args:
            topic: the topic.
            queue: the queue; a number selects that queue on the first broker that has it.
            offset: the first offset.
            max_count: the largest number of messages.
            expression: a tag expression, or a `Subscription`.
            group: the consumer group that reads.
            wait: the time in seconds that the broker waits if there is no message.
            timeout: the time limit in seconds; by default 15 s more than `wait`.

        Raises:
            BrokerError: the broker refused.
            ClientError: the topic has no such queue.
        """
        limit = self._puller.limit(wait, timeout)

        async def pull() -> PullResult:
            target = await self._puller.resolve(topic, queue)
            wanted = subscription(expression)
            return inflated_result(
                await self._puller.pull(
                    target, offset, max_count, group=group, subscription=wanted, wait=wait, timeout=limit
                )
            )

        return await self._session.requests.within(limit, pull())

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
        """Return the encoded records of one queue from an offset on, to copy them or to decode only some fields.

        Arguments are those of `pull`.

        Args:
            max_bytes: the largest size of an answer in bytes; a broker may have a smaller limit.
        """
        limit = self._puller.limit(wait, timeout)
        wanted = subscription(expression)
        pulling = self._puller.pull_records(
            queue, offset, max_count, group=group, wanted=wanted, wait=wait, timeout=limit, max_bytes=max_bytes
        )
        return await self._session.requests.within(limit, pulling)

    def reader(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        queue: int | MessageQueue | None = None,
        expression: str | Subscription = "*",
    ) -> AsyncIterator[Message]:
        """Iterate over the messages of a topic, queue by queue, each up to its end when the iteration reaches it.

        Args:
            topic: the topic.
            start: "earliest", a datetime with a time zone, or milliseconds since 1970.
            queue: read only this queue.
            expression: a tag expression, or a `Subscription`.

        Raises:
            ClientError: `start` is "latest", or no start.
        """
        return self._puller.read(topic, start=start, queue=queue, subscription=subscription(expression))

    async def min_offset(self, topic: str, queue: int | MessageQueue) -> int:
        """Return the offset of the first message of a queue."""
        return await self._at(topic, queue, self._puller.min_offset)

    async def max_offset(self, topic: str, queue: int | MessageQueue) -> int:
        """Return the offset that the next message of a queue will get."""
        return await self._at(topic, queue, self._puller.max_offset)

    async def offset_by_time(self, topic: str, queue: int | MessageQueue, when: Time) -> int:
        """Return the offset of the first message of a queue that was stored at `when` or later.

        Apache RocketMQ's brokers assume ascending store times. After a step of their clock they may return a later
        offset.
        """
        at = time_ms(when)
        return await self._at(topic, queue, lambda target: self._puller.offset_by_time(target, at))

    async def committed(self, group: str, topic: str, queue: int | MessageQueue) -> int | None:
        """Return the committed offset of a group in a queue, or None if it has none."""
        return await self._at(topic, queue, lambda target: self._puller.committed(group, target))

    async def commit(self, group: str, topic: str, queue: int | MessageQueue, offset: int) -> None:
        """Commit an offset for a group: the offset of the next message that it reads."""
        await self._at(topic, queue, lambda target: self._puller.commit(group, target, offset))

    async def _at(self, topic: str, queue: int | MessageQueue, work: Callable[[MessageQueue], Awaitable[T]]) -> T:
        """Resolve the queue and do `work` with it, within the time limit of a call."""

        async def inside() -> T:
            return await work(await self._puller.resolve(topic, queue))

        return await self._session.requests.within(None, inside())
