"""The local disk as a dependency: all I/O whose durability matters, or that a full disk can fail.

`RealDisk` is a thin layer over the system. `SimDisk` (`tests/kit/store/sim_disk.py`) models the effect of a power cut.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

_mincore = ctypes.CDLL(None, use_errno=True).mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class DiskFull(OSError):
    """There is no room for an allocation; the file system is unchanged."""


class OutOfDescriptors(OSError):
    """The process or the machine is out of descriptors or mappings; the operation had no effect."""


class DiskLocked(OSError):
    """Another process holds the lock."""


class Room(NamedTuple):
    """Bytes of a file system as `df` counts them: reserved blocks are neither used nor available."""

    used: int
    available: int

    @property
    def used_ratio(self) -> float:
        """The used share, 0 to 1: the `Use%` of `df`, to which RocketMQ's thresholds refer."""
        whole = self.used + self.available
        return self.used / whole if whole else 0.0


class FileWriter(Protocol):
    """Positioned writes to one file, which may be mapped, too. The last reference closes the descriptor."""

    def write(self, data: bytes | memoryview, position: int) -> None:
        """Write all bytes or raise OSError."""

    def sync(self) -> None:
        """Sync the file, with the pages of its maps, without another descriptor."""


class DescriptorWriter:
    """A `FileWriter` that owns a descriptor."""

    __slots__ = ("_descriptor",)

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: bytes | memoryview, position: int) -> None:
        written = os.pwrite(self._descriptor, data, position)
        while written < len(data):
            more = os.pwrite(self._descriptor, memoryview(data)[written:], position + written)
            if not more:
                raise OSError(errno.EIO, f"nothing was written at {position + written}")
            written += more

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def __del__(self) -> None:
        os.close(self._descriptor)


class Disk(Protocol):
    """The file system operations of the product. Paths are absolute or relative to the working directory."""

    def create_preallocated(self, path: Path, size: int, *, sync: bool = True) -> None:
        """Create a file of zeros whose blocks exist; with `sync` it also survives a power cut."""

    def grow(self, path: Path, size: int) -> None:
        """Extend a preallocated file with preallocated zeros."""

    def map(self, path: Path, size: int) -> mmap.mmap: ...

    def writer(self, path: Path) -> FileWriter:
        """Open a file whose blocks are allocated, for writing."""

    def read(self, path: Path) -> bytes: ...

    def read_at(self, path: Path, offset: int, size: int) -> bytes: ...

    def is_resident(self, mapped: mmap.mmap, offset: int, size: int) -> bool:
        """Return whether a part of a map is in memory, so that reading it does not wait for the device."""

    def write_atomic(self, path: Path, data: bytes) -> None:
        """Replace the content of a file with mode 0600. After a crash it is either the old or the new content."""

    def append(self, path: Path, data: bytes) -> None: ...

    def fdatasync(self, path: Path) -> None: ...

    def fsync_dir(self, path: Path) -> None: ...

    def rename(self, source: Path, target: Path) -> None: ...

    def remove(self, path: Path) -> None: ...

    def remove_dir(self, path: Path) -> None: ...

    def exists(self, path: Path) -> bool: ...

    def list_dir(self, path: Path) -> list[str]: ...

    def size(self, path: Path) -> int: ...

    def number(self, path: Path) -> int:
        """Return the inode number: a rename keeps it, a copy has another one."""

    def make_dirs(self, path: Path) -> None: ...

    def make_private(self, path: Path) -> None:
        """Only the owner may enter the directory."""

    def room(self, path: Path) -> Room: ...

    def lock(self, path: Path) -> Callable[[], None]:
        """Take an exclusive lock, which ends with the process; return a function that releases it."""


def allocate(descriptor: int, offset: int, size: int, path: Path) -> None:
    """Give a file blocks for a range, or raise `DiskFull`."""
    try:
        os.posix_fallocate(descriptor, offset, size)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            raise DiskFull(error.errno, f"no room for {size} bytes: {os.strerror(error.errno)}", str(path)) from error
        raise


_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


# Only the owner may read a data directory: it holds messages and the secrets of users.
_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700


def _open(path: Path, flags: int, mode: int = _FILE_MODE) -> int:
    """Raises OutOfDescriptors if a retry may succeed; that error is unrelated to the file and the disk."""
    try:
        return os.open(path, flags | os.O_CLOEXEC, mode)
    except OSError as error:
        raise _classified(error, path) from error


def _classified(error: OSError, path: Path) -> OSError:
    if error.errno not in _EXHAUSTED or error.errno is None:
        return error
    return OutOfDescriptors(error.errno, os.strerror(error.errno), str(path))


class RealDisk:
    """The machine's file system. Each call that opens or maps may raise OutOfDescriptors."""

    __slots__ = ()

    def create_preallocated(self, path: Path, size: int, *, sync: bool = True) -> None:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            allocate(descriptor, 0, size, path)
            if sync:
                os.fsync(descriptor)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        if sync:
            try:
                self.fsync_dir(path.parent)
            except OutOfDescriptors:
                path.unlink(missing_ok=True)
                raise

    def grow(self, path: Path, size: int) -> None:
        descriptor = _open(path, os.O_RDWR)
        try:
            old = os.fstat(descriptor).st_size
            if size > old:
                allocate(descriptor, old, size - old, path)
        finally:
            os.close(descriptor)

    def map(self, path: Path, size: int) -> mmap.mmap:
        descriptor = _open(path, os.O_RDWR)
        try:
            # an access to a map beyond the end of its file would kill the process (SIGBUS)
            if os.fstat(descriptor).st_size < size:
                raise OSError(errno.EINVAL, f"shorter than the {size} bytes to map", str(path))
            try:
                return mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            except OSError as error:  # mmap duplicates the descriptor, and the kernel limits mappings
                raise _classified(error, path) from error
        finally:
            os.close(descriptor)

    def writer(self, path: Path) -> FileWriter:
        return DescriptorWriter(_open(path, os.O_WRONLY))

    def read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise _classified(error, path) from error

    def read_at(self, path: Path, offset: int, size: int) -> bytes:
        descriptor = _open(path, os.O_RDONLY)
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def is_resident(self, mapped: mmap.mmap, offset: int, size: int) -> bool:
        skipped = offset % mmap.PAGESIZE
        pages = (skipped + size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        there = ctypes.create_string_buffer(pages)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped)) + offset - skipped
        return _mincore(address, skipped + size, there) == 0 and there.raw.count(1) == pages

    def write_atomic(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        directory = _open(path.parent, os.O_RDONLY | os.O_DIRECTORY)  # first: an error leaves everything as it was
        try:
            descriptor = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            try:
                os.fchmod(descriptor, _FILE_MODE)  # a temporary file from before a crash may have another mode
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            temporary.rename(path)
            os.fsync(directory)
        finally:
            os.close(directory)

    def append(self, path: Path, data: bytes) -> None:
        with os.fdopen(_open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as file:
            file.write(data)

    def fdatasync(self, path: Path) -> None:
        # the dirty pages of all maps are dirty pages of the file: one call covers them
        descriptor = _open(path, os.O_RDWR)
        try:
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def fsync_dir(self, path: Path) -> None:
        descriptor = _open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        path.unlink()

    def remove_dir(self, path: Path) -> None:
        path.rmdir()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def list_dir(self, path: Path) -> list[str]:
        return sorted(os.listdir(path))  # noqa: PTH208 - names are wanted, not paths

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def number(self, path: Path) -> int:
        return path.stat().st_ino

    def make_dirs(self, path: Path) -> None:
        path.mkdir(_DIRECTORY_MODE, parents=True, exist_ok=True)

    def make_private(self, path: Path) -> None:
        path.chmod(_DIRECTORY_MODE)

    def room(self, path: Path) -> Room:
        status = os.statvfs(path)
        used = max(status.f_blocks - status.f_bfree, 0)
        return Room(used * status.f_frsize, status.f_bavail * status.f_frsize)

    def lock(self, path: Path) -> Callable[[], None]:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in {errno.EWOULDBLOCK, errno.EACCES}:
                raise DiskLocked(error.errno, "held by another process", str(path)) from error
            raise

        def release() -> None:
            os.close(descriptor)

        return release
