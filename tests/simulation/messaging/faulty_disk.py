"""One process's view of a simulated disk: each call may fail, take long, or kill the process.

Calls of a dead process have no effect: each further call raises at once.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import greenlet

from infra.disk.filesystem import DiskFull, FileWriter, OutOfDescriptors, Room
from tests.kit.store.sim_disk import SimDisk
from tests.simulation.messaging.loop import KilledHere, SimThread

#: The effect of each call on the file system, which determines its possible errors.
OPENS = frozenset(
    ("create", "grow", "map", "writer", "read", "read_at", "write_atomic", "append", "fdatasync", "fsync_dir", "lock")
)
ALLOCATES = frozenset(("create", "grow", "write_atomic", "append"))
SYNCS = frozenset(("sync", "fdatasync", "fsync_dir", "write_atomic"))
WRITES = frozenset(("write", "write_atomic", "append"))
MAPS = frozenset(("map",))


@dataclass
class Faults:
    """The calls that fail, with their errors and probabilities, and a count of the failures."""

    shares: dict[tuple[str, int], float] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)

    def set(self, calls: frozenset[str], error: int, share: float) -> None:
        for call in sorted(calls):
            self.shares[call, error] = share

    def heal(self) -> None:
        self.shares.clear()


class FaultyDisk:
    """A disk with faults; `before` is called at each call and may raise `Killed`."""

    def __init__(self, platter: SimDisk, faults: Faults, chance: random.Random) -> None:
        self.platter, self.faults, self._chance = platter, faults, chance
        self.before: Callable[[str, Path], None] = lambda call, path: None
        self.drag: Callable[[str], float] = lambda call: 0.0  # The factor by which a call takes longer.
        self.dead = False
        self.lost_pages = False  # A sync failed, and the kernel may have dropped the pages that it covered.

    def _call(self, call: str, path: Path) -> None:
        if self.dead:
            raise KilledHere(f"{call} {path} after the death")
        here = greenlet.getcurrent()
        if isinstance(here, SimThread):
            here.give_way(here._loop.latency() + self.drag(call))
            if self.dead:
                raise KilledHere(f"{call} {path} after the death")
        try:
            self.before(call, path)
        except KilledHere:
            self.dead = True  # From this call on, whatever its threads still do while they unwind.
            raise
        for (name, error), share in self.faults.shares.items():
            if name == call and self._chance.random() < share:
                self._fail(call, error, path)

    def _fail(self, call: str, error: int, path: Path) -> None:
        self.faults.met[f"{errno.errorcode[error]} at {call}"] += 1
        if error == errno.EIO and call in {"sync", "fdatasync"}:
            self.lost_pages = True
        if error in {errno.EMFILE, errno.ENOMEM}:
            raise OutOfDescriptors(error, os.strerror(error), str(path))
        kind = DiskFull if error == errno.ENOSPC and call in {"create", "grow"} else OSError
        raise kind(error, os.strerror(error), str(path))

    def create_preallocated(self, path: Path, size: int, *, sync: bool = True) -> None:
        self._call("create", path)
        self.platter.create_preallocated(path, size, sync=sync)

    def grow(self, path: Path, size: int) -> None:
        self._call("grow", path)
        self.platter.grow(path, size)

    def map(self, path: Path, size: int) -> mmap.mmap:
        self._call("map", path)
        return self.platter.map(path, size)

    def writer(self, path: Path) -> FileWriter:
        self._call("writer", path)
        return _Writer(self, path, self.platter.writer(path))

    def read(self, path: Path) -> bytes:
        self._call("read", path)
        return self.platter.read(path)

    def read_at(self, path: Path, offset: int, size: int) -> bytes:
        self._call("read_at", path)
        return self.platter.read_at(path, offset, size)

    def is_resident(self, mapped: mmap.mmap, offset: int, size: int) -> bool:
        return True

    def write_atomic(self, path: Path, data: bytes) -> None:
        self._call("write_atomic", path)
        self.platter.write_atomic(path, data)

    def append(self, path: Path, data: bytes) -> None:
        self._call("append", path)
        self.platter.append(path, data)

    def fdatasync(self, path: Path) -> None:
        self._call("fdatasync", path)
        self.platter.fdatasync(path)

    def fsync_dir(self, path: Path) -> None:
        self._call("fsync_dir", path)
        self.platter.fsync_dir(path)

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", source)
        self.platter.rename(source, target)

    def remove(self, path: Path) -> None:
        self._call("remove", path)
        self.platter.remove(path)

    def remove_dir(self, path: Path) -> None:
        self._call("remove_dir", path)
        self.platter.remove_dir(path)

    def exists(self, path: Path) -> bool:
        return self.platter.exists(path)

    def list_dir(self, path: Path) -> list[str]:
        return self.platter.list_dir(path)

    def size(self, path: Path) -> int:
        return self.platter.size(path)

    def number(self, path: Path) -> int:
        return self.platter.number(path)

    def make_dirs(self, path: Path) -> None:
        self.platter.make_dirs(path)

    def make_private(self, path: Path) -> None:
        self.platter.make_private(path)

    def room(self, path: Path) -> Room:
        return self.platter.room(path)

    def lock(self, path: Path) -> Callable[[], None]:
        self._call("lock", path)
        return self.platter.lock(path)


class _Writer:
    def __init__(self, disk: FaultyDisk, path: Path, writer: FileWriter) -> None:
        self._disk, self._path, self._writer = disk, path, writer

    def write(self, data: bytes | memoryview, position: int) -> None:
        try:
            self._disk._call("write", self._path)
        except OSError:
            self._writer.write(data[: len(data) // 2], position)
            raise
        self._writer.write(data, position)

    def sync(self) -> None:
        self._disk._call("sync", self._path)
        self._writer.sync()
