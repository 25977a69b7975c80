"""Descriptions of a master's appends, sent with the bytes to slaves, so that slaves need not parse each record.

    u32 CRC-32 of the records' bytes, as appended, and of all following bytes of the description
    i64 store time of all records     u16 records     u16 keys     u8 queues
    records   times a CRC entry as in `layout`; then records times a u8: index of the record's queue in the list below
    keys      times an i64: physical offset of the key's record; then keys times its hash, a u32
    queues    times i32 queue id, i64 the queue offset of its first record here, u8 length of the topic, and the topic

All numbers are big endian, as in the log and its CRC file. The CRC is computed at the append. So it proves that a slave
stores exactly what its master wrote, whatever happened during the transfer. It covers heads and bodies together, so
that a slave checks neither of them again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from struct import Struct, error

import msgspec
from zlib_ng.zlib_ng import crc32

from broker.store.layout import CRC_ENTRY, CRC_ENTRY_SIZE

LEAST = 4  # with fewer records, parsing them is faster than describing them
_RECORDS_MAX = 0xFFFF
_KEYS_MAX = 0xFFFF
_QUEUES_MAX = 0xFF
# limit on the records of one append, and on all records kept in memory; slaves that keep up need only those
_BYTES_MAX = 256 << 10
_KEPT_MAX = 4 << 20  # limit on the descriptions kept
_HEAD = Struct(">IqHHB")
_CRC_SIZE = 4
_QUEUE = Struct(">iqB")

Queue = tuple[str, int, int]  # topic, queue id, queue offset of its first record in the append


class DamagedAppend(Exception):
    """The bytes, or their description, are not those of the master."""


class ParsedDescription(msgspec.Struct, frozen=True, gc=False):
    """Content of a description, as parallel sequences."""

    store_time: int
    crc_entries: bytes
    marks: tuple[int, ...]  # of each record: its position in its file, plus 1
    codes: tuple[int, ...]
    whose: bytes  # of each record: the index of its queue
    keys: tuple[int, ...]  # of each key: the physical offset of its record
    hashes: tuple[int, ...]
    queues: list[tuple[bytes, int, int]]


@lru_cache(512)
def _keys(count: int) -> Struct:
    return Struct(f">{count}q{count}I")


@lru_cache(512)
def _entries(count: int) -> Struct:
    return Struct(CRC_ENTRY.format[:1] + CRC_ENTRY.format[1:] * count)


def describe(  # noqa: PLR0917 - the fields of `ParsedDescription`, as parallel sequences
    records: bytes,
    crc_entries: bytes,
    whose: Sequence[int],
    queues: Sequence[Queue],
    keys: Sequence[int],
    hashes: Sequence[int],
    store_time: int,
) -> bytes | None:
    """Return the encoded description; None if the append exceeds a limit. Arguments: see `ParsedDescription`."""
    if len(records) > _BYTES_MAX or len(whose) > _RECORDS_MAX or len(keys) > _KEYS_MAX or len(queues) > _QUEUES_MAX:
        return None
    rest = [
        _HEAD.pack(0, store_time, len(whose), len(keys), len(queues))[_CRC_SIZE:],
        crc_entries,
        bytes(whose),
        _keys(len(keys)).pack(*keys, *hashes),
    ]
    for topic, queue_id, first in queues:
        name = topic.encode("utf-8", "surrogateescape")
        rest += (_QUEUE.pack(queue_id, first, len(name)), name)
    described = b"".join(rest)
    return crc32(described, crc32(records)).to_bytes(_CRC_SIZE) + described


def parse_description(description: bytes | memoryview, records: bytes | memoryview) -> ParsedDescription:
    """Decode a description and verify it against the records' bytes. Raises DamagedAppend."""
    raw = bytes(description)
    try:
        crc, store_time, count, keys, queues = _HEAD.unpack_from(raw)
        if crc32(raw[_CRC_SIZE:], crc32(records)) != crc:
            raise DamagedAppend("the CRC of the records differs from the description")
        entries_end = _HEAD.size + count * CRC_ENTRY_SIZE
        entries = raw[_HEAD.size : entries_end]
        fields = _entries(count).unpack(entries)
        keys_at = entries_end + count
        whose = raw[entries_end:keys_at]
        keyed = _keys(keys)
        numbers = keyed.unpack_from(raw, keys_at)
        at = keys_at + keyed.size
        found = list[tuple[bytes, int, int]]()
        for _ in range(queues):
            queue_id, first, length = _QUEUE.unpack_from(raw, at)
            at += _QUEUE.size + length
            found.append((raw[at - length : at], queue_id, first))
    except error as fault:
        raise DamagedAppend(f"a truncated description: {fault}") from fault
    if at != len(raw) or not whose or max(whose) >= queues:
        raise DamagedAppend(f"a description of {count} records in {queues} queues, {len(raw)} bytes")
    return ParsedDescription(
        store_time, entries, fields[0::3], fields[2::3], whose, numbers[:keys], numbers[keys:], found
    )


class DescribedAppend(msgspec.Struct, frozen=True, gc=False):
    """One described append. `records` are its bytes if they are still kept; otherwise they are read from the log."""

    end: int
    description: bytes
    records: bytes


class Described:
    """Descriptions of a master's latest appends, by physical offset, and the bytes of the newest ones.

    The bytes save mapping the log again for a slave that keeps up. Nothing is kept while no slave uses descriptions.
    """

    def __init__(self) -> None:
        self.is_wanted = False
        self._by_start: dict[int, DescribedAppend] = {}  # oldest first
        self._at_hand: deque[int] = deque()  # the starts of those whose bytes are kept
        self._described_bytes = self._bytes_at_hand = 0

    def want(self, wanted: bool) -> None:
        """Set whether any slave uses descriptions."""
        self.is_wanted = wanted
        if not wanted:
            self.forget()

    def forget(self) -> None:
        """Drop all descriptions, because the log was changed."""
        self._by_start.clear()
        self._at_hand.clear()
        self._described_bytes = self._bytes_at_hand = 0

    def add(self, start: int, description: bytes, records: bytes) -> None:
        """Keep the description of an append that starts at a physical offset."""
        kept, at_hand = self._by_start, self._at_hand
        kept[start] = DescribedAppend(start + len(records), description, records)
        at_hand.append(start)
        self._described_bytes += len(description)
        self._bytes_at_hand += len(records)
        while self._bytes_at_hand > _BYTES_MAX:
            oldest = at_hand.popleft()
            one = kept[oldest]
            kept[oldest] = DescribedAppend(one.end, one.description, b"")
            self._bytes_at_hand -= len(one.records)
        while self._described_bytes > _KEPT_MAX:
            self._described_bytes -= len(kept.pop(next(iter(kept))).description)

    def at(self, start: int) -> DescribedAppend | None:
        """Return the append that starts at the offset, if it is still kept."""
        return self._by_start.get(start)
