"""One queue of one group that pops: the next offset to hand out, and what is out until when.

The group's offset is the lowest offset that is still out.

In order a queue has one batch out. Until each of its messages is acknowledged or seen again nobody gets more of the
queue; then it goes on at the first one that is not acknowledged. The attempt that took a batch may take it again.

A receipt names a message by offset and pop time. No offset goes out twice with the same pop time, so a receipt from
before a message was given again, or from before the group was set elsewhere, fits nothing.

What lasts is changed by the book alone (`pop_book`), event by event; the lock is of this process.
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
    """One message that is out."""

    pop_time: int
    visible_at: int
    in_order: bool


@dataclass(slots=True)
class Batch:
    """What the last pop in order got, and how often each of these messages had come back before."""

    attempt: str = ""
    offsets: Sequence[int] = ()
    counts: dict[int, int] = field(default_factory=dict)

    def followed_by(self, attempt: str, offsets: Sequence[int]) -> "Batch":
        """The same attempt again is no new try."""
        if attempt and attempt == self.attempt:
            return Batch(attempt, offsets, self.counts)
        again = set(self.offsets)
        return Batch(attempt, offsets, {o: self.counts.get(o, 0) + 1 for o in offsets if o in again})


class Unreadable(NamedTuple):
    """What could not be read, and until when, by the monotonic clock, it is left alone."""

    offset: int
    until: float
    why: str


@dataclass(slots=True)
class QueueLock:
    """One pop at a time reads a queue; who passes it by meanwhile looks again when that one is done."""

    held: bool = False
    passed_by: bool = False

    def take(self) -> None:
        assert not self.held, "who finds it held passes by"
        self.held = True

    def pass_by(self) -> bool:
        """True: another one reads there, and release will tell that somebody wanted to."""
        self.passed_by |= self.held
        return self.held

    def release(self) -> bool:
        """Whether somebody passed by."""
        assert self.held, "released by who took it"
        told, self.held, self.passed_by = self.passed_by, False, False
        return told


@dataclass(slots=True, eq=False)
class PopQueue:
    """One queue of one group."""

    key: Key
    next_offset: int
    committed: int = -1
    flights: dict[int, Flight] = field(default_factory=dict)
    batch: Batch = field(default_factory=Batch)
    # Counts how often it was set elsewhere or freed: what was read before that is not handed out any more.
    turn: int = 0
    lock: QueueLock = field(default_factory=QueueLock)
    unreadable: Unreadable | None = None
    # The latest pop time, and that of what may go out again.
    newest: int = 0
    floor: int = 0
    _lowest: list[int] = field(default_factory=list)

    def add(self, offset: int, flight: Flight) -> None:
        if offset not in self.flights:
            heapq.heappush(self._lowest, offset)
        self.flights[offset] = flight
        self.newest = max(self.newest, flight.pop_time)

    @property
    def is_empty(self) -> bool:
        """No message is out, and no pop reads here now."""
        return not self.flights and not self.lock.held

    def low(self) -> int:
        lowest = self._lowest
        while lowest and lowest[0] not in self.flights:
            heapq.heappop(lowest)
        return min(lowest[0], self.next_offset) if lowest else self.next_offset

    def start(self, *, in_order: bool) -> int:
        """The first offset that a pop gets: in order, what is not acknowledged comes before what is new."""
        return self.low() if in_order else self.next_offset

    def is_blocked(self, now: int, *, in_order: bool, attempt: str) -> bool:
        """A pop gets nothing from here, whatever there is."""
        if not in_order:
            return len(self.flights) >= MAX_OUT
        again = bool(attempt) and attempt == self.batch.attempt
        return any(not flight.in_order or (flight.visible_at > now and not again) for flight in self.flights.values())

    def least_pop_time(self, start: int) -> int:
        """What a pop from there must be popped at, at the least."""
        return 1 + (self.newest if start < self.next_offset else self.floor)

    def begin_batch(self, checkpoint: PopCheckPoint) -> None:
        """What was out of the last batch is not out any more: it is in this one, or comes after it."""
        self.batch = self.batch.followed_by(checkpoint.attempt, checkpoint.offsets)
        if self.flights:
            self.go_to(checkpoint.next_offset)

    def go_to(self, offset: int) -> None:
        """Nothing is out any more."""
        self.next_offset = offset
        self.flights.clear()
        self._lowest.clear()
        self.floor = self.newest
        self.turn += 1


def is_out(queue: PopQueue, offsets: Iterable[int], pop_time: int) -> list[int]:
    """Those of the offsets that are out since that pop; an acknowledgement of another one is too late."""
    flights = queue.flights
    return [o for o in offsets if (flight := flights.get(o)) is not None and flight.pop_time == pop_time]
