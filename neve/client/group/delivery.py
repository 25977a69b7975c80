"""The buffer between the network and the application: messages wait by queue, and queues take turns.

A queue in order delivers its next message when the one before is settled. A closed queue delivers nothing. Buffered
bodies stay compressed, and are decompressed at delivery: the limit of buffered bytes is then a limit of memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from neve.client.group.received import Received
from neve.client.model import inflated


class DeliveryQueue:
    """The buffered messages of one queue. Only a `DeliveryBuffer` changes it."""

    def __init__(self, *, in_order: bool = False) -> None:
        self.waiting: deque[Received] = deque()
        self.waiting_bytes = 0
        self.in_order = in_order
        self.current: Received | None = None  # in order: the delivered message that is not settled
        self.is_open = True
        self.is_queued = False

    @property
    def can_deliver(self) -> bool:
        return self.is_open and self.current is None and bool(self.waiting)


class DeliveryBuffer:
    """The buffered messages of one consumer. `on_room` is called when a message leaves the buffer."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self.count = 0
        self.bytes = 0
        self._on_room = on_room
        self._ready: deque[DeliveryQueue] = deque()
        self._arrived = asyncio.Event()

    def put(self, delivery: DeliveryQueue, messages: Iterable[Received], *, first: bool = False) -> None:
        """Append messages to a queue, or with `first` prepend them."""
        for message in messages:
            (delivery.waiting.appendleft if first else delivery.waiting.append)(message)
            self._count(delivery, 1, len(message.body))
        self._queue(delivery, first=first)

    def take(self) -> Received | None:
        """Remove and return the next message of the queue whose turn it is."""
        while self._ready:
            delivery = self._ready.popleft()
            delivery.is_queued = False
            if not delivery.can_deliver:
                continue
            message = delivery.waiting.popleft()
            self._count(delivery, -1, -len(message.body))
            message = inflated(message)
            if delivery.in_order:
                delivery.current = message
            self._queue(delivery)
            self._on_room()
            return message
        return None

    async def wait(self) -> None:
        """Wait until `take` may return a message, or until `wake`."""
        self._arrived.clear()
        await self._arrived.wait()

    def wake(self) -> None:
        """Wake all callers of `wait`."""
        self._arrived.set()

    def settled(self, delivery: DeliveryQueue) -> None:
        """Allow a queue in order to deliver its next message."""
        delivery.current = None
        self._queue(delivery)

    def close(self, delivery: DeliveryQueue) -> None:
        """Stop the delivery of a queue until `open`."""
        delivery.is_open = False

    def open(self, delivery: DeliveryQueue) -> None:
        delivery.is_open = True
        self._queue(delivery)

    def discard(self, delivery: DeliveryQueue) -> list[Received]:
        """Remove and return the buffered messages of a queue."""
        dropped = list(delivery.waiting)
        self._count(delivery, -len(dropped), -delivery.waiting_bytes)
        delivery.waiting.clear()
        self._on_room()
        return dropped

    def _queue(self, delivery: DeliveryQueue, *, first: bool = False) -> None:
        if delivery.can_deliver and not delivery.is_queued:
            delivery.is_queued = True
            (self._ready.appendleft if first else self._ready.append)(delivery)
            self._arrived.set()

    def _count(self, delivery: DeliveryQueue, messages: int, size: int) -> None:
        self.count += messages
        self.bytes += size
        delivery.waiting_bytes += size
        assert self.count >= 0
        assert delivery.waiting_bytes >= 0
