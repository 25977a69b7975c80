"""How long the event loop was busy with something else: the lateness of a timer, its largest since the last look."""

from __future__ import annotations

import asyncio

PERIOD_S = 0.1


class LoopPause:
    """Start it on the loop that it watches. One timer every 100 ms; it costs nothing that a broker would notice."""

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
        """The longest pause in seconds since the last call."""
        largest, self._largest_s = self._largest_s, 0.0
        return largest
