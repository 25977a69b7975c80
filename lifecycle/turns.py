"""A lock that is given in the order in which it was asked for.

Whoever lets go of it and asks again goes to the end of the line: a long job that does so between its steps holds nobody
up for longer than a step. Once the line is closed it begins no further step; a turn that is asked for is still given.
"""

from __future__ import annotations

from collections import deque

from infra.loop.locks import Event
from infra.loop.threads import SYSTEM_THREADS, Threads


class Turns:
    """A fair lock, as a context manager.

    Entering it after `close` is still answered; `closed` tells long jobs to stop there.
    """

    def __init__(self, threads: Threads = SYSTEM_THREADS) -> None:
        self._threads, self._lock = threads, threads.lock()
        self._line: deque[Event] = deque()  # the first has the turn
        self.closed = False

    def close(self) -> None:
        """Begin nothing further: a backlog of many segments must not hold up the end of the process."""
        self.closed = True

    def __enter__(self) -> None:
        mine = self._threads.event()
        with self._lock:
            self._line.append(mine)
            if len(self._line) == 1:
                mine.set()
        mine.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._line.popleft()
            if self._line:
                self._line[0].set()
