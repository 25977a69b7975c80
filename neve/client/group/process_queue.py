"""The state of one assigned queue: fetched messages, delivered messages, and the offset that may be committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from neve.client.group.delivery import DeliveryQueue
from neve.client.group.ownership import Owner
from neve.client.group.received import Received
from neve.client.model import Message, MessageQueue

_EXPIRED_MAX = 1024  # expired deliveries that are remembered, to log a late settlement


class _Delivery(NamedTuple):
    """A message that `owner` has owned since `since`, on the loop's clock."""

    message: Received
    since: float
    owner: Owner


class ProcessQueue:
    """The offsets between `committable` (all below are acknowledged) and `next_offset` (the next to fetch). No I/O.

    An offset without a message, because a filter or the broker skipped it, is acknowledged with its predecessors.
    """

    def __init__(self, queue: MessageQueue, offset: int, *, in_order: bool = False) -> None:
        self.queue = queue
        self.next_offset = offset
        self.is_dropped = False
        self.is_paused = False  # by the application
        self.is_leaving = False  # another member gets the queue when its current message is settled
        self.committed = offset
        self.keeper: object = None  # where `committed` is stored: see `OffsetStore.keeper`
        self.delivery = DeliveryQueue(in_order=in_order)
        self.locked_until: float | None = None  # on the loop's clock; None if the queue needs no lock
        self.last_lock_ms = 0
        self.last_pull_ms = 0
        self.last_consume_ms = 0
        self.expired: deque[int] = deque(maxlen=_EXPIRED_MAX)  # offsets whose delivery exceeded the consume timeout
        self._open: dict[int, _Delivery | None] = {}  # fetched and not acknowledged, ascending; None: not delivered

    @property
    def committable(self) -> int:
        """The offset below which all messages are acknowledged."""
        return next(iter(self._open), self.next_offset)

    @property
    def unacked(self) -> int:
        """The number of fetched messages that are not acknowledged."""
        return len(self._open)

    @property
    def open_offsets(self) -> tuple[int, int]:
        """The first and the last offset that is fetched and not acknowledged; (0, 0) if there is none."""
        return (next(iter(self._open)), next(reversed(self._open))) if self._open else (0, 0)

    def is_usable(self, now: float) -> bool:
        """Return whether messages may be fetched and delivered: the queue is assigned, and locked if it must be."""
        return not self.is_dropped and (self.locked_until is None or now < self.locked_until)

    def fetched(self, messages: Iterable[Message], next_offset: int) -> None:
        """Record a pull."""
        for message in messages:
            self._open[message.queue_offset] = None
        self.next_offset = max(self.next_offset, next_offset)

    def delivered(self, message: Received, now: float, owner: Owner) -> None:
        """Record that `owner` received the message at `now`."""
        if message.queue_offset in self._open:
            self._open[message.queue_offset] = _Delivery(message, now, owner)

    def give_back(self, offset: int) -> None:
        """Record that the application gave the message back; it is not acknowledged."""
        if offset in self._open:
            self._open[offset] = None

    def overdue(self, before: float) -> Received | None:
        """Return the first unacknowledged message if it was delivered earlier than `before`."""
        first = next(iter(self._open.values()), None)
        return first.message if first is not None and first.since < before else None

    def is_owned(self, offset: int) -> bool:
        """Return whether the application owns the message."""
        return self._open.get(offset) is not None

    @property
    def owners(self) -> list[Owner]:
        """The owners of delivered messages, once for each message."""
        return [delivery.owner for delivery in self._open.values() if delivery is not None]

    def ack(self, offset: int) -> float | None:
        """Acknowledge an offset.

        Returns:
            The time of its delivery, 0 if it was not delivered, or None if it was not open.
        """
        if offset not in self._open:
            return None
        delivery = self._open.pop(offset)
        return 0.0 if delivery is None else delivery.since
