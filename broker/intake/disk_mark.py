"""Refusal of sends while the data disk is fuller than `diskSpaceWarningLevelRatio`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.config import BrokerConfig
from broker.life import BrokerLife
from infra.disk.filesystem import Disk


class DiskMark:
    """Monitor of the data disk, run once per second; `used_ratio` returns the used share of the disk, 0 to 1."""

    def __init__(self, config: BrokerConfig, used_ratio: Callable[[], float], life: BrokerLife) -> None:
        self._config, self._used_ratio, self._life = config, used_ratio, life

    def look(self) -> None:
        """Update `BrokerLife`: sends are refused while the used share exceeds the mark."""
        mark, ratio = self._config.disk_space_warning_level_ratio / 100, self._used_ratio()
        if ratio > mark:
            self._life.disk_full(f"the broker's disk is full, {ratio:.0%} used, mark {mark:.0%}")
        else:
            self._life.disk_has_room()


def used_ratio(disk: Disk, root: Path) -> float:
    """Return the used share (0 to 1) of the file system that contains `root`."""
    return round(disk.room(root).used_ratio, 4)
