"""Blocks: some tens of a topic's committed names, packed, as a catalog holds them and a checkpoint writes them.

As objects names take 4 KB each, and an archive has a million. A block is unpacked when it is asked, a few stay so.

    content   the names' records one after another; `packed` is that, compressed where `codec` says "zlib"
    record    [suffix, key, day, start, length, size, footer, etag, checksum, sha256, rows, wire_bytes,
               min_time, span, queues, row groups]
    key       empty: it is <head>/dt=<day>/<tail>/<start>-<start + length>-<suffix>.parquet, numbers of 20 digits
    hex       etag, sha256 and the checksum's second part are bytes where they were lower-case hexadecimal digits
    span      max_time - min_time
    queues    nil: what the runs of the row groups say
    row group [first_row, rows, offset, length, newest, oldest, wire_bytes, [queue, first, count - 1, …]], where
              first_row, offset and first are what they lie above the place that follows the row group or run before
              (0 at first), and newest and oldest what they lie above min_time

A block never changes: any number of threads read it without a lock while the catalog puts another in its place.
"""

import zlib
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from neve.archive.journal import CommittedName, RowGroup

NAMES_MAX = 32
#: A block of objects with many row groups has fewer names: what is asked unpacks all of it.
BYTES_MAX = 8192
UNPACKED_MAX = 64  # blocks that stay so, of all catalogs of a process: some 10 MB
NO_TIME = -1
NEVER = (1 << 63) - 1

_LEVEL = 6
_CODECS = ("", "zlib")
_ARRAY = b"\xdc"  # msgpack: an array whose length follows in two bytes

assert NAMES_MAX < 1 << 16, "the length of that array"

Run = tuple[int, int, CommittedName, int]  # first, last, object, row group


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


class _Unpacked(NamedTuple):
    names: tuple[CommittedName, ...]
    runs: Mapping[int, list[Run]]  # of each queue, by first offset


class Block:
    """Names in log order, with what is asked of them without unpacking. Never changes but for its cache."""

    __slots__ = (
        "begin", "bounds", "bytes", "codec", "count", "end", "head", "last_begin", "newest_ms", "newest_time", "packed",
        "rows", "soonest_ms", "tail", "topic", "unpacked",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917 - a record of the format
        self,
        topic: str,
        head: str,
        tail: str,
        count: int,
        begin: int,
        last_begin: int,
        end: int,
        rows: int,
        size: int,
        newest_ms: int,
        newest_time: int,
        soonest_ms: int,
        bounds: "array[int]",
        codec: int,
        packed: bytes,
    ) -> None:
        self.topic, self.head, self.tail = topic, head, tail
        self.count = count
        self.begin, self.last_begin = begin, last_begin  # of the first and of the last name
        self.end = end  # of the CommitLog ranges
        self.rows, self.bytes = rows, size
        self.newest_ms = newest_ms  # of all row groups
        self.newest_time = newest_time  # of all names' `max_time`
        self.soonest_ms = soonest_ms  # of the row group that expires first
        self.bounds = bounds  # queue, first, last, and so on, by queue
        self.codec, self.packed = codec, packed
        self.unpacked: _Unpacked | None = None

    @property
    def is_full(self) -> bool:
        return self.count >= NAMES_MAX or len(self.packed) >= BYTES_MAX

    def names(self) -> tuple[CommittedName, ...]:
        """For who goes through many blocks: what others have asked stays unpacked, this does not."""
        held = self.unpacked
        return held.names if held is not None else self._unpack()

    def kept_names(self) -> tuple[CommittedName, ...]:
        """They stay unpacked for who asks next."""
        return self._kept().names

    def runs(self, queue: int) -> Sequence[Run]:
        """By first offset. They stay unpacked for who asks next."""
        return self._kept().runs.get(queue, ())

    def queues(self) -> Iterator[tuple[int, int, int]]:
        """(queue, first offset, last offset) over all names."""
        flat = iter(self.bounds)
        return zip(flat, flat, flat, strict=True)

    def content(self) -> bytes:
        return zlib.decompress(self.packed) if self.codec else self.packed

    def has(self, queue: int) -> bool:
        return any(queue == one for one in self.bounds[::3])

    def _kept(self) -> _Unpacked:
        held = self.unpacked
        if held is None:
            names = self._unpack()
            held = self.unpacked = _Unpacked(names, _runs(names))
            _kept.append(self)
            while len(_kept) > UNPACKED_MAX:
                _kept.popleft().unpacked = None
        return held

    def _unpack(self) -> tuple[CommittedName, ...]:
        records = _decoder.decode(_ARRAY + self.count.to_bytes(2, "big") + self.content())
        return tuple(_name(record, self) for record in records)


_kept: deque[Block] = deque()  # appended to and taken from by any thread
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Record])


# ---- making blocks


def blocks_of(topic: str, names: Sequence[CommittedName]) -> list[Block]:
    """Names in log order, as full as blocks get, the last one too."""
    made: list[Block] = []
    for name in names:
        if made and not made[-1].is_full:
            made[-1] = with_name(made[-1], name)
        else:
            made.append(first_block(name, made[-1] if made else None))
    if made:
        made[-1] = closed(made[-1])
    return made


def first_block(name: CommittedName, neighbour: Block | None = None) -> Block:
    """Of one name, open. What its keys have in common with the neighbour's is held once."""
    head, tail = _key_parts(name)
    if neighbour is not None and (head, tail) == (neighbour.head, neighbour.tail):
        head, tail = neighbour.head, neighbour.tail
    empty = Block(name.topic, head, tail, 0, name.start, name.start, 0, 0, 0, -1, NO_TIME, NEVER, array("q"), 0, b"")
    return with_name(empty, name)


def with_name(block: Block, name: CommittedName) -> Block:
    """With one more at its end; compressed when it is full with that."""
    bounds = {queue: (first, last) for queue, first, last in block.queues()}
    newest, soonest = block.newest_ms, block.soonest_ms
    for group in name.row_groups:
        newest = max(newest, group.newest_ms)
        soonest = min(soonest, group.newest_ms) if group.newest_ms >= 0 else soonest
        for queue, first, last in group.runs:
            low, high = bounds.get(queue, (first, last))
            bounds[queue] = min(low, first), max(high, last)
    flat = array("q", (number for queue in sorted(bounds) for number in (queue, *bounds[queue])))
    content = block.content() + _encoder.encode(_record(name, block))
    made = Block(
        block.topic, block.head, block.tail, block.count + 1, block.begin, name.start, max(block.end, name.end),
        block.rows + name.rows, block.bytes + name.size, newest, max(block.newest_time, name.max_time), soonest, flat,
        0, content,
    )  # fmt: skip
    return closed(made) if made.is_full else made


def closed(block: Block) -> Block:
    """Nothing is expected to come to it."""
    if block.codec:
        return block
    return Block(
        block.topic, block.head, block.tail, block.count, block.begin, block.last_begin, block.end, block.rows,
        block.bytes, block.newest_ms, block.newest_time, block.soonest_ms, block.bounds, 1,
        zlib.compress(block.packed, _LEVEL),
    )  # fmt: skip


# ---- one name


def _record(name: CommittedName, block: Block) -> _Record:
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


def _name(record: _Record, block: Block) -> CommittedName:
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
    return CommittedName(
        key=key, topic=block.topic, day=record.day, start=record.start, end=record.start + record.length,
        size=record.size, footer=record.footer, etag=_to_hex(record.etag), checksum=(algorithm, _to_hex(digits)),
        sha256=_to_hex(record.sha256), rows=record.rows, wire_bytes=record.wire_bytes, min_time=record.min_time,
        max_time=record.min_time + record.span, row_groups=groups,
        queues=_queues(groups) if record.queues is None else record.queues,
    )  # fmt: skip


def _queues(groups: Iterable[RowGroup]) -> dict[int, tuple[int, int, int]]:
    """queue -> (first offset, last offset, first row), as the runs say it."""
    found: dict[int, tuple[int, int, int]] = {}
    for group in groups:
        row = group.first_row
        for queue, first, last in group.runs:
            known = found.get(queue)
            found[queue] = (first, last, row) if known is None else (known[0], last, known[2])
            row += last - first + 1
    return found


def _runs(names: Iterable[CommittedName]) -> dict[int, list[Run]]:
    found: dict[int, list[Run]] = {}
    for name in names:
        for index, group in enumerate(name.row_groups):
            for queue, first, last in group.runs:
                runs = found.setdefault(queue, [])
                if not runs or runs[-1][0] <= first:
                    runs.append((first, last, name, index))
                else:
                    runs.insert(bisect_right(runs, first, key=_first), (first, last, name, index))
    return found


def _first(run: Run) -> int:
    return run[0]


def _key_parts(name: CommittedName) -> tuple[str, str]:
    """What comes before the day in a key, and between day and place; empty where it is no such key."""
    head, found, rest = name.key.partition(f"/dt={name.day}/")
    tail, slash, _ = rest.rpartition("/")
    return (head, tail) if found and slash else ("", "")


def _key(block: Block, day: str, start: int, end: int, suffix: str) -> str:
    return f"{block.head}/dt={day}/{block.tail}/{start:020d}-{end:020d}-{suffix}.parquet"


def _suffix(name: CommittedName, block: Block) -> str | None:
    """None: its key does not follow from the block's."""
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
