"""A message with its way back to the consumer that delivered it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any, Protocol, Self

from neve.client.model import Message
from neve.errors import ClientError


class Settles(Protocol):
    """A consumer that takes its messages back."""

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """Done with it (None), or again later."""


@dataclass(frozen=True, slots=True)
class Received(Message):
    """What a consumer delivers. `receipt` is the consumer's own note on where the message belongs."""

    consumer: Settles | None = None
    receipt: Any = None

    async def ack(self) -> None:
        """Done with it; the group does not need it again."""
        await self._consumer().settle(self, None)

    async def nack(self, delay_level: int = 0) -> None:
        """Have it delivered again later; after too many times it goes to %DLQ%group.

        Args:
            delay_level: 1..18 (1 s … 2 h); 0 lets the wait grow with each redelivery; -1 means %DLQ% at once.
                A consumer in order repeats the message itself after its pause, whatever the level.
        """
        await self._consumer().settle(self, delay_level)

    def again(self) -> Self:
        """As it is delivered the next time."""
        return replace(self, reconsume_times=self.reconsume_times + 1)

    def _consumer(self) -> Settles:
        if self.consumer is None:
            raise ClientError("this message was not delivered by a consumer")
        return self.consumer


_NAMES = tuple(field.name for field in fields(Message))
_values = attrgetter(*_NAMES)


def received(message: Message, consumer: Settles, receipt: Any) -> Received:
    """`message` as `consumer` delivers it."""
    values: dict[str, Any] = dict(zip(_NAMES, _values(message), strict=True))
    return Received(**values, consumer=consumer, receipt=receipt)
