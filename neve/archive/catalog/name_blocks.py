"""Blocks: up to 32 committed objects of a topic, packed, as a catalog holds them and a checkpoint stores them.

An unpacked object takes 4 KB of memory, and an archive has a million. Blocks are unpacked on demand; the most recently
used ones stay unpacked.

    content   the objects' records one after another; `packed` is the content, compressed if `codec` is "zlib"
    record    [suffix, key, day, start, length, size, footer, etag, checksum, sha256, rows, wire_bytes,
               min_time, span, queues, row groups]
    key       empty if it is <head>/dt=<day>/<tail>/<start>-<start + length>-<suffix>.parquet, numbers of 20 digits
    hex       etag, sha256 and the digits of the checksum are bytes if they are lower-case hexadecimal digits
    span      max_time - min_time
    queues    nil if they follow from the runs of the row groups
    row group [first_row, rows, offset, length, newest, oldest, wire_bytes, [queue, first, count - 1, …]], where
              first_row, offset and first are relative to the end of the preceding row group or run (0 for the first),
              and newest and oldest are relative to min_time

A block is immutable: any number of threads read it without a lock while the catalog replaces it.
"""

import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, Self

import msgspec

from neve.archive.format.journal import CommittedObject, RowGroup

NAMES_MAX = 32
#: A block of objects with many row groups has fewer objects, because a read unpacks the whole block.
BYTES_MAX = 8192
UNPACKED_MAX = 64  # unpacked blocks of all catalogs of a process: about 10 MB
NO_TIME = -1
NEVER = (1 << 63) - 1

_LEVEL = 6
_CODECS = ("", "zlib")
_ARRAY = b"\xdc"  # msgpack array with a two-byte length

assert NAMES_MAX < 1 << 16, "the length of that array"

ABOVE = 1 << 63  # (offset, ABOVE) sorts after every run or gap that begins at the offset
Run = tuple[int, int, CommittedObject, int]  # first, last, object, row group


class _Group(msgspec.Struct, array_like=True, frozen=True):
    first_row: int
    rows: int
    offset: int
    length: int
    newest: int
    oldest: int
    wire_bytes: int
    runs: list[int]


class _Record(msgspec.Struct, array_like=True, frozen=True):
    suffix: str
    key: str
    day: str
    start: int
    length: int
    size: int
    footer: int
    etag: Any
    checksum: tuple[str, Any]
    sha256: Any
    rows: int
    wire_bytes: int
    min_time: int
    span: int
    queues: dict[int, tuple[int, int, int]] | None
    row_groups: list[_Group]


class _Place(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The fields of a record that form its key; the rest is not decoded."""

    suffix: str
    key: str
    day: str
    start: int
    length: int


class _GroupAge(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The first fields of a row group."""

    first_row: int
    rows: int
    offset: int
    length: int
    newest: int


class _Age(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record without its runs: its age, and whether its queues follow from its row groups."""

    suffix: str
    key: str
    day: str
    start: int
    length: int
    size: int
    footer: int
    etag: msgspec.Raw
    checksum: msgspec.Raw
    sha256: msgspec.Raw
    rows: int
    wire_bytes: int
    min_time: int
    span: int
    queues: dict[int, tuple[int, int, int]] | None
    row_groups: list[_GroupAge]


class _GroupTimes(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The first fields of a row group, up to its times."""

    first_row: int
    rows: int
    offset: int
    length: int
    newest: int
    oldest: int


class _Times(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record without its runs: its times."""

    suffix: msgspec.Raw
    key: msgspec.Raw
    day: msgspec.Raw
    start: int
    length: int
    size: int
    footer: int
    etag: msgspec.Raw
    checksum: msgspec.Raw
    sha256: msgspec.Raw
    rows: int
    wire_bytes: int
    min_time: int
    span: int
    queues: msgspec.Raw
    row_groups: list[_GroupTimes]


class StoredBlock(msgspec.Struct, array_like=True, frozen=True):
    """A block in a checkpoint; its part names the topic."""

    head: str
    tail: str
    count: int
    begin: int
    last_begin: int
    end: int
    rows: int
    size: int
    newest_ms: int
    newest_time: int
    soonest_ms: int
    bounds: list[int]
    record_bytes: int
    codec: str
    packed: bytes


class _Unpacked(NamedTuple):
    names: tuple[CommittedObject, ...]
    runs: Mapping[int, list[Run]]  # by queue, ordered by first offset
    overlapping: Set[int]  # queues whose runs may overlap


class Block:
    """Objects in log order, with bounds that queries use without unpacking. Immutable except for a cache."""

    __slots__ = (
        "begin", "bounds", "bytes", "codec", "count", "end", "head", "last_begin", "newest_ms", "newest_time", "packed",
        "record_bytes", "rows", "soonest_ms", "tail", "topic", "unpacked",
    )  # fmt: skip

    def __init__(self, topic: str, head: str, tail: str, one: StoredBlock) -> None:
        """Load a stored block. Neighbours share the memory of an equal `head` and `tail`.

        Raises ValueError for an unknown codec.
        """
        self.topic, self.head, self.tail = topic, head, tail
        self.count = one.count
        self.begin, self.last_begin = one.begin, one.last_begin  # starts of the first and the last object
        self.end = one.end  # the highest end of the CommitLog ranges
        self.rows, self.bytes = one.rows, one.size
        self.newest_ms = one.newest_ms  # of all row groups
        self.newest_time = one.newest_time  # the highest `max_time`
        self.soonest_ms = one.soonest_ms  # newest time of the row group that expires first
        self.bounds = array("q", one.bounds)  # queue, first, last, …, ordered by queue
        self.record_bytes = one.record_bytes  # before compression
        self.codec, self.packed = _CODECS.index(one.codec), one.packed
        self.unpacked: _Unpacked | None = None

    @property
    def takes_more(self) -> bool:
        """Whether another object fits."""
        return self.count < NAMES_MAX and self.record_bytes < BYTES_MAX

    def may_join(self, other: "Block") -> bool:
        """Return whether both blocks together fill at most half a block."""
        return self.count + other.count <= NAMES_MAX // 2 and self.record_bytes + other.record_bytes <= BYTES_MAX // 2

    def names(self) -> tuple[CommittedObject, ...]:
        """Return the objects; unlike `kept_names`, a block that is not unpacked yet is not cached."""
        held = self.unpacked
        return held.names if held is not None else self._unpack()

    def may_be_of(self, start: int | None, end: int | None) -> bool:
        """Return False if no row group has a row of [start, end) in ms; a row of unknown time may be in any range."""
        if self.unpacked is not None:
            return True  # the caller filters the unpacked objects
        low, high = NO_TIME if start is None else start, NEVER if end is None else end
        return any(
            not 0 <= one.min_time + group.newest < low and one.min_time + group.oldest < high
            for one in _times.decode(self._records())
            for group in one.row_groups
        )

    def kept_names(self) -> tuple[CommittedObject, ...]:
        """Return the objects and keep them unpacked."""
        return self._kept().names

    def name_keys(self) -> list[str]:
        """Return the keys of the objects without unpacking them."""
        held = self.unpacked
        if held is not None:
            return [name.key for name in held.names]
        return self._keys(_places.decode(self._records()))

    def expired(self, time_ms: int) -> tuple[list[str], dict[int, int]] | None:
        """Return the keys, and the end of each queue, if all row groups are of that time or older.

        None if some row group is newer or of unknown age.
        """
        if not 0 <= self.newest_ms <= time_ms:
            return None
        records = _ages.decode(self._records())
        if not all(
            one.row_groups and all(one.min_time + each.newest >= 0 for each in one.row_groups) for one in records
        ):
            return None
        return self._keys(records), self._ends(records)

    def ends(self) -> dict[int, int]:
        """Return the end of each queue: one above its last offset."""
        return self._ends(_ages.decode(self._records()))

    def _keys(self, records: "Iterable[_Place | _Age]") -> list[str]:
        return [one.key or _key(self, one.day, one.start, one.start + one.length, one.suffix) for one in records]

    def _ends(self, records: "Iterable[_Age]") -> dict[int, int]:
        if all(one.queues is None for one in records):
            bounds = self.bounds
            return {queue: last + 1 for queue, last in zip(bounds[::3], bounds[2::3], strict=True)}
        ends: dict[int, int] = {}
        for name in self.names():
            for queue, (_, last, _) in name.queues.items():
                ends[queue] = max(ends.get(queue, 0), last + 1)
        return ends

    def runs(self, queue: int) -> Sequence[Run]:
        """Return the runs of a queue ordered by first offset; keeps the block unpacked."""
        return self._kept().runs.get(queue, ())

    def run_at(self, queue: int, offset: int) -> Run | None:
        """Return the run that contains an offset, the last one if they overlap; keeps the block unpacked."""
        held = self._kept()
        runs = held.runs.get(queue, ())
        place = bisect_right(runs, (offset, ABOVE)) - 1
        while place >= 0:
            if runs[place][1] >= offset:
                return runs[place]
            if queue not in held.overlapping:
                return None
            place -= 1
        return None

    def queues(self) -> Iterator[tuple[int, int, int]]:
        """Yield (queue, first offset, last offset) over all objects."""
        flat = iter(self.bounds)
        return zip(flat, flat, flat, strict=True)

    def content(self) -> bytes:
        """Return the uncompressed records."""
        return zlib.decompress(self.packed) if self.codec else self.packed

    def _kept(self) -> _Unpacked:
        held = self.unpacked
        if held is None:
            names = self._unpack()
            held = self.unpacked = _Unpacked(names, *_runs(names))
            _kept.append(self)
            while len(_kept) > UNPACKED_MAX:
                _kept.popleft().unpacked = None
        return held

    def _unpack(self) -> tuple[CommittedObject, ...]:
        return tuple(_name(record, self) for record in _decoder.decode(self._records()))

    def _records(self) -> bytes:
        return _ARRAY + self.count.to_bytes(2, "big") + self.content()


_kept: deque[Block] = deque()  # used by any thread
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Record])
_places = msgspec.msgpack.Decoder(list[_Place])
_ages = msgspec.msgpack.Decoder(list[_Age])
_times = msgspec.msgpack.Decoder(list[_Times])


# ---- in a checkpoint


def stored(block: Block) -> StoredBlock:
    """Return the stored form, which is compressed even if the block is open."""
    packed = block.packed if block.codec else zlib.compress(block.packed, _LEVEL)
    return StoredBlock(
        block.head, block.tail, block.count, block.begin, block.last_begin, block.end, block.rows, block.bytes,
        block.newest_ms, block.newest_time, block.soonest_ms, list(block.bounds), block.record_bytes, _CODECS[1],
        packed,
    )  # fmt: skip


def blocks_from(topic: str, parts: Iterable[StoredBlock]) -> Iterator[Block]:
    """Load blocks; equal heads and tails of neighbours share memory. Raises ValueError for an unknown codec."""
    head = tail = ""
    for one in parts:
        head, tail = head if head == one.head else one.head, tail if tail == one.tail else one.tail
        yield Block(topic, head, tail, one)


# ---- making blocks


def blocks_of(topic: str, names: Iterable[CommittedObject], *, open_end: bool = False) -> list[Block]:
    """Pack objects, given in log order, into full blocks; with `open_end` the last block stays open."""
    made: list[Block] = []
    making: _Builder | None = None
    for name in names:
        if making is None:
            making = _Builder(topic, *_key_parts(name, made[-1] if made else None))
        making.add(name)
        if making.is_full:
            made.append(making.block(is_open=False))
            making = None
    if making is not None:
        made.append(making.block(is_open=open_end))
    return made


def with_names(block: Block, names: Iterator[CommittedObject]) -> Block:
    """Return the block with further objects until it is full, consumed from `names`; a full block is compressed."""
    making = _Builder.of(block)
    while not making.is_full and (name := next(names, None)) is not None:
        making.add(name)
    return making.block(is_open=not making.is_full)


def closed(block: Block) -> Block:
    """Return the block in compressed form."""
    return block if block.codec else _Builder.of(block).block(is_open=False)


class _Builder:
    """Builds a block object by object."""

    def __init__(self, topic: str, head: str, tail: str) -> None:
        self.topic, self.head, self.tail = topic, head, tail
        self._records: list[bytes] = []
        self._size = self._count = 0
        self._begin: int | None = None
        self._last_begin = self._end = self._rows = self._bytes = 0
        self._newest = self._newest_time = NO_TIME
        self._soonest = NEVER
        self._bounds: dict[int, tuple[int, int]] = {}

    @classmethod
    def of(cls, block: Block) -> Self:
        made = cls(block.topic, block.head, block.tail)
        content = block.content()
        made._records, made._size, made._count = [content], len(content), block.count
        made._begin, made._last_begin, made._end = block.begin, block.last_begin, block.end
        made._rows, made._bytes = block.rows, block.bytes
        made._newest, made._newest_time, made._soonest = block.newest_ms, block.newest_time, block.soonest_ms
        made._bounds = {queue: (first, last) for queue, first, last in block.queues()}
        return made

    @property
    def is_full(self) -> bool:
        return self._count >= NAMES_MAX or self._size >= BYTES_MAX

    def add(self, name: CommittedObject) -> None:
        record = _encoder.encode(_record(name, self))
        self._records.append(record)
        self._size += len(record)
        self._count += 1
        self._begin = name.start if self._begin is None else self._begin
        self._last_begin, self._end = name.start, max(self._end, name.end)
        self._rows, self._bytes = self._rows + name.rows, self._bytes + name.size
        self._newest_time = max(self._newest_time, name.max_time)
        bounds = self._bounds
        for group in name.row_groups:
            newest = group.newest_ms
            if newest >= 0:
                self._newest, self._soonest = max(self._newest, newest), min(self._soonest, newest)
            for queue, first, last in group.runs:
                known = bounds.get(queue)
                bounds[queue] = (first, last) if known is None else (min(known[0], first), max(known[1], last))

    def block(self, *, is_open: bool) -> Block:
        content = b"".join(self._records)
        flat = [number for queue in sorted(self._bounds) for number in (queue, *self._bounds[queue])]
        one = StoredBlock(
            self.head, self.tail, self._count, self._begin or 0, self._last_begin, self._end, self._rows, self._bytes,
            self._newest, self._newest_time, self._soonest, flat, len(content), _CODECS[0 if is_open else 1],
            content if is_open else zlib.compress(content, _LEVEL),
        )  # fmt: skip
        return Block(self.topic, self.head, self.tail, one)


# ---- one object


def _record(name: CommittedObject, block: _Builder) -> _Record:
    suffix = _suffix(name, block)
    groups, row, place = [], 0, 0
    following: dict[int, int] = {}
    for group in name.row_groups:
        runs: list[int] = []
        for queue, first, last in group.runs:
            runs += queue, first - following.get(queue, 0), last - first
            following[queue] = last + 1
        newest, oldest = group.newest_ms - name.min_time, group.oldest_ms - name.min_time
        rows, length = group.rows, group.length
        groups.append(
            _Group(group.first_row - row, rows, group.offset - place, length, newest, oldest, group.wire_bytes, runs)
        )
        row, place = group.first_row + group.rows, group.offset + group.length
    algorithm, digits = name.checksum
    return _Record(
        suffix or "", "" if suffix is not None else name.key, name.day, name.start, name.end - name.start, name.size,
        name.footer, _from_hex(name.etag), (algorithm, _from_hex(digits)), _from_hex(name.sha256), name.rows,
        name.wire_bytes, name.min_time, name.max_time - name.min_time,
        None if name.queues == _queues(name.row_groups) else name.queues, groups,
    )  # fmt: skip


def _name(record: _Record, block: Block) -> CommittedObject:
    groups, row, place = [], 0, 0
    following: dict[int, int] = {}
    for group in record.row_groups:
        runs = []
        flat = iter(group.runs)
        for queue, above, more in zip(flat, flat, flat, strict=True):
            first = following.get(queue, 0) + above
            last = first + more
            runs.append((queue, first, last))
            following[queue] = last + 1
        row, place = row + group.first_row, place + group.offset
        groups.append(
            RowGroup(
                row, group.rows, place, group.length, record.min_time + group.newest, record.min_time + group.oldest,
                group.wire_bytes, runs,
            )
        )  # fmt: skip
        row, place = row + group.rows, place + group.length
    algorithm, digits = record.checksum
    key = record.key or _key(block, record.day, record.start, record.start + record.length, record.suffix)
    return CommittedObject(
        key=key, topic=block.topic, day=record.day, start=record.start, end=record.start + record.length,
        size=record.size, footer=record.footer, etag=_to_hex(record.etag), checksum=(algorithm, _to_hex(digits)),
        sha256=_to_hex(record.sha256), rows=record.rows, wire_bytes=record.wire_bytes, min_time=record.min_time,
        max_time=record.min_time + record.span, row_groups=groups,
        queues=_queues(groups) if record.queues is None else record.queues,
    )  # fmt: skip


def _queues(groups: Iterable[RowGroup]) -> dict[int, tuple[int, int, int]]:
    """Return queue -> (first offset, last offset, first row) from the runs."""
    found: dict[int, tuple[int, int, int]] = {}
    for group in groups:
        row = group.first_row
        for queue, first, last in group.runs:
            known = found.get(queue)
            found[queue] = (first, last, row) if known is None else (known[0], last, known[2])
            row += last - first + 1
    return found


def _runs(names: Iterable[CommittedObject]) -> tuple[dict[int, list[Run]], set[int]]:
    """Return the runs by queue, and the queues whose runs may overlap."""
    found: dict[int, list[Run]] = {}
    highest: dict[int, int] = {}
    overlapping: set[int] = set()
    for name in names:
        for index, group in enumerate(name.row_groups):
            for queue, first, last in group.runs:
                high = highest.get(queue, -1)
                if first <= high:
                    overlapping.add(queue)
                if last > high:
                    highest[queue] = last
                runs = found.setdefault(queue, [])
                if not runs or runs[-1][0] <= first:
                    runs.append((first, last, name, index))
                else:
                    runs.insert(bisect_right(runs, first, key=_first), (first, last, name, index))
    return found, overlapping


def _first(run: Run) -> int:
    return run[0]


def _key_parts(name: CommittedObject, neighbour: Block | None) -> tuple[str, str]:
    """Return the parts of a key before and after the day; empty for a key of another grammar.

    Parts equal to the neighbour's share its memory.
    """
    head, found, rest = name.key.partition(f"/dt={name.day}/")
    tail, slash, _ = rest.rpartition("/")
    parts = (head, tail) if found and slash else ("", "")
    same = neighbour is not None and parts == (neighbour.head, neighbour.tail)
    return (neighbour.head, neighbour.tail) if neighbour is not None and same else parts


def _key(block: Block | _Builder, day: str, start: int, end: int, suffix: str) -> str:
    return f"{block.head}/dt={day}/{block.tail}/{start:020d}-{end:020d}-{suffix}.parquet"


def _suffix(name: CommittedObject, block: _Builder) -> str | None:
    """Return the variable end of a key; None if the key does not follow from the head and tail of the block."""
    before, _, after = _key(block, name.day, name.start, name.end, "\0").partition("\0")
    if not block.head or not name.key.startswith(before) or not name.key.endswith(after):
        return None
    return name.key[len(before) : -len(after)]


def _from_hex(text: str) -> str | bytes:
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        return text
    return raw if raw.hex() == text else text


def _to_hex(stored: str | bytes) -> str:
    return stored.hex() if isinstance(stored, bytes) else stored
