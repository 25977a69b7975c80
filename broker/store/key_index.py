"""Index by message key (RocketMQ's IndexFile): preallocated hash files, filled in batches after the append.

    0    u32   magic             24   i64  physical offset of the newest record
    4    u32   version           32   i64  store time of the oldest record
    8    u32   slots             40   i64  greatest store time of a record
    12   u32   capacity          48   16 bytes, zero
    16   u32   entries, plus 1   64   u32 * slots: newest entry of the chain, 0 = none
    20   u32   zero                   entry * capacity:
    entry: u32 hash, i64 physical offset, u32 seconds since the oldest record, u32 previous entry of the chain

A file is named by the physical offset of its first record. Key text is not stored: the caller of `find` compares it. A
message has one entry for each distinct hash of its keys.

A look-up follows the chain of its slot up to a limit. After that it scans the older entries in blocks, by hash and
time, because senders control the length of a chain.
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
# Keys that are collected before they are indexed, by the append that adds the last one. A batch is one turn of the
# event loop. Batches of 1,024 took 3 to 5 ms beside a saturating producer, forty times a second, and delayed all other
# clients.
_BATCH = 128
# Entries of a chain that a look-up follows in one file; each costs more than scanning a hundred entries of a block.
CHAIN_MAX = 128
# Entries that are scanned at once after that: some 50 µs.
BLOCK = 16_384

# topic, keys separated by spaces, physical offset, store time
IndexItem = tuple[str, str, int, int]
# For each key, in parallel lists: its hash, the physical offset of its message, the message's store time.
Hashed = tuple[list[int], list[int], list[int]]


def _hash(topic: str, key: str) -> int:
    return crc32(f"{topic}#{key}".encode("utf-8", "surrogatepass"))


def start_of(topic: str) -> int:
    """Return the CRC of the topic's part of a key, from which the CRC of the whole key continues."""
    return _hash(topic, "")


def hashes_of(start: int, keys: str) -> list[int]:
    """Return the distinct hashes of the keys of a message."""
    words = keys.split()
    if len(words) == 1:
        return [crc32(words[0].encode("utf-8", "surrogatepass"), start)]
    return list({crc32(key.encode("utf-8", "surrogatepass"), start) for key in words})


def hashed(items: Sequence[IndexItem]) -> Hashed:
    """Return the hashed keys of messages; `items` may not be empty."""
    topics, words, places, times = zip(*items, strict=True)
    text = "".join(words)  # most messages have only a unique id, so that there is nothing to split
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
        """Add as many entries as fit, each at the head of its chain; return their number."""
        count = self.count
        added = min(len(hashes), self.capacity - count)
        assert added > 0 and count > 0
        if count == 1:
            self.oldest_time = store_times[0]
        key_hashes = np.array(hashes[:added], np.uint32)
        numbers = np.arange(count, count + added, dtype=np.uint32)
        places = key_hashes % self.slots
        previous = self._slots[places]
        # within the batch, the previous entry of the same slot is one of the batch
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
        self._slots[places] = numbers  # for equal places, the last assignment wins
        self.count = count + added
        self.newest_physical = physical_offsets[added - 1]
        self.newest_time = max(self.newest_time, *store_times[:added])
        self.write_header()
        return added

    def write_header(self) -> None:
        """Write the header with the values that `add` changed."""
        _HEADER.pack_into(
            self.map, 0, _MAGIC, _VERSION, self.slots, self.capacity, self.count, 0,
            self.newest_physical, self.oldest_time, self.newest_time,
        )  # fmt: skip

    def find(self, key_hash: int, begin: int, end: int) -> Iterator[int | None]:
        """Yield physical offsets of a hash, newest first, and None after each unit of work that may have found nothing.

        Several entries of one record (keys with equal hashes) yield one result.
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
            # rounded down, and 0 for records older than the first one: the caller compares the record's exact time
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
        """Return the matching physical offsets in the entries [first, end_number), newest first; they may repeat."""
        block = self._entries[first:end_number]
        block = block[block["hash"] == key_hash]
        seconds = block["seconds"].astype(np.int64) * 1000 + self.oldest_time
        in_time = ((seconds <= end) | (seconds == self.oldest_time)) & (seconds + 999 >= begin)
        offsets: list[int] = block["physical"][in_time][::-1].tolist()
        return offsets

    def count_below(self, physical_offset: int, count: int) -> int:
        """Return how many of the first `count` entries belong to records below an offset; entries are in log order.

        An unfinished truncation may have zeroed some of the entries above.
        """
        places = self._entries["physical"][1:count]
        above = np.flatnonzero((places >= physical_offset) | (places < np.maximum.accumulate(places)))
        return 1 + (int(above[0]) if len(above) else len(places))

    def rewind(self, count: int) -> None:
        """Reduce the file to the entries that a checkpoint covers, and rebuild the chains, because slots may be newer
        or older.
        """
        entries, slots = self._entries, self._slots
        slots[:] = 0
        entries[count:] = np.zeros((), _ENTRY_TYPE)
        numbers = np.arange(1, count, dtype=np.uint32)
        # for equal places the last assignment wins: the newest entry of each chain
        slots[entries["hash"][1:count] % self.slots] = numbers
        self.count = count
        if count > 1:
            self.newest_physical = int(entries["physical"][count - 1])
            self.newest_time = self.oldest_time + int(entries["seconds"][1:count].max()) * 1000 + 999
        self.write_header()


class KeyIndex:
    """All files of the index, and the keys that are not indexed yet. Not thread-safe.

    Invariant: `build` runs before a checkpoint is described and before a query, so that no key is pending then.
    """

    def __init__(self, config: StoreConfig, disk: Disk) -> None:
        self.directory = config.root / "index"
        self._config = config
        self._disk = disk
        self.files: list[IndexFile] = []
        self._dirty: set[Path] = set()
        self._wanted: list[IndexItem] = []
        # Pending keys that are hashed already; those in `_wanted` are newer.
        self._hashed: Hashed = ([], [], [])
        self.skipped = 0  # keys since the start that were not indexed for lack of disk space
        self._skipping = False

    def load(self, base: int, count: int, *, scrub: bool) -> None:
        """Open the files in the state that a checkpoint describes; newer files are deleted and built again."""
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
        """Exchange files and pending keys with another index that has opened the same directory."""
        self.files, other.files = other.files, self.files
        self._dirty, other._dirty = other._dirty, self._dirty
        self._wanted, other._wanted = other._wanted, self._wanted
        self._hashed, other._hashed = other._hashed, self._hashed

    def drop_waiting(self) -> None:
        """Drop the pending keys, because another index finds them in the log."""
        self._wanted.clear()
        for column in self._hashed:
            column.clear()

    def close(self) -> None:
        """Unmap all files, on a thread, after the index is no longer used."""
        while self.files:
            self.files.pop()

    def below(self, physical_offset: int, base: int, count: int) -> tuple[int, int]:
        """Return base and count for a checkpoint at an offset, given those of a later checkpoint; see `load`."""
        names = self._disk.list_dir(self.directory) if self._disk.exists(self.directory) else []
        bases = [int(name) for name in names if is_file_name(name) and int(name) <= base]
        last = max((found for found in bases if found < physical_offset), default=-1)
        if last < 0:
            return -1, 0
        file = IndexFile(self.directory / file_name(last), self._disk)
        return last, file.count_below(physical_offset, count if last == base else file.count)

    def want(self, items: Iterable[IndexItem]) -> None:
        """Add keys of messages to the pending ones."""
        self._wanted += items
        if len(self._wanted) + len(self._hashed[0]) >= _BATCH:
            self.build()

    def want_hashed(self, keys: Hashed) -> None:
        """Add keys that are already hashed."""
        if self._wanted:
            self._hash()  # the older keys first
        _extend(self._hashed, keys)
        if len(self._hashed[0]) >= _BATCH:
            self.build()

    def _hash(self) -> None:
        """Move the pending keys, hashed, to the end of `_hashed`."""
        items, self._wanted = self._wanted, []
        if self._config.index_enabled:
            _extend(self._hashed, hashed(items))

    def build(self) -> None:
        """Index all pending keys."""
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
                # messages remain readable without their keys, so a full disk must not stop the store here
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
            self._log_skipped(path, error)
            return None
        header = (_MAGIC, _VERSION, config.index_slots, config.index_entries, 1, 0, 0, 0, 0)
        try:
            _HEADER.pack_into(self._disk.map(path, size), 0, *header)
            self.files.append(IndexFile(path, self._disk))
        except OSError as error:  # for example, too many open files
            self._disk.remove(path)  # no start could read it without its header
            self._log_skipped(path, error)
            return None
        self._skipping = False
        return self.files[-1]

    def _log_skipped(self, path: Path, error: OSError) -> None:
        if not self._skipping:
            log.warning("%s can't be made, keys are not indexed for now: %s", path, error)
        self._skipping = True

    def find(self, topic: str, key: str, begin: int, end: int) -> Iterator[int | None]:
        """Yield physical offsets of a key, newest first; records of other keys with the same hash may be among them.

        None marks a unit of work without a result, where the caller may yield to the event loop. The index may change
        meanwhile; records added then are not found.
        """
        key_hash = _hash(topic, key)
        for file in self.files[::-1]:
            yield from file.find(key_hash, begin, end)
            yield None

    def state(self) -> tuple[int, int]:
        """Return base and count of the newest file, for a checkpoint."""
        return (self.files[-1].base, self.files[-1].count) if self.files else (-1, 0)

    def take_dirty(self) -> list[Path]:
        """Return the files to sync for a checkpoint, and mark them clean."""
        dirty = list(self._dirty)
        self._dirty.clear()
        return dirty

    def evict(self, min_physical_offset: int) -> None:
        """Remove files whose records have all left the log."""
        while len(self.files) > 1 and self.files[0].newest_physical < min_physical_offset:
            file = self.files.pop(0)
            self._dirty.discard(file.path)
            self._disk.remove(file.path)
