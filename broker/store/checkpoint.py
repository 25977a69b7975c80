"""What the data directory says about itself: lock, identity, how the last run ended, and the checkpoint.

lock          flock, held while a broker runs
log_uuid      made with the CommitLog; ties it to its archive
abort         exists while the store is open: found at start, the last stop was not clean
recovering    a start changes what it found and hasn't brought that to the disk yet; beside `abort`
checkpoint    JSON: everything below `physical` is on the disk, in the log and in what is derived from it
queue_state   JSON: minimum offsets that were asked for, and deleted topics
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from broker.store.errors import StoreCorrupt, StoreLocked
from infra import failpoint
from infra.disk import Disk, DiskLocked
from neve.entropy import Entropy, system_entropy, unique_name

_VERSION = 1
_OPEN, _RECOVERING = "abort", "recovering"
_T = TypeVar("_T")


class Checkpoint(msgspec.Struct):
    """The point from which recovery reads the log again."""

    physical: int
    store_time: int = 0
    index_base: int = -1
    index_count: int = 0
    # the topic table of the file that holds `physical`
    topics: dict[str, tuple[int, int]] = {}
    version: int = _VERSION


class QueueState(msgspec.Struct):
    """What the queue files alone don't tell."""

    floors: dict[str, dict[str, int]] = {}
    # topic -> physical offset: its older records belong to a topic that is gone
    deleted: dict[str, int] = {}
    # topic -> queue -> where a deleted queue goes on, should it come again: none that is archived is given twice
    ended: dict[str, dict[str, int]] = {}
    version: int = _VERSION


class StateImage(NamedTuple):
    """The state of queues at one moment; a later one has a higher number."""

    number: int
    data: bytes


class DataDirectory:
    """The small files of a store."""

    def __init__(self, root: Path, disk: Disk, entropy: Entropy = system_entropy) -> None:
        self.root = root
        self._entropy = entropy
        self._disk = disk
        self._release: Callable[[], None] | None = None
        self._writing = threading.Lock()
        self._images = self._written = 0

    def lock(self) -> None:
        """Keep other brokers out."""
        self._disk.make_dirs(self.root)
        try:
            self._release = self._disk.lock(self.root / "lock")
        except DiskLocked as error:
            raise StoreLocked(f"another broker uses the data directory {self.root}") from error

    def release(self) -> None:
        """Let others in."""
        if self._release is not None:
            self._release()
            self._release = None

    def log_uuid(self, *, log_is_empty: bool) -> str:
        """The log's identity, made on first use."""
        path = self.root / "log_uuid"
        if self._disk.exists(path):
            return self._disk.read(path).decode().strip()
        if not log_is_empty:
            raise StoreCorrupt(f"{path} is missing beside a CommitLog: restore it, the archive knows the log by it")
        made = unique_name(self._entropy)
        self._disk.write_atomic(path, made.encode())
        return made

    def begin(self) -> bool:
        """Mark the store open; tells whether the last stop was clean."""
        clean = not any(self._disk.exists(self.root / name) for name in (_OPEN, _RECOVERING))
        if not self._disk.exists(self.root / _OPEN):
            self._disk.write_atomic(self.root / _OPEN, b"open\n")
        return clean

    def begin_recovery(self) -> bool:
        """Before anything of an unclean store is changed; tells whether an earlier start died while it did that.

        What that one changed may be in the page cache only, where nothing tells it from what is on the disk. The mark
        of an open store stays beside this one: renamed, a power cut could take both names.
        """
        if self._disk.exists(self.root / _RECOVERING):
            return True
        self._disk.write_atomic(self.root / _RECOVERING, b"recovering\n")
        return False

    def end_recovery(self) -> None:
        """What the start changed is on the disk."""
        if self._disk.exists(self.root / _RECOVERING):
            self._disk.remove(self.root / _RECOVERING)
            self._disk.fsync_dir(self.root)

    def end(self) -> None:
        """Mark the store cleanly closed."""
        self._disk.remove(self.root / _OPEN)
        self._disk.fsync_dir(self.root)

    def read_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint; None if there was none."""
        path = self.root / "checkpoint"
        if not self._disk.exists(path):
            return None
        checkpoint = _decode(path, self._disk.read(path), Checkpoint)
        _check_version(path, checkpoint.version)
        return checkpoint

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint; everything that it promises is on the disk already."""
        failpoint.hit("store.checkpoint")
        self._disk.write_atomic(self.root / "checkpoint", msgspec.json.encode(checkpoint))

    def read_queue_state(self) -> QueueState:
        """The state of queues, empty on first use."""
        path = self.root / "queue_state"
        if not self._disk.exists(path):
            return QueueState()
        state = _decode(path, self._disk.read(path), QueueState)
        _check_version(path, state.version)
        return state

    def write_queue_state(self, state: QueueState) -> None:
        """Replace the state of queues. On the thread that changes it."""
        self.write_image(self.image_of(state))

    def image_of(self, state: QueueState) -> StateImage:
        """The state as it is now, on the thread that changes it; `write_image` is for any thread."""
        self._images += 1
        return StateImage(self._images, msgspec.json.encode(state))

    def write_image(self, image: StateImage) -> None:
        """An older image never replaces a newer one."""
        with self._writing:
            if image.number > self._written:
                self._disk.write_atomic(self.root / "queue_state", image.data)
                self._written = image.number


def _decode(path: Path, data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"{path} can't be read: {error}") from error


def _check_version(path: Path, version: int) -> None:
    if version > _VERSION:
        raise StoreCorrupt(f"{path} has version {version}; this broker knows {_VERSION}: it was written by a newer one")
