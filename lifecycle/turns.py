"""First-in, first-out lock between jobs.

A job that releases the lock and acquires it again goes to the end of the queue. So a long job that does so between its
steps delays other jobs by one step at most. After `close`, `closed` asks long jobs to stop before their next step. The
lock can still be acquired then.
"""

from __future__ import annotations

from collections import deque

from infra.loop.locks import Event
from infra.loop.threads import SYSTEM_THREADS, Threads


class Turns:
    """A fair lock, as a context manager."""

    def __init__(self, threads: Threads = SYSTEM_THREADS) -> None:
        self._threads, self._lock = threads, threads.lock()
        self._line: deque[Event] = deque()  # the first one holds the lock
        self.closed = False

    def close(self) -> None:
        """Ask jobs to start no further step, so that a long backlog does not delay the end of the process."""
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
