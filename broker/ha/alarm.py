"""One thing to be done at its time, for who may put it off or bring it forward many times a second.

Asked for later than it is due it stays as it is: who is woken too early looks at the time himself. What is due at once
is no timer on uvloop (`call_later` of nothing is a `call_soon`, without a time to ask for), so the time is kept here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """`ring` is called once for each time that it was set and not stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._handle: asyncio.Handle | None = None
        self._due = 0.0  # the loop's time

    def ring_in(self, delay: float) -> None:
        """Seconds; below 0 is at once."""
        delay = max(delay, 0.0)
        due = self._loop.time() + delay
        if self._handle is not None:
            if self._due <= due:
                return
            self._handle.cancel()
        self._handle, self._due = self._loop.call_later(delay, self._rings), due

    def stop(self) -> None:
        """It does not ring before it is set again."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rings(self) -> None:
        self._handle = None
        self._ring()
