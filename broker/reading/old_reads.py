"""Local records that may have left the page cache: read from the file, not through the mapping.

A page fault in a mapping stops every thread, because it holds the GIL; a pread lets it go. So for what lies more than
`hotBytes` below the log's end the kernel is asked whether it is in memory, and if it isn't, a thread reads it from the
disk while the pull is parked. The mapped slices of the same bytes stay at hand: they answer where the file has been
evicted in between (a mapping outlives its file's name).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from broker.store.commit_log import LogFile
from infra.disk.filesystem import Disk
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

_THREADS = 4
_WAITING_MAX = 4096
# Runs this near each other are one read: the records of a queue lie among those of others.
_GAP_MAX = 64 << 10


class Piece(NamedTuple):
    """One read of a file, and the parts of it that were asked for, as (start, end) in it."""

    file: LogFile
    position: int
    length: int
    parts: list[tuple[int, int]]


def pieces_of(file_at: Callable[[int], LogFile | None], runs: list[tuple[int, int]]) -> list[Piece]:
    """The reads for these runs of the log, (start, end) as physical offsets in rising order; each lies in one file."""
    pieces: list[Piece] = []
    file = None
    origin = reached = 0
    parts: list[tuple[int, int]] = []
    for start, end in runs:
        if file is None or start > reached + _GAP_MAX or end > file.end:
            if file is not None:
                pieces.append(Piece(file, origin - file.base, reached - origin, parts))
            file, origin, parts = file_at(start), start, []
            assert file is not None, "a run was sliced from this file just now"
        parts.append((start - origin, end - origin))
        reached = end
    if file is not None:
        pieces.append(Piece(file, origin - file.base, reached - origin, parts))
    return pieces


class OldReads:
    """Reads of local records past the page cache, on threads of their own, so that no page fault stops the loop.

    `load` raises BrokerError SYSTEM_BUSY when the disk can't be read or too many wait already.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._pool = ThreadPoolExecutor(_THREADS, "old-read")
        self.count = 0  # reads below hotBytes
        self.waited = 0  # those that memory did not answer
        self.waiting = 0

    def in_memory(self, pieces: list[Piece]) -> bool:
        """Whether the mapping can be read without a wait for the disk."""
        self.count += 1
        return all(self._disk.is_resident(piece.file.map, piece.position, piece.length) for piece in pieces)

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
                read = self._disk.read_at(piece.file.path, piece.position, piece.length)
            except OSError:
                return None
            if len(read) != piece.length:
                return None
            view = memoryview(read)
            found += [view[start:end] for start, end in piece.parts]
        return found
