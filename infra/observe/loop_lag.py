"""The lag of the event loop: the largest delay of a periodic timer since the last reading."""

from __future__ import annotations

import asyncio

PERIOD_S = 0.1


class LoopLag:
    """Measures the loop on which `start` is called, by a timer every 100 ms. Its cost is negligible."""

    def __init__(self) -> None:
        self._largest_s = 0.0
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + PERIOD_S
        self._timer = loop.call_at(self._due, self._tick, loop)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._largest_s = max(self._largest_s, now - self._due)
        self._due = now + PERIOD_S
        self._timer = loop.call_at(self._due, self._tick, loop)

    def take(self) -> float:
        """Return the largest lag in seconds since the last call."""
        largest, self._largest_s = self._largest_s, 0.0
        return largest
