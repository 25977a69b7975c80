"""Queue state file: the state of queues that their own files do not contain.

queue_state   JSON: requested minimum offsets, deleted topics, the first offsets of queues without a file, queues
              that a master's record raised above their last message, and erased messages
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
    """Content of the queue state file."""

    floors: dict[str, dict[str, int]] = {}
    # topic -> physical offset: older records belong to a deleted topic of the same name
    deleted: dict[str, int] = {}
    # topic -> queue -> end offset of a deleted queue. If it is created again it continues there, so that no archived
    # offset is assigned twice
    ended: dict[str, dict[str, int]] = {}
    # topic -> queue -> offset of the first local message; all lower offsets are only elsewhere
    begins: dict[str, dict[str, int]] = {}
    # topic -> queue -> (minimum end offset of the queue, physical end of the log record that sets it). It holds while
    # the log has that record, even after a truncation. There are several if a truncation may remove some; each is
    # higher than those before it. A physical end of 0 marks an offset from a state image of a master or archive, which
    # no truncation affects
    raised: dict[str, dict[str, list[tuple[int, int]]]] = {}
    # topic -> queue -> (first, last) offsets of messages that are still in the log but that no request returns
    erased: dict[str, dict[str, Spans]] = {}
    version: int = 1


class StateImage(NamedTuple):
    """Encoded queue state at one moment; later images have higher numbers."""

    number: int
    data: bytes


class QueueStateFile:
    """Creates images on the thread that changes the state, and writes them on any thread; the newest one wins."""

    def __init__(self, root: Path, disk: Disk, new_lock: NewLock = new_lock) -> None:
        self._file = VersionedFile(disk, root / _NAME, QueueState, StoreCorrupt)
        self._writing = new_lock()
        self._images = self._written = 0

    def read(self) -> QueueState:
        """Return the state; an empty one on first use."""
        return self._file.read() or QueueState()

    def image_of(self, state: QueueState) -> StateImage:
        """Return an image of the state; on the thread that changes it."""
        self._images += 1
        return StateImage(self._images, self._file.encode(state))

    @property
    def written(self) -> int:
        """The number of the newest durable image; any thread."""
        return self._written

    def is_newest(self, image: StateImage) -> bool:
        """Return whether no later image exists; on the thread that changes the state."""
        return image.number == self._images

    def write(self, image: StateImage) -> None:
        """Write an image, unless a newer one was written before."""
        assert 0 < image.number <= self._images
        with self._writing:
            if image.number > self._written:
                self._file.replace(image.data)
                self._written = image.number
