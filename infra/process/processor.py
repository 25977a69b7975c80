"""The processor time of processes: lower the priority of this one, and look at how much another one gets.

The kernel derives the class of disk requests from the scheduling policy unless one is set: SCHED_IDLE gives `idle`,
any other policy gives best effort, the lower the higher the nice value. A process without privileges cannot raise its
priority again, so a caller that needs a faster process starts another one.

A process that waits for a disk, a socket or a lock wants no processor. A process of the lowest priority may want one
for minutes and get none while others use the whole machine; such a process does not hang.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from infra.process.priority import IDLE, LOW

_LOW_NICE = 19
_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessorDemand(NamedTuple):
    """A process at one moment. `cpu_s`: CPU time since its start; `wants_more`: a thread of it is runnable."""

    pid: int
    cpu_s: float
    wants_more: bool


def processor_demand(pid: int) -> ProcessorDemand | None:
    """Return the state of a process; None if it has ended, or if there is no /proc."""
    process = Path(f"/proc/{pid}")
    try:
        own = _stat(process)
        wants_more = any(_stat(thread)[0] == "R" for thread in _threads(process))
    except OSError:
        return None
    return ProcessorDemand(pid, (int(own[11]) + int(own[12])) / _TICKS, wants_more)


def _threads(process: Path) -> list[Path]:
    tasks = process / "task"
    return [tasks / name for name in os.listdir(tasks)]  # noqa: PTH208 - there may be dozens


def _stat(directory: Path) -> list[str]:
    """Return the fields from the state on; the process name before them is in parentheses."""
    return (directory / "stat").read_text().rpartition(")")[2].split()


def take_priority(priority: str) -> None:
    """Lower the priority of this process and of the threads that it starts from now on. Raises OSError."""
    if priority == IDLE:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    elif os.sched_getscheduler(0) == os.SCHED_IDLE:
        return  # already lower
    elif priority == LOW:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(_LOW_NICE)
