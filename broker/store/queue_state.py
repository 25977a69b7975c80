"""The state of queues that their own files do not contain.

queue_state   JSON: requested minimum offsets, deleted topics, the first offsets of queues without a file, queues that
              a master's record raised above their last message, and erased messages
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from broker.store.erased import Spans
from broker.store.errors import StoreCorrupt
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.loop.locks import NewLock, new_lock

_NAME = "queue_state"


class QueueState(msgspec.Struct):
    """What the file says."""

    floors: dict[str, dict[str, int]] = {}
    # topic -> physical offset: its older records belong to a topic that is gone
    deleted: dict[str, int] = {}
    # topic -> queue -> where a deleted queue goes on, should it come again: none that is archived is given twice
    ended: dict[str, dict[str, int]] = {}
    # topic -> queue -> the offset that its first message here gets, or got: all below is elsewhere
    begins: dict[str, dict[str, int]] = {}
    # topic -> queue -> the offset on which it goes on at least, and where the record ends that says so: as long as the
    # log has that one, no cut takes it back. Several, each higher than those before it, where a cut may leave some. One
    # that no record says, but an image of a master or of the archive, ends at 0: no cut takes that
    raised: dict[str, dict[str, list[tuple[int, int]]]] = {}
    # topic -> queue -> first and last offset each of messages that are here still, and that no request returns
    erased: dict[str, dict[str, Spans]] = {}
    version: int = 1


class StateImage(NamedTuple):
    """The state of queues at one moment; a later one has a higher number."""

    number: int
    data: bytes


class QueueStateFile:
    """Takes images on the thread that changes the state, and writes them on any; the newest one stays."""

    def __init__(self, root: Path, disk: Disk, new_lock: NewLock = new_lock) -> None:
        self._file = VersionedFile(disk, root / _NAME, QueueState, StoreCorrupt)
        self._writing = new_lock()
        self._images = self._written = 0

    def read(self) -> QueueState:
        """Empty on first use."""
        return self._file.read() or QueueState()

    def image_of(self, state: QueueState) -> StateImage:
        """The state as it is now, on the thread that changes it."""
        self._images += 1
        return StateImage(self._images, self._file.encode(state))

    @property
    def written(self) -> int:
        """The number of the newest image that is on the disk. Any thread."""
        return self._written

    def is_newest(self, image: StateImage) -> bool:
        """Whether none was taken since. On the thread that changes the state."""
        return image.number == self._images

    def write(self, image: StateImage) -> None:
        """An older image never replaces a newer one."""
        assert 0 < image.number <= self._images
        with self._writing:
            if image.number > self._written:
                self._file.replace(image.data)
                self._written = image.number
