"""What an Apache master said last of what it brings on its way: who becomes master in its place goes on with that.

config/lastPoll.json    {"poll":{"master":"host:port","logBegin":…,"askedAt":…,"delays":{level:offset},
                        "timers":{"read_ms":…,"next_offset":…} or null,"system":{topic@group:{queue:offset}},
                        "elsewhere":[setting,…]}}

One image, written whole: positions of different polls would not fit each other. An older one is as good, it only
leaves more to look up: the log ended at `askedAt` when it was asked for, and what was brought on its way since then
lies above.
`logBegin` is that of the poll before: what was delivered when it was due may be told of a poll later.
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
    """See the module. `system`: where the master's own groups stood."""

    master: str
    log_begin: int
    asked_at: int
    delays: dict[int, int]
    timers: TimerCheckPoint | None
    system: Positions
    elsewhere: list[str]

    def position(self, topic: str, group: str, queue_id: int) -> int:
        """Of one of the master's own groups; -1: it had none."""
        return self.system.get(f"{topic}@{group}", {}).get(queue_id, -1)


class LastPollFile:
    """On the loop."""

    def __init__(self, disk: Disk, path: Path, sync_log: SyncLog | None, threads: Threads = SYSTEM_THREADS) -> None:
        self.current: LastPoll | None = None
        self._before = -1  # where the log ended when the poll before this one was begun
        self.file = StateFile(disk, path, self._snapshot, sync_log=sync_log, threads=threads)

    def load(self) -> None:
        """ValueError for what can't be read."""
        value = self.file.load(poll=LastPoll)
        self.current = value.get("poll")
        if self.current is not None:
            self._before = self.current.asked_at

    def take(self, master: str, image: StockImage) -> None:
        """It is installed: the own log has all that it speaks of."""
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
        """What a master left on its disk, whose log is here: what its tables do not say of it lies above a place."""
        self._before = above
        self.take(master, image)

    def forget(self) -> None:
        """On the disk when it returns: it is master itself, or the log lost what the poll speaks of."""
        self.current, self._before = None, -1
        self.file.touch()
        self.file.save_now()

    @property
    def dirty(self) -> bool:
        """Whether the file is behind."""
        return self.current is not None and self.file.dirty

    async def save(self) -> None:
        """Returns when it is on disk."""
        await self.file.save()

    def _snapshot(self) -> Mapping[str, Any]:
        return {} if self.current is None else {"poll": msgspec.to_builtins(self.current, str_keys=True)}
