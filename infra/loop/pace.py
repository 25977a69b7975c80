"""Limit a background thread to a share of the Python interpreter.

Python runs one thread at a time. While another thread computes, the event loop resumes one switch interval late after
each system call, so a job that computes for a second without a pause delays answers for a second. A job with a
hundredth of the interpreter takes 100 times as long but delays only one answer in a hundred. It pauses between its
pieces of work, in proportion to the time that they took.
"""

from __future__ import annotations

from infra.clock import Clock
from infra.loop.threads import Threads

#: For background jobs.
SHARE = 0.01
#: For a scrape, whose client waits: the first one with ten thousand topics takes a second or two.
SCRAPE_SHARE = 0.05
_PIECE_S = 0.0005  # shorter pieces have no measurable effect
LONGEST_S = 2.0  # bounds the delay of a stop


class Pace:
    """Paces one thread. Do not pause while holding a lock; `pause` makes up for the whole time since the last call."""

    def __init__(self, clock: Clock, threads: Threads, share: float = SHARE) -> None:
        """`share`: the share of the interpreter, above 0 and at most 1."""
        assert 0 < share <= 1, share
        self._clock, self._waits = clock, threads.event()
        self._per_second = 1 / share - 1  # seconds of pause per second of work
        self._since = clock.thread_seconds()

    def pause(self) -> None:
        """Pause in proportion to the processor time since the last pause."""
        worked = self._clock.thread_seconds() - self._since
        if worked >= _PIECE_S:
            self._waits.wait(min(worked * self._per_second, LONGEST_S))
            self._since = self._clock.thread_seconds()
