"""The books of one assigned queue: what was fetched, what is with the application, how far it may be committed."""

from __future__ import annotations

from collections.abc import Iterable

from neve.client.delivery import Lane
from neve.client.model import Message, MessageQueue


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
        self.lane = Lane(in_order=in_order)
        self.locked_until: float | None = None  # on the loop's clock; None: this queue needs no lock
        self.last_lock_ms = 0
        self.last_pull_ms = 0
        self.last_consume_ms = 0
        self._open: dict[int, float] = {}  # fetched and not acked, ascending; when it was handed over, or 0

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
            self._open[message.queue_offset] = 0.0
        self.next_offset = max(self.next_offset, next_offset)

    def handed_over(self, offset: int, now: float) -> None:
        """The application got the message at `now`."""
        if offset in self._open:
            self._open[offset] = now

    def ack(self, offset: int) -> float | None:
        """When the message was handed over; None when the offset was not open."""
        return self._open.pop(offset, None)
