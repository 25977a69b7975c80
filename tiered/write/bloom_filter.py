"""Bloom filters of a data object: whether a row group may have a word as `msg_id` or among its `keys`.

pyarrow writes the filters, but can only read their places from the footer. Their format is Parquet's BloomFilter.md:

    0x15, zigzag varint      length of the bitset                        header, in Thrift's compact protocol
    1c 1c 00 00 (3 times)    algorithm BLOCK, hash XXHASH, compression UNCOMPRESSED
    00
    bitset                   blocks of 8 little-endian u32; a word has one bit in each of the 8

A filter has no false negatives, and false positives in one of a hundred row groups. Parquet has no checksum for
filters: an incomplete filter is rejected here, but a flipped bit in the bitset is not detected.
"""

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import NamedTuple

import pyarrow.parquet as pq
import xxhash

from neve.archive.rows.schema import FILTERED, FILTERS_MARK, DamagedObject

# Filters of neighbouring row groups are read by one request up to this many bytes.
_READ_MAX = 256 << 10
_SALT = (0x47B6137B, 0x44974D91, 0x8824AD5B, 0xA2B7289D, 0x705495C7, 0x2DF1424B, 0x9EFC4947, 0x5C6BFB31)
_BLOCK = Struct("<8I")
_KIND = bytes.fromhex("1c1c0000") * 3 + b"\0"
_VARINT_MAX = 5


class FilterRead(NamedTuple):
    """A range of the object with filters: for each row group, their (start, length) within the range."""

    start: int
    length: int
    groups: dict[int, list[tuple[int, int]]]

    def may_hold(self, data: bytes, word: bytes) -> frozenset[int]:
        """Return the row groups that may have the word. Raises DamagedObject."""
        hashed = xxhash.xxh64_intdigest(word)
        return frozenset(
            group
            for group, places in self.groups.items()
            if any(_holds(data[start : start + length], hashed) for start, length in places)
        )


def filter_reads(metadata: pq.FileMetaData) -> Iterator[FilterRead]:
    """Yield the ranges with filters. A row group without filters is in none.

    The ranges are the same for each call, so that their bytes can be cached.
    """
    if FILTERS_MARK.encode() not in (metadata.metadata or {}):
        return
    part: dict[int, list[tuple[int, int]]] = {}
    for group in range(metadata.num_row_groups):
        places = _places(metadata.row_group(group))
        if places:
            if part and _end([*part.values(), places]) - _start([*part.values(), places]) > _READ_MAX:
                yield _read(part)
                part = {}
            part[group] = places
    if part:
        yield _read(part)


def _places(group: pq.RowGroupMetaData) -> list[tuple[int, int]]:
    """Return (offset, length) of a row group's filters in the object; empty if any is missing."""
    chunks = [group.column(index) for index in range(group.num_columns)]
    places = [
        (chunk.bloom_filter_offset, chunk.bloom_filter_length) for chunk in chunks if chunk.path_in_schema in FILTERED
    ]
    whole = len(places) == len(FILTERED) and all(None not in place and min(place) > 0 for place in places)
    return places if whole else []


def _read(part: dict[int, list[tuple[int, int]]]) -> FilterRead:
    start, end = _start(part.values()), _end(part.values())
    within = {group: [(offset - start, length) for offset, length in places] for group, places in part.items()}
    return FilterRead(start, end - start, within)


def _start(groups: Iterable[Sequence[tuple[int, int]]]) -> int:
    return min(offset for places in groups for offset, _ in places)


def _end(groups: Iterable[Sequence[tuple[int, int]]]) -> int:
    return max(offset + length for places in groups for offset, length in places)


def _holds(data: bytes, hashed: int) -> bool:
    bitset = _bitset(data)
    block = ((hashed >> 32) * (len(bitset) // _BLOCK.size)) >> 32
    low = hashed & 0xFFFFFFFF
    masks = (1 << ((low * salt & 0xFFFFFFFF) >> 27) for salt in _SALT)
    return all(part & mask for part, mask in zip(_BLOCK.unpack_from(bitset, block * _BLOCK.size), masks, strict=True))


def _bitset(data: bytes) -> bytes:
    """Return the bitset of a filter. Raises DamagedObject unless it is complete and of the only supported kind."""
    number = at = 0
    while at < _VARINT_MAX and data[1 + at : 2 + at]:
        number |= (data[1 + at] & 0x7F) << 7 * at
        at += 1
        if data[at] < 0x80:
            break
    begin = 1 + at + len(_KIND)
    length = number >> 1
    is_one = data[:1] == b"\x15" and not number & 1 and data[1 + at : begin] == _KIND
    if not is_one or length < _BLOCK.size or length % _BLOCK.size or len(data) != begin + length:
        raise DamagedObject(f"{len(data)} bytes are not a bloom filter")
    return data[begin:]
