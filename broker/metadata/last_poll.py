"""Delivery positions of an Apache master from the last poll, with which a slave that is made master continues.

config/lastPoll.json    {"poll":{"master":"host:port","logBegin":…,"askedAt":…,"delays":{level:offset},
                        "timers":{"read_ms":…,"next_offset":…} or null,"system":{topic@group:{queue:offset}},
                        "elsewhere":[setting,…]}}

The image is replaced as a whole, because positions of different polls would be inconsistent. An older image is still
correct, and only makes a promotion search more of the log. The log ended at `askedAt` when the poll began, so that
messages delivered since then are above.

`logBegin` is `askedAt` of the poll before: a delivery may be missing from the next poll's positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from broker.metadata.images import Positions
from broker.metadata.stock_tables import StockImage, TimerCheckPoint
from broker.tables.state_file import StateFile, SyncLog
from infra.disk.filesystem import Disk
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.remoting.names import HALF_TOPIC, OP_HALF_TOPIC, REVIVE_LOG_PREFIX

_SYSTEM = (HALF_TOPIC, OP_HALF_TOPIC, REVIVE_LOG_PREFIX)


class LastPoll(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Positions of a poll. `system`: committed offsets of the master's own groups."""

    master: str
    log_begin: int
    asked_at: int
    delays: dict[int, int]
    timers: TimerCheckPoint | None
    system: Positions
    elsewhere: list[str]

    def position(self, topic: str, group: str, queue_id: int) -> int:
        """Return the committed offset of one of the master's own groups; -1: it had none."""
        return self.system.get(f"{topic}@{group}", {}).get(queue_id, -1)


class LastPollFile:
    """File of the last poll. Runs on the event loop."""

    def __init__(self, disk: Disk, path: Path, sync_log: SyncLog | None, threads: Threads = SYSTEM_THREADS) -> None:
        self.current: LastPoll | None = None
        self._before = -1  # end of the log when the poll before this one began
        self.file = StateFile(disk, path, self._snapshot, sync_log=sync_log, threads=threads)

    def load(self) -> None:
        """Load the file. Raise ValueError if it is unreadable."""
        value = self.file.load(poll=LastPoll)
        self.current = value.get("poll")
        if self.current is not None:
            self._before = self.current.asked_at

    def take(self, master: str, image: StockImage) -> None:
        """Take a poll that is installed: the own log contains everything that it refers to."""
        begin = image.log_begin if self._before < 0 else min(self._before, image.log_begin)
        self._before = image.log_begin
        self.current = LastPoll(
            master=master,
            log_begin=begin,
            asked_at=image.log_begin,
            delays=dict(image.delays),
            timers=image.timers,
            system={name: queues for name, queues in image.offsets.items() if name.startswith(_SYSTEM)},
            elsewhere=image.elsewhere,
        )
        self.file.touch()

    def take_stored(self, master: str, image: StockImage, *, above: int) -> None:
        """Take tables from the disk of a master whose log is here. Deliveries that they lack are above `above`."""
        self._before = above
        self.take(master, image)

    def forget(self) -> None:
        """Delete the poll durably: this broker is master itself, or a truncated log invalidates the poll."""
        self.current, self._before = None, -1
        self.file.touch()
        self.file.save_now()

    @property
    def dirty(self) -> bool:
        """Return whether the file is outdated."""
        return self.current is not None and self.file.dirty

    async def save(self) -> None:
        """Save the file. It is durable when this returns."""
        await self.file.save()

    def _snapshot(self) -> Mapping[str, Any]:
        return {} if self.current is None else {"poll": msgspec.to_builtins(self.current, str_keys=True)}
