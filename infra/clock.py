"""Time as a dependency: the only module of the product that reads the machine's clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time in milliseconds and a monotonic time in seconds."""

    def now_ms(self) -> int: ...

    def monotonic(self) -> float: ...

    def thread_seconds(self) -> float:
        """Return the processor time of the calling thread."""
        ...


class SystemClock:
    """The machine's clock."""

    __slots__ = ()

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def thread_seconds(self) -> float:
        return time.thread_time()


class ManualClock:
    """A clock that only a test moves."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0
        self.worked_s = 0.0  # processor time of any thread

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    def thread_seconds(self) -> float:
        return self.worked_s

    def advance(self, milliseconds: int) -> None:
        """Move both times forward."""
        self._now_ms += milliseconds
        self._monotonic += milliseconds / 1000

    def set_wall(self, now_ms: int) -> None:
        """Set the wall time only, as an operator or NTP would; it may go backwards."""
        self._now_ms = now_ms
