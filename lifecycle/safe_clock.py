"""The time that deletion goes by: late rather than early."""

from __future__ import annotations

from infra.clock import Clock
from infra.object_store import ObjectStore

TOLERANCE_MS = 5 * 60_000


class ClocksDisagree(Exception):
    """Two clocks are more than five minutes apart: nothing expires until they agree."""


class SafeClock:
    """The earlier of the local clock and the store's; a jump of the local one against the monotonic clock stops it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._base = clock.now_ms() - clock.monotonic() * 1000

    def now_ms(self, store: ObjectStore) -> int:
        local = self._clock.now_ms()
        remote = store.now_ms()
        if remote is None:
            steady = int(self._base + self._clock.monotonic() * 1000)
            if abs(local - steady) > TOLERANCE_MS:
                raise ClocksDisagree(f"the local clock moved by {(local - steady) // 1000} s since the start")
            return min(local, steady)
        if abs(local - remote) > TOLERANCE_MS:
            raise ClocksDisagree(f"the local clock is {(local - remote) // 1000} s ahead of the store's")
        return min(local, remote)
