"""How fast uploads may go: by the age of what waits and the fill of the disk, looked at also while a round runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from infra.clock import Clock
from lifecycle.hot_store import HotStore
from lifecycle.retention import Policy, upload_rate
from lifecycle.turns import Turns


class Paced(Protocol):
    """Who uploads at a rate."""

    def set_upload_rate(self, bytes_per_second: int) -> None: ...


class UploadThrottle:
    """`oldest_ms` says from when the oldest message is that is not archived."""

    def __init__(  # noqa: PLR0917
        self,
        worker: Paced,
        hot: HotStore,
        policy: Callable[[], Policy],
        clock: Clock,
        turns: Turns,
        oldest_ms: Callable[[], int],
    ) -> None:
        self._worker, self._hot, self._policy, self._clock = worker, hot, policy, clock
        self._turns, self._oldest_ms = turns, oldest_ms
        self.bytes_per_second = 0  # 0: no limit

    def adjust(self) -> None:
        """The disk does not wait for a round's end, and a stop waits for no rate."""
        now = self._clock.now_ms()
        closed = self._turns.closed
        rate = 0 if closed else upload_rate(self._policy(), self._oldest_ms(), now, self._hot.disk_ratio())
        self.bytes_per_second = rate
        self._worker.set_upload_rate(rate)
