"""Local records that may have left the page cache: read from the file, not through the mapping.

A page fault in a mapping stops every thread, because it holds the GIL; a pread lets it go. So what lies more than
`hotBytes` below the log's end is asked of memory without waiting first, and if it isn't there, of the disk in a thread,
while the pull is parked. The mapped slices of the same bytes stay at hand: they answer where the file has been evicted
in between (a mapping outlives its file's name).
"""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from broker.store.commit_log import CommitLog
from infra.disk import Disk
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

_THREADS = 4
_WAITING_MAX = 4096
# Runs this near each other are one read: the records of a queue lie among those of others.
_GAP_MAX = 64 << 10
# What is copied on the loop at a time.
_CACHED_MAX = 1 << 20


class Piece(NamedTuple):
    """One read of a file, and the parts of it that were asked for, as (start in it, length)."""

    path: Path
    position: int
    length: int
    parts: list[tuple[int, int]]


def pieces_of(log: CommitLog, runs: Iterable[tuple[int, int]]) -> list[Piece]:
    """The reads for these runs of the log, (physical offset, length) in rising order; each lies in one file."""
    pieces: list[Piece] = []
    end = -1  # of the last piece, as a physical offset
    for start, length in runs:
        file = log.at(start)
        assert file is not None, "a run was sliced from this file just now"
        last = pieces[-1] if pieces else None
        if last is not None and last.path == file.path and end <= start <= end + _GAP_MAX:
            begin = start - file.base - last.position
            last.parts.append((begin, length))
            pieces[-1] = last._replace(length=begin + length)
        else:
            pieces.append(Piece(file.path, start - file.base, length, [(0, length)]))
        end = start + length
    return pieces


class OldReads:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._pool = ThreadPoolExecutor(_THREADS, "old-read")
        self.count = 0  # reads below hotBytes
        self.waited = 0  # those that memory did not answer
        self.waiting = 0

    def cached(self, pieces: list[Piece]) -> list[memoryview] | None:
        """The parts, if all of them are in memory; never waits for the disk."""
        self.count += 1
        if sum(piece.length for piece in pieces) > _CACHED_MAX:
            return None
        found: list[memoryview] = []
        for piece in pieces:
            try:
                read = self._disk.read_cached(piece.path, piece.position, piece.length)
            except OSError:
                return None  # the thread meets it again, and has an answer
            if read is None:
                return None
            found += _parts(piece, read)
        return found

    async def load(self, pieces: list[Piece]) -> list[memoryview] | None:
        """The parts, read in a thread; None: the file is gone or shorter. Raises BrokerError SYSTEM_BUSY."""
        if self.waiting >= _WAITING_MAX:
            raise BrokerError(ResponseCode.SYSTEM_BUSY, f"{self.waiting} reads wait for the disk already")
        self.waited += 1
        self.waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, pieces)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self, pieces: list[Piece]) -> list[memoryview] | None:
        found: list[memoryview] = []
        for piece in pieces:
            try:
                read = self._disk.read_at(piece.path, piece.position, piece.length)
            except OSError:
                return None
            if len(read) != piece.length:
                return None
            found += _parts(piece, memoryview(read))
        return found


def _parts(piece: Piece, read: memoryview) -> list[memoryview]:
    return [read[start : start + length] for start, length in piece.parts]
