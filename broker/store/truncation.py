"""A slave gives up the end of its log: what its set never confirmed, and another member was elected without.

truncation                            JSON: the log ends at `to`, whatever is found above; there until that is so
diverged/<epoch>-<from>-<to>.log      what was cut: the log's bytes as they lay, without the rest of a file behind its
                                      END record; each record says its place. A second of the name is <…>.2.log

    kept      what lies above is in diverged/, synced, and so is all that lies below
    decided   `truncation` is on the disk: from here on every start ends at `to`, before that at the old end
    cut       recovery, as at any start, with `to` as the end: queues, CRC entries, keys and tables are made to agree
              from the checkpoint below it, or from one that is made for `to`; the rest is zeroed and synced
    done      a checkpoint at `to` is on the disk, and `truncation` goes

All of it runs on a thread. The cut is a second store's (`MessageStore._cut`): the first one changes nothing meanwhile,
and takes over in one turn of the loop what the second has recovered.
"""

from __future__ import annotations

import errno
from itertools import count
from pathlib import Path

import msgspec

from broker.store import reading
from broker.store.commit_log import CommitLog
from broker.store.errors import LogMismatch, StoreCorrupt, StoreError, StoreFull, TruncationRefused
from infra import failpoint
from infra.disk.filesystem import Disk, OutOfDescriptors

_NAME, _DIVERGED = "truncation", "diverged"
_VERSION = 1
_CHUNK = 1 << 20
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT))


class Truncation(msgspec.Struct):
    """What the file says."""

    to: int
    version: int = _VERSION


def read_truncation(root: Path, disk: Disk) -> Truncation | None:
    """One that was decided and is not done."""
    path = root / _NAME
    if not disk.exists(path):
        return None
    try:
        found = msgspec.json.decode(disk.read(path), type=Truncation)
    except msgspec.DecodeError as error:
        raise StoreCorrupt(f"{path} can't be read: {error}") from error
    if found.version > _VERSION:
        raise StoreCorrupt(f"{path} has version {found.version}; this broker knows {_VERSION}: a newer one wrote it")
    return found


def decide(root: Path, disk: Disk, to: int) -> None:
    """From here on the log ends there."""
    assert to >= 0
    failpoint.hit("store.truncate")
    disk.write_atomic(root / _NAME, msgspec.json.encode(Truncation(to)))


def is_decided(root: Path, disk: Disk) -> bool:
    """Return whether a start would find a decision and cut the log."""
    return disk.exists(root / _NAME)


def is_done(root: Path, disk: Disk) -> None:
    """It does, on the disk."""
    disk.remove(root / _NAME)
    disk.fsync_dir(root)


def check(log: CommitLog, to: int, end: int, floor: int) -> None:
    """Raises TruncationRefused, LogMismatch."""
    if to < floor:
        raise TruncationRefused(f"the log would be cut to {to}, and what lies below {floor} is confirmed")
    if not log.min_offset <= to <= end:
        raise LogMismatch(f"the log has {log.min_offset} to {end}: it can't be cut to {to}")
    if not (to == end or log.is_record_start(to)):
        raise LogMismatch(f"no record begins at {to}: the log can't be cut there")


def keep(log: CommitLog, to: int, end: int, *, epoch: int, root: Path, disk: Disk) -> Path:
    """Write what lies above. Raises StoreFull, then there is nothing new."""
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
        raise kind(f"what is to be cut can't be kept in {directory}: {error}") from error
    disk.rename(temporary, path)
    disk.fsync_dir(directory)
    return path
