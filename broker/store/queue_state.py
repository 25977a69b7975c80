"""What the queues' files alone don't tell.

queue_state   JSON: minimum offsets that were asked for, deleted topics, and where queues begin that have no file yet

Version 2 has such queues: who does not know of them would give their offsets again. A file without any is of version 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from broker.store.errors import StoreCorrupt
from infra.disk import Disk
from infra.locks import NewLock, new_lock

_NAME = "queue_state"
_VERSION = 2


class QueueState(msgspec.Struct):
    """What the file says."""

    floors: dict[str, dict[str, int]] = {}
    # topic -> physical offset: its older records belong to a topic that is gone
    deleted: dict[str, int] = {}
    # topic -> queue -> where a deleted queue goes on, should it come again: none that is archived is given twice
    ended: dict[str, dict[str, int]] = {}
    # topic -> queue -> the offset that its first message here gets, or got: all below is elsewhere
    begins: dict[str, dict[str, int]] = {}
    version: int = 1


class StateImage(NamedTuple):
    """The state of queues at one moment; a later one has a higher number."""

    number: int
    data: bytes


class QueueStateFile:
    """Takes images on the thread that changes the state, and writes them on any; the newest one stays."""

    def __init__(self, root: Path, disk: Disk, new_lock: NewLock = new_lock) -> None:
        self._path, self._disk = root / _NAME, disk
        self._writing = new_lock()
        self._images = self._written = 0

    def read(self) -> QueueState:
        """Empty on first use."""
        if not self._disk.exists(self._path):
            return QueueState()
        try:
            state = msgspec.json.decode(self._disk.read(self._path), type=QueueState)
        except msgspec.DecodeError as error:
            raise StoreCorrupt(f"{self._path} can't be read: {error}") from error
        if state.version > _VERSION:
            raise StoreCorrupt(
                f"{self._path} has version {state.version}; this broker knows {_VERSION}: it was written by a newer one"
            )
        return state

    def image_of(self, state: QueueState) -> StateImage:
        """The state as it is now, on the thread that changes it."""
        self._images += 1
        state.version = _VERSION if state.begins else 1
        return StateImage(self._images, msgspec.json.encode(state))

    def write(self, image: StateImage) -> None:
        """An older image never replaces a newer one."""
        assert 0 < image.number <= self._images
        with self._writing:
            if image.number > self._written:
                self._disk.write_atomic(self._path, image.data)
                self._written = image.number
