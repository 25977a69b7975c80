"""Files of the CommitLog: preallocated, mapped, and named by their first physical offset.

Invariant: the files ascend without overlap, and only the last one may be unsealed. `log_end` manages the position of
the next record.
"""

from __future__ import annotations

import functools
import mmap
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from broker.store.config import StoreConfig
from broker.store.errors import StoreCorrupt, StoreFull
from broker.store.layout import CRC_ENTRY_SIZE, END_SIZE, end_record, file_name, is_file_name
from infra import failpoint
from infra.disk.filesystem import Disk, DiskFull, FileWriter, OutOfDescriptors
from infra.disk.versioned_file import VersionedFile
from infra.loop.locks import Lock, NewLock, new_lock

_SMALLEST_FILE = 4096
_DESCRIPTORS = 2  # of a file: its map and the map of its CRC file; twice as many for the newest, which is also written


class _TableFile(msgspec.Struct):
    newest_store_time: int
    topics: dict[str, tuple[int, int]]
    high_time: int = 0
    version: int = 1


@dataclass(slots=True)
class LogFile:
    """One file of the log, with its CRC file and its topic table."""

    base: int
    size: int
    path: Path
    map: mmap.mmap
    crc_path: Path
    crc_map: mmap.mmap
    crc_size: int
    # Only of a file with unsynced data, so that a flush opens no file. Reads use the maps.
    writer: FileWriter | None = None
    crc_writer: FileWriter | None = None
    crc_position: int = 0
    sealed: bool = False
    newest_store_time: int = 0
    # If the clock was set back, the newest store time before that. 0 if the records are in the order of their store
    # times.
    high_time: int = 0
    # topic -> (physical offset of its last record, newest store time); complete once the file is sealed
    topics: dict[str, tuple[int, int]] = field(default_factory=dict)
    table_written: bool = False
    used_size: int = -1  # cache of `log_records.used_size`; -1: not computed yet

    @property
    def end(self) -> int:
        """The physical offset behind the file."""
        return self.base + self.size


class CommitLog:
    """The ordered list of log files."""

    def __init__(self, config: StoreConfig, disk: Disk, new_lock: NewLock = new_lock) -> None:
        self.directory = config.root / "commitlog"
        self.crc_directory = config.root / "commitlogcrc"
        self.table_directory = config.root / "commitlogtable"
        self.files: list[LogFile] = []
        self._file_size = config.commit_log_file_size
        self._disk = disk
        self._next: LogFile | None = None
        self._allocation, self._removal = new_lock(), new_lock()
        self._lives = 0  # how often the log was replaced; a removal decided before a replacement is not executed
        self._is_left = False

    @property
    def min_offset(self) -> int:
        """The first physical offset; 0 of an empty log."""
        return self.files[0].base if self.files else 0

    def leave(self) -> None:
        """Stop changing files, because another log opens them. The caller holds `unchanged` and `files_stay`."""
        self._lives += 1
        self._drop_next()
        self._is_left = True

    def exchange(self, other: CommitLog) -> None:
        """Exchange the files with a log that has opened the same directory; this log must be left."""
        assert self._is_left and not other._is_left and self._next is None and other._next is None
        self.files, other.files = other.files, self.files
        self._is_left, other._is_left = False, True

    def open(self) -> None:
        """Map the existing files. Raises StoreCorrupt if files overlap."""
        for directory in (self.directory, self.crc_directory, self.table_directory):
            self._disk.make_dirs(directory)
        names = [name for name in self._disk.list_dir(self.directory) if is_file_name(name)]
        if names and self._disk.size(self.directory / names[-1]) < _SMALLEST_FILE:
            # an unfinished allocation: nothing can have been stored in it
            self._disk.remove(self.directory / names.pop())
        for name in names:
            path = self.directory / name
            self.files.append(self._open_file(int(name), self._disk.size(path)))
        for lower, upper in zip(self.files, self.files[1:], strict=False):
            if lower.end > upper.base:
                raise StoreCorrupt(f"{lower.path} overlaps {upper.path}: was the directory assembled by hand?")

    def _open_file(self, base: int, size: int) -> LogFile:
        name = file_name(base)
        crc_path = self.crc_directory / name
        if self._disk.exists(crc_path) and self._disk.size(crc_path) < CRC_ENTRY_SIZE:
            self._disk.remove(crc_path)
        if not self._disk.exists(crc_path):
            self._disk.create_preallocated(crc_path, max(_SMALLEST_FILE, size // 64 & -_SMALLEST_FILE))
        crc_size = self._disk.size(crc_path)
        file = LogFile(
            base=base,
            size=size,
            path=self.directory / name,
            map=self._disk.map(self.directory / name, size),
            crc_path=crc_path,
            crc_map=self._disk.map(crc_path, crc_size),
            crc_size=crc_size,
        )
        self._read_table(file)
        return file

    def _table_file(self, file: LogFile) -> VersionedFile[_TableFile]:
        path = self.table_directory / f"{file.path.name}.json"
        return VersionedFile(self._disk, path, _TableFile, StoreCorrupt)

    def _read_table(self, file: LogFile) -> None:
        table = self._table_file(file).read()
        if table is not None:
            file.topics, file.newest_store_time, file.table_written = table.topics, table.newest_store_time, True
            file.high_time = table.high_time

    def write_tables(self, below: int) -> None:
        """Write the topic tables of sealed files that end at or below `below`; the log is durable up to there."""
        for file in list(self.files):
            if file.sealed and not file.table_written and file.end <= below:
                self._table_file(file).write(_TableFile(file.newest_store_time, file.topics, file.high_time))
                file.table_written = True

    def forget_table(self, file: LogFile) -> None:
        """Delete a table that recovery found to be newer than the log."""
        if file.table_written:
            self._table_file(file).remove()
        file.topics, file.newest_store_time, file.high_time, file.table_written = {}, 0, 0, False

    def at(self, physical_offset: int) -> LogFile | None:
        """Return the file that contains an offset."""
        files = self.files
        index = bisect_right(files, physical_offset, key=_base) - 1
        if index < 0 or physical_offset >= files[index].end:
            return None
        return files[index]

    def ending_at(self, physical_offset: int) -> LogFile | None:
        """Return the file that ends at an offset."""
        return next((file for file in self.files if file.end == physical_offset), None)

    def empty_above(self, physical_offset: int) -> LogFile | None:
        """Return the only file if it is empty and begins above an offset; see `move_empty`."""
        file = self.files[0] if len(self.files) == 1 else None
        return file if file is not None and file.base > physical_offset and not any(file.map[:END_SIZE]) else None

    def allocate(self, base: int) -> LogFile:
        """Append the next file to the log, the one prepared ahead if there is one. Raises StoreFull."""
        with self._allocation:
            file, self._next = self._next, None
            if file is not None and file.base != base:
                self.remove(file)
                file = None
            if file is None:
                file = self._create(base)
        self.files.append(file)
        return file

    def move_empty(self, file: LogFile, base: int) -> None:
        """Let the newest file, which must be empty, begin at a higher offset.

        It is renamed, so that no start finds the log without either file.
        """
        assert file is self.files[-1] and base >= file.base and file.crc_position == 0
        self.drop_next()
        with self._allocation:
            old_crc = file.crc_path
            path, crc_path = self.directory / file_name(base), self.crc_directory / file_name(base)
            self._disk.rename(file.path, path)
            self._disk.fsync_dir(self.directory)
            self._disk.rename(old_crc, crc_path)
            self._disk.fsync_dir(self.crc_directory)
            file.base, file.path, file.crc_path = base, path, crc_path
            file.writer = file.crc_writer = None

    def prepare_next(self) -> None:
        """Allocate the file after the active one; for a thread, so that no send waits for it."""
        with self._allocation:
            if self.files and self._next is None and not self._is_left:
                self._next = self._create(self.files[-1].end)

    def prepare_at(self, base: int) -> None:
        """Allocate the file that will begin at a higher offset, in place of the next one; for a thread."""
        with self._allocation:
            if self._next is not None and self._next.base != base:
                self._drop_next()
            if self._next is None and not self._is_left:
                self._next = self._create(base)

    def unchanged(self) -> Lock:
        """Return a lock; while it is held, no thread creates a file."""
        return self._allocation

    def files_stay(self) -> Lock:
        """Return a lock; while it is held, no thread deletes a file that was taken out."""
        return self._removal

    def drop_next(self) -> None:
        """Delete the file that was prepared ahead."""
        with self._allocation:
            self._drop_next()

    def _drop_next(self) -> None:
        file, self._next = self._next, None
        if file is not None:
            self.remove(file)

    @property
    def next_is_ready(self) -> bool:
        """Whether the next file is allocated."""
        return self._next is not None

    def _create(self, base: int) -> LogFile:
        path = self.directory / file_name(base)
        failpoint.hit("store.allocate")
        try:
            self._disk.create_preallocated(path, self._file_size)
        except DiskFull as error:
            raise StoreFull(f"no room for the next CommitLog file ({self._file_size} bytes) at {path}") from error
        except OutOfDescriptors as error:
            raise StoreFull(f"the next CommitLog file can't be opened: {error}") from error
        try:
            return self._open_file(base, self._file_size)
        except DiskFull as error:
            self._disk.remove(path)
            raise StoreFull(f"no room for the CRC file of {path}") from error
        except OutOfDescriptors as error:
            self._disk.remove(path)
            raise StoreFull(f"the next CommitLog file can't be mapped: {error}") from error

    def grow_crc(self, file: LogFile) -> None:
        """Double the size of the CRC file. Raises StoreFull."""
        size = file.crc_size * 2
        try:
            self._disk.grow(file.crc_path, size)
            file.crc_map = self._disk.map(file.crc_path, size)
        except (DiskFull, OutOfDescriptors) as error:
            raise StoreFull(f"no room for {size} bytes at {file.crc_path}: {error}") from error
        file.crc_size = size

    def seal(self, file: LogFile, position: int) -> None:
        """Close a file behind its last record, with an END record."""
        rest = file.size - position
        assert rest >= 0 and not file.sealed
        if rest >= END_SIZE:
            file.map[position : position + END_SIZE] = end_record(rest)
        file.sealed = True

    def open_writer(self, file: LogFile) -> None:
        """Open the file descriptors that write to the file and its CRC file. Raises StoreFull.

        Records are written with write(2), not through the map. A page that is stored to through a map is first zeroed.
        Each write-back also makes it read-only again, with an interrupt of every core that runs one of our threads.
        Together this was a fifth of a send's CPU time.
        """
        if file.writer is None or file.crc_writer is None:
            try:
                self._open_writers(file)
            except OSError as error:  # for example, too many open files; the next send tries again
                raise StoreFull(f"{file.path} can't be opened to write into it: {error}") from error

    def sync(self, file: LogFile) -> None:
        """Sync a file and its CRC entries to the disk; any thread.

        A file is opened here only if nothing was appended to it since the start. OutOfDescriptors then does not count
        as a failed sync.
        """
        writer, crc_writer = self._open_writers(file)
        writer.sync()
        crc_writer.sync()

    def release_writers(self, file: LogFile) -> None:
        """Close the writers of a sealed file that is durable."""
        file.writer = file.crc_writer = None

    def _open_writers(self, file: LogFile) -> tuple[FileWriter, FileWriter]:
        writer, crc_writer = file.writer, file.crc_writer
        if writer is None:
            writer = file.writer = self._disk.writer(file.path)
        if crc_writer is None:
            crc_writer = file.crc_writer = self._disk.writer(file.crc_path)
        return writer, crc_writer

    @property
    def descriptors(self) -> int:
        """The number of descriptors that the log holds, including one for each map."""
        return _DESCRIPTORS * (len(self.files) + (self._next is not None)) + _DESCRIPTORS

    def take_out(self, file: LogFile) -> Callable[[], bool]:
        """Remove the oldest file from the list, and return a function that deletes it from the disk, on any thread.

        The function returns False if the log was replaced meanwhile: the file is in the new log and its oldest.
        """
        self.files.remove(file)
        return functools.partial(self._remove_taken_out, file, self._lives)

    def _remove_taken_out(self, file: LogFile, life: int) -> bool:
        with self._removal:
            if life == self._lives:
                self.remove(file)
            return life == self._lives

    def remove(self, file: LogFile) -> None:
        """Delete a file that is no longer in the list. It is renamed first, so that no start finds a part of it.

        The memory is released with the last reference, which takes a tenth of a second for a gigabyte.
        """
        evicted = file.path.with_name(f"{file.path.name}.evicted")
        self._disk.rename(file.path, evicted)
        self._disk.fsync_dir(self.directory)
        failpoint.hit("store.evict")
        # the maps stay valid until the last reader releases its views
        self._disk.remove(evicted)
        self._disk.remove(file.crc_path)
        table = self._table_file(file)
        if table.exists:
            self._disk.remove(table.path)

    def drop_after(self, file: LogFile | None) -> None:
        """Remove the files above the given one, which lie above the recovered end."""
        while self.files and self.files[-1] is not file:
            self.remove(self.files.pop())

    def sweep_evicted(self) -> None:
        """Finish evictions that a stop interrupted."""
        for name in self._disk.list_dir(self.directory):
            if name.endswith(".evicted"):
                self._disk.remove(self.directory / name)
        bases = {file.path.name for file in self.files}
        for directory in (self.crc_directory, self.table_directory):
            for name in self._disk.list_dir(directory):
                if name.partition(".")[0] not in bases:
                    self._disk.remove(directory / name)


def _base(file: LogFile) -> int:
    return file.base
