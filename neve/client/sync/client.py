"""The same client without asyncio: every call runs on a loop in a background thread and waits for the answer.

    with connect("127.0.0.1:9876") as client:
        client.send("topic", b"body")
        with client.consumer("group", "topic") as consumer:
            for message in consumer: ...

Names and arguments are those of `AsyncClient`; it may be shared by threads.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self, TypeVar

from neve.client import client as asynchronous
from neve.client.client import AsyncClient
from neve.client.consumers import lite_pull as lite
from neve.client.consumers import pop as popping
from neve.client.consumers import push as grouped
from neve.client.group.pull import Subscription, Topics
from neve.client.model import Message, MessageQueue, SendResult
from neve.client.options import ClientOptions
from neve.client.send import batch_sender as asynchronous_batches
from neve.client.sync.consumer import Consumer, LitePullConsumer, PopConsumer, Received
from neve.client.sync.loop import BackgroundLoop, Wrapper, waiting
from neve.client.sync.transaction import SyncCheck, Transaction, TransactionProducer, in_thread
from neve.client.times import Start

T = TypeVar("T")

_READ_AHEAD = 256  # messages that a reader fetches per hop between the threads


class Client(Wrapper):
    """See `AsyncClient`."""

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
    set_request_mode = waiting(AsyncClient.set_request_mode)
    create_topic = waiting(AsyncClient.create_topic)
    delete_topic = waiting(AsyncClient.delete_topic)
    topic_config = waiting(AsyncClient.topic_config)
    topic_route = waiting(AsyncClient.topic_route)
    topic_list = waiting(AsyncClient.topic_list)
    topic_stats = waiting(AsyncClient.topic_stats)
    consume_stats = waiting(AsyncClient.consume_stats)
    cluster_info = waiting(AsyncClient.cluster_info)
    view_message = waiting(AsyncClient.view_message)
    query_messages = waiting(AsyncClient.query_messages)

    _inner: AsyncClient

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all consumers, leaves all groups, closes the connections and ends the thread."""
        if self._loop.is_stopped:
            return
        try:
            self._loop.call(self._inner.close())
        finally:
            self._loop.stop()

    @property
    def client_id(self) -> str:
        return self._inner.client_id

    @property
    def traces_dropped(self) -> int:
        """As of `AsyncClient.traces_dropped`."""
        return self._inner.traces_dropped

    def send_async(self, topic: str, body: bytes | str, **arguments: Any) -> concurrent.futures.Future[SendResult]:
        """As `AsyncClient.send_async`, with a future."""

        async def begin() -> SendResult:
            return await self._inner.send_async(topic, body, **arguments)

        return self._loop.submit(begin())

    def batch_sender(self, **limits: Any) -> BatchSender:
        """As `AsyncClient.batch_sender`."""
        return BatchSender(self._loop, self._inner.batch_sender(**limits))

    def transaction_producer(self, group: str, *, check: SyncCheck) -> TransactionProducer:
        """As `AsyncClient.transaction_producer`; `check` is called in a thread of its own."""
        return TransactionProducer(self._loop, self._inner.transaction_producer(group, check=in_thread(check)))

    def consumer(self, group: str, topics: Topics, **arguments: Any) -> Consumer:
        """A member of a group; enter it to join. Arguments as of `AsyncClient.consumer`."""

        async def make() -> grouped.Consumer:
            return self._inner.consumer(group, topics, **arguments)

        return Consumer(self._loop, self._loop.call(make()))

    def pop_consumer(self, group: str, topics: Topics, **arguments: Any) -> PopConsumer:
        """A member of a group that pops; enter it to join. Arguments as of `AsyncClient.pop_consumer`."""

        async def make() -> popping.PopConsumer:
            return self._inner.pop_consumer(group, topics, **arguments)

        return PopConsumer(self._loop, self._loop.call(make()))

    def lite_pull_consumer(self, group: str, **arguments: Any) -> LitePullConsumer:
        """A consumer that is asked; enter it. Arguments as of `AsyncClient.lite_pull_consumer`."""

        async def make() -> lite.LitePullConsumer:
            return self._inner.lite_pull_consumer(group, **arguments)

        return LitePullConsumer(self._loop, self._loop.call(make()))

    def reader(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        queue: int | MessageQueue | None = None,
        expression: str | Subscription = "*",
    ) -> Iterator[Message]:
        """As of `AsyncClient.reader`."""
        inner = self._inner.reader(topic, start=start, queue=queue, expression=expression)
        while block := self._loop.call(_next_block(inner, _READ_AHEAD)):
            yield from block


class BatchSender(Wrapper):
    """See `neve.client.send.batch_sender`; what is under way goes on while nobody calls."""

    put = waiting(asynchronous_batches.BatchSender.put)
    flush = waiting(asynchronous_batches.BatchSender.flush)

    _inner: asynchronous_batches.BatchSender

    @property
    def sent(self) -> int:
        """Messages that brokers have stored."""
        return self._inner.sent


async def _next_block(source: AsyncIterator[T], count: int) -> list[T]:
    block: list[T] = []
    with contextlib.suppress(StopAsyncIteration):
        while len(block) < count:
            block.append(await anext(source))
    return block


def connect(namesrv: str, *, options: ClientOptions | None = None, **changes: Any) -> Client:
    """A client that is connected; `with` closes it. Arguments as of `neve.client.connect`."""
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
