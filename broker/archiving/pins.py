"""What keeps a segment of the log: messages in waiting, which no archive takes."""

from __future__ import annotations

from typing import Protocol

from broker.metadata.metadata_log import MetadataLog
from broker.pop.pop_book import PopBook
from broker.store.message_store import MessageStore
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages


class Pins(Protocol):
    """Asked on the loop."""

    def lowest(self) -> int | None:
        """The lowest log position that a message in waiting needs; nothing from it on may be evicted. None: no pin."""
        ...

    def undelivered_from(self) -> int | None:
        """The lowest log position of a delayed, timer or half message that is not delivered. None: there is none."""
        ...

    def reappend(self, below: int) -> bool:
        """Append again some of what waits below a position; True: there is more."""
        ...

    async def save(self) -> None:
        """Bring to disk what pins the log until it is there."""
        ...

    def counts(self) -> dict[str, int]:
        """How many wait, by kind."""
        ...


class WaitingMessages:
    """Delayed messages, timers, half messages, what is popped, and changes that no table's file has."""

    def __init__(
        self,
        schedule: ScheduleMessage,
        timers: TimerMessages,
        transactions: HalfMessages,
        pops: PopBook,
        metadata: MetadataLog,
    ) -> None:
        self._schedule, self._timers, self._transactions, self._pops = schedule, timers, transactions, pops
        self._metadata = metadata

    def lowest(self) -> int | None:
        return _lowest(
            self.undelivered_from(), self._pops.oldest_needed_physical(), self._metadata.oldest_needed_physical()
        )

    def undelivered_from(self) -> int | None:
        return _lowest(
            self._schedule.oldest_pending_physical(), self._timers.pinned_from(), self._transactions.pinned_from()
        )

    def reappend(self, below: int) -> bool:
        return (
            self._schedule.reappend(below, self._timers)
            or self._timers.reappend(below)
            or self._transactions.reappend(below)
        )

    async def save(self) -> None:
        await self._metadata.save()

    def counts(self) -> dict[str, int]:
        return {
            "timers": len(self._timers),
            "delayed": self._schedule.pending(),
            "half_messages": len(self._transactions),
        }


def _lowest(*positions: int | None) -> int | None:
    return min((position for position in positions if position is not None), default=None)


class SetPins:
    """Of a member of a broker set: what lies below its *frontier* was needed by nothing when all there was by then was
    confirmed. What a master has not confirmed may be cut off, and what that has brought on its way waits again.

    A slave's own books stand still; what waits it hears from its master, with the end of the log that this belongs to.
    """

    def __init__(self, store: MessageStore, pins: Pins) -> None:
        self._store, self._pins = store, pins
        # Where the log ended and what nothing below it needed, not confirmed yet: the oldest, and the newest.
        self._looks: list[tuple[int, int]] = []
        self._frontier = 0

    def frontier(self) -> int:
        """Of a master, as a slave may be told."""
        store, lowest = self._store, self._pins.lowest()
        end = store.max_physical_offset
        self._looks[1:] = [(end, end if lowest is None else lowest)]
        while self._looks and self._looks[0][0] <= store.confirmed_offset:
            self._frontier = self._looks.pop(0)[1]
        return self._frontier

    def told(self, frontier: int) -> None:
        """By the master, to a slave that is confirmed as far as what it tells of."""
        self._frontier = frontier

    def lowest(self) -> int | None:
        if not self._store.is_following:
            return self.frontier()
        self._looks.clear()
        lowest = self._pins.lowest()  # what this broker's own files need
        return self._frontier if lowest is None else min(lowest, self._frontier)

    def undelivered_from(self) -> int | None:
        return self._pins.undelivered_from()

    def reappend(self, below: int) -> bool:
        return self._pins.reappend(below)

    async def save(self) -> None:
        await self._pins.save()

    def counts(self) -> dict[str, int]:
        return self._pins.counts()
