"""Memory in which the fetching worker lays a row group and the broker reads it, used again when nobody reads it.

    take ──▶ the worker fills it ──▶ lent: a DecodedGroup and its slices ──the last of them goes──▶ free ──▶ take
                └─ it does not answer ──▶ dropped: it may write there for as long as it lives

A page costs more to come by, to map and to give back than to fill: of a replay that is a sixth of all CPU. A piece is a
memfd whose size is sealed, so that a mapping of it never ends early. Thread-safe; a slice may go in any thread, and in
a collection of garbage, so what is told then takes no lock.
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


class Piece:
    """One memfd; `size` is what it holds at most. Two descriptors, its own and its mapping's."""

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
        """It is never used again; slices of it stay good."""
        os.close(self.descriptor)

    def content(self, size: int) -> bytes:
        """A copy of its begin."""
        copy = bytearray(size)
        view, position = memoryview(copy), 0
        while position < size:
            position += os.preadv(self.descriptor, [view[position:]], position)
        return bytes(copy)

    def map(self) -> None:
        """All its pages together, and once: a page that is met by a fault costs as much as sixteen."""
        if self._mapped is None:
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._mapped = mmap.mmap(self.descriptor, self.size, flags=flags, prot=mmap.PROT_READ)

    def lend(self, returned: "deque[Piece]") -> memoryview:
        """It is mapped, and goes to `returned` when the last slice of this has gone.

        Until then nobody may know it: what is registered for that holds it, without a circle.
        """
        assert self._mapped is not None
        lease = np.frombuffer(self._mapped, np.uint8)
        content = lease.data
        weakref.finalize(lease, returned.append, self).atexit = False
        return content


class GroupMemory:
    """Pieces that are free, at most `kept` bytes and sixteen of them."""

    def __init__(self, kept: int = KEPT_BYTES) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._free: list[Piece] = []  # the one that was used last at the end: its pages may still be in a cache
        self._returned: deque[Piece] = deque()
        self.made = 0

    def take(self, size: int) -> Piece:
        """For that many bytes. Raises OSError."""
        rounded = -(-size // _STEP) * _STEP
        with self._lock:
            self._collect()
            for index in range(len(self._free) - 1, -1, -1):
                if rounded <= self._free[index].size <= rounded + rounded // 4:
                    return self._free.pop(index)
            self.made += 1
        return Piece(rounded)

    def lend(self, piece: Piece) -> memoryview:
        """Raises OSError, then the piece is still whose it was."""
        piece.map()
        return piece.lend(self._returned)

    def give_back(self, piece: Piece) -> None:
        """Nobody has seen it."""
        self._returned.append(piece)

    def close(self) -> None:
        """What is lent comes back, and is let go at the next take, of which there is none."""
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
