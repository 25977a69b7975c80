"""An object store in a directory, for `neve up`; the archive in it is the same as in a bucket.

An object is a file under its key. It is written and synced under `.upload/`, then linked to its name in one step. The
link fails if the name exists, which implements the conditional PUT, and no reader ever sees an unfinished object.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from infra import failpoint
from infra.clock import Clock, SystemClock
from infra.objects.store import (
    AccessDenied,
    BadStoreUrl,
    NotFound,
    ObjectInfo,
    ObjectStoreError,
    Pace,
    PreconditionFailed,
    PutOutcome,
    StoreUnavailable,
    UnknownOutcome,
    check_key,
    check_prefix,
    unpaced,
)
from neve.entropy import Entropy, system_entropy, unique_name

UPLOADS = ".upload"
STALE_UPLOAD_SECONDS = 24 * 3600


class DirectoryStore:
    """An `ObjectStore` in a directory. Raises the errors of the protocol."""

    def __init__(self, root: Path, clock: Clock | None = None, entropy: Entropy = system_entropy) -> None:
        self.root = root.absolute()
        self._clock, self._entropy = clock or SystemClock(), entropy
        self.url = f"dir:{self.root}"
        self.requests: Counter[str] = Counter()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
        self.requests["put"] += 1
        target = self._path(key)
        try:
            temporary = self._stage(data, pace)
        except OSError as error:
            raise self._failure(error, key) from error
        try:
            _make_directories(target.parent, self.root)
            if if_absent:
                os.link(temporary, target)
            else:
                temporary.replace(target)
        except OSError as error:
            raise self._failure(error, key) from error
        finally:
            temporary.unlink(missing_ok=True)
        try:
            _sync_directory(target.parent)
            return PutOutcome(_etag(target.stat()))
        except OSError as error:
            raise UnknownOutcome(f"{key}: linked, but the directory could not be synced: {error}") from error

    def get(self, key: str) -> bytes:
        self.requests["get"] += 1
        try:
            return self._path(key).read_bytes()
        except OSError as error:
            raise self._failure(error, key) from error

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests["get_range"] += 1
        try:
            with self._path(key).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), length, start)
        except OSError as error:
            raise self._failure(error, key) from error

    def head(self, key: str) -> ObjectInfo:
        self.requests["head"] += 1
        path = self._path(key)
        try:
            status = path.stat()
        except OSError as error:
            raise self._failure(error, key) from error
        if path.is_dir():
            raise NotFound(key)
        return ObjectInfo(key, status.st_size, _etag(status), status.st_mtime_ns // 1_000_000)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.requests["list"] += 1
        top = self._path(check_prefix(prefix)[:-1]) if prefix else self.root
        for path in _files(top):
            if path.is_relative_to(self.root / UPLOADS):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # deleted since the listing
            key = path.relative_to(self.root).as_posix()
            yield ObjectInfo(key, status.st_size, _etag(status), status.st_mtime_ns // 1_000_000)

    def list_prefixes(self, prefix: str) -> Sequence[str]:
        self.requests["list_prefixes"] += 1
        top = self._path(check_prefix(prefix)[:-1]) if prefix else self.root
        try:
            names = sorted(path.name for path in top.iterdir() if path.is_dir())
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _translate(error, prefix) from error
        return [f"{prefix}{name}/" for name in names if name != UPLOADS]

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete files, and sync each directory once: a sync delays all other writers of the disk."""
        self.requests["delete"] += len(keys)
        changed: dict[Path, str] = {}
        for key in keys:
            path = self._path(key)
            try:
                path.unlink()
            except FileNotFoundError:
                continue  # as in S3: deleting a missing object succeeds
            except OSError as error:
                raise _translate(error, key) from error
            changed[path.parent] = key
        for directory, key in changed.items():
            try:
                _sync_directory(directory)
            except OSError as error:
                raise _translate(error, key) from error

    def now_ms(self) -> int | None:
        return None

    def remove_stale_uploads(self, ours: Callable[[str], bool]) -> int:
        """Remove files older than a day; newer ones may be in use. `ours` is unused: they lack a key."""
        removed = 0
        for path in _files(self.root / UPLOADS):
            try:
                if path.stat().st_mtime < self._clock.now_ms() / 1000 - STALE_UPLOAD_SECONDS:
                    path.unlink()
                    removed += 1
            except FileNotFoundError:
                continue
        return removed

    def _failure(self, error: OSError, key: str) -> ObjectStoreError:
        """Translate an error; if the root is missing (not mounted?), the state of its objects is unknown."""
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.EEXIST} and not self.root.is_dir():
            return StoreUnavailable(f"{self.root} is not a directory (not mounted?)")
        return _translate(error, key)

    def _path(self, key: str) -> Path:
        check_key(key)
        if key.split("/", 1)[0] == UPLOADS:
            raise BadStoreUrl(f"{UPLOADS} is reserved for unfinished objects, got {key!r}")
        return self.root / key

    def _stage(self, data: bytes | Path, pace: Pace) -> Path:
        directory = self.root / UPLOADS
        _make_directories(directory, self.root)
        temporary = directory / unique_name(self._entropy)
        try:
            with temporary.open("xb") as file:
                if isinstance(data, Path):
                    with data.open("rb") as source:
                        while chunk := source.read(1 << 20):
                            pace(len(chunk))
                            file.write(chunk)
                    failpoint.hit("object_store.mid_put")
                else:
                    pace(len(data))
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        return temporary


def _files(top: Path) -> Iterator[Path]:
    for directory, names, files in os.walk(top):
        names.sort()
        for name in sorted(files):
            yield Path(directory, name)


def _make_directories(directory: Path, root: Path) -> None:
    """Create directories durably: otherwise a power cut may lose a directory with its synced files."""
    missing = []
    current = directory
    while not current.is_dir():
        missing.append(current)
        current = current.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _etag(status: os.stat_result) -> str:
    return f"{status.st_size:x}-{status.st_mtime_ns:x}"


def _translate(error: OSError, key: str) -> ObjectStoreError:
    if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}:
        return NotFound(key)
    if error.errno == errno.EEXIST:
        return PreconditionFailed(key)
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return AccessDenied(f"{key}: {error.strerror}")
    return StoreUnavailable(f"{key}: {error.strerror}")
