"""CPU time of the process that listens at a local address, from /proc.

    /proc/net/tcp, tcp6    local address, state, inode of each socket
    /proc/PID/fd           links to socket:[inode]
    /proc/PID/stat         utime, stime, cutime, cstime in clock ticks

It is unknown for other machines, for processes of other users, and without /proc.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"
_TICKS = os.sysconf("SC_CLK_TCK")
_FROM_STATE = 11  # fields between a process's name and its utime
_LOOPBACK = ("127.0.0.1", "[::1]", "localhost")


class ListeningProcess:
    """A process whose CPU time is readable."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def cpu_seconds(self) -> float | None:
        """Return user and system time, including ended children; None if the process has ended."""
        try:
            text = (_PROC / str(self._pid) / "stat").read_text()
        except OSError:
            return None
        fields = text.rpartition(")")[2].split()
        return sum(map(int, fields[_FROM_STATE : _FROM_STATE + 4])) / _TICKS


def listening_at(address: str) -> ListeningProcess | None:
    """Return the process that listens at an address; None if it is unknown."""
    host, _, port = address.rpartition(":")
    if host not in _LOOPBACK or not port.isdecimal():
        return None
    inodes = {f"socket:[{inode}]" for inode in _inodes(int(port))}
    if not inodes:
        return None
    for directory in _PROC.iterdir():
        if directory.name.isdecimal() and _has_any(directory / "fd", inodes):
            return ListeningProcess(int(directory.name))
    return None


def _inodes(port: int) -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    found.append(fields[9])
    return found


def _has_any(descriptors: Path, links: set[str]) -> bool:
    """Return whether a process has one of these descriptors; False if it has ended or belongs to another user."""
    with contextlib.suppress(OSError):
        for one in descriptors.iterdir():
            with contextlib.suppress(OSError):
                if str(one.readlink()) in links:
                    return True
    return False
