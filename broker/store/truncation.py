"""Truncation of a slave's log: removal of a tail that its set never confirmed and the elected master lacks.

    truncation                            JSON: the log ends at `to`, whatever is found above; exists until that is done
    diverged/<epoch>-<from>-<to>.log      the removed bytes of the log, without padding behind END records; each record
                                          contains its offset. A second file of the name is <…>.2.log

Steps:

    kept      the tail is in diverged/, synced, and everything below is synced too
    decided   `truncation` is durable: from now on every start ends the log at `to`; before, at the old end
    cut       a recovery as at any start, with `to` as the end. Queues, CRC entries, keys and tables are made consistent
              from the checkpoint below `to`, or from a new one at `to`; the rest is zeroed and synced
    done      a checkpoint at `to` is durable, and `truncation` is removed

All of it runs on a thread. A second store performs the cut (`MessageStore._cut`). The first store rejects all changes
meanwhile, and takes over the recovered state in one turn of the event loop.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import count
from pathlib import Path

import msgspec

from broker.store import reading
from broker.store.commit_log import CommitLog
from broker.store.errors import LogMismatch, StoreCorrupt, StoreError, StoreFull, TruncationRefused, TruncationRunning
from broker.store.log_records import is_record_start
from infra import failpoint
from infra.disk.filesystem import Disk, OutOfDescriptors

_NAME, _DIVERGED = "truncation", "diverged"
_VERSION = 1
_CHUNK = 1 << 20
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class Truncation(msgspec.Struct):
    """Content of the truncation file."""

    to: int
    version: int = _VERSION


class TruncationState:
    """Whether a truncation is in progress in this process; on the event loop.

    The queue state must not change during a truncation, because the recovered state would not contain the change.
    """

    def __init__(self) -> None:
        #: Changes at the begin and the end of each truncation, after which the removed offsets are assigned again.
        self.count = 0
        self.is_running = False
        self._waiting: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Reject changes from now on."""
        assert not self.is_running
        self.count += 1
        self.is_running = True

    def end(self) -> None:
        """Accept changes again, and call back those who waited."""
        self.count += 1
        self.is_running = False
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            callback()

    def check_whole(self) -> None:
        """Raise TruncationRunning during a truncation."""
        if self.is_running:
            raise TruncationRunning("the log is being truncated: the store accepts no change until that is done")

    def when_whole(self, callback: Callable[[], None]) -> None:
        """Call back when no truncation is in progress; immediately if there is none."""
        if self.is_running:
            self._waiting.append(callback)
        else:
            callback()


def read_truncation(root: Path, disk: Disk) -> Truncation | None:
    """Return a truncation that was decided and is not done. Raises StoreCorrupt."""
    path = root / _NAME
    if not disk.exists(path):
        return None
    try:
        found = msgspec.json.decode(disk.read(path), type=Truncation)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"{path} can't be read: {error}") from error
    if found.version > _VERSION:
        raise StoreCorrupt(
            f"{path} has version {found.version}; this broker knows {_VERSION}: a newer release wrote it"
        )
    return found


def decide(root: Path, disk: Disk, to: int) -> None:
    """Decide durably that the log ends at `to`."""
    assert to >= 0
    failpoint.hit("store.truncate")
    disk.write_atomic(root / _NAME, msgspec.json.encode(Truncation(to)))


def is_decided(root: Path, disk: Disk) -> bool:
    """Return whether a start would find a decision and truncate the log."""
    return disk.exists(root / _NAME)


def is_done(root: Path, disk: Disk) -> None:
    """Remove the decision durably, after the truncation is done."""
    disk.remove(root / _NAME)
    disk.fsync_dir(root)


def check(log: CommitLog, to: int, end: int, floor: int) -> None:
    """Raise TruncationRefused or LogMismatch if the log may not be truncated to `to`."""
    if to < floor:
        raise TruncationRefused(f"the log can't be truncated to {to}, below the confirmed offset {floor}")
    if not log.min_offset <= to <= end:
        raise LogMismatch(f"the log has {log.min_offset} to {end}: it can't be truncated to {to}")
    if not (to == end or is_record_start(log, to)):
        raise LogMismatch(f"no record begins at {to}: the log can't be truncated there")


def keep(log: CommitLog, to: int, end: int, *, epoch: int, root: Path, disk: Disk) -> Path:
    """Write the tail of the log to a file and return its path. Raises StoreFull or StoreError; then no file is left."""
    directory = root / _DIVERGED
    disk.make_dirs(directory)
    disk.fsync_dir(root)
    names = (f"{epoch}-{to}-{end}{f'.{number}' if number > 1 else ''}.log" for number in count(1))
    path = next(directory / name for name in names if not disk.exists(directory / name))
    temporary = path.with_name(f".{path.name}.tmp")
    if disk.exists(temporary):
        disk.remove(temporary)
    try:
        disk.append(temporary, b"")
        at, data = reading.log_bytes(log, to, end, _CHUNK, padding=False)
        while data:
            disk.append(temporary, bytes(data))
            at, data = reading.log_bytes(log, at + len(data), end, _CHUNK, padding=False)
        disk.fdatasync(temporary)
    except OSError as error:
        if disk.exists(temporary):
            disk.remove(temporary)
        kind = StoreFull if isinstance(error, OutOfDescriptors) or error.errno in _FULL else StoreError
        raise kind(f"the diverged tail can't be kept in {directory}: {error}") from error
    disk.rename(temporary, path)
    disk.fsync_dir(directory)
    return path
