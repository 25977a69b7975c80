"""The CommitLog's files: allocated whole, mapped, named by their first physical offset.

Invariant: the files rise without overlap, and only the last may be unsealed. Where in it the next record goes is
`log_end`'s business.
"""

from __future__ import annotations

import functools
import mmap
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from broker.store.config import StoreConfig
from broker.store.errors import StoreCorrupt, StoreFull
from broker.store.layout import CRC_ENTRY, CRC_ENTRY_SIZE, END_SIZE, end_record, file_name, is_file_name
from infra import failpoint
from infra.disk.filesystem import Disk, DiskFull, FileWriter, OutOfDescriptors
from infra.disk.versioned_file import VersionedFile
from infra.loop.locks import Lock, NewLock, new_lock
from neve.record.layout import SIZE_AND_MAGIC

_SMALLEST_FILE = 4096
_DESCRIPTORS = 2  # of a file: its map and that of its CRC entries; as many again to write into the newest


class _TableFile(msgspec.Struct):
    newest_store_time: int
    topics: dict[str, tuple[int, int]]
    high_time: int = 0
    version: int = 1


@dataclass(slots=True)
class LogFile:
    """One file of the log with the CRC file and the topic table beside it."""

    base: int
    size: int
    path: Path
    map: mmap.mmap
    crc_path: Path
    crc_map: mmap.mmap
    crc_size: int
    # Of a file that has something to sync: a flush opens nothing. Reading goes through the maps.
    writer: FileWriter | None = None
    crc_writer: FileWriter | None = None
    crc_position: int = 0
    sealed: bool = False
    newest_store_time: int = 0
    # The newest store time that a later record of the file is older than, because the clock was set back; 0: the
    # records are in the order of their times.
    high_time: int = 0
    # topic -> (physical offset of its last record, newest store time); complete once the file is sealed
    topics: dict[str, tuple[int, int]] = field(default_factory=dict)
    table_written: bool = False
    used_size: int = -1  # see `CommitLog.used_size`; not asked for yet

    @property
    def end(self) -> int:
        """The physical offset after the file."""
        return self.base + self.size


class CommitLog:
    """The list of files."""

    def __init__(self, config: StoreConfig, disk: Disk, new_lock: NewLock = new_lock) -> None:
        self.directory = config.root / "commitlog"
        self.crc_directory = config.root / "commitlogcrc"
        self.table_directory = config.root / "commitlogtable"
        self.files: list[LogFile] = []
        self._file_size = config.commit_log_file_size
        self._disk = disk
        self._next: LogFile | None = None
        self._allocation, self._removal = new_lock(), new_lock()
        self._lives = 0  # how often it was replaced: what a file was taken out of is gone since
        self._is_left = False

    @property
    def min_offset(self) -> int:
        """Where the log begins; 0 of an empty one."""
        return self.files[0].base if self.files else 0

    def leave(self) -> None:
        """Change no file from here on: another log opens them. For the holder of `unchanged` and `files_stay`."""
        self._lives += 1
        self._drop_next()
        self._is_left = True

    def exchange(self, other: CommitLog) -> None:
        """Take the files that another log has opened, and give it the own ones, of a log that is left."""
        assert self._is_left and not other._is_left and self._next is None and other._next is None
        self.files, other.files = other.files, self.files
        self._is_left, other._is_left = False, True

    def open(self) -> None:
        """Map what is there."""
        for directory in (self.directory, self.crc_directory, self.table_directory):
            self._disk.make_dirs(directory)
        names = [name for name in self._disk.list_dir(self.directory) if is_file_name(name)]
        if names and self._disk.size(self.directory / names[-1]) < _SMALLEST_FILE:
            # an allocation that never ended: nothing can have been stored into it
            self._disk.remove(self.directory / names.pop())
        for name in names:
            path = self.directory / name
            self.files.append(self._open_file(int(name), self._disk.size(path)))
        for lower, upper in zip(self.files, self.files[1:], strict=False):
            if lower.end > upper.base:
                raise StoreCorrupt(f"{lower.path} overlaps {upper.path}: was the directory copied together by hand?")

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
        """Persist the tables of sealed files that end at or below an offset known to be on the disk."""
        for file in list(self.files):
            if file.sealed and not file.table_written and file.end <= below:
                self._table_file(file).write(_TableFile(file.newest_store_time, file.topics, file.high_time))
                file.table_written = True

    def forget_table(self, file: LogFile) -> None:
        """Drop a table that recovery found to be newer than the log."""
        if file.table_written:
            self._table_file(file).remove()
        file.topics, file.newest_store_time, file.high_time, file.table_written = {}, 0, 0, False

    def at(self, physical_offset: int) -> LogFile | None:
        """The file that holds an offset."""
        files = self.files
        index = bisect_right(files, physical_offset, key=_base) - 1
        if index < 0 or physical_offset >= files[index].end:
            return None
        return files[index]

    def ending_at(self, physical_offset: int) -> LogFile | None:
        """The file that ends at an offset."""
        return next((file for file in self.files if file.end == physical_offset), None)

    def empty_above(self, physical_offset: int) -> LogFile | None:
        """The only file, if it begins above an offset and holds nothing: see `move_empty`."""
        file = self.files[0] if len(self.files) == 1 else None
        return file if file is not None and file.base > physical_offset and not any(file.map[:END_SIZE]) else None

    def used_size(self, file: LogFile) -> int:
        """Of a sealed file, the bytes up to and with its END record: behind them is nothing."""
        if file.used_size < 0:
            last = self._record_before(file, self.find_crc_position(file, file.size))
            file.used_size = min((0 if last is None else last[1]) + END_SIZE, file.size)
        return file.used_size

    def is_record_start(self, physical_offset: int) -> bool:
        """Whether a record begins at an offset, or might: at a file's begin, or behind a record."""
        file = self.at(physical_offset)
        if file is None:
            return self.ending_at(physical_offset) is not None
        return self.record_start(physical_offset) == physical_offset

    def record_start(self, physical_offset: int) -> int:
        """The highest place at or below an offset of the log where a record begins, or might."""
        file = self.at(physical_offset)
        if file is None:  # between files, or at the end of one
            return max((below.end for below in self.files if below.end <= physical_offset), default=physical_offset)
        position = physical_offset - file.base
        before = self._record_before(file, self.find_crc_position(file, position))
        if before is None:
            return file.base
        begin, end = before
        return file.base + (end if position >= end else begin)

    def _record_before(self, file: LogFile, crc_position: int) -> tuple[int, int] | None:
        """The place of the record whose CRC entry lies before this position: its begin and end in the file."""
        if not crc_position:
            return None
        begin = CRC_ENTRY.unpack_from(file.crc_map, crc_position - CRC_ENTRY_SIZE)[0] - 1
        return begin, begin + SIZE_AND_MAGIC.unpack_from(file.map, begin)[0]

    def records_ending_above(self, physical_offset: int) -> Iterator[tuple[int, int, int]]:
        """Physical offset, size and tags code of the records that end above an offset, in their order."""
        for file in self.files:
            if file.end <= physical_offset:
                continue
            position = self.find_crc_position(file, max(physical_offset - file.base, 0))
            before = self._record_before(file, position)
            if before is not None and file.base + before[1] > physical_offset:
                position -= CRC_ENTRY_SIZE
            while position + CRC_ENTRY_SIZE <= file.crc_size:
                mark, _, tags = CRC_ENTRY.unpack_from(file.crc_map, position)
                if not mark:
                    break
                yield file.base + mark - 1, SIZE_AND_MAGIC.unpack_from(file.map, mark - 1)[0], tags
                position += CRC_ENTRY_SIZE

    def last_record_below(self, physical_offset: int) -> memoryview | None:
        """The newest record that begins below an offset."""
        for file in reversed(self.files):
            if file.base < physical_offset:
                place = self._record_before(file, self.find_crc_position(file, physical_offset - file.base))
                if place is not None:
                    return memoryview(file.map)[place[0] : place[1]]
        return None

    def allocate(self, base: int) -> LogFile:
        """Add the next file; takes the one prepared ahead if there is one. Raises `StoreFull`."""
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
        """Have the newest file, which holds nothing, begin higher: with one rename, so that no start meets neither."""
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
        """Allocate the file after the active one; meant for a thread, so that no send waits for it."""
        with self._allocation:
            if self.files and self._next is None and not self._is_left:
                self._next = self._create(self.files[-1].end)

    def unchanged(self) -> Lock:
        """While it is held, no thread makes a file."""
        return self._allocation

    def files_stay(self) -> Lock:
        """While it is held, no thread takes a file from the disk that was taken out."""
        return self._removal

    def drop_next(self) -> None:
        """Give up the file that was prepared ahead."""
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
        """Make room for more CRC entries. Raises `StoreFull`."""
        size = file.crc_size * 2
        try:
            self._disk.grow(file.crc_path, size)
            file.crc_map = self._disk.map(file.crc_path, size)
        except (DiskFull, OutOfDescriptors) as error:
            raise StoreFull(f"no room for {size} bytes at {file.crc_path}: {error}") from error
        file.crc_size = size

    def seal(self, file: LogFile, position: int) -> None:
        """Close a file behind its last record."""
        rest = file.size - position
        assert rest >= 0 and not file.sealed
        if rest >= END_SIZE:
            file.map[position : position + END_SIZE] = end_record(rest)
        file.sealed = True

    def open_writer(self, file: LogFile) -> None:
        """How records get into a file, and from there to the disk. Raises `StoreFull`.

        A write dirties the page cache without touching the map: a page that is stored into through a map is zeroed
        first, and each write-back takes it from the map again, with an interrupt of every core that runs a thread of
        ours; together a fifth of a send's CPU time.
        """
        if file.writer is None or file.crc_writer is None:
            try:
                self._open_writers(file)
            except OSError as error:  # no more open files, say; the next send tries again
                raise StoreFull(f"{file.path} can't be opened to write into it: {error}") from error

    def sync(self, file: LogFile) -> None:
        """Bring a file and its CRC entries to the disk (any thread).

        Only a file that nothing was appended to since the start is opened for it: OutOfDescriptors is then no failed
        sync.
        """
        writer, crc_writer = self._open_writers(file)
        writer.sync()
        crc_writer.sync()

    def release_writers(self, file: LogFile) -> None:
        """All of a sealed file is on the disk."""
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
        """How many the log holds: a map has one of its own."""
        return _DESCRIPTORS * (len(self.files) + (self._next is not None)) + _DESCRIPTORS

    def take_out(self, file: LogFile) -> Callable[[], bool]:
        """The oldest: the log begins with the next one. What is returned takes it from the disk, from any thread.

        False where the log was replaced since: the file is in it again, and is the oldest again.
        """
        self.files.remove(file)
        return functools.partial(self._remove_taken_out, file, self._lives)

    def _remove_taken_out(self, file: LogFile, life: int) -> bool:
        with self._removal:
            if life == self._lives:
                self.remove(file)
            return life == self._lives

    def remove(self, file: LogFile) -> None:
        """Of a file that is in the log no more: its name first, so that no start ever meets half of it.

        Who lets go of it last gives its memory back: of a gigabyte that takes a tenth of a second.
        """
        gone = file.path.with_name(f"{file.path.name}.evicted")
        self._disk.rename(file.path, gone)
        self._disk.fsync_dir(self.directory)
        failpoint.hit("store.evict")
        # the maps stay until the last reader lets go of its views
        self._disk.remove(gone)
        self._disk.remove(file.crc_path)
        table = self._table_file(file)
        if table.exists:
            self._disk.remove(table.path)

    def drop_after(self, file: LogFile | None) -> None:
        """Remove the files above one: what they hold is above the recovered end."""
        while self.files and self.files[-1] is not file:
            self.remove(self.files.pop())

    def find_crc_position(self, file: LogFile, relative: int) -> int:
        """Position of the first CRC entry at or above a relative offset; entries below are known to be on the disk."""
        low, high = 0, file.crc_size // CRC_ENTRY_SIZE
        while low < high:
            middle = (low + high) // 2
            mark = CRC_ENTRY.unpack_from(file.crc_map, middle * CRC_ENTRY_SIZE)[0]
            if 0 < mark <= relative:
                low = middle + 1
            else:
                high = middle
        return low * CRC_ENTRY_SIZE

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
