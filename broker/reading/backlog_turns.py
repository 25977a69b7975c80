"""Throttle for reads of a backlog: a limited share of each turn of the event loop; the rest waits for the next turn.

    turn of the loop   sends, pulls at the end of a queue: as they arrive │ backlogs: for `TURN_S` │ the next turn

A read that has begun completes in its turn. A read that has to wait for the disk or the archive is answered when the
data arrives. The reason: eight groups that replay request sixty answers at once. Served together these take
milliseconds in which no send is processed. Waiting reads are served first in, first out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURN_S = 0.0003
_WAITING_MAX = 4096  # with more waiting reads, answering them costs less than keeping them


class BacklogTurns:
    """Time that reads of backlogs used in this turn of the event loop, and the reads that wait for the next one."""

    def __init__(self) -> None:
        self._used = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_next_due = False

    @property
    def waiting(self) -> int:
        """The number of backlog reads that wait for a turn."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a backlog read may begin now."""
        waiting = len(self._waiting)
        return (self._used < TURN_S and not waiting) or waiting >= _WAITING_MAX

    def used(self, seconds: float) -> None:
        """Add the duration of a backlog read in this turn."""
        self._used += seconds
        self._see_to_next()

    def wait(self, read: Callable[[], None]) -> None:
        """Call `read` in a later turn. It must call `used` itself and must not raise."""
        self._waiting.append(read)
        self._see_to_next()

    def _see_to_next(self) -> None:
        if not self._is_next_due:
            self._is_next_due = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_next_due, self._used = False, 0.0
        while self._waiting and self._used < TURN_S:
            self._waiting.popleft()()
        if self._waiting:
            self._see_to_next()
