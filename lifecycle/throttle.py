"""Upload rate and processor priority of the worker.

Both depend on the age of the backlog and the fill of the disk. They are also adjusted during a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from infra.clock import Clock
from lifecycle.hot_store import HotStore
from lifecycle.retention import RetentionPolicy, upload_rate, worker_priority
from lifecycle.turns import Turns


class Paced(Protocol):
    """A worker that encodes, and uploads at a rate."""

    def set_upload_rate(self, bytes_per_second: int) -> None: ...

    def set_priority(self, priority: str) -> None: ...


class UploadThrottle:
    """Throttle of the worker. `oldest_ms` returns the store time of the oldest unarchived message."""

    def __init__(  # noqa: PLR0917
        self,
        worker: Paced,
        hot: HotStore,
        policy: Callable[[], RetentionPolicy],
        clock: Clock,
        turns: Turns,
        oldest_ms: Callable[[], int],
    ) -> None:
        self._worker, self._hot, self._policy, self._clock = worker, hot, policy, clock
        self._turns, self._oldest_ms = turns, oldest_ms
        self._is_awaited = False
        self.bytes_per_second = 0  # 0: no limit

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Raise the priority while a caller waits for rounds: on a busy machine an idle-priority worker may not end."""
        self._is_awaited = True
        try:
            self.adjust()
            yield
        finally:
            self._is_awaited = False
            self.adjust()

    def adjust(self) -> None:
        """Set rate and priority now: a disk fills up during a round, too, and a stop must not wait for the rate."""
        now, ratio = self._clock.now_ms(), self._hot.disk_ratio()
        policy, oldest_ms = self._policy(), self._oldest_ms()
        closed = self._turns.closed
        self.bytes_per_second = 0 if closed else upload_rate(policy, oldest_ms, now, ratio)
        self._worker.set_upload_rate(self.bytes_per_second)
        priority = worker_priority(policy, oldest_ms, now, ratio, is_awaited=self._is_awaited)
        self._worker.set_priority(priority)
