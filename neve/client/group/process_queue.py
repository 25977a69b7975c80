"""The books of one assigned queue: what was fetched, what is with the application, how far it may be committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from neve.client.group.delivery import DeliveryQueue
from neve.client.group.in_work import Asker
from neve.client.group.received import Received
from neve.client.model import Message, MessageQueue

_REMEMBERED = 1024  # messages that were taken back from the application, so that it can be told


class _InHand(NamedTuple):
    """With the application since `since`, on the loop's clock; `asker` is who has it."""

    message: Received
    since: float
    asker: Asker


class ProcessQueue:
    """Offsets between `next_offset` (to fetch) and `committable` (everything below is done with). No I/O.

    An offset that carries no message (filtered, skipped) is done with as soon as all before it are acked.
    """

    def __init__(self, queue: MessageQueue, offset: int, *, in_order: bool = False) -> None:
        self.queue = queue
        self.next_offset = offset
        self.is_dropped = False
        self.is_paused = False  # by the application
        self.is_leaving = False  # another member gets it as soon as the message in hand is settled
        self.committed = offset
        self.keeper: object = None  # who has that
        self.delivery = DeliveryQueue(in_order=in_order)
        self.locked_until: float | None = None  # on the loop's clock; None: this queue needs no lock
        self.last_lock_ms = 0
        self.last_pull_ms = 0
        self.last_consume_ms = 0
        self.taken_back: deque[int] = deque(maxlen=_REMEMBERED)  # offsets that the application held too long
        self._open: dict[int, _InHand | None] = {}  # fetched and not acked, ascending

    @property
    def committable(self) -> int:
        return next(iter(self._open), self.next_offset)

    @property
    def unacked(self) -> int:
        return len(self._open)

    @property
    def open_offsets(self) -> tuple[int, int]:
        """The first and the last offset that was fetched and not acked; (0, 0) without one."""
        return (next(iter(self._open)), next(reversed(self._open))) if self._open else (0, 0)

    def is_usable(self, now: float) -> bool:
        """Whether messages may be fetched and handed out: the queue is ours, and locked if it has to be."""
        return not self.is_dropped and (self.locked_until is None or now < self.locked_until)

    def fetched(self, messages: Iterable[Message], next_offset: int) -> None:
        for message in messages:
            self._open[message.queue_offset] = None
        self.next_offset = max(self.next_offset, next_offset)

    def handed_over(self, message: Received, now: float, asker: Asker) -> None:
        """The application got the message at `now`."""
        if message.queue_offset in self._open:
            self._open[message.queue_offset] = _InHand(message, now, asker)

    def not_in_hand(self, offset: int) -> None:
        """The application gave the message back; it is still to be done."""
        if offset in self._open:
            self._open[offset] = None

    def overdue(self, before: float) -> Received | None:
        """The first open message, if the application has it since earlier than `before`."""
        first = next(iter(self._open.values()), None)
        return first.message if first is not None and first.since < before else None

    def is_in_hand(self, offset: int) -> bool:
        """Whether the application has the message and has not said yet what is to become of it."""
        return self._open.get(offset) is not None

    @property
    def askers(self) -> list[Asker]:
        """Who has messages of this queue, once for each."""
        return [in_hand.asker for in_hand in self._open.values() if in_hand is not None]

    def ack(self, offset: int) -> float | None:
        """When the message was handed over, 0 if it was not; None when the offset was not open."""
        if offset not in self._open:
            return None
        in_hand = self._open.pop(offset)
        return 0.0 if in_hand is None else in_hand.since
