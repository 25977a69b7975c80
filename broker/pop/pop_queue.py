"""Pop state of one queue and group: the next offset to hand out, and the messages in flight.

The group's committed offset is the lowest offset in flight.

In ordered consumption, a queue has at most one batch in flight. The queue is blocked until each message of the batch
is acknowledged or visible again. Then it resumes at the first unacknowledged message. The attempt (client-supplied id)
that took a batch may take it again.

A receipt handle identifies a message by offset and pop time. No offset is handed out twice with the same pop time.
Receipts from before a redelivery or an offset reset are therefore invalid.

Only `pop_book` changes the durable state, event by event. The lock is not durable.
"""

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from broker.pop.pop_log import PopCheckPoint

Key = tuple[str, str, int]  # group, topic, queue
MAX_OUT = 20_000
# RocketMQ keeps a pop's checkpoint as a timer message; these are delayed for three days at most.
MAX_INVISIBLE_MS = 3 * 24 * 3_600_000


@dataclass(slots=True)
class Flight:
    """One message in flight; times in ms."""

    pop_time: int
    visible_at: int
    in_order: bool


@dataclass(slots=True)
class Batch:
    """Messages of the last ordered pop, with the number of earlier deliveries of each."""

    attempt: str = ""
    offsets: Sequence[int] = ()
    counts: dict[int, int] = field(default_factory=dict)

    def followed_by(self, attempt: str, offsets: Sequence[int]) -> "Batch":
        """Return the batch of the next pop. A repeated attempt does not count as a redelivery."""
        if attempt and attempt == self.attempt:
            return Batch(attempt, offsets, self.counts)
        again = set(self.offsets)
        return Batch(attempt, offsets, {o: self.counts.get(o, 0) + 1 for o in offsets if o in again})


class UnreadableOffset(NamedTuple):
    """Offset that could not be read, and the monotonic time until which it is skipped."""

    offset: int
    until: float
    why: str


@dataclass(slots=True)
class QueueLock:
    """Lock for one pop at a time; remembers whether another pop skipped the queue meanwhile and must be woken."""

    held: bool = False
    passed_by: bool = False

    def take(self) -> None:
        assert not self.held, "a queue that is held is skipped"
        self.held = True

    def pass_by(self) -> bool:
        """Return whether another pop reads the queue; if so, `release` will report the skipped pop."""
        self.passed_by |= self.held
        return self.held

    def release(self) -> bool:
        """Release the lock and return whether a pop skipped the queue meanwhile."""
        assert self.held, "only the holder releases it"
        was_passed_by, self.held, self.passed_by = self.passed_by, False, False
        return was_passed_by


@dataclass(slots=True, eq=False)
class PopQueue:
    """Pop state of one queue of one group."""

    key: Key
    next_offset: int
    committed: int = -1
    flights: dict[int, Flight] = field(default_factory=dict)
    batch: Batch = field(default_factory=Batch)
    # Incremented by each reset or release of a batch, to invalidate reads that started before.
    turn: int = 0
    lock: QueueLock = field(default_factory=QueueLock)
    unreadable: UnreadableOffset | None = None
    # `newest` is the latest pop time. `floor` is its value at the last reset: from `next_offset` on,
    # pop times are later.
    newest: int = 0
    floor: int = 0
    _lowest: list[int] = field(default_factory=list)

    def add(self, offset: int, flight: Flight) -> None:
        """Mark a message as in flight, or replace its state."""
        if offset not in self.flights:
            heapq.heappush(self._lowest, offset)
        self.flights[offset] = flight
        self.newest = max(self.newest, flight.pop_time)

    @property
    def is_empty(self) -> bool:
        """Whether no message is in flight and no pop reads the queue."""
        return not self.flights and not self.lock.held

    def low(self) -> int:
        """Return the lowest offset in flight, or the next offset if none is: the group's committed offset."""
        lowest = self._lowest
        while lowest and lowest[0] not in self.flights:
            heapq.heappop(lowest)
        return min(lowest[0], self.next_offset) if lowest else self.next_offset

    def start(self, *, in_order: bool) -> int:
        """Return the first offset of a pop; an ordered pop starts with unacknowledged messages."""
        return self.low() if in_order else self.next_offset

    def is_blocked(self, now: int, *, in_order: bool, attempt: str) -> bool:
        """Return whether a pop gets nothing because of the messages in flight."""
        if not in_order:
            return len(self.flights) >= MAX_OUT
        again = bool(attempt) and attempt == self.batch.attempt
        return any(not flight.in_order or (flight.visible_at > now and not again) for flight in self.flights.values())

    def least_pop_time(self, start: int) -> int:
        """Return the lowest allowed pop time for a pop that starts at `start`."""
        return 1 + (self.newest if start < self.next_offset else self.floor)

    def begin_batch(self, checkpoint: PopCheckPoint) -> None:
        """Begin a batch; it supersedes the messages of the last one that are still in flight."""
        self.batch = self.batch.followed_by(checkpoint.attempt, checkpoint.offsets)
        if self.flights:
            self.go_to(checkpoint.next_offset)

    def go_to(self, offset: int) -> None:
        """Set the next offset and forget all messages in flight."""
        self.next_offset = offset
        self.flights.clear()
        self._lowest.clear()
        self.floor = self.newest
        self.turn += 1


def is_out(queue: PopQueue, offsets: Iterable[int], pop_time: int) -> list[int]:
    """Return the offsets that are in flight since `pop_time`; an acknowledgement of others is too late."""
    flights = queue.flights
    return [o for o in offsets if (flight := flights.get(o)) is not None and flight.pop_time == pop_time]
