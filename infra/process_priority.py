"""Gives up a part of the machine, see `infra.priority`.

The kernel derives the class of disk requests from that, as long as none is set: of SCHED_IDLE it is `idle`, else best
effort, the later the higher the nice value. A process without privileges can't get back what it gave up: whoever wants
it quicker starts another one.
"""

from __future__ import annotations

import os

from infra.priority import IDLE, LOW

_LOW_NICE = 19


def take_priority(priority: str) -> None:
    """Of this process, and of the threads that it starts from here on. Raises OSError where the system refuses."""
    if priority == IDLE:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    elif os.sched_getscheduler(0) == os.SCHED_IDLE:
        return  # that is less
    elif priority == LOW:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(_LOW_NICE)
