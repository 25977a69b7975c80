"""A share of the interpreter for work beside the event loop.

Python runs one thread at a time: while another computes, the loop gets it back a switch interval late, each time that
it comes from the kernel. What takes a second of a job's thread at once is a second of late answers. At a hundredth of
the interpreter it takes two minutes, in which one answer of a hundred is late: the slowest hundredth was so anyway. So
what may wait waits between its pieces, in proportion to what they took.
"""

from __future__ import annotations

from infra.clock import Clock
from infra.loop.threads import Threads

#: For what nobody waits for.
SHARE = 0.01
#: For what somebody waits for, if not for long: a first scrape at ten thousand topics takes a second or two then.
SCRAPE_SHARE = 0.05
_PIECE_S = 0.0005  # of less nobody has noticed anything
LONGEST_S = 2.0  # a stop waits for no more


class Pace:
    """Of one thread, from here on. What it does while it holds what others wait for is told afterwards, in one."""

    def __init__(self, clock: Clock, threads: Threads, share: float = SHARE) -> None:
        """`share`: of the thread's time, above 0 and at most 1."""
        assert 0 < share <= 1, share
        self._clock, self._waits = clock, threads.event()
        self._per_second = 1 / share - 1  # seconds to wait for one of work
        self._since = clock.thread_seconds()

    def pause(self) -> None:
        """Between two pieces of work: wait as long as what was done since the last time is worth."""
        worked = self._clock.thread_seconds() - self._since
        if worked >= _PIECE_S:
            self._waits.wait(min(worked * self._per_second, LONGEST_S))
            self._since = self._clock.thread_seconds()
