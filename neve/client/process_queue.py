"""The books of one assigned queue: what was fetched, what is with the application, how far it may be committed."""

from __future__ import annotations

from collections.abc import Sequence

from neve.client.model import Message, MessageQueue


class ProcessQueue:
    """Offsets between `next_offset` (to fetch) and `committable` (everything below is done with). No I/O.

    An offset that carries no message (filtered, skipped) is done with as soon as all before it are acked.
    """

    def __init__(self, queue: MessageQueue, offset: int) -> None:
        self.queue = queue
        self.next_offset = offset
        self.is_dropped = False
        self.buffered = 0
        self.buffered_bytes = 0
        self.committed = offset
        self._open: dict[int, None] = {}  # fetched and not acked, ascending (a dict keeps the order of arrival)

    @property
    def committable(self) -> int:
        return next(iter(self._open), self.next_offset)

    @property
    def unacked(self) -> int:
        return len(self._open)

    def fetched(self, messages: Sequence[Message], next_offset: int) -> None:
        for message in messages:
            self._open[message.queue_offset] = None
            self.buffered_bytes += len(message.body)
        self.buffered += len(messages)
        self.next_offset = max(self.next_offset, next_offset)

    def handed_over(self, message: Message) -> None:
        """The message left the buffer for the application."""
        self.buffered -= 1
        self.buffered_bytes -= len(message.body)

    def ack(self, offset: int) -> bool:
        """Whether the offset was open."""
        if offset not in self._open:
            return False
        del self._open[offset]
        return True
