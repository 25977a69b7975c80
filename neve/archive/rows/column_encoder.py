"""Encode stored records as rows column by column, without Python code per record.

A record takes this path if its head agrees with its queue entry, its parts fill it exactly, its CRC is right, its
times fit the columns, and its properties are UTF-8 text of distinct names (name 0x01 value 0x02; the last 0x02 is
optional). `row_encoder` encodes every other record, and the rows of both paths are merged in order. The result does
not depend on the path. Exactness rests on comparison: each rebuilt row is compared with its record, either here
(`with_wire`) or, for rows of the common shape, when the written file is read back.

Arrow cuts out the parts: an array alternates between gaps and parts of one buffer, and one `take` copies the parts.
"""

from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from neve.archive.rows.rebuild import COLUMN_OF, Records, TopicFields
from neve.archive.rows.row_encoder import Entries, exact_rows, with_wire
from neve.archive.rows.schema import SCHEMA, TIME_END_MS, body_codec
from neve.record.codec import host_text
from neve.record.layout import PROPERTIES_LENGTH_MAX, RECORD_SIZE_MIN, SYS_FLAG_AT, dtype_of, host_sizes
from neve.record.properties import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY

try:
    from zlib_ng.zlib_ng import crc32
except ModuleNotFoundError:  # a server package; zlib computes the same, more slowly
    from zlib import crc32

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


def table_of(entries: Entries, sealed: Records, topic: str, *, compare_all: bool = True) -> pa.Table:
    """Encode records as rows that rebuild to exactly these records.

    Without `compare_all`, the caller has to compare the rows of the common shape.
    """
    parts, order = common_tables(entries, sealed, TopicFields.of(topic))
    is_left = np.ones(len(entries.size), np.bool_)
    for rows in order:
        is_left[rows] = False
    rest = np.flatnonzero(is_left)
    if len(rest):
        records = [sealed.record(row) for row in rest.tolist()]
        rows = exact_rows(entries.at(rest).each(), records, topic)
        parts.append(rows if compare_all else with_wire(rows, Records.of(records), topic))
        order.append(rest)
    table = parts[0]
    if len(parts) > 1:
        table = pa.concat_tables(parts).take(pa.array(np.argsort(np.concatenate(order))))
    return with_wire(table, sealed, topic) if compare_all else table


def common_tables(entries: Entries, sealed: Records, topics: TopicFields) -> tuple[list[pa.Table], list[Int64s]]:
    """Return tables of rows of the common shape, and the row numbers of each; other rows are in no table."""
    parts: list[pa.Table] = []
    order: list[Int64s] = []
    for framed in _common_rows(entries, sealed, topics):
        properties = _Properties.of(sealed, framed)
        plain = properties.plain()
        common, properties = framed.only(plain), properties.only(plain)
        if len(common.rows):
            parts.append(_table(common, properties, sealed))
            order.append(common.rows)
    return parts, order


# ---- heads


@lru_cache(4)
def _head(born_width: int, store_width: int) -> np.dtype[np.void]:
    """Return the type of a record up to the body, with the column names of the archive."""
    return np.dtype([(COLUMN_OF.get(name, name), kind) for name, kind in dtype_of(born=born_width, store=store_width)])


class _Common(NamedTuple):
    """Rows of the common shape, with the positions of their parts in the sealed bytes."""

    rows: Int64s
    heads: npt.NDArray[np.void]
    body_at: Int64s
    topic_at: Int64s
    properties_at: Int64s
    end: Int64s

    def only(self, mask: Bools) -> "_Common":
        if mask.all():
            return self
        rows, heads = self.rows[mask], self.heads[mask]
        return _Common(rows, heads, self.body_at[mask], self.topic_at[mask], self.properties_at[mask], self.end[mask])


def _common_rows(entries: Entries, sealed: Records, topics: TopicFields) -> list[_Common]:
    """Return the rows of the common shape, one group for each combination of host widths."""
    begins, ends = sealed.positions[:-1], sealed.positions[1:]
    rows = np.flatnonzero(ends - begins >= RECORD_SIZE_MIN)
    hosts = _gather(sealed, begins[rows] + SYS_FLAG_AT, np.dtype(">i4")) >> 4 & 3
    found = []
    for kind in np.unique(hosts).tolist():
        head = _head(*host_sizes(kind << 4))
        chosen = rows[hosts == kind]
        chosen = chosen[ends[chosen] - begins[chosen] >= head.itemsize]
        heads = _gather(sealed, begins[chosen], head)
        agrees = _agrees(heads, entries.at(chosen), ends[chosen] - begins[chosen])
        common = _framed(sealed, chosen[agrees], heads[agrees], topics)
        if len(common.rows):
            found.append(common)
    return found


def _agrees(heads: npt.NDArray[np.void], entries: Entries, sizes: Int64s) -> Bools:
    """Return which records match their queue entries and have times that the columns can represent."""
    agrees: Bools = (heads["size"] == entries.size) & (sizes == entries.size)
    agrees &= (heads["queue_id"] == entries.queue_id) & (heads["queue_offset"] == entries.queue_offset)
    agrees &= heads["commit_log_offset"] == entries.physical
    for name in ("born_timestamp", "store_timestamp"):
        agrees &= (heads[name] >= 0) & (heads[name] < TIME_END_MS)
    return agrees


def _framed(sealed: Records, rows: Int64s, heads: npt.NDArray[np.void], topics: TopicFields) -> _Common:
    """Return the rows whose parts fill the record, with the right topic and body CRC."""
    fields = topics.at(rows)
    body_at = sealed.positions[rows] + heads.dtype.itemsize
    topic_at = body_at + heads["body_length"]
    common = _Common(rows, heads, body_at, topic_at, topic_at + fields.length + 2, sealed.positions[rows + 1])
    lengths = common.end - common.properties_at
    common = common.only(
        (heads["magic"] == fields.magic)
        & (heads["body_length"] >= 0)
        & (lengths >= 0)
        & (lengths <= PROPERTIES_LENGTH_MAX)
    )
    topic = _cut(pa.py_buffer(sealed.wire), common.topic_at, common.properties_at - 2)
    is_topic = pc.equal(topic, topics.at(common.rows).part).to_numpy(zero_copy_only=False)
    length = _gather(sealed, common.properties_at - 2, np.dtype(">u2"))
    common = common.only(is_topic & (length == common.end - common.properties_at))
    wire, bodies = sealed.wire, zip(common.body_at.tolist(), common.topic_at.tolist(), strict=True)
    crc = np.array([crc32(wire[begin:end]) for begin, end in bodies], np.int64)
    return common.only((crc & 0x7FFFFFFF) == common.heads["body_crc"])


def _gather(sealed: Records, at: Int64s, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read a value of this type at each position, without alignment."""
    if not len(at):
        return np.empty(0, kind)
    return np.ndarray((len(sealed.wire) - kind.itemsize + 1,), kind, sealed.wire, strides=(1,))[at]


# ---- properties


class _Properties:
    """The concatenated property strings of rows, each non-empty one terminated by 0x02."""

    def __init__(self, strings: pa.Array, tail: Bools) -> None:
        self._strings = strings
        self.tail = tail
        _, offsets, data = strings.buffers()
        self.ends = np.frombuffer(offsets, np.int32)[strings.offset : strings.offset + len(strings) + 1]
        self.data = np.frombuffer(data or b"", np.uint8)[: self.ends[-1]]
        self._separators = np.flatnonzero((self.data == 1) | (self.data == 2))

    @classmethod
    def of(cls, sealed: Records, common: _Common) -> Self:
        strings = _cut(pa.py_buffer(sealed.wire), common.properties_at, common.end)
        filled = common.end > common.properties_at
        tail = filled & (np.frombuffer(sealed.wire, np.uint8)[common.end - 1] == 2)
        if (filled & ~tail).any():
            end = pc.if_else(pa.array(filled & ~tail), pa.scalar(b"\x02"), pa.scalar(b""))
            strings = pc.binary_join_element_wise(strings, end, pa.scalar(b""))
        return cls(strings, tail)

    def only(self, mask: Bools) -> Self:
        if mask.all():
            return self
        return type(self)(self._strings.filter(pa.array(mask)), self.tail[mask])

    def plain(self) -> Bools:
        """Return the rows that are UTF-8 with alternating 0x01 and 0x02, which the map represents exactly."""
        plain = np.ones(len(self.tail), np.bool_)
        rows = np.searchsorted(self.ends, self._separators, "right") - 1
        within = np.arange(len(rows)) - np.searchsorted(rows, rows)
        plain[rows[self.data[self._separators] != 1 + (within & 1)]] = False
        for row in np.unique(np.searchsorted(self.ends, np.flatnonzero(self.data >= 0x80), "right") - 1).tolist():
            plain[row] &= _is_utf8(self.data[self.ends[row] : self.ends[row + 1]].tobytes())
        if plain.all():
            plain &= self._distinct()
        else:
            chosen = np.flatnonzero(plain)
            plain[chosen] = self.only(plain)._distinct()
        return plain

    @cached_property
    def pairs(self) -> tuple[Int64s, pa.Array, pa.Array]:
        """(first pair of each row and the end, names as a dictionary array, values) of plain rows."""
        name_ends, value_ends = self._separators[0::2], self._separators[1::2]
        begins = np.concatenate([np.zeros(min(len(name_ends), 1), np.int64), value_ends[:-1] + 1])
        data = pa.py_buffer(self.data)
        names = _cut(data, begins, name_ends).cast(pa.string())
        values = _cut(data, name_ends + 1, value_ends).cast(pa.string())
        return np.searchsorted(value_ends, self.ends), names.dictionary_encode(), values

    def _distinct(self) -> Bools:
        """Return the rows without a repeated name."""
        first, encoded, _ = self.pairs
        names = max(len(encoded.dictionary), 1)
        rows = np.repeat(np.arange(len(self.tail)), np.diff(first))
        pairs = np.sort(rows * names + encoded.indices.to_numpy())
        distinct = np.ones(len(self.tail), np.bool_)
        distinct[pairs[1:][np.diff(pairs) == 0] // names] = False
        return distinct


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _cut(data: pa.Buffer, begins: Int64s, ends: Int64s) -> pa.Array:
    """Return data[begin:end] for each pair; pairs are ordered and disjoint."""
    offsets = np.empty(2 * len(begins) + 1, np.int32)
    offsets[0:-1:2], offsets[1::2] = begins, ends
    offsets[-1] = offsets[-2] if len(begins) else 0
    pieces = pa.Array.from_buffers(pa.binary(), 2 * len(begins), [None, pa.py_buffer(offsets), data])
    return pieces.take(pa.array(np.arange(0, 2 * len(begins), 2)))


# ---- columns


def _table(common: _Common, properties: _Properties, sealed: Records) -> pa.Table:
    heads = common.heads
    flags, code = np.unique(heads["sys_flag"], return_inverse=True)
    codecs = pa.array([body_codec(flag) for flag in flags.tolist()], pa.string())
    columns = {
        "body": _cut(pa.py_buffer(sealed.wire), common.body_at, common.topic_at),
        "body_codec": codecs.take(pa.array(code)),
        "born_host": _hosts(heads["born_host"]),
        "store_host": _hosts(heads["store_host"]),
        "wire": pa.nulls(len(heads), pa.binary()),
        "damaged": pa.array(np.zeros(len(heads), np.bool_)),
        "properties_tail": pa.array(properties.tail),
        **_property_columns(properties),
    }
    for field in SCHEMA:
        if field.name not in columns:
            native = np.ascontiguousarray(heads[field.name], heads[field.name].dtype.newbyteorder("="))
            columns[field.name] = pa.array(native).cast(field.type)
    return pa.table([columns[name] for name in SCHEMA.names], SCHEMA)


def _hosts(values: npt.NDArray[np.void]) -> pa.Array:
    packed = np.ascontiguousarray(values)
    kind = pa.binary(packed.dtype.itemsize)
    encoded = pa.Array.from_buffers(kind, len(packed), [None, pa.py_buffer(packed)]).dictionary_encode()
    texts = pa.array([host_text(host) for host in encoded.dictionary.to_pylist()], pa.string())
    return texts.take(encoded.indices)


def _property_columns(properties: _Properties) -> dict[str, pa.Array]:
    first, encoded, values = properties.pairs
    offsets = pa.array(first.astype(np.int32))
    known = {name: code for code, name in enumerate(encoded.dictionary.to_pylist())}
    codes = encoded.indices.to_numpy()

    def named(name: str) -> pa.Array:
        """Return each row's value of a property, or null."""
        pairs = np.flatnonzero(codes == known.get(name, -1))
        rows = np.searchsorted(first, pairs, "right") - 1
        chosen = np.zeros(len(first) - 1, np.int64)
        chosen[rows] = pairs
        missing = np.ones(len(chosen), np.bool_)
        missing[rows] = False
        return values.take(pa.array(chosen, mask=missing))

    return {
        "msg_id": named(PROPERTY_UNIQUE_KEY),
        "tags": named(PROPERTY_TAGS),
        "keys": _words(named(PROPERTY_KEYS)),
        "properties": pa.MapArray.from_arrays(offsets, encoded.dictionary.take(encoded.indices), values),
    }


def _words(texts: pa.Array) -> pa.Array:
    """Split at blanks, without empty words."""
    split = pc.split_pattern(pc.fill_null(texts, ""), " ")
    words = split.flatten()
    filled = pc.not_equal(words, "")
    counts = np.concatenate([[0], np.cumsum(filled.to_numpy(zero_copy_only=False))])
    offsets = counts[split.offsets.to_numpy() - split.offsets[0].as_py()].astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), words.filter(filled), type=SCHEMA.field("keys").type)
