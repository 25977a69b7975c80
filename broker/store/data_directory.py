"""What the data directory says about itself: lock, identity, and how the last run ended.

lock          flock, held while a broker runs
log_uuid      made with the CommitLog; ties it to its archive
abort         exists while the store is open: found at start, the last stop was not clean
following     the log above the checkpoint may be what a master laid out: with other clocks' times, and queues that go
              on higher than they ended
recovering    a start changes what it found and hasn't brought that to the disk yet; beside `abort`

`checkpoint`, `queue_state` and the rest belong to the modules of those names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.store.errors import StoreCorrupt, StoreLocked
from infra.disk.filesystem import Disk, DiskLocked
from neve.entropy import Entropy, system_entropy, unique_name

_OPEN, _RECOVERING, _FOLLOWING = "abort", "recovering", "following"


class DataDirectory:
    """The small files of a store."""

    def __init__(self, root: Path, disk: Disk, entropy: Entropy = system_entropy) -> None:
        self.root = root
        self._entropy = entropy
        self._disk = disk
        self._release: Callable[[], None] | None = None

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

    @property
    def is_following(self) -> bool:
        """Whether it is marked."""
        return self._disk.exists(self.root / _FOLLOWING)

    def begin_following(self) -> None:
        """Before the first byte of a master."""
        if not self.is_following:
            self._disk.write_atomic(self.root / _FOLLOWING, b"following\n")

    def end_following(self) -> None:
        """A checkpoint covers the last byte of a master.

        The next checkpoint makes it durable. Until then a start after a power cut may still find the mark: it then
        checks less of the own records above the checkpoint, and believes the same ones.
        """
        if self.is_following:
            self._disk.remove(self.root / _FOLLOWING)

    def end(self) -> None:
        """Mark the store cleanly closed."""
        self._disk.remove(self.root / _OPEN)
        self._disk.fsync_dir(self.root)


def clear_store(root: Path, disk: Disk) -> None:
    """Remove a store's files but its `log_uuid`: for a restore that begins again, into which nothing was stored yet.

    Between its steps such a store may be one that no start can open: a log without its checkpoint.
    """
    for name in ("checkpoint", "queue_state", "abort", "recovering", "following", "truncation"):
        if disk.exists(root / name):
            disk.remove(root / name)
    queues = root / "consumequeue"
    for topic in _names(disk, queues):
        for queue in _names(disk, queues / topic):
            _clear_directory(disk, queues / topic / queue)
            disk.remove_dir(queues / topic / queue)
        disk.remove_dir(queues / topic)
    for name in ("commitlog", "commitlogcrc", "commitlogtable", "index"):
        _clear_directory(disk, root / name)
    disk.fsync_dir(root)


def _clear_directory(disk: Disk, directory: Path) -> None:
    names = _names(disk, directory)
    for name in names:
        disk.remove(directory / name)
    if names:
        disk.fsync_dir(directory)


def _names(disk: Disk, directory: Path) -> list[str]:
    return disk.list_dir(directory) if disk.exists(directory) else []
