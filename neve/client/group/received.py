"""A message that a consumer delivered, with the means to settle it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Protocol, Self

from neve.client.model import Message
from neve.errors import ClientError, NeveError

log = logging.getLogger(__name__)


class Settles(Protocol):
    """The consumer of a message."""

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """Acknowledge the message (None), or have it redelivered after a delay level."""

    async def redeliver(self, message: Received, seconds: float) -> None:
        """Have the message redelivered after `seconds`."""


@dataclass(frozen=True, slots=True)
class Received(Message):
    """A message that a consumer delivered. Its receiver owns it until it acknowledges it or gives it back.

    `async with message:` acknowledges the message at the end of the block, or has it redelivered if the block raises.
    """

    consumer: Settles | None = None
    receipt: Any = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.ack()
            return
        try:
            await self.nack()
        except NeveError as error:  # the error of the block is the one that the caller has to see
            log.warning("nack failed, the message is redelivered later: msg_id=%s cause=%s", self.msg_id, error)

    async def ack(self) -> None:
        """Acknowledge the message: the group has processed it.

        Raises:
            NeveError: the broker did not confirm it, and the message is redelivered. Only pop consumers wait for it.
        """
        await self._consumer().settle(self, None)

    async def nack(self, delay_level: int = 0, *, delay: float | None = None) -> None:
        """Give the message back. It is redelivered later, and after `max_redeliveries` it moves to %DLQ%group.

        Args:
            delay_level: 1 to 18 for 1 s to 2 h; 0 for a delay that grows with each redelivery; -1 for %DLQ%group at
                once. A consumer in order ignores it and redelivers after its `pause_after_nack`.
            delay: seconds until the redelivery, instead of a level; for pop consumers only.

        Raises:
            NeveError: the broker did not confirm it, and the message is redelivered at another time.
            ClientError: `delay` is given for a message of another kind of consumer.
        """
        if delay is None:
            await self._consumer().settle(self, delay_level)
        elif delay_level:
            raise ClientError("delay_level and delay exclude each other")
        else:
            await self._consumer().redeliver(self, delay)

    def next_delivery(self) -> Self:
        """Return the message with its redelivery counted."""
        return replace(self, reconsume_times=self.reconsume_times + 1)

    def _consumer(self) -> Settles:
        if self.consumer is None:
            raise ClientError("this message was not delivered by a consumer")
        return self.consumer


_NAMES = tuple(field.name for field in fields(Message))
_values = attrgetter(*_NAMES)


def received(message: Message, consumer: Settles, receipt: Any) -> Received:
    """Return `message` as `consumer` delivers it."""
    values: dict[str, Any] = dict(zip(_NAMES, _values(message), strict=True))
    return Received(**values, consumer=consumer, receipt=receipt)
