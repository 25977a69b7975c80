"""Token bucket for uploads. A large take may overdraw it; the next take waits until the debt is paid.

A change of the rate takes effect at once, also for waiting takes: the debt is paid at the new rate.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from infra.clock import Clock

BURST_SECONDS = 1.0


class UploadRate:
    """The token bucket. Thread-safe. `wait` is Condition.wait; a test moves its clock there."""

    def __init__(
        self, clock: Clock, wait: Callable[[threading.Condition, float], object] = threading.Condition.wait
    ) -> None:
        self._clock, self._wait = clock, wait
        self._changed = threading.Condition()
        self._rate = 0
        self._paid_at = 0.0  # time at which all takes are paid; meaningful only with a rate

    def set(self, bytes_per_second: int) -> None:
        """Set the rate in bytes per second; 0 for no limit."""
        assert bytes_per_second >= 0
        with self._changed:
            now = self._clock.monotonic()
            owed = (self._paid_at - now) * self._rate
            self._rate = bytes_per_second
            self._paid_at = now + max(0.0, owed) / bytes_per_second if bytes_per_second else now
            self._changed.notify_all()

    def take(self, count: int) -> float:
        """Wait until all earlier takes but one second's worth are paid, then take `count` bytes.

        Returns the seconds waited.
        """
        with self._changed:
            started = self._clock.monotonic()
            now = started
            while self._rate and (early := self._paid_at - BURST_SECONDS - now) > 0:
                self._wait(self._changed, early)
                now = self._clock.monotonic()
            if self._rate:
                self._paid_at = max(self._paid_at, now) + count / self._rate
            return now - started
