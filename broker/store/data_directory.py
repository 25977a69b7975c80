"""State files of the data directory: lock, identity, and whether the last stop was clean.

    lock          flock, held while a broker runs
    log_uuid      created with the CommitLog; links it to its archive
    abort         exists while the store is open; if a start finds it, the last stop was not clean
    following     the log above the checkpoint may contain a master's records: their store times come from other
                  clocks, and queues may have been raised above their last message
    recovering    exists, beside `abort`, from the first change of files by a start until a checkpoint covers them

`checkpoint`, `queue_state` and others belong to the modules of those names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.store.errors import StoreCorrupt, StoreLocked
from infra.disk.filesystem import Disk, DiskLocked
from neve.entropy import Entropy, system_entropy, unique_name

_OPEN, _RECOVERING, _FOLLOWING = "abort", "recovering", "following"


class DataDirectory:
    """The state files of a store."""

    def __init__(self, root: Path, disk: Disk, entropy: Entropy = system_entropy) -> None:
        self.root = root
        self._entropy = entropy
        self._disk = disk
        self._release: Callable[[], None] | None = None

    def lock(self) -> None:
        """Lock the directory against other brokers. Raises StoreLocked."""
        self._disk.make_dirs(self.root)
        try:
            self._release = self._disk.lock(self.root / "lock")
        except DiskLocked as error:
            raise StoreLocked(f"another broker uses the data directory {self.root}") from error

    def release(self) -> None:
        """Release the lock."""
        if self._release is not None:
            self._release()
            self._release = None

    def log_uuid(self, *, log_is_empty: bool) -> str:
        """Return the log's identity; create it on first use. Raises StoreCorrupt if it is missing beside a log."""
        path = self.root / "log_uuid"
        if self._disk.exists(path):
            return self._disk.read(path).decode().strip()
        if not log_is_empty:
            raise StoreCorrupt(
                f"{path} is missing beside a CommitLog: restore it, because it identifies the log to the archive"
            )
        made = unique_name(self._entropy)
        self._disk.write_atomic(path, made.encode())
        return made

    def begin(self) -> bool:
        """Mark the store as open; return whether the last stop was clean."""
        clean = not any(self._disk.exists(self.root / name) for name in (_OPEN, _RECOVERING))
        if not self._disk.exists(self.root / _OPEN):
            self._disk.write_atomic(self.root / _OPEN, b"open\n")
        return clean

    def begin_recovery(self) -> bool:
        """Mark the start of changes to an unclean store; return whether an earlier start crashed during its changes.

        Such changes may exist only in the page cache, where they look as if they were durable. The file `abort` stays
        beside this mark and is not renamed to it, because a power cut during a rename could lose both names.
        """
        if self._disk.exists(self.root / _RECOVERING):
            return True
        self._disk.write_atomic(self.root / _RECOVERING, b"recovering\n")
        return False

    def end_recovery(self) -> None:
        """Remove the mark, after a checkpoint covers the changes."""
        if self._disk.exists(self.root / _RECOVERING):
            self._disk.remove(self.root / _RECOVERING)
            self._disk.fsync_dir(self.root)

    @property
    def is_following(self) -> bool:
        """Whether the log may contain records of a master above the checkpoint."""
        return self._disk.exists(self.root / _FOLLOWING)

    def begin_following(self) -> None:
        """Set the mark, before the first byte of a master is stored."""
        if not self.is_following:
            self._disk.write_atomic(self.root / _FOLLOWING, b"following\n")

    def end_following(self) -> None:
        """Remove the mark, after a checkpoint covers the last byte of a master.

        The next checkpoint makes the removal durable. Until then, a start after a power cut may still find the mark. It
        then checks its own records above the checkpoint less strictly, and accepts the same ones.
        """
        if self.is_following:
            self._disk.remove(self.root / _FOLLOWING)

    def end(self) -> None:
        """Mark the store as cleanly closed."""
        self._disk.remove(self.root / _OPEN)
        self._disk.fsync_dir(self.root)


def clear_store(root: Path, disk: Disk) -> None:
    """Remove all files of a store except `log_uuid`, to repeat a restore into which nothing has been stored yet.

    An interruption may leave a store that cannot start: a log without its checkpoint.
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
