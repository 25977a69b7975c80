"""Shared memory for row groups: the worker writes a group, the broker reads it, and the memory is reused afterwards.

    take ──▶ worker fills it ──▶ lent: a DecodedGroup and its slices ──last slice is gone──▶ free ──▶ take
               └─ no answer ──▶ dropped: the worker may write to it as long as it lives

To allocate, map and free a page costs more than to fill it: a sixth of the CPU time of a replay. A piece is a memfd
with a sealed size, so that a mapping of it never ends early. Thread-safe. A slice may be freed in any thread, also
during garbage collection, so its finalizer takes no lock.
"""

import fcntl
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np

_STEP = 256 << 10
KEPT_BYTES, _KEPT_PIECES = 32 << 20, 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class MemoryPiece:
    """One memfd of `size` bytes. It has two descriptors, its own and that of its mapping."""

    __slots__ = ("_mapped", "descriptor", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self._mapped: mmap.mmap | None = None
        self.descriptor = os.memfd_create("neve-group", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Close the memfd, so that it is not reused; existing slices remain valid."""
        os.close(self.descriptor)

    def content(self, size: int) -> bytes:
        """Return a copy of the first `size` bytes."""
        copy = bytearray(size)
        view, position = memoryview(copy), 0
        while position < size:
            position += os.preadv(self.descriptor, [view[position:]], position)
        return bytes(copy)

    def map(self) -> None:
        """Map all pages at once: a page fault for a single page costs as much as mapping sixteen."""
        if self._mapped is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapped = mmap.mmap(self.descriptor, self.size, flags=flags, prot=mmap.PROT_READ)

    def lend(self, returned: "deque[MemoryPiece]") -> memoryview:
        """Return the mapped memory; append the piece to `returned` when the last slice of it is gone.

        Until then the piece must not be used: only the finalizer references it, without a reference cycle.
        """
        assert self._mapped is not None
        lease = np.frombuffer(self._mapped, np.uint8)
        content = lease.data
        weakref.finalize(lease, returned.append, self).atexit = False
        return content


class GroupMemory:
    """The free pieces, limited to `kept` bytes and sixteen pieces."""

    def __init__(self, kept: int = KEPT_BYTES) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._free: list[MemoryPiece] = []  # most recently used last: its pages may still be in a CPU cache
        self._returned: deque[MemoryPiece] = deque()
        self.made = 0

    def take(self, size: int) -> MemoryPiece:
        """Return a piece of at least `size` bytes. Raises OSError."""
        rounded = -(-size // _STEP) * _STEP
        with self._lock:
            self._collect()
            for index in range(len(self._free) - 1, -1, -1):
                if rounded <= self._free[index].size <= rounded + rounded // 4:
                    return self._free.pop(index)
            self.made += 1
        return MemoryPiece(rounded)

    def lend(self, piece: MemoryPiece) -> memoryview:
        """Map and lend a piece. If it raises OSError, the piece still belongs to the caller."""
        piece.map()
        return piece.lend(self._returned)

    def give_back(self, piece: MemoryPiece) -> None:
        """Return a piece that was not lent."""
        self._returned.append(piece)

    def close(self) -> None:
        """Free the unused pieces. Lent ones are closed with the process, since no later `take` collects them."""
        with self._lock:
            self._kept = 0
            self._collect()

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())
        free = sum(piece.size for piece in self._free)
        while free > self._kept or len(self._free) > _KEPT_PIECES:
            piece = self._free.pop(0)
            free -= piece.size
            piece.drop()
