"""Disk cache of byte ranges of the archive (compressed row groups and footers), limited in bytes; one file per range.

    magic "NVRANGE1" 8 | CRC-32 of all that follows u32 | length of the name u32 | name, UTF-8 | the range's bytes

A file is named by the SHA-256 of the range's name (store, object, range). The cache outlives its process, because a
worker ends when it is idle and the next one can use the data. So each file is verified when it is read. One that is
torn, stale or foreign fails its CRC or its name, is removed, and the store is read. No file is fsynced. If the disk
fails or is full, the cache is off, without any other effect.
"""

import contextlib
import hashlib
import itertools
import logging
import re
import struct
import threading
from collections.abc import Iterable
from pathlib import Path

from zlib_ng.zlib_ng import crc32

from infra.disk.filesystem import Disk
from tiered.worker.segmented_lru import SegmentedLru

log = logging.getLogger(__name__)

_MAGIC = b"NVRANGE1"
_HEAD = struct.Struct(">8sII")
_LENGTH = struct.Struct(">I")
_FILE_NAME = re.compile(r"[0-9a-f]{64}")
# The cache yields disk space first: if less than this share is free, it stores nothing and evicts files.
_FREE_SHARE = 0.1


class DiskCache:
    """The cache. Thread-safe. A `name` identifies bytes that never change."""

    def __init__(self, disk: Disk, directory: Path, capacity: int) -> None:
        self._disk, self._directory = disk, directory
        self._lock = threading.Lock()
        self._files: SegmentedLru[str, int] = SegmentedLru(capacity)
        self._parts = itertools.count()
        self.broken: OSError | None = None
        try:
            self._open()
        except OSError as error:
            self._give_up(error)

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._files.nbytes

    def get(self, name: str) -> bytes | None:
        """Return the bytes that were put under this name, or None."""
        file = _file_name(name)
        with self._lock:
            if self._files.use(file, again=True) is None:
                return None
        try:
            raw = self._disk.read(self._directory / file)
        except FileNotFoundError:
            raw = b""  # evicted in between, or removed by hand
        except OSError as error:
            self._give_up(error)
            return None
        found = _unwrap(raw, name)
        if found is None:
            self.forget(name)
        return found

    def put(self, name: str, data: bytes) -> None:
        file, head = _file_name(name), _head(name, data)
        size = len(head) + len(data)
        try:
            with self._lock:
                if self.broken is not None or file in self._files or not self._has_room(size):
                    return
            part = self._directory / f"{file}.{next(self._parts)}.part"
            try:
                self._disk.append(part, head)
                self._disk.append(part, data)
                self._disk.rename(part, self._directory / file)
            except OSError:
                self._remove(part)
                raise
            with self._lock:
                self._drop(removed for removed, _ in self._files.put(file, size, size))
        except OSError as error:
            self._give_up(error)

    def forget(self, name: str) -> None:
        """Remove a range, for example because its bytes do not decode."""
        file = _file_name(name)
        with self._lock:
            self._files.pop(file)
        try:
            self._remove(self._directory / file)
        except OSError as error:
            self._give_up(error)

    # ---- internals

    def _open(self) -> None:
        """Load the index of files that an earlier process left."""
        self._disk.make_dirs(self._directory)
        for file in self._disk.list_dir(self._directory):
            if _FILE_NAME.fullmatch(file) is None:
                self._remove(self._directory / file)
                continue
            size = self._disk.size(self._directory / file)
            self._drop(removed for removed, _ in self._files.put(file, size, size))

    def _has_room(self, size: int) -> bool:
        """Whether there is room for `size` bytes, after evicting files. Under the lock."""
        while not (roomy := self._is_roomy(size)) and (oldest := self._files.oldest()) is not None:
            self._files.pop(oldest)
            self._drop([oldest])
        return roomy

    def _is_roomy(self, size: int) -> bool:
        room = self._disk.room(self._directory)
        return room.available >= (room.used + room.available) * _FREE_SHARE + size

    def _drop(self, files: Iterable[str]) -> None:
        for file in files:
            self._remove(self._directory / file)

    def _remove(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._disk.remove(path)

    def _give_up(self, error: OSError) -> None:
        if self.broken is None:
            self.broken = error
            log.warning("the cold cache in %s is off: %s", self._directory, error)


def _file_name(name: str) -> str:
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()


def _head(name: str, data: bytes) -> bytes:
    """Return the bytes before the data. The data is not joined to it, because it has megabytes."""
    text = name.encode("utf-8", "surrogateescape")
    return _HEAD.pack(_MAGIC, crc32(data, crc32(_LENGTH.pack(len(text)) + text)), len(text)) + text


def _unwrap(raw: bytes, name: str) -> bytes | None:
    """Return the data of a file; None if it is damaged or has another name."""
    if len(raw) < _HEAD.size:
        return None
    magic, crc, length = _HEAD.unpack_from(raw)
    text = name.encode("utf-8", "surrogateescape")
    if magic != _MAGIC or length != len(text) or crc32(memoryview(raw)[12:]) != crc:
        return None
    return raw[_HEAD.size + length :] if raw[_HEAD.size : _HEAD.size + length] == text else None
