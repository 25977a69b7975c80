"""The synchronous client: every call runs on an event loop in a background thread and waits for the result.

    with connect("127.0.0.1:9876") as client:
        client.send("topic", b"body")
        with client.consumer("group", "topic") as consumer:
            for message in consumer: ...

Names and arguments are those of `AsyncClient`. Threads may share a client.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Self, TypeVar, Unpack

from neve.client import client as asynchronous
from neve.client.client import AsyncClient
from neve.client.group.pull import Subscription
from neve.client.model import Message, MessageQueue, SendResult
from neve.client.options import ClientOptions, OptionChanges
from neve.client.send import batch_sender as batches
from neve.client.send.queue_selector import OrderKey
from neve.client.sync.admin import Admin
from neve.client.sync.consumer import Consumer, LitePullConsumer, PopConsumer, Received
from neve.client.sync.loop import BackgroundLoop, Wrapper, creating, submitting, waiting
from neve.client.sync.transaction import SyncCheck, Transaction, TransactionProducer, in_thread
from neve.client.times import Start, Time

T = TypeVar("T")

_READ_AHEAD = 256  # messages that a reader fetches for each switch between the threads


class BatchSender(Wrapper):
    """Sends messages in batches, in the background: see `neve.client.BatchSender`."""

    put_all = waiting(batches.BatchSender.put_all)
    flush = waiting(batches.BatchSender.flush)

    _inner: batches.BatchSender

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._loop.call(self._inner.__aexit__(kind))

    def put(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: int | MessageQueue | None = None,
        order_key: OrderKey | None = None,
        delay_level: int = 0,
        delay: float | None = None,
        deliver_at: Time | None = None,
        flag: int = 0,
    ) -> concurrent.futures.Future[SendResult]:
        """Add one message; return a future of its `SendResult`. Arguments are those of `neve.client.BatchSender.put`.

        `put_all` is faster for many messages.
        """
        stored: concurrent.futures.Future[SendResult] = concurrent.futures.Future()

        def forward(delivery: batches.Delivery) -> None:
            if delivery.cancelled():
                stored.cancel()
            elif (error := delivery.exception()) is not None:
                stored.set_exception(error)
            else:
                stored.set_result(delivery.result())

        async def put() -> None:
            delivery = await self._inner.put(
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
            )
            delivery.add_done_callback(forward)

        self._loop.call(put())
        return stored

    @property
    def sent(self) -> int:
        """The number of messages that brokers have stored."""
        return self._inner.sent

    @property
    def repeated(self) -> int:
        """The number of messages that may be stored twice."""
        return self._inner.repeated

    @property
    def not_stored(self) -> list[Message]:
        """After an error: the messages that no broker confirmed."""
        return self._inner.not_stored


class Client(Wrapper):
    """A client of one cluster: see `AsyncClient`."""

    send = waiting(AsyncClient.send)
    send_oneway = waiting(AsyncClient.send_oneway)
    send_batch = waiting(AsyncClient.send_batch)
    recall = waiting(AsyncClient.recall)
    request = waiting(AsyncClient.request)
    reply = waiting(AsyncClient.reply)
    queues = waiting(AsyncClient.queues)
    pull = waiting(AsyncClient.pull)
    send_to_group = waiting(AsyncClient.send_to_group)
    pull_records = waiting(AsyncClient.pull_records)
    min_offset = waiting(AsyncClient.min_offset)
    max_offset = waiting(AsyncClient.max_offset)
    offset_by_time = waiting(AsyncClient.offset_by_time)
    committed = waiting(AsyncClient.committed)
    commit = waiting(AsyncClient.commit)
    send_async = submitting(AsyncClient.send_async)
    batch_sender = creating(AsyncClient.batch_sender, BatchSender)
    consumer = creating(AsyncClient.consumer, Consumer)
    pop_consumer = creating(AsyncClient.pop_consumer, PopConsumer)
    lite_pull_consumer = creating(AsyncClient.lite_pull_consumer, LitePullConsumer)

    _inner: AsyncClient

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all consumers, leave their groups, close the connections, and end the background thread.

        Calls of other threads raise ClientError.
        """
        if self._loop.is_stopped:
            return
        try:
            self._loop.call(self._inner.close())
        finally:
            self._loop.stop()

    @property
    def options(self) -> ClientOptions:
        """The options of this client."""
        return self._inner.options

    @property
    def admin(self) -> Admin:
        """The administration of topics, groups and messages."""
        return Admin(self._loop, self._inner.admin)

    @property
    def client_id(self) -> str:
        """The id by which brokers know this client."""
        return self._inner.client_id

    @property
    def traces_dropped(self) -> int:
        """The number of message traces that were dropped."""
        return self._inner.traces_dropped

    def transaction_producer(self, group: str, *, check: SyncCheck) -> TransactionProducer:
        """Return a producer of transactional messages; see `AsyncClient.transaction_producer`.

        `check` is called in a thread of its own.
        """
        return TransactionProducer(self._loop, self._inner.transaction_producer(group, check=in_thread(check)))

    def reader(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        queue: int | MessageQueue | None = None,
        expression: str | Subscription = "*",
    ) -> Iterator[Message]:
        """Iterate over the messages of a topic; see `AsyncClient.reader`."""
        inner = self._inner.reader(topic, start=start, queue=queue, expression=expression)
        while block := self._loop.call(_next_block(inner, _READ_AHEAD)):
            yield from block


async def _next_block(source: AsyncIterator[T], count: int) -> list[T]:
    block: list[T] = []
    with contextlib.suppress(StopAsyncIteration):
        while len(block) < count:
            block.append(await anext(source))
    return block


def connect(namesrv: str, *, options: ClientOptions | None = None, **changes: Unpack[OptionChanges]) -> Client:
    """Connect to a cluster, and return its client. `with` closes it.

    Arguments are those of `neve.client.connect`.

    Raises:
        ConnectionFailed: no name server is reachable.
        ClientError: no name server is given, or an option is out of range.
    """
    loop = BackgroundLoop()

    async def open_client() -> AsyncClient:
        client = asynchronous.connect(namesrv, options=options, **changes)
        try:
            await client.start()
        except BaseException:
            await client.close()
            raise
        return client

    try:
        return Client(loop, loop.call(open_client()))
    except BaseException:
        loop.stop()
        raise


__all__ = ["BatchSender", "Client", "Consumer", "Received", "Transaction", "TransactionProducer", "connect"]
