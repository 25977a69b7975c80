"""Whether another process wants a processor, and how much of one it got: what the kernel tells in /proc.

One that waits for a disk, a socket or a lock wants none. One of the lowest priority may want it for minutes and get
nothing while others take all of the machine; it does not hang.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class Standing(NamedTuple):
    """At one moment. `cpu_s`: since its start; `wants_more`: a thread of it runs, or would if it were let."""

    pid: int
    cpu_s: float
    wants_more: bool


def standing(pid: int) -> Standing | None:
    """None: it is gone, or the system has no such directory."""
    process = Path(f"/proc/{pid}")
    try:
        own = _stat(process)
        wants_more = any(_stat(thread)[0] == "R" for thread in _threads(process))
    except OSError:
        return None
    return Standing(pid, (int(own[11]) + int(own[12])) / _TICKS, wants_more)


def _threads(process: Path) -> list[Path]:
    tasks = process / "task"
    return [tasks / name for name in os.listdir(tasks)]  # noqa: PTH208 - there may be dozens


def _stat(directory: Path) -> list[str]:
    """Its fields, from the state on; a process's name may hold anything but is in parentheses."""
    return (directory / "stat").read_text().rpartition(")")[2].split()
