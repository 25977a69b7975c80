"""Consumers for programs without asyncio: see `neve.client.sync`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Self

from neve.client import consumer as grouped
from neve.client.model import Message, MessageQueue
from neve.client.sync_loop import Face, waiting
from neve.errors import ClientError


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


class Consumer(Face):
    """A member of a group; iterate over it."""

    start = waiting(grouped.Consumer.start)
    close = waiting(grouped.Consumer.close)
    commit = waiting(grouped.Consumer.commit)
    seek = waiting(grouped.Consumer.seek)
    seek_to_time = waiting(grouped.Consumer.seek_to_time)
    seek_to_begin = waiting(grouped.Consumer.seek_to_begin)
    seek_to_end = waiting(grouped.Consumer.seek_to_end)
    nack = waiting(grouped.Consumer.nack)
    ack = waiting(_ack)

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
