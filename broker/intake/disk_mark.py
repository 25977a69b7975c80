"""Sends are refused while the data disk is above its mark (`diskSpaceWarningLevelRatio`)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from broker.config import BrokerConfig
from broker.life import BrokerLife
from infra.disk import Disk

log = logging.getLogger(__name__)


class DiskMark:
    """Looked at each second; `used_ratio` is the used share of the data disk."""

    def __init__(self, config: BrokerConfig, used_ratio: Callable[[], float], life: BrokerLife) -> None:
        self._config, self._used_ratio, self._life = config, used_ratio, life

    def look(self) -> None:
        """Tell the broker's life on which side of the mark the disk is now."""
        mark, ratio = self._config.disk_space_warning_level_ratio / 100, self._used_ratio()
        was_refused = self._life.refusal is not None
        if ratio > mark:
            self._life.disk_full(f"the broker's disk is full, {ratio:.0%} used, mark {mark:.0%}")
        else:
            self._life.disk_has_room()
        is_refused = self._life.refusal is not None
        if is_refused and not was_refused:
            log.error("the disk is full, %.0f %% used, mark %.0f %%: sends are refused", ratio * 100, mark * 100)
        elif was_refused and not is_refused:
            log.info("the disk has room again, %.0f %% used: sends are taken", ratio * 100)


def used_ratio(disk: Disk, root: Path) -> float:
    """The used share of the disk that has `root`."""
    return round(disk.room(root).used_ratio, 4)
