"""Who may hold how many descriptors: one budget for all parts of a server that hold many.

    RLIMIT_NOFILE, vm.max_map_count
      ├─ reserve       held briefly: flushes, tables, workers, name servers, the admin port, a burst of accepts
      ├─ queue files   at most half of the rest; opened in turn beyond that
      ├─ cold groups   at most an eighth: row groups of the archive that are mapped
      ├─ log files     what there are: the broker's life
      └─ connections   what the log leaves of the rest

A mapping holds a descriptor too, Python's mmap keeps one of its own; so what is mapped is also bounded by how many
mappings the machine allows. A shortage is for whoever asks last: a connection is refused, a queue's file waits its
turn. It is no failure of the disk.
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
    """Counts of descriptors."""

    open_files: int
    reserve: int
    queue_files: int
    cold_groups: int

    def connections(self, log: int) -> int:
        """How many there may be while the log holds this many."""
        return max(0, self.open_files - self.reserve - self.queue_files - self.cold_groups - log)

    @property
    def accepts(self) -> int:
        """Connections that may be accepted at once, before each is looked at: the reserve stands for them."""
        return min(1024, self.reserve // 2)


def budget(open_files: int, mappings: int) -> DescriptorBudget:
    """For a process that may have so many files open, on a machine that allows so many mappings for each."""
    reserve = min(max(open_files // 8, _RESERVE_MIN), _RESERVE_MAX)
    rest = max(0, open_files - reserve)
    return DescriptorBudget(
        open_files,
        reserve,
        max(1, min(_QUEUE_FILES_MAX, rest // 2, mappings // 4)),
        max(1, min(_COLD_GROUPS_MAX, rest // 8, mappings // 8)),
    )


def mappings_limit() -> int:
    """How many mappings the machine allows a process."""
    try:
        return int(_MAP_COUNT.read_text())
    except (OSError, ValueError):
        return _MAPPINGS_DEFAULT
