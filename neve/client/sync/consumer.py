"""The consumers of the synchronous client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Self, cast

from neve.client.consumers import lite_pull as lite
from neve.client.consumers import pop as popping
from neve.client.consumers import push as grouped
from neve.client.group import received
from neve.client.group.ownership import current_owner
from neve.client.model import Message, MessageQueue
from neve.client.sync.loop import BackgroundLoop, ClientClosed, Wrapper, waiting
from neve.errors import ClientError, NeveError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received(Message):
    """A message that a consumer delivered. Its receiver owns it until it acknowledges it or gives it back.

    `with message:` acknowledges the message at the end of the block, or has it redelivered if the block raises.
    """

    loop: BackgroundLoop | None = None
    inner: received.Received | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.ack()
            return
        try:
            self.nack()
        except NeveError as error:  # the error of the block is the one that the caller has to see
            log.warning("nack failed, the message is redelivered later: msg_id=%s cause=%s", self.msg_id, error)

    def ack(self) -> None:
        """Acknowledge the message; see `neve.client.Received.ack`."""
        loop, inner = self._parts()
        loop.call(inner.ack())

    def nack(self, delay_level: int = 0, *, delay: float | None = None) -> None:
        """Give the message back; see `neve.client.Received.nack`."""
        loop, inner = self._parts()
        loop.call(inner.nack(delay_level, delay=delay))

    def _parts(self) -> tuple[BackgroundLoop, received.Received]:
        if self.loop is None or self.inner is None:
            raise ClientError("this message was not delivered by a consumer")
        return self.loop, self.inner


_MESSAGE_FIELDS = tuple(field.name for field in fields(Message))


def _received(message: received.Received, loop: BackgroundLoop) -> Received:
    values: dict[str, Any] = {name: getattr(message, name) for name in _MESSAGE_FIELDS}
    return Received(**values, loop=loop, inner=message)


class _Entered(Wrapper):
    """A consumer that is used in a `with` block."""

    def __enter__(self) -> Self:
        self._loop.call(self._inner.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(ClientClosed):  # closing the client closed this consumer, too
            self._loop.call(self._inner.__aexit__(kind))

    @property
    def problem(self) -> NeveError | None:
        """The latest error of a pull, pop or rebalance that has not succeeded since; None if all succeed."""
        return cast("NeveError | None", self._inner.problem)

    @property
    def group(self) -> str:
        """The name of the group."""
        return str(self._inner.group)

    @property
    def assigned(self) -> list[MessageQueue]:
        """The assigned queues, sorted."""
        return list(self._inner.assigned)

    @property
    def is_closed(self) -> bool:
        """Whether the consumer is closed, or being closed."""
        return bool(self._inner.is_closed)


class _Delivering(_Entered):
    """A consumer that delivers message by message."""

    def __iter__(self) -> Iterator[Received]:
        with contextlib.suppress(ClientClosed):  # closing the client ends the iteration
            while (message := self._loop.call(self._inner.iterate(current_owner()))) is not None:
                yield _received(message, self._loop)

    def receive(self, timeout: float | None = None) -> Received | None:
        """Return the next message, which the caller owns; see `neve.client.Consumer.receive`."""
        message = self._loop.call(self._inner.receive(timeout))
        return None if message is None else _received(message, self._loop)

    def run(self, handler: Callable[[Received], None], *, workers: int = 1, delay_level: int = 0) -> None:
        """Call `handler` with every message, in `workers` threads, until another thread closes the consumer.

        A message is acknowledged if its handler returns, and redelivered after `delay_level` if its handler raises.
        """
        with concurrent.futures.ThreadPoolExecutor(max(workers, 1), "neve-handler") as pool:

            async def in_a_thread(message: received.Received) -> None:
                context = contextvars.copy_context()  # so that a handler that closes the consumer is recognized
                work = functools.partial(context.run, handler, _received(message, self._loop))
                await asyncio.get_running_loop().run_in_executor(pool, work)

            self._loop.call(self._inner.run(in_a_thread, workers=workers, delay_level=delay_level))


class Consumer(_Delivering):
    """A member of a group; see `neve.client.Consumer`."""

    start = waiting(grouped.Consumer.start)
    close = waiting(grouped.Consumer.close)
    commit = waiting(grouped.Consumer.commit)
    committed = waiting(grouped.Consumer.committed)
    seek = waiting(grouped.Consumer.seek)
    seek_to_time = waiting(grouped.Consumer.seek_to_time)
    seek_to_beginning = waiting(grouped.Consumer.seek_to_beginning)
    seek_to_end = waiting(grouped.Consumer.seek_to_end)
    offset_by_time = waiting(grouped.Consumer.offset_by_time)
    pause = waiting(grouped.Consumer.pause)
    resume = waiting(grouped.Consumer.resume)

    _inner: grouped.Consumer

    def position(self, queue: MessageQueue) -> int:
        """Return the offset below which every message of the queue is acknowledged."""
        return self._inner.position(queue)


class PopConsumer(_Delivering):
    """A member of a group that pops; see `neve.client.PopConsumer`."""

    start = waiting(popping.PopConsumer.start)
    close = waiting(popping.PopConsumer.close)

    _inner: popping.PopConsumer


class LitePullConsumer(_Entered):
    """A consumer that is polled; see `neve.client.LitePullConsumer`."""

    start = waiting(lite.LitePullConsumer.start)
    close = waiting(lite.LitePullConsumer.close)
    subscribe = waiting(lite.LitePullConsumer.subscribe)
    unsubscribe = waiting(lite.LitePullConsumer.unsubscribe)
    assign = waiting(lite.LitePullConsumer.assign)
    queues = waiting(lite.LitePullConsumer.queues)
    poll = waiting(lite.LitePullConsumer.poll)
    commit = waiting(lite.LitePullConsumer.commit)
    committed = waiting(lite.LitePullConsumer.committed)
    seek = waiting(lite.LitePullConsumer.seek)
    seek_to_time = waiting(lite.LitePullConsumer.seek_to_time)
    seek_to_beginning = waiting(lite.LitePullConsumer.seek_to_beginning)
    seek_to_end = waiting(lite.LitePullConsumer.seek_to_end)
    offset_by_time = waiting(lite.LitePullConsumer.offset_by_time)
    pause = waiting(lite.LitePullConsumer.pause)
    resume = waiting(lite.LitePullConsumer.resume)

    _inner: lite.LitePullConsumer

    def position(self, queue: MessageQueue) -> int:
        """Return the offset below which every message of the queue is acknowledged."""
        return self._inner.position(queue)
