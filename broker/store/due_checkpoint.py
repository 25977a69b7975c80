"""A checkpoint on its way: what it says, and what must be on the disk before it may say so.

It stays due until it is written: one that could not be begun for want of descriptors comes again whole with the next
upkeep, and takes along what the next description adds.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import msgspec

from broker.store.checkpoint import Checkpoint
from broker.store.consume_queue import ConsumeQueue
from infra.disk import Disk


class DueCheckpoint(msgspec.Struct):
    content: Checkpoint
    queues: list[ConsumeQueue]
    index_paths: list[Path]

    def sync(self, disk: Disk, root: Path) -> None:
        """For a thread."""
        for queue in self.queues:
            queue.sync()
        for path in self.index_paths:
            with suppress(FileNotFoundError):  # evicted meanwhile
                disk.fdatasync(path)
        disk.fsync_dir(root / "consumequeue")

    def after(self, before: DueCheckpoint | None) -> DueCheckpoint:
        """This one, with what one before it, never written, still had to sync."""
        if before is not None:
            self.queues = [*before.queues, *self.queues]
            self.index_paths = [*before.index_paths, *self.index_paths]
        return self
