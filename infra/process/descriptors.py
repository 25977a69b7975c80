"""The budget of file descriptors for all parts of a server that hold many.

    RLIMIT_NOFILE, vm.max_map_count
      ├─ reserve       short uses: flushes, tables, workers, name servers, the admin port, a burst of accepts
      ├─ queue files   at most half of the rest; above that, files are closed to open others
      ├─ cold groups   at most an eighth of the rest: mapped row groups of the archive
      ├─ log files     all of them, for the life of the broker
      └─ connections   the remainder

Python's mmap duplicates the descriptor, so each mapping holds one, and the kernel's limit of mappings applies as well.
A shortage is not a disk failure: a connection is refused, or a queue's file is opened later.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_QUEUE_FILES_MAX = 8192
_COLD_GROUPS_MAX = 1024
_RESERVE_MIN, _RESERVE_MAX = 64, 2304
_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
_MAPPINGS_DEFAULT = 65_530


@dataclass(frozen=True, slots=True)
class DescriptorBudget:
    """Numbers of descriptors."""

    open_files: int
    reserve: int
    queue_files: int
    cold_groups: int

    def connections(self, log: int) -> int:
        """Return the limit of connections while the log holds `log` descriptors."""
        return max(0, self.open_files - self.reserve - self.queue_files - self.cold_groups - log)

    @property
    def accepts(self) -> int:
        """The limit of connections accepted in one batch before the first is checked; they use the reserve."""
        return min(1024, self.reserve // 2)


def budget(open_files: int, mappings: int) -> DescriptorBudget:
    """Divide the limits of open files and of mappings of one process."""
    reserve = min(max(open_files // 8, _RESERVE_MIN), _RESERVE_MAX)
    rest = max(0, open_files - reserve)
    return DescriptorBudget(
        open_files,
        reserve,
        max(1, min(_QUEUE_FILES_MAX, rest // 2, mappings // 4)),
        max(1, min(_COLD_GROUPS_MAX, rest // 8, mappings // 8)),
    )


def mappings_limit() -> int:
    """Return the kernel's limit of mappings of one process."""
    try:
        return int(_MAP_COUNT.read_text())
    except (OSError, ValueError):
        return _MAPPINGS_DEFAULT
