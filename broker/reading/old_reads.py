"""Reads of local records that may have left the page cache, from the file instead of the mapping.

A page fault in a mapping stops all threads, because it occurs with the GIL held; pread releases the GIL. For records
more than `hotBytes` below the log end offset, the kernel is asked whether the pages are resident. If not, a thread
reads them from the disk while the pull is parked. The mapped slices of the same bytes remain available. They provide
the answer if the file was evicted meanwhile, because a mapping stays valid after its file is deleted.
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
# Runs closer than this are merged into one read, because a queue's records are interleaved with those of other queues.
_GAP_MAX = 64 << 10


class Piece(NamedTuple):
    """One read of a file, and the requested parts of it as (start, end) relative to the read."""

    file: LogFile
    position: int
    length: int
    parts: list[tuple[int, int]]


def pieces_of(file_at: Callable[[int], LogFile | None], runs: list[tuple[int, int]]) -> list[Piece]:
    """Return the reads for runs of the log.

    A run is (start, end) in physical offsets, within one file. Runs are in ascending order.
    """
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
    """Reads of records outside the page cache, in a thread pool, so that no page fault blocks the event loop.

    `load` raises BrokerError SYSTEM_BUSY if too many reads wait already.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._pool = ThreadPoolExecutor(_THREADS, "old-read")
        self.count = 0  # reads below `hotBytes`
        self.waited = 0  # those whose pages were not resident
        self.waiting = 0

    def in_memory(self, pieces: list[Piece]) -> bool:
        """Return whether the mapping can be read without waiting for the disk."""
        self.count += 1
        return all(self._disk.is_resident(piece.file.map, piece.position, piece.length) for piece in pieces)

    async def load(self, pieces: list[Piece]) -> list[memoryview] | None:
        """Read the requested parts in a thread.

        Returns None if the file cannot be read or is shorter. Raises BrokerError SYSTEM_BUSY if too many reads wait.
        """
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
