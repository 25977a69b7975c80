"""The point from which a start reads the log again.

checkpoint    JSON: everything below `physical` is on the disk, in the log and in what is derived from it
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from broker.store.errors import StoreCorrupt
from infra import failpoint
from infra.disk.filesystem import Disk

_NAME = "checkpoint"
_VERSION = 1


class StoreCheckpoint(msgspec.Struct):
    """What the file says."""

    physical: int
    store_time: int = 0
    index_base: int = -1
    index_count: int = 0
    # the topic table of the file that holds `physical`
    topics: dict[str, tuple[int, int]] = {}
    high_time: int = 0  # of the same file, see `LogFile`
    version: int = _VERSION


def read_checkpoint(root: Path, disk: Disk) -> StoreCheckpoint | None:
    """The last checkpoint; None if there was none."""
    path = root / _NAME
    if not disk.exists(path):
        return None
    try:
        checkpoint = msgspec.json.decode(disk.read(path), type=StoreCheckpoint)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"{path} can't be read: {error}") from error
    if checkpoint.version > _VERSION:
        raise StoreCorrupt(
            f"{path} has version {checkpoint.version}; this broker knows {_VERSION}: it was written by a newer one"
        )
    if checkpoint.physical < 0:
        raise StoreCorrupt(f"{path} names the offset {checkpoint.physical}")
    return checkpoint


def write_checkpoint(root: Path, disk: Disk, checkpoint: StoreCheckpoint) -> None:
    """Replace the checkpoint; everything that it promises is on the disk already."""
    assert checkpoint.physical >= 0
    assert all(0 <= offset < checkpoint.physical for offset, _ in checkpoint.topics.values())
    failpoint.hit("store.checkpoint")
    disk.write_atomic(root / _NAME, msgspec.json.encode(checkpoint))
