"""A lock that is given in the order in which it was asked for.

Whoever lets go of it and asks again goes to the end of the line: a long job that does so between its steps holds nobody
up for longer than a step. Once the line is closed it begins no further step; a turn that is asked for is still given.
"""

from __future__ import annotations

import threading
from collections import deque


class Turns:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[threading.Event] = deque()  # the first has the turn
        self.closed = False

    def close(self) -> None:
        """Begin nothing further: a backlog of many segments must not hold up the end of the process."""
        self.closed = True

    def __enter__(self) -> None:
        mine = threading.Event()
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
