"""A disk in memory that models a power cut.

    map / write  ->  volatile content (a memfd, so all maps and writers of a file agree)
    fdatasync    ->  durable content of one file
    fsync_dir    ->  durable names of one directory

`power_cut()` randomly keeps the old or the new version of each unsynced 4 KiB page, and of each unsynced name: the
kernel writes pages back at any time and in any order. Directories themselves are always durable.
"""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from infra.disk.filesystem import DescriptorWriter, DiskFull, DiskLocked, FileWriter, Room

T = TypeVar("T")

PAGE = 4096


# Disks of finished tests are in reference cycles with their stores. The collector counts objects, not descriptors:
# after some thousand tests, whose objects it rarely examines, there would be more descriptors than a process may have.
_COLLECTED_EACH = 4_000


class _File:
    """One inode: its volatile content and its durable content."""

    __slots__ = ("descriptor", "durable", "number")
    _numbers = itertools.count(1)

    def __init__(self, content: bytes = b"", size: int = 0) -> None:
        # Also if no descriptor is available: a finalizer must not raise.
        self.descriptor = -1
        self.descriptor = _with_a_descriptor(lambda: os.memfd_create("sim-disk", os.MFD_CLOEXEC))
        os.ftruncate(self.descriptor, max(size, len(content)))
        if content:
            os.pwrite(self.descriptor, content, 0)
        self.durable = b""
        self.number = next(self._numbers)
        if self.number % _COLLECTED_EACH == 0:
            gc.collect()

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def size(self) -> int:
        return os.fstat(self.descriptor).st_size

    def content(self) -> bytes:
        return os.pread(self.descriptor, self.size(), 0)

    def sync(self) -> None:
        self.durable = self.content()

    def after_cut(self, coin: Callable[[], bool]) -> _File:
        """Return the file as the next start finds it."""
        volatile, durable = self.content(), self.durable
        size = len(volatile) if len(durable) == len(volatile) or coin() else len(durable)
        kept = bytearray(size)
        for start in range(0, size, PAGE):
            new, old = volatile[start : start + PAGE], durable[start : start + PAGE]
            page = new if new == old or coin() else old
            kept[start : start + len(page)] = page
        survivor = _File(bytes(kept[:size]), size)
        survivor.sync()
        survivor.number = self.number
        return survivor


def _with_a_descriptor(make: Callable[[], T]) -> T:
    """Open a descriptor; if none is available, first collect the garbage in reference cycles and retry."""
    try:
        return make()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        gc.collect()
        return make()


def _inside(directory: Path, paths: Iterable[Path]) -> list[Path]:
    """Return the paths in a directory, compared as strings, because a Path creates its parent again each time."""
    prefix = f"{str(directory).rstrip('/')}/"
    length = len(prefix)
    return [path for path in paths if (name := str(path)).startswith(prefix) and name.rfind("/") < length]


class _SimWriter:
    def __init__(self, disk: SimDisk, path: Path, inode: _File) -> None:
        self._disk, self._path, self._inode = disk, path, inode
        self._file = DescriptorWriter(os.dup(inode.descriptor))

    def write(self, data: bytes | memoryview, position: int) -> None:
        if self._disk.fail_write(self._path):
            self._file.write(data[: len(data) // 2], position)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self._path))
        self._file.write(data, position)

    def sync(self) -> None:
        self._disk.sync_file(self._path, self._inode)


class SimDisk:
    """Files in memory; `capacity` bounds the sum of their sizes."""

    def __init__(self, capacity: int = 1 << 40, seed: int = 0) -> None:
        self.capacity = capacity
        self.fail_sync: Callable[[Path], bool] = lambda _path: False
        self.fail_write: Callable[[Path], bool] = lambda _path: False  # Half of it is written.
        self.fail_read: Callable[[Path], bool] = lambda _path: False  # Also of a new map.
        self.syncs = 0
        self._random = random.Random(seed)
        self._names: dict[Path, _File] = {}
        self._durable_names: dict[Path, _File] = {}
        self._directories: set[Path] = {Path("/")}
        self._locks: set[Path] = set()

    def power_cut(self, seed: int | None = None) -> SimDisk:
        """Return the disk after the power cut. The old object still serves those who hold it."""
        coins = random.Random(self._random.random() if seed is None else seed)

        def coin() -> bool:
            return coins.random() < 0.5

        after = SimDisk(self.capacity)
        after._random = coins
        after._directories = set(self._directories)
        survivors: dict[int, _File] = {}
        for path in sorted(self._names.keys() | self._durable_names.keys()):
            new, old = self._names.get(path), self._durable_names.get(path)
            file = new if new is old or coin() else old
            if file is not None:
                survivor = survivors.setdefault(id(file), file.after_cut(coin))
                after._names[path] = after._durable_names[path] = survivor
                after._directories.update(path.parents)  # Its rename was not synced.
        return after

    def copy(self) -> SimDisk:
        """Return a backup, or the disk of a second machine: every file as it is now, all of it durable."""
        other = SimDisk(self.capacity)
        other._random = random.Random(self._random.random())
        other._directories = set(self._directories)
        for path, file in self._names.items():
            copied = _File(file.content(), file.size())
            copied.sync()
            other._names[path] = other._durable_names[path] = copied
        return other

    def kill(self) -> None:
        """End the process that used this disk, with its locks; its writes are in the page cache."""
        self._locks.clear()

    def open_path(self, path: Path) -> str:
        """Return a path at which the operating system can open the file, while the file exists here."""
        return f"/proc/self/fd/{self._file(path).descriptor}"

    def _file(self, path: Path) -> _File:
        file = self._names.get(path)
        if file is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return file

    def _need(self, size: int, path: Path) -> None:
        if size > self.room(path).available:
            raise DiskFull(errno.ENOSPC, f"no room for {size} bytes", str(path))

    def _need_parent(self, path: Path) -> None:
        if path.parent not in self._directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))

    def create_preallocated(self, path: Path, size: int, *, sync: bool = True) -> None:
        self._need_parent(path)
        if path in self._names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        self._need(size, path)
        self._names[path] = file = _File(size=size)
        if sync:
            file.sync()
            self.fsync_dir(path.parent)

    def grow(self, path: Path, size: int) -> None:
        file = self._file(path)
        if size > file.size():
            self._need(size - file.size(), path)
            os.ftruncate(file.descriptor, size)

    def _check_readable(self, path: Path) -> None:
        if self.fail_read(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def map(self, path: Path, size: int) -> mmap.mmap:
        self._check_readable(path)
        file = self._file(path)
        if file.size() < size:
            raise OSError(errno.EINVAL, f"shorter than the {size} bytes to map", str(path))
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        return _with_a_descriptor(lambda: mmap.mmap(file.descriptor, size, mmap.MAP_SHARED, protection))

    def writer(self, path: Path) -> FileWriter:
        return _SimWriter(self, path, self._file(path))

    def read(self, path: Path) -> bytes:
        return self._file(path).content()

    def read_at(self, path: Path, offset: int, size: int) -> bytes:
        self._check_readable(path)
        return os.pread(self._file(path).descriptor, size, offset)

    def is_resident(self, mapped: mmap.mmap, offset: int, size: int) -> bool:
        return True  # Its files are memory.

    def write_atomic(self, path: Path, data: bytes) -> None:
        self._need_parent(path)
        self._need(len(data), path)
        file = _File(data)
        file.sync()
        self._names[path] = file
        self.fsync_dir(path.parent)

    def append(self, path: Path, data: bytes) -> None:
        self._need_parent(path)
        self._need(len(data), path)
        file = self._names.setdefault(path, _File())
        os.pwrite(file.descriptor, data, file.size())

    def fdatasync(self, path: Path) -> None:
        self.sync_file(path, self._file(path))

    def sync_file(self, path: Path, file: _File) -> None:
        self.syncs += 1
        if self.fail_sync(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        file.sync()

    def fsync_dir(self, path: Path) -> None:
        for name in [name for name in _inside(path, self._durable_names) if name not in self._names]:
            del self._durable_names[name]
        # Renaming or removing a directory affects all names below it.
        for name in [name for name in self._durable_names if path in name.parents and not self._leads_to(path, name)]:
            del self._durable_names[name]
        self._durable_names.update({name: self._names[name] for name in _inside(path, self._names)})

    def _leads_to(self, path: Path, name: Path) -> bool:
        """Return whether the entry of a directory on the way to a name exists."""
        entry = path / name.relative_to(path).parts[0]
        return entry in self._directories or entry in self._names

    def rename(self, source: Path, target: Path) -> None:
        self._need_parent(target)
        if source in self._directories:
            self._rename_dir(source, target)
            return
        self._names[target] = self._file(source)
        del self._names[source]

    def _rename_dir(self, source: Path, target: Path) -> None:
        """Rename a directory. A power cut may lose single names inside, which is harsher than a real file system."""
        if self.exists(target):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(target))
        for table in (self._directories, self._names):
            for path in [path for path in table if path == source or source in path.parents]:
                moved = target / path.relative_to(source)
                if isinstance(table, set):
                    table.remove(path)
                    table.add(moved)
                else:
                    table[moved] = table.pop(path)

    def remove(self, path: Path) -> None:
        self._file(path)
        del self._names[path]

    def remove_dir(self, path: Path) -> None:
        if self.list_dir(path):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        self._directories.discard(path)

    def exists(self, path: Path) -> bool:
        return path in self._names or path in self._directories

    def list_dir(self, path: Path) -> list[str]:
        if path not in self._directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return sorted(entry.name for entry in _inside(path, (*self._names, *self._directories)) if entry != path)

    def size(self, path: Path) -> int:
        return self._file(path).size()

    def number(self, path: Path) -> int:
        return self._file(path).number

    def make_dirs(self, path: Path) -> None:
        self._directories.update((path, *path.parents))

    def make_private(self, path: Path) -> None:
        """Do nothing: there is only one owner."""

    def room(self, path: Path) -> Room:
        used = sum(file.size() for file in self._names.values())
        return Room(used, self.capacity - used)

    def lock(self, path: Path) -> Callable[[], None]:
        if path in self._locks:
            raise DiskLocked(errno.EWOULDBLOCK, "held by another process", str(path))
        self._locks.add(path)
        return lambda: self._locks.discard(path)
