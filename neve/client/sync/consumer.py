"""Consumers for programs without asyncio: see `neve.client.sync`."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Self, cast

from neve.client.consumers import lite_pull as lite
from neve.client.consumers import pop as popping
from neve.client.consumers import push as grouped
from neve.client.group import received
from neve.client.group.in_work import current_asker
from neve.client.model import Message, MessageQueue
from neve.client.sync.loop import BackgroundLoop, ClientClosed, Face, waiting
from neve.errors import ClientError, NeveError


@dataclass(frozen=True, slots=True)
class Received(Message):
    """A message with its way back to the consumer that delivered it."""

    loop: BackgroundLoop | None = None
    inner: received.Received | None = None

    def ack(self) -> None:
        """Done with it; see `neve.client.Received.ack`."""
        loop, inner = self.parts()
        loop.call(inner.ack())

    def nack(self, delay_level: int = 0) -> None:
        """Have it delivered again later; see `neve.client.Received.nack`."""
        loop, inner = self.parts()
        loop.call(inner.nack(delay_level))

    def parts(self) -> tuple[BackgroundLoop, received.Received]:
        """The loop to settle it on, and the message as the consumer knows it."""
        if self.loop is None or self.inner is None:
            raise ClientError("this message was not delivered by a consumer")
        return self.loop, self.inner


_MESSAGE_FIELDS = tuple(field.name for field in fields(Message))


def _received(message: received.Received, loop: BackgroundLoop) -> Received:
    values: dict[str, Any] = {name: getattr(message, name) for name in _MESSAGE_FIELDS}
    return Received(**values, loop=loop, inner=message)


class _Delivering(Face):
    """What all consumers that deliver message by message have in common."""

    def __enter__(self) -> Self:
        self._loop.call(self._inner.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(ClientClosed):  # which has closed this, too
            self._loop.call(self._inner.__aexit__(kind))

    def __iter__(self) -> Iterator[Received]:
        with contextlib.suppress(ClientClosed):  # and this with it
            while (message := self._loop.call(self._inner.following(current_asker()))) is not None:
                yield _received(message, self._loop)

    def receive(self, timeout: float | None = None) -> Received | None:
        """The next message; None when the consumer is closed, or nothing came within `timeout` seconds."""
        message = self._loop.call(self._inner.receive(timeout))
        return None if message is None else _received(message, self._loop)

    def run(self, handler: Callable[[Received], None], *, workers: int = 1, delay_level: int = 0) -> None:
        """Gives every message to `handler`, in `workers` threads, until the consumer is closed by another thread.

        Returning acks, raising nacks with `delay_level`.
        """
        with concurrent.futures.ThreadPoolExecutor(workers, "neve-handler") as pool:

            async def in_a_thread(message: received.Received) -> None:
                context = contextvars.copy_context()  # so that a handler which closes the consumer is known as one
                work = functools.partial(context.run, handler, _received(message, self._loop))
                await asyncio.get_running_loop().run_in_executor(pool, work)

            self._loop.call(self._inner.run(in_a_thread, workers=workers, delay_level=delay_level))

    @property
    def problem(self) -> NeveError | None:
        """Why nothing may come: the latest error of a pull or pop that is tried again, and has not succeeded since."""
        return cast("NeveError | None", self._inner.problem)

    @property
    def group(self) -> str:
        return str(self._inner.group)

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, sorted."""
        return list(self._inner.assigned)


class Consumer(_Delivering):
    """A member of a group; iterate over it."""

    start = waiting(grouped.Consumer.start)
    close = waiting(grouped.Consumer.close)
    commit = waiting(grouped.Consumer.commit)
    seek = waiting(grouped.Consumer.seek)
    seek_to_time = waiting(grouped.Consumer.seek_to_time)
    seek_to_begin = waiting(grouped.Consumer.seek_to_begin)
    seek_to_end = waiting(grouped.Consumer.seek_to_end)
    pause = waiting(grouped.Consumer.pause)
    resume = waiting(grouped.Consumer.resume)

    _inner: grouped.Consumer

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which all of the queue is acked."""
        return self._inner.position(queue)


async def _change_invisible(consumer: popping.PopConsumer, message: Received, seconds: float) -> None:
    _, inner = message.parts()
    await consumer.change_invisible(inner, seconds)


class PopConsumer(_Delivering):
    """A member of a group that pops; iterate over it."""

    start = waiting(popping.PopConsumer.start)
    close = waiting(popping.PopConsumer.close)
    change_invisible = waiting(_change_invisible)

    _inner: popping.PopConsumer


class LitePullConsumer(Face):
    """A consumer that is asked; see `neve.client.LitePullConsumer`."""

    start = waiting(lite.LitePullConsumer.start)
    close = waiting(lite.LitePullConsumer.close)
    subscribe = waiting(lite.LitePullConsumer.subscribe)
    unsubscribe = waiting(lite.LitePullConsumer.unsubscribe)
    assign = waiting(lite.LitePullConsumer.assign)
    queues = waiting(lite.LitePullConsumer.queues)
    poll = waiting(lite.LitePullConsumer.poll)
    seek = waiting(lite.LitePullConsumer.seek)
    seek_to_begin = waiting(lite.LitePullConsumer.seek_to_begin)
    seek_to_end = waiting(lite.LitePullConsumer.seek_to_end)
    seek_to_time = waiting(lite.LitePullConsumer.seek_to_time)
    offset_for_time = waiting(lite.LitePullConsumer.offset_for_time)
    commit = waiting(lite.LitePullConsumer.commit)
    committed = waiting(lite.LitePullConsumer.committed)
    pause = waiting(lite.LitePullConsumer.pause)
    resume = waiting(lite.LitePullConsumer.resume)

    _inner: lite.LitePullConsumer

    def __enter__(self) -> Self:
        self._loop.call(self._inner.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(ClientClosed):  # which has closed this, too
            self._loop.call(self._inner.__aexit__(kind))

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, sorted."""
        return self._inner.assigned

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which all of the queue is done with."""
        return self._inner.position(queue)
