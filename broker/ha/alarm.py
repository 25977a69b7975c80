"""One timer that may be put off or brought forward many times a second.

If it is set to a later time than before, it keeps the earlier one. A callback that runs too early has to check the time
itself. The due time is kept here, because uvloop turns `call_later` with a delay of 0 into `call_soon`, whose handle
has no time to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Timer that calls `ring` once for each time that it was set and not stopped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop, self._ring = loop, ring
        self._handle: asyncio.Handle | None = None
        self._due = 0.0  # the loop's time

    def ring_in(self, delay: float) -> None:
        """Ring after `delay` seconds, or before if that is already set. A negative delay counts as 0."""
        delay = max(delay, 0.0)
        due = self._loop.time() + delay
        if self._handle is not None:
            if self._due <= due:
                return
            self._handle.cancel()
        self._handle, self._due = self._loop.call_later(delay, self._rings), due

    def stop(self) -> None:
        """Cancel the pending ring, if any."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _rings(self) -> None:
        self._handle = None
        self._ring()
