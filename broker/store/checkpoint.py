"""Checkpoint file: the physical offset from which a start reads the log again.

checkpoint    JSON: everything below `physical` is durable, in the log and in the queues and indexes built from it
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from broker.store.errors import StoreCorrupt
from infra import failpoint
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile

_NAME = "checkpoint"


class StoreCheckpoint(msgspec.Struct):
    """Content of the checkpoint file."""

    physical: int
    store_time: int = 0
    index_base: int = -1
    index_count: int = 0
    # the topic table of the log file that contains `physical`
    topics: dict[str, tuple[int, int]] = {}
    high_time: int = 0  # of the same file, see `LogFile`
    version: int = 1


def read_checkpoint(root: Path, disk: Disk) -> StoreCheckpoint | None:
    """Return the last checkpoint; None if there is none. Raises StoreCorrupt."""
    checkpoint = _file(root, disk).read()
    if checkpoint is not None and checkpoint.physical < 0:
        raise StoreCorrupt(f"{root / _NAME} names the offset {checkpoint.physical}")
    return checkpoint


def write_checkpoint(root: Path, disk: Disk, checkpoint: StoreCheckpoint) -> None:
    """Replace the checkpoint. Everything that it covers must be durable already."""
    assert checkpoint.physical >= 0
    assert all(0 <= offset < checkpoint.physical for offset, _ in checkpoint.topics.values())
    failpoint.hit("store.checkpoint")
    _file(root, disk).write(checkpoint)


def _file(root: Path, disk: Disk) -> VersionedFile[StoreCheckpoint]:
    return VersionedFile(disk, root / _NAME, StoreCheckpoint, StoreCorrupt)
