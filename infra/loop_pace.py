"""A share of the event loop for work on it that may wait: as `infra.pace`, in slices; others have turns between."""

from __future__ import annotations

import asyncio

from infra.clock import Clock
from infra.pace import LONGEST_S, SHARE


class LoopPace:
    """Of one piece of work, from here on."""

    def __init__(self, clock: Clock, share: float = SHARE) -> None:
        """`share`: of the loop's time, above 0 and at most 1."""
        assert 0 < share <= 1, share
        self._clock, self._per_second = clock, 1 / share - 1
        self._since = clock.thread_seconds()

    async def breathe(self) -> None:
        """Between two slices."""
        worked = self._clock.thread_seconds() - self._since
        await asyncio.sleep(min(worked * self._per_second, LONGEST_S))
        self._since = self._clock.thread_seconds()
