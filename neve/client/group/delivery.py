"""Between the network and the application: messages wait in lanes, one lane a queue, and are handed out in turn.

A lane in order hands out its next message only after the one before was settled. A closed lane hands out nothing.
Messages wait as they are stored, compressed where they were sent so, and are inflated one by one as they are handed
out: the bound on their bytes is one on memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from neve.client.group.received import Received
from neve.client.model import inflated


class Lane:
    """The waiting messages of one queue. Only a `DeliveryBuffer` changes it."""

    def __init__(self, *, in_order: bool = False) -> None:
        self.waiting: deque[Received] = deque()
        self.waiting_bytes = 0
        self.in_order = in_order
        self.in_hand: Received | None = None  # only of a lane in order
        self.is_open = True
        self.is_queued = False

    @property
    def can_deliver(self) -> bool:
        return self.is_open and self.in_hand is None and bool(self.waiting)


class DeliveryBuffer:
    """All lanes of a consumer. `on_room` is called when a message leaves, so that more may be fetched."""

    def __init__(self, on_room: Callable[[], None]) -> None:
        self.count = 0
        self.bytes = 0
        self._on_room = on_room
        self._ready: deque[Lane] = deque()
        self._arrived = asyncio.Event()

    def put(self, lane: Lane, messages: Iterable[Received], *, first: bool = False) -> None:
        """Adds to the end of the lane, or to its front."""
        for message in messages:
            (lane.waiting.appendleft if first else lane.waiting.append)(message)
            self._count(lane, 1, len(message.body))
        self._queue(lane, first=first)

    def take(self) -> Received | None:
        """The next message of the lane whose turn it is."""
        while self._ready:
            lane = self._ready.popleft()
            lane.is_queued = False
            if not lane.can_deliver:
                continue
            message = lane.waiting.popleft()
            self._count(lane, -1, -len(message.body))
            message = inflated(message)
            if lane.in_order:
                lane.in_hand = message
            self._queue(lane)
            self._on_room()
            return message
        return None

    async def wait(self) -> None:
        """Until something may have changed for `take`."""
        self._arrived.clear()
        await self._arrived.wait()

    def wake(self) -> None:
        self._arrived.set()

    def settled(self, lane: Lane) -> None:
        """The message in hand is done with; a lane in order goes on."""
        lane.in_hand = None
        self._queue(lane)

    def close(self, lane: Lane) -> None:
        """Hands out nothing more until `open`."""
        lane.is_open = False

    def open(self, lane: Lane) -> None:
        lane.is_open = True
        self._queue(lane)

    def discard(self, lane: Lane) -> list[Received]:
        """Empties the lane; what was waiting in it."""
        dropped = list(lane.waiting)
        self._count(lane, -len(dropped), -lane.waiting_bytes)
        lane.waiting.clear()
        self._on_room()
        return dropped

    def _queue(self, lane: Lane, *, first: bool = False) -> None:
        if lane.can_deliver and not lane.is_queued:
            lane.is_queued = True
            (self._ready.appendleft if first else self._ready.append)(lane)
            self._arrived.set()

    def _count(self, lane: Lane, messages: int, size: int) -> None:
        self.count += messages
        self.bytes += size
        lane.waiting_bytes += size
        assert self.count >= 0
        assert lane.waiting_bytes >= 0
