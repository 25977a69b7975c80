"""Consume queue of a queue: 20-byte entries in preallocated, mapped files (layout in `layout`).

A file holds up to 300,000 entries and grows by doubling, because most queues are small. The files of a queue are
contiguous, except where the queue was raised to a higher offset.
"""

from __future__ import annotations

import errno
import mmap
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from broker.store import erased
from broker.store.config import StoreConfig
from broker.store.errors import NotThisTurn, StoreFull
from broker.store.layout import QUEUE_ENTRY, QUEUE_ENTRY_SIZE, file_name, is_file_name
from broker.store.queue_removal import QueueRemoval
from broker.store.topic_tails import TopicTail
from infra.disk.filesystem import Disk, DiskFull, OutOfDescriptors
from infra.process.collector import Turnover
from neve.record.layout import topic_field

# Limit on what is read from an unmapped file for a single look-up; larger reads justify a map.
_LOOK_BYTES = 64 << 10
# Most queues have at most this many entries, which a start counts without a map.
_FEW_ENTRIES = 100


class QueueFile:
    """One file of a consume queue."""

    __slots__ = ("base", "capacity", "count", "map", "owner", "path")

    def __init__(self, owner: ConsumeQueue, base: int, path: Path, size: int) -> None:
        self.owner = owner
        self.base = base
        self.path = path
        self.capacity = size // QUEUE_ENTRY_SIZE
        self.count = 0
        self.map: mmap.mmap | None = None

    @property
    def end(self) -> int:
        return self.base + self.count


class FileBudget:
    """Budget of consume queue files that may be created, grown or mapped for appends in one turn of the event loop.

    For callers that append many sends at once. Each file costs 0.1 to 0.3 ms. `left` is None if there is no limit.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: int | None = None

    def take(self) -> None:
        """Use up one file of the budget. Raises NotThisTurn if none is left."""
        if self.left is not None:
            if self.left == 0:
                raise NotThisTurn("enough queue files were made ready in this turn")
            self.left -= 1


class MappedFiles:
    """Limit on the number of mapped consume queue files, with second-chance eviction.

    Use `map` for queues that are used repeatedly: a map costs ten times as much as a read, and at the limit it evicts
    another one. Use `look` for a single look-up, possibly in every queue, because it does not evict the maps of active
    queues.
    """

    def __init__(self, limit: int, disk: Disk, removal: QueueRemoval) -> None:
        self.disk, self.removal = disk, removal
        self._limit = limit
        self._files: deque[QueueFile] = deque()
        self._made = Turnover()
        self.file_budget = FileBudget()

    def map(self, file: QueueFile) -> mmap.mmap:
        """Return the file's map; create it if missing."""
        file.owner.used = True
        if file.map is None:
            while len(self._files) >= self._limit:
                self._release_one()
            file.map = self._map(file)
            self._files.append(file)
            self._made.add()
        return file.map

    def look(self, file: QueueFile, first: int, end: int) -> memoryview:
        """Return the entries of [first, end), counted from the beginning of the file, for a single look-up."""
        start, size = first * QUEUE_ENTRY_SIZE, (end - first) * QUEUE_ENTRY_SIZE
        if file.map is None and size <= _LOOK_BYTES:
            with suppress(OutOfDescriptors):  # a map remains possible, because another one can be released for it
                found = self.disk.read_at(file.path, start, size)
                if len(found) < size:
                    raise OSError(errno.EINVAL, f"shorter than its {end} entries", str(file.path))
                return memoryview(found)
        return memoryview(self.map(file) if file.map is None else file.map)[start : start + size]

    def _map(self, file: QueueFile) -> mmap.mmap:
        """Map a file, releasing other maps if necessary. Raises OutOfDescriptors if none is left to release."""
        while True:
            try:
                return self.disk.map(file.path, file.capacity * QUEUE_ENTRY_SIZE)
            except OutOfDescriptors:
                if not self._files:
                    raise
                held = len(self._files)
                while len(self._files) == held:
                    self._release_one()

    def _release_one(self) -> None:
        file = self._files.popleft()
        if file.owner.used:
            file.owner.used = False
            self._files.append(file)
            return
        file.map = None
        if file is file.owner.tail:
            file.owner.map = None

    def forget(self, file: QueueFile) -> None:
        """Remove a file that grew or will be deleted."""
        if file.map is not None:
            file.map = None
            self._files.remove(file)

    def take_all(self) -> list[mmap.mmap]:
        """Remove and return all maps; a thread can unmap them, which takes time for each."""
        maps = [file.map for file in self._files if file.map is not None]
        for file in self._files:
            file.map = file.owner.map = None
        self._files.clear()
        return maps

    def take_out(self, queues: Iterable[ConsumeQueue]) -> None:
        """Remove the files of queues that will be deleted; closing the queues unmaps them."""
        removed = {file for queue in queues for file in queue.files if file.map is not None}
        if removed:
            self._files = deque(file for file in self._files if file not in removed)

    def __len__(self) -> int:
        return len(self._files)


class ConsumeQueue:
    """One consume queue.

    The append sets `map`, `position`, `end` and `visible` directly: a call would cost too much.
    """

    __slots__ = (
        "_config", "_disk", "_maps", "_minimum", "_minimum_for", "directory", "dirty", "end", "erased", "files",
        "floor", "limit", "magic", "map", "position", "queue_id", "tail", "topic", "topic_part", "topic_tail", "used",
        "visible",
    )  # fmt: skip

    def __init__(
        self, config: StoreConfig, maps: MappedFiles, topic: str, queue_id: int, topic_tail: TopicTail
    ) -> None:
        self._config = config
        self._disk = maps.disk
        self._maps = maps
        self.topic = topic
        self.queue_id = queue_id
        self.topic_tail = topic_tail
        self.directory = config.root / "consumequeue" / topic / str(queue_id)
        self.files: list[QueueFile] = []
        self.tail: QueueFile | None = None
        self.map: mmap.mmap | None = None
        self.position = 0  # append position in the tail file, in bytes
        self.limit = 0
        self.end = 0  # queue offset of the next message
        self.visible = 0  # readers see offsets below this one
        self.floor = 0  # requested minimum offset
        self.erased = erased.NONE
        self.used = False
        self.dirty = False
        self._minimum = 0
        self._minimum_for = -1
        name = topic.encode("utf-8", "surrogateescape")
        self.magic, self.topic_part = topic_field(name)

    # -- files

    def create(self, first_offset: int) -> None:
        """Create a file that begins at an offset, after the existing files; the next checkpoint syncs it.

        Raises StoreFull.
        """
        size = min(self._config.queue_first_step, self._config.queue_file_size)
        path = self.directory / file_name(first_offset * QUEUE_ENTRY_SIZE)
        try:
            if not self.files:
                self._maps.removal.make_way(self.topic, self.queue_id)
            self._disk.make_dirs(self.directory)
            self._disk.create_preallocated(path, size, sync=False)
        except (DiskFull, OutOfDescriptors) as error:
            raise StoreFull(f"no room for {size} bytes at {path}: {error}") from error
        self.files.append(QueueFile(self, first_offset, path, size))
        try:
            self._set_tail()
        except OutOfDescriptors as error:
            self._remove(self.files.pop())
            raise StoreFull(f"{path} can't be mapped: {error}") from error

    def _set_tail(self) -> None:
        tail = self.files[-1]
        self.map = self._maps.map(tail)  # before the other attributes: without a map, the previous tail stays in use
        self._know_tail(tail)

    def _know_tail(self, tail: QueueFile) -> None:
        """Set the tail; the first append maps it."""
        self.tail = tail
        self.position = tail.count * QUEUE_ENTRY_SIZE
        self.limit = tail.capacity * QUEUE_ENTRY_SIZE
        self.end = tail.end

    def make_room(self) -> mmap.mmap:
        """Return a map with room for an entry; call it if there is no map, or it is full.

        Raises StoreFull or NotThisTurn.
        """
        self._maps.file_budget.take()
        tail = self.tail
        if tail is None:
            self.create(self.end)
        elif self.position + QUEUE_ENTRY_SIZE > self.limit:
            self.settle()
            if self.limit + QUEUE_ENTRY_SIZE > self._config.queue_file_size:
                self.create(self.end)
            else:
                self._grow(tail)
        else:
            try:
                self.map = self._maps.map(tail)
            except OutOfDescriptors as error:
                raise StoreFull(f"{tail.path} can't be mapped: {error}") from error
        assert self.map is not None
        return self.map

    def _grow(self, tail: QueueFile) -> None:
        size = min(max(self._disk.size(tail.path), QUEUE_ENTRY_SIZE) * 2, self._config.queue_file_size)
        try:
            self._disk.grow(tail.path, size)
        except (DiskFull, OutOfDescriptors) as error:
            raise StoreFull(f"no room for {size} bytes at {tail.path}: {error}") from error
        self._maps.forget(tail)
        self.map = None
        tail.capacity = size // QUEUE_ENTRY_SIZE
        self.limit = tail.capacity * QUEUE_ENTRY_SIZE  # even if the file cannot be mapped now
        try:
            self._set_tail()
        except OutOfDescriptors as error:
            raise StoreFull(f"{tail.path} can't be mapped: {error}") from error

    def settle(self) -> None:
        """Update the tail file's entry count from the append position."""
        if self.tail is not None:
            self.tail.count = self.position // QUEUE_ENTRY_SIZE

    def append(self, physical_offset: int, size: int, tags_code: int) -> None:
        """Append an entry, for recovery; `Appender` has its own copy of these lines."""
        assert physical_offset >= 0 and size > 0
        target = self.map
        if target is None or self.position + QUEUE_ENTRY_SIZE > self.limit:
            target = self.make_room()
        QUEUE_ENTRY.pack_into(target, self.position, physical_offset, size, tags_code)
        self.position += QUEUE_ENTRY_SIZE
        self.end += 1
        self.visible = self.end
        self.dirty = True

    @property
    def used_end(self) -> int:
        """The offset behind the last entry; below `end` if the queue was raised and has no message since."""
        self.settle()
        return next((file.end for file in reversed(self.files) if file.count), 0)

    def go_to(self, offset: int) -> None:
        """Set the offset of the next entry, which may not be below `used_end`. Raises StoreFull."""
        assert offset >= self.used_end
        while self.files and not self.files[-1].count and self.files[-1].base > offset:
            self._remove(self.files.pop())
        if self.files and self.files[-1].end == offset:
            try:
                self._set_tail()
            except OutOfDescriptors as error:
                raise StoreFull(f"{self.files[-1].path} can't be mapped: {error}") from error
        else:
            self.create(offset)

    def begin_at(self, offset: int) -> None:
        """Set the offset of the first entry of an empty queue; its file is created with that entry."""
        assert not self.files
        self.end = self.visible = offset

    # -- load and removal

    def load(self, below: int, *, scrub: bool) -> None:
        """Open the files, and keep the entries of records below a physical offset."""
        for name in self._disk.list_dir(self.directory):
            if not is_file_name(name):
                continue
            path = self.directory / name
            size = self._disk.size(path)
            if size < QUEUE_ENTRY_SIZE:  # unfinished allocation
                self._disk.remove(path)
                self.dirty = True
                continue
            file = QueueFile(self, int(name) // QUEUE_ENTRY_SIZE, path, size)
            file.count = self._count_below(file, below)
            self.files.append(file)
        while len(self.files) > 1 and self.files[-1].count == 0 and self.files[-2].end == self.files[-1].base:
            self._remove(self.files.pop())
            self.dirty = True
        # a file that follows one that lost its end would leave a hole, which no raise of the queue explains
        for index, file in enumerate(self.files[:-1]):
            if file.count < file.capacity and self.files[index + 1].count == 0 and self._lost_end(file):
                for later in self.files[index + 1 :]:
                    self._remove(later)
                    self.dirty = True
                del self.files[index + 1 :]
                break
        if scrub:
            for file in self.files:
                self._scrub(file)
        if self.files:
            self._know_tail(self.files[-1])
        self.visible = self.end

    def _lost_end(self, file: QueueFile) -> bool:
        return self._full_end(file) == self.files[self.files.index(file) + 1].base

    def _full_end(self, file: QueueFile) -> int:
        return file.base + self._config.queue_file_size // QUEUE_ENTRY_SIZE

    def would_seem_lost(self, first_offset: int) -> bool:
        """Return whether a new file at this offset would make the file before it look as if it had lost its end."""
        before = next((file for file in reversed(self.files) if file.base < first_offset), None)
        return before is not None and before.end < first_offset == self._full_end(before)

    def _count_below(self, file: QueueFile, below: int) -> int:
        """Count the entries of records below a physical offset by binary search.

        Entries below the checkpoint are durable. Later entries may have any content, except that none looks like an
        entry below it.
        """
        low, high = 0, file.capacity
        view, few = memoryview(b""), min(_FEW_ENTRIES, high)
        if few:
            view = self._maps.look(file, 0, few)
            physical_offset, size, _ = QUEUE_ENTRY.unpack_from(view, (few - 1) * QUEUE_ENTRY_SIZE)
            if size > 0 and physical_offset < below:
                low, view = few, memoryview(self._maps.map(file))
            else:
                high = few
        while low < high:
            middle = (low + high) // 2
            physical_offset, size, _ = QUEUE_ENTRY.unpack_from(view, middle * QUEUE_ENTRY_SIZE)
            if size > 0 and physical_offset < below:
                low = middle + 1
            else:
                high = middle
        return low

    def _scrub(self, file: QueueFile) -> None:
        view = self._maps.map(file)
        start = file.count * QUEUE_ENTRY_SIZE
        rest = view[start:]
        if rest.count(0) != len(rest):
            view[start:] = bytes(len(rest))
            self.dirty = True

    def _remove(self, file: QueueFile) -> None:
        """Remove a file. The next checkpoint makes this durable, because the queue is dirty."""
        self._maps.forget(file)
        self._disk.remove(file.path)

    def close(self) -> None:
        """Release the files; nothing is appended through this object any longer."""
        for file in self.files:
            file.map = None
        self.files.clear()
        self.tail = self.map = None
        self.position = self.limit = 0

    def sync(self) -> None:
        """Sync the files and their directories; any thread."""
        # a file or the queue may be deleted meanwhile; then nothing is left to sync
        for file in list(self.files):
            with suppress(FileNotFoundError):
                self._disk.fdatasync(file.path)
        for directory in (self.directory, self.directory.parent):
            with suppress(FileNotFoundError):
                self._disk.fsync_dir(directory)

    # -- reading

    def slices(self, first: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Yield the entries of [first, end) as contiguous runs, with the offset of each run's first entry."""
        self.settle()
        for file in self.files:
            start, stop = max(first, file.base), min(end, file.end)
            if start < stop:
                view = memoryview(self._maps.map(file))
                yield start, view[(start - file.base) * QUEUE_ENTRY_SIZE : (stop - file.base) * QUEUE_ENTRY_SIZE]

    def looked_at(self, first: int, end: int) -> Iterator[tuple[int, memoryview]]:
        """Yield as `slices` does, for a single look-up; see `MappedFiles.look`."""
        self.settle()
        for file in self.files:
            start, stop = max(first, file.base), min(end, file.end)
            if start < stop:
                yield start, self._maps.look(file, start - file.base, stop - file.base)

    def entry(self, offset: int) -> tuple[int, int, int] | None:
        """Return physical offset, size and tags code of an entry; None in a hole or outside the queue."""
        for _, view in self.looked_at(offset, offset + 1):
            physical_offset, size, tags_code = QUEUE_ENTRY.unpack_from(view)
            assert physical_offset >= 0 and size > 0, f"entry {offset} of {self.directory} was never written"
            return physical_offset, size, tags_code
        return None

    def next_existing(self, offset: int) -> int:
        """Return the first offset at or above the given one that is not in a hole."""
        self.settle()
        for file in self.files:
            if offset < file.base:
                return file.base
            if offset < file.end:
                return offset
        return self.end

    def first_at(self, physical_offset: int) -> int:
        """Return the first offset whose record is at or above a physical offset; the end if there is none."""
        self.settle()
        for file in reversed(self.files):
            if file.count == 0:
                continue
            if QUEUE_ENTRY.unpack_from(self._maps.look(file, 0, 1))[0] < physical_offset:
                view = self._maps.look(file, 0, file.count)
                found = file.base + self._search(view, file.count, physical_offset)
                return self.next_existing(found)
        return self.next_existing(self.files[0].base) if self.files else self.end

    @staticmethod
    def _search(view: memoryview, count: int, physical_offset: int) -> int:
        low, high = 0, count
        while low < high:
            middle = (low + high) // 2
            if QUEUE_ENTRY.unpack_from(view, middle * QUEUE_ENTRY_SIZE)[0] < physical_offset:
                low = middle + 1
            else:
                high = middle
        return low

    def min_offset(self, min_physical_offset: int) -> int:
        """Return the lowest offset that readers may get from the local log. Files below it are removed by a thread."""
        if self._minimum_for != min_physical_offset:
            self._minimum = self.first_at(min_physical_offset)
            self._minimum_for = min_physical_offset
            while len(self.files) > 1 and self.files[0].end <= self._minimum:
                file = self.files.pop(0)
                self._maps.forget(file)
                self._maps.removal.add_file(file.path)
        return max(self._minimum, self.floor)

    def first_here(self, min_physical_offset: int) -> int:
        """Return the lowest offset that the local log has, without regard to `floor`."""
        self.min_offset(min_physical_offset)
        return self._minimum
