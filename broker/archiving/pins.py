"""Pins: messages that are waiting for delivery, and therefore keep their log segments."""

from __future__ import annotations

from typing import Protocol

from broker.metadata.metadata_log import MetadataLog
from broker.pop.pop_book import PopBook
from broker.store.message_store import MessageStore
from broker.waiting.half_messages import HalfMessages
from broker.waiting.schedule_message import ScheduleMessage
from broker.waiting.timer_message import TimerMessages


class Pins(Protocol):
    """Source of pins. Called on the event loop."""

    def lowest(self) -> int | None:
        """Return the lowest physical offset that a restart or a delivery needs, None without pins.

        Segments from it on must not be evicted.
        """
        ...

    def undelivered_from(self) -> int | None:
        """Return the lowest physical offset of an undelivered delayed, timer or half message; None if there is none."""
        ...

    def reappend(self, below: int) -> bool:
        """Append some waiting messages below `below` again; return whether more are left."""
        ...

    async def save(self) -> None:
        """Save the state that pins the log until it is on disk."""
        ...

    def counts(self) -> dict[str, int]:
        """Return the number of waiting messages by kind."""
        ...


class WaitingMessages:
    """Pins of delayed messages, timers, half messages, pop state, and changes that no table file includes yet."""

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
    """Pins of a member of a broker set, based on a confirmed frontier.

    Below the frontier, nothing needed the log once everything logged up to that observation was confirmed. Unconfirmed
    records may be truncated, and messages that they delivered would wait again. A slave does not update its own
    pins, but receives the frontier from its master, with the end of the log to which it belongs.
    """

    def __init__(self, store: MessageStore, pins: Pins) -> None:
        self._store, self._pins = store, pins
        # (log end, lowest needed offset) of observations that are not confirmed yet: the oldest and the newest.
        self._looks: list[tuple[int, int]] = []
        self._frontier = 0

    def frontier(self) -> int:
        """Return the frontier of a master, which it also sends to its slaves."""
        store, lowest = self._store, self._pins.lowest()
        end = store.max_physical_offset
        self._looks[1:] = [(end, end if lowest is None else lowest)]
        while self._looks and self._looks[0][0] <= store.visibility.confirmed:
            self._frontier = self._looks.pop(0)[1]
        return self._frontier

    def set_frontier(self, frontier: int) -> None:
        """Accept the frontier of the master; this slave's log has to be confirmed up to the end that belongs to it."""
        self._frontier = frontier

    def lowest(self) -> int | None:
        if not self._store.end.is_following:
            return self.frontier()
        self._looks.clear()
        lowest = self._pins.lowest()  # needed by this broker's own files
        return self._frontier if lowest is None else min(lowest, self._frontier)

    def undelivered_from(self) -> int | None:
        return self._pins.undelivered_from()

    def reappend(self, below: int) -> bool:
        return self._pins.reappend(below)

    async def save(self) -> None:
        await self._pins.save()

    def counts(self) -> dict[str, int]:
        return self._pins.counts()
