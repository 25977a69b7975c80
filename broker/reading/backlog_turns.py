"""Who reads a backlog gives way: a part of each turn of the loop is his, and what does not fit waits for the next one.

    turn of the loop   sends, pulls at the end of a queue: as they come │ backlogs: for `TURN_S` │ the next turn

A read that has begun ends in its turn. One that has to wait for the disk or the archive is answered when that has come.
Eight groups that replay ask for sixty answers at once; served in one go these are milliseconds in which no send is
heard. Who waits is served in the order in which he came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

TURN_S = 0.0003
_WAITING_MAX = 4096  # above that it is quicker to answer than to keep them


class BacklogTurns:
    """How much of this turn of the loop backlogs have had, and who waits for the next."""

    def __init__(self) -> None:
        self._used = 0.0
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_next_due = False

    @property
    def waiting(self) -> int:
        """How many reads of backlogs wait for a turn."""
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Whether a read of a backlog may begin now."""
        waiting = len(self._waiting)
        return (self._used < TURN_S and not waiting) or waiting >= _WAITING_MAX

    def used(self, seconds: float) -> None:
        """A read of a backlog took so long of this turn."""
        self._used += seconds
        self._see_to_next()

    def wait(self, read: Callable[[], None]) -> None:
        """`read` has its turn later; it says itself what it used, and fails by nothing."""
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
