"""The same client without asyncio: every call runs on a loop in a background thread and waits for the answer.

    with connect("127.0.0.1:9876") as client:
        client.send("topic", b"body")
        with client.consumer("group", "topic") as consumer:
            for message in consumer: ...

Names and arguments are those of `AsyncClient`; it may be shared by threads.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass, fields
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from neve.client import client as asynchronous
from neve.client import consumer as grouped
from neve.client.client import AsyncClient, Topics
from neve.client.model import Message, MessageQueue, SendResult
from neve.client.options import ClientOptions
from neve.client.pull import Subscription
from neve.errors import ClientError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_READ_AHEAD = 256  # messages that a reader fetches per hop between the threads


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="neve-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, R]) -> concurrent.futures.Future[R]:
        if self._pid != os.getpid():
            work.close()
            raise ClientError("this client was made before a fork; make one in this process")
        if self._loop.is_closed():
            work.close()
            raise ClientError("the client is closed")
        if threading.current_thread() is self._thread:
            work.close()
            raise ClientError("the synchronous client was called on its own loop; use neve.client.connect there")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, R]) -> R:
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C while waiting: the call is given up
            future.cancel()
            raise

    def stop(self) -> None:
        if self._pid == os.getpid() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()


class _Face:
    """Something asynchronous and the loop that it lives on."""

    def __init__(self, loop: _Loop, inner: Any) -> None:
        self._loop = loop
        self._inner = inner


F = TypeVar("F", bound=_Face)


def _waiting(
    method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Any, P], R]:
    """The method that calls `method` of the inner object on its loop and waits; same arguments, same documentation."""

    def call(self: _Face, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._loop.call(method(self._inner, *args, **kwargs))

    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


@dataclass(frozen=True, slots=True)
class Received(Message):
    """A message with its way back to the consumer that delivered it."""

    consumer: Consumer | None = None
    inner: grouped.Received | None = None

    def ack(self) -> None:
        """Done with it; the group's offset may pass it."""
        consumer, inner = self._parts()
        consumer.ack(inner)

    def nack(self, delay_level: int = 0) -> None:
        """Have the broker deliver it again later; see `neve.client.Received.nack`."""
        consumer, inner = self._parts()
        consumer.nack(inner, delay_level)

    def _parts(self) -> tuple[Consumer, grouped.Received]:
        if self.consumer is None or self.inner is None:
            raise ClientError("this message was not delivered by a consumer")
        return self.consumer, self.inner


_MESSAGE_FIELDS = tuple(field.name for field in fields(Message))


async def _ack(consumer: grouped.Consumer, message: grouped.Received) -> None:
    consumer.ack(message)


class Consumer(_Face):
    """A member of a group; iterate over it."""

    start = _waiting(grouped.Consumer.start)
    close = _waiting(grouped.Consumer.close)
    commit = _waiting(grouped.Consumer.commit)
    seek = _waiting(grouped.Consumer.seek)
    seek_to_time = _waiting(grouped.Consumer.seek_to_time)
    seek_to_begin = _waiting(grouped.Consumer.seek_to_begin)
    seek_to_end = _waiting(grouped.Consumer.seek_to_end)
    nack = _waiting(grouped.Consumer.nack)
    ack = _waiting(_ack)

    _inner: grouped.Consumer

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._loop.call(self._inner.__aexit__(kind))

    def __iter__(self) -> Iterator[Received]:
        while (message := self.receive()) is not None:
            yield message

    def receive(self, timeout: float | None = None) -> Received | None:
        """The next message; None when the consumer is closed, or nothing came within `timeout` seconds."""
        message = self._loop.call(self._inner.receive(timeout))
        if message is None:
            return None
        values: dict[str, Any] = {name: getattr(message, name) for name in _MESSAGE_FIELDS}
        return Received(**values, consumer=self, inner=message)

    @property
    def group(self) -> str:
        return self._inner.group

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, sorted."""
        return self._inner.assigned

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which all of the queue is acked."""
        return self._inner.position(queue)


class Client(_Face):
    """See `AsyncClient`."""

    send = _waiting(AsyncClient.send)
    send_oneway = _waiting(AsyncClient.send_oneway)
    send_batch = _waiting(AsyncClient.send_batch)
    queues = _waiting(AsyncClient.queues)
    pull = _waiting(AsyncClient.pull)
    min_offset = _waiting(AsyncClient.min_offset)
    max_offset = _waiting(AsyncClient.max_offset)
    offset_by_time = _waiting(AsyncClient.offset_by_time)
    committed = _waiting(AsyncClient.committed)
    commit = _waiting(AsyncClient.commit)
    create_topic = _waiting(AsyncClient.create_topic)
    delete_topic = _waiting(AsyncClient.delete_topic)
    topic_config = _waiting(AsyncClient.topic_config)
    topic_route = _waiting(AsyncClient.topic_route)
    topic_list = _waiting(AsyncClient.topic_list)
    topic_stats = _waiting(AsyncClient.topic_stats)
    consume_stats = _waiting(AsyncClient.consume_stats)
    cluster_info = _waiting(AsyncClient.cluster_info)
    view_message = _waiting(AsyncClient.view_message)
    query_messages = _waiting(AsyncClient.query_messages)

    _inner: AsyncClient

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes all consumers, leaves all groups, closes the connections and ends the thread."""
        try:
            self._loop.call(self._inner.close())
        finally:
            self._loop.stop()

    @property
    def client_id(self) -> str:
        return self._inner.client_id

    def send_async(self, topic: str, body: bytes | str, **arguments: Any) -> concurrent.futures.Future[SendResult]:
        """As `send`, but at once with a future."""
        return self._loop.submit(self._inner.send(topic, body, **arguments))

    def consumer(self, group: str, topics: Topics, **arguments: Any) -> Consumer:
        """A member of a group; enter it to join. Arguments as of `AsyncClient.consumer`."""

        async def make() -> grouped.Consumer:
            return self._inner.consumer(group, topics, **arguments)

        return Consumer(self._loop, self._loop.call(make()))

    def reader(
        self,
        topic: str,
        *,
        start: str | int = "first",
        queue: int | MessageQueue | None = None,
        expression: str | Subscription = "*",
    ) -> Iterator[Message]:
        """The topic's messages, queue by queue, up to each queue's end as it is when the reader comes to it."""
        inner = self._inner.reader(topic, start=start, queue=queue, expression=expression)
        while block := self._loop.call(_next_block(inner, _READ_AHEAD)):
            yield from block


async def _next_block(source: AsyncIterator[T], count: int) -> list[T]:
    block: list[T] = []
    with contextlib.suppress(StopAsyncIteration):
        while len(block) < count:
            block.append(await anext(source))
    return block


def connect(namesrv: str, *, options: ClientOptions | None = None, **changes: Any) -> Client:
    """A client that is connected; `with` closes it. Arguments as of `neve.client.connect`."""
    loop = _Loop()

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


__all__ = ["Client", "Consumer", "Received", "connect"]
