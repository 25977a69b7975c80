"""Epochs of the log on the disk, in RocketMQ's format. Lines end with a line feed.

epochFileCheckpoint, and the same in epochFileCheckpoint.bak
  count
  crc32 of what follows this line, & 0x7FFFFFFF; 0: not checked
  epoch-start           count times                           2\\n522188333\\n1-0\\n2-223129\\n

An epoch is saved before its first byte is appended, and removed after its last byte is truncated. A crash in between
leaves an entry at or above the end of the log, which the next start drops.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

from broker.ha.epochs import Entry, EpochCache
from infra.disk.filesystem import Disk
from infra.loop.threads import SYSTEM_THREADS, Threads

FILE_NAME = "epochFileCheckpoint"
_BACKUP = ".bak"


class EpochFileDamaged(ValueError):
    """Neither the file nor its backup can be read."""


class EpochFile:
    """Epoch file of a member, and its backup."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self.path = directory / FILE_NAME
        self._backup = directory / (FILE_NAME + _BACKUP)

    def load(self) -> EpochCache:
        """Return the saved epochs. Raise EpochFileDamaged: a member with unknown epochs must not follow a master."""
        faults = list[str]()
        for path in (self.path, self._backup):
            if not self._disk.exists(path):
                continue
            try:
                return EpochCache(decode_entries(self._disk.read(path)))
            except ValueError as error:
                faults.append(f"{path}: {error}")
        if faults:
            raise EpochFileDamaged("; ".join(faults))
        return EpochCache()

    def save(self, entries: Iterable[Entry]) -> None:
        """Write both files, one after the other.

        A crash in between leaves a backup that is one save behind. It lacks an epoch that has no bytes yet.
        """
        data = encode_entries(tuple(entries))
        self._disk.write_atomic(self.path, data)
        self._disk.write_atomic(self._backup, data)


class StoredEpochs:
    """Epochs of a member's log. Invariant: an epoch is on the disk before `cache` has it.

    A change that fails leaves `cache` as it was; the caller tries again.
    """

    def __init__(self, file: EpochFile, threads: Threads = SYSTEM_THREADS) -> None:
        self._file, self._threads = file, threads
        self.cache = EpochCache()

    def load(self) -> None:
        """Load the file, at a start. Raise EpochFileDamaged."""
        self.cache = self._file.load()

    def drop_above(self, end: int) -> None:
        """Drop the epochs above the end of the log, at a start."""
        if self.cache.drop_above(end):
            self._file.save(self.cache.entries())

    async def assign(self, entries: Sequence[Entry]) -> None:
        """Save new epochs before their first byte."""
        await self._save(EpochCache((*self.cache.entries(), *entries)))
        for epoch, start in entries:
            self.cache.assign(epoch, start)

    async def truncate(self, end: int) -> None:
        """Drop the epochs that have no bytes after a truncation."""
        wanted = EpochCache(self.cache.entries())
        if wanted.truncate(end):
            await self._save(wanted)
            self.cache.truncate(end)

    async def _save(self, wanted: EpochCache) -> None:
        """Save epochs. A cancellation waits for the end of the write: the next role saves epochs after it."""
        saving = asyncio.ensure_future(self._threads.run(self._file.save, wanted.entries()))
        try:
            await asyncio.shield(saving)
        except asyncio.CancelledError:
            await saving
            raise


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """Return the content of the file."""
    lines = b"".join(b"%d-%d\n" % entry for entry in entries)
    return b"%d\n%d\n%b" % (len(entries), crc32(lines) & 0x7FFFFFFF, lines)


def decode_entries(data: bytes) -> list[Entry]:
    """Return the entries of a file, which may be RocketMQ's. Raise ValueError."""
    count, _, rest = data.partition(b"\n")
    crc, _, lines = rest.partition(b"\n")
    expected = int(crc)
    if expected and crc32(lines) & 0x7FFFFFFF != expected:
        raise ValueError("its checksum does not match its lines")
    entries = [_entry(line) for line in lines.split(b"\n") if line]
    if len(entries) != int(count):
        raise ValueError(f"{len(entries)} lines of {int(count)}")
    return entries


def _entry(line: bytes) -> Entry:
    epoch, dash, start = line.partition(b"-")
    if not dash:
        raise ValueError(f"{line!r} is no epoch and start")
    return int(epoch), int(start)
