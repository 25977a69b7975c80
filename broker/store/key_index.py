"""The index by message key: preallocated hash files, filled in batches behind the append.

    0    u32   magic             24   i64  physical offset of the newest record
    4    u32   version           32   i64  store time of the oldest record
    8    u32   slots             40   i64  greatest store time of a record
    12   u32   capacity          48   16 bytes, zero
    16   u32   entries, plus 1   64   u32 * slots: newest entry of the chain, 0 = none
    20   u32   zero                   entry * capacity:
    entry: u32 hash, i64 physical offset, u32 seconds since the oldest record, u32 previous entry of the chain

A file is named by the physical offset of its first record. Key text is not stored: the caller of `find` compares it.
A message has one entry for each distinct hash of its keys.

A look-up follows the chain of its slot while that is short. The rest of a long chain is not followed entry by entry:
the entries below it are searched in blocks, by hash and time, because a sender decides how long a chain is.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct

import numpy as np
from zlib_ng.zlib_ng import crc32

from broker.store.config import StoreConfig
from broker.store.errors import StoreCorrupt
from broker.store.layout import file_name, is_file_name
from infra.disk.filesystem import Disk

log = logging.getLogger(__name__)

_MAGIC = 0x4E494458
_VERSION = 1
_HEADER = Struct(">IIIIIIqqq")
_HEADER_SIZE = 64
_SLOT = Struct(">I")
_ENTRY = Struct(">IqII")
_ENTRY_TYPE = np.dtype([("hash", ">u4"), ("physical", ">i8"), ("seconds", ">u4"), ("previous", ">u4")])
assert _HEADER.size == 48 <= _HEADER_SIZE
assert _ENTRY.size == _ENTRY_TYPE.itemsize == 20
# Keys that wait; then they are indexed with the append that brings the last one. Each batch is one turn of the event
# loop: 1,024 took 3 to 5 ms beside a saturating producer, forty times a second, and every other client waited for it.
_BATCH = 128
# Entries of one chain that a look-up follows in one file; each costs more than a hundred entries of a block.
CHAIN_MAX = 128
# Entries that are searched at once behind that: some 50 µs.
BLOCK = 16_384

# topic, keys separated by spaces, physical offset, store time
IndexItem = tuple[str, str, int, int]
# Of each key, column by column: its hash, where its message lies, that one's store time.
Hashed = tuple[list[int], list[int], list[int]]


def _hash(topic: str, key: str) -> int:
    return crc32(f"{topic}#{key}".encode("utf-8", "surrogatepass"))


def start_of(topic: str) -> int:
    """The topic's part of a key's hash: a CRC goes on where it stopped."""
    return _hash(topic, "")


def hashes_of(start: int, keys: str) -> list[int]:
    """Return the distinct hashes of the keys of a message."""
    words = keys.split()
    if len(words) == 1:
        return [crc32(words[0].encode("utf-8", "surrogatepass"), start)]
    return list({crc32(key.encode("utf-8", "surrogatepass"), start) for key in words})


def hashed(items: Sequence[IndexItem]) -> Hashed:
    """The keys of messages, of which there are some."""
    topics, words, places, times = zip(*items, strict=True)
    text = "".join(words)  # of most it is an id alone, which nothing has to be cut out of
    if text.isascii() and text.split(None, 1) == [text] and topics.count(topics[0]) == len(topics):
        start = start_of(topics[0])
        return [crc32(word.encode(), start) for word in words], list(places), list(times)
    found: Hashed = [], [], []
    starts: dict[str, int] = {}
    for topic, keys, physical_offset, store_time in items:
        start = starts.get(topic, -1)
        if start < 0:
            start = starts[topic] = start_of(topic)
        hashes = hashes_of(start, keys)
        _extend(found, (hashes, [physical_offset] * len(hashes), [store_time] * len(hashes)))
    return found


def _extend(columns: Hashed, more: Hashed) -> None:
    for column, other in zip(columns, more, strict=True):
        column.extend(other)


class IndexFile:
    """One file of the index."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self.path = path
        self.base = int(path.name)
        self.map: mmap.mmap = disk.map(path, disk.size(path))
        self.slots: int
        self.capacity: int
        self.count: int
        magic, version, self.slots, self.capacity, self.count, _, newest, oldest_time, newest_time = (
            _HEADER.unpack_from(self.map)
        )
        if magic != _MAGIC or version > _VERSION or not 0 < self.count <= self.capacity:
            raise StoreCorrupt(f"{path}: magic {magic:#x}, version {version}: not an index that this broker can read")
        self.newest_physical, self.oldest_time, self.newest_time = newest, oldest_time, newest_time
        self.entries_at = _HEADER_SIZE + self.slots * _SLOT.size
        self._slots = np.frombuffer(self.map, ">u4", self.slots, _HEADER_SIZE)
        self._entries = np.frombuffer(self.map, _ENTRY_TYPE, self.capacity, self.entries_at)

    def add(self, hashes: Sequence[int], physical_offsets: Sequence[int], store_times: Sequence[int]) -> int:
        """Add entries, each in front of its chain, as many as fit; returns how many."""
        count = self.count
        added = min(len(hashes), self.capacity - count)
        assert added > 0 and count > 0
        if count == 1:
            self.oldest_time = store_times[0]
        key_hashes = np.array(hashes[:added], np.uint32)
        numbers = np.arange(count, count + added, dtype=np.uint32)
        places = key_hashes % self.slots
        previous = self._slots[places]
        # within the batch, an entry of the same slot is the nearer one
        order = places.argsort(kind="stable")
        ordered = places[order]
        (same,) = (ordered[1:] == ordered[:-1]).nonzero()
        previous[order[same + 1]] = numbers[order[same]]
        block = self._entries[count : count + added]
        block["hash"] = key_hashes
        block["physical"] = physical_offsets[:added]
        ages = np.array(store_times[:added], np.int64) - self.oldest_time
        block["seconds"] = np.maximum(ages, 0) // 1000
        block["previous"] = previous
        self._slots[places] = numbers  # of equal places the last assignment stays
        self.count = count + added
        self.newest_physical = physical_offsets[added - 1]
        self.newest_time = max(self.newest_time, *store_times[:added])
        self.write_header()
        return added

    def write_header(self) -> None:
        """Store what `add` counted."""
        _HEADER.pack_into(
            self.map, 0, _MAGIC, _VERSION, self.slots, self.capacity, self.count, 0,
            self.newest_physical, self.oldest_time, self.newest_time,
        )  # fmt: skip

    def find(self, key_hash: int, begin: int, end: int) -> Iterator[int | None]:
        """Physical offsets of a hash, newest first; None after a piece of work that may have found nothing.

        Several entries of one record (keys with equal hashes) are one result.
        """
        if self.newest_time < begin:
            return
        (number,) = _SLOT.unpack_from(self.map, _HEADER_SIZE + key_hash % self.slots * _SLOT.size)
        last = -1
        for _ in range(CHAIN_MAX):
            if not 0 < number < self.count:
                return
            found, physical_offset, seconds, previous = _ENTRY.unpack_from(
                self.map, self.entries_at + number * _ENTRY.size
            )
            # rounded down, and 0 of what is older than the first: the caller compares the record's own time
            second = self.oldest_time + seconds * 1000
            in_time = (second <= end or not seconds) and second + 999 >= begin
            if found == key_hash and in_time and physical_offset != last:
                last = physical_offset
                yield last
            if previous >= number:
                return
            number = previous
        for block_end in range(number + 1, 1, -BLOCK):
            yield None
            for physical_offset in self._in_block(max(block_end - BLOCK, 1), block_end, key_hash, begin, end):
                if physical_offset != last:
                    last = physical_offset
                    yield last

    def _in_block(self, first: int, end_number: int, key_hash: int, begin: int, end: int) -> list[int]:
        """Search the entries of [first, end_number); the results may repeat."""
        block = self._entries[first:end_number]
        block = block[block["hash"] == key_hash]
        seconds = block["seconds"].astype(np.int64) * 1000 + self.oldest_time
        in_time = ((seconds <= end) | (seconds == self.oldest_time)) & (seconds + 999 >= begin)
        offsets: list[int] = block["physical"][in_time][::-1].tolist()
        return offsets

    def count_below(self, physical_offset: int, count: int) -> int:
        """Of so many entries those of records below an offset; entries are in the order of the log.

        A cut that was not ended may have zeroed some of those above.
        """
        places = self._entries["physical"][1:count]
        above = np.flatnonzero((places >= physical_offset) | (places < np.maximum.accumulate(places)))
        return 1 + (int(above[0]) if len(above) else len(places))

    def rewind(self, count: int) -> None:
        """Go back to the entries that a checkpoint vouches for and link them again: slots may have any age."""
        entries, slots = self._entries, self._slots
        slots[:] = 0
        entries[count:] = np.zeros((), _ENTRY_TYPE)
        numbers = np.arange(1, count, dtype=np.uint32)
        # of equal places the last assignment stays: the newest entry of each chain
        slots[entries["hash"][1:count] % self.slots] = numbers
        self.count = count
        if count > 1:
            self.newest_physical = int(entries["physical"][count - 1])
            self.newest_time = self.oldest_time + int(entries["seconds"][1:count].max()) * 1000 + 999
        self.write_header()


class KeyIndex:
    """All files of the index, and the keys that wait to be in them. One thread only.

    Invariant: what is asked for or described for a checkpoint has `build` before it, so that nothing waits then.
    """

    def __init__(self, config: StoreConfig, disk: Disk) -> None:
        self.directory = config.root / "index"
        self._config = config
        self._disk = disk
        self.files: list[IndexFile] = []
        self._dirty: set[Path] = set()
        self._wanted: list[IndexItem] = []
        # The same, hashed already; what is wanted has come behind them.
        self._hashed: Hashed = ([], [], [])
        self.skipped = 0  # keys since the start, for want of room
        self._skipping = False

    def load(self, base: int, count: int, *, scrub: bool) -> None:
        """Open the files as a checkpoint described them; what is newer goes, to be built again."""
        self._disk.make_dirs(self.directory)
        for name in self._disk.list_dir(self.directory):
            if not is_file_name(name):
                continue
            path = self.directory / name
            if int(name) > base or self._disk.size(path) < _HEADER_SIZE:
                self._disk.remove(path)
                continue
            self.files.append(IndexFile(path, self._disk))
        if self.files and self.files[-1].base == base and scrub:
            self.files[-1].rewind(count)
            self._dirty.add(self.files[-1].path)

    def exchange(self, other: KeyIndex) -> None:
        """Take the files that another index has opened, and give it the own ones, with the keys that wait for these."""
        self.files, other.files = other.files, self.files
        self._dirty, other._dirty = other._dirty, self._dirty
        self._wanted, other._wanted = other._wanted, self._wanted
        self._hashed, other._hashed = other._hashed, self._hashed

    def drop_waiting(self) -> None:
        """Index no key that waits: another index finds them in the log."""
        self._wanted.clear()
        for column in self._hashed:
            column.clear()

    def close(self) -> None:
        """Unmap all files, on a thread: the index is not in use."""
        while self.files:
            self.files.pop()

    def below(self, physical_offset: int, base: int, count: int) -> tuple[int, int]:
        """Base and count for a checkpoint at an offset, by those of a later one; see `load`."""
        names = self._disk.list_dir(self.directory) if self._disk.exists(self.directory) else []
        bases = [int(name) for name in names if is_file_name(name) and int(name) <= base]
        last = max((found for found in bases if found < physical_offset), default=-1)
        if last < 0:
            return -1, 0
        file = IndexFile(self.directory / file_name(last), self._disk)
        return last, file.count_below(physical_offset, count if last == base else file.count)

    def want(self, items: Iterable[IndexItem]) -> None:
        """Have the keys of messages indexed, soon."""
        self._wanted += items
        if len(self._wanted) + len(self._hashed[0]) >= _BATCH:
            self.build()

    def want_hashed(self, keys: Hashed) -> None:
        """The same, of keys that are hashed already."""
        if self._wanted:
            self._hash()  # they came first
        _extend(self._hashed, keys)
        if len(self._hashed[0]) >= _BATCH:
            self.build()

    def _hash(self) -> None:
        """What waits, into columns, behind what is there."""
        items, self._wanted = self._wanted, []
        if self._config.index_enabled:
            _extend(self._hashed, hashed(items))

    def build(self) -> None:
        """Index what waits."""
        if self._wanted:
            self._hash()
        if self._hashed[0]:
            keys, self._hashed = self._hashed, ([], [], [])
            if self._config.index_enabled:
                self._add_hashed(*keys)

    def _add_hashed(self, hashes: list[int], physical_offsets: list[int], store_times: list[int]) -> None:
        done = 0
        while done < len(hashes):
            file = self.files[-1] if self.files else None
            if file is None or file.count >= file.capacity:
                file = self._create(file, physical_offsets[done])
            if file is None:
                # a message can be found without its key: whatever the disk has, it must not stop the store here
                self.skipped += len(hashes) - done
                return
            done += file.add(hashes[done:], physical_offsets[done:], store_times[done:])
            self._dirty.add(file.path)

    def _create(self, full: IndexFile | None, physical_offset: int) -> IndexFile | None:
        if full is not None:
            physical_offset = max(physical_offset, full.base + 1)
        path = self.directory / file_name(physical_offset)
        config = self._config
        size = _HEADER_SIZE + config.index_slots * _SLOT.size + config.index_entries * _ENTRY.size
        try:
            self._disk.create_preallocated(path, size)
        except OSError as error:
            self._say_skipped(path, error)
            return None
        header = (_MAGIC, _VERSION, config.index_slots, config.index_entries, 1, 0, 0, 0, 0)
        try:
            _HEADER.pack_into(self._disk.map(path, size), 0, *header)
            self.files.append(IndexFile(path, self._disk))
        except OSError as error:  # no more open files, say
            self._disk.remove(path)  # without its header no start would read it
            self._say_skipped(path, error)
            return None
        self._skipping = False
        return self.files[-1]

    def _say_skipped(self, path: Path, error: OSError) -> None:
        if not self._skipping:
            log.warning("%s can't be made, keys are not indexed for now: %s", path, error)
        self._skipping = True

    def find(self, topic: str, key: str, begin: int, end: int) -> Iterator[int | None]:
        """Physical offsets of a key, newest first; may name records of other keys with the same hash.

        None is a piece of work without a result: the caller may yield to the event loop there. Changes of the index
        meanwhile are allowed; a record that is added then is not found.
        """
        key_hash = _hash(topic, key)
        for file in self.files[::-1]:
            yield from file.find(key_hash, begin, end)
            yield None

    def state(self) -> tuple[int, int]:
        """Base and count of the newest file, for a checkpoint."""
        return (self.files[-1].base, self.files[-1].count) if self.files else (-1, 0)

    def take_dirty(self) -> list[Path]:
        """The files to sync for a checkpoint."""
        dirty = list(self._dirty)
        self._dirty.clear()
        return dirty

    def evict(self, min_physical_offset: int) -> None:
        """Remove files whose records have all left the log."""
        while len(self.files) > 1 and self.files[0].newest_physical < min_physical_offset:
            file = self.files.pop(0)
            self._dirty.discard(file.path)
            self._disk.remove(file.path)
