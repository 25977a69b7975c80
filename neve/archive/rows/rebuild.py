"""Rebuild records from rows, byte for byte; vectorized, so that a cold read runs no Python code per message.

A record is the concatenation of these parts (layout: neve.record.layout). Everything before the body is one big-endian
numpy structure, whose width depends on the kinds of the two addresses; the texts are Arrow arrays. The parts behind the
body are joined first. Head, body and rest are then described as Arrow views, and one cast copies them together, so a
body is copied once. The buffers of the cast are the result:

    head, 88 to 112 | body | topic length 1/2, topic | properties length 2, properties

The size, the magic and the width of the topic length are derived (version 2 exactly if the topic is longer than 127
bytes). A row that would be rebuilt differently has `wire`, which takes precedence.
"""

import ipaddress
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from neve.record.codec import MalformedRecord, decode_record
from neve.record.layout import HOST_V4_SIZE, I32, dtype_of, topic_field
from neve.record.properties import PROPERTY_TAGS, tags_code

#: Columns whose names differ from the record's fields.
COLUMN_OF = {"physical_offset": "commit_log_offset"}


@cache
def _head(born: int, store: int) -> np.dtype[np.void]:
    return np.dtype([(COLUMN_OF.get(name, name), kind) for name, kind in dtype_of(born=born, store=store)])


assert _head(HOST_V4_SIZE, HOST_V4_SIZE).itemsize == 88
_NUMBERS = (
    "body_crc",
    "queue_id",
    "flag",
    "queue_offset",
    "commit_log_offset",
    "sys_flag",
    "born_timestamp",
    "store_timestamp",
    "reconsume_times",
    "prepared_transaction_offset",
)

#: The columns that `rebuild` and `tag_codes` need; the others serve queries.
COLUMNS = (*_NUMBERS, "born_host", "store_host", "body", "properties", "properties_tail", "tags", "wire")
#: Columns with few distinct values in a row group.
REPEATED = ("born_host", "store_host", "tags")

# Arrow's view of a string: it contains up to 12 bytes, or the place of a longer string. The prefix of a longer string,
# which comparisons use, is left 0: the views are only cast, and gathering the prefixes would read each string.
_VIEW = np.dtype([("length", "<i4"), ("prefix", "<i4"), ("buffer", "<i4"), ("position", "<i4")])
_INLINE = np.dtype([("length", "<i4"), ("text", "V12")])
_INLINE_MAX = _INLINE["text"].itemsize
_EMPTY = pa.scalar(b"", pa.binary())


class Records(NamedTuple):
    """Records one after another; record i is wire[positions[i]:positions[i + 1]]."""

    wire: memoryview
    positions: npt.NDArray[np.int64]

    @staticmethod
    def of(records: Sequence[bytes | memoryview]) -> "Records":
        """Concatenate records."""
        return Records(memoryview(b"".join(records)), np.cumsum([0, *map(len, records)], dtype=np.int64))

    def record(self, row: int) -> memoryview:
        """Return one record."""
        return self.wire[self.positions[row] : self.positions[row + 1]]

    def same_as(self, other: "Records") -> bool:
        """Return whether both have the same records."""
        # Arrow compares buffers as memory; memoryview compares byte by byte.
        same_bytes: bool = pa.py_buffer(self.wire).equals(pa.py_buffer(other.wire))
        return same_bytes and np.array_equal(self.positions, other.positions)


class TopicFields(NamedTuple):
    """The topic fields of records: the same for all rows, or one for each row."""

    magic: Any
    length: Any
    part: Any  # the length and the name, as one binary value

    @classmethod
    def of(cls, topic: str) -> "TopicFields":
        magic, part = topic_field(topic.encode("utf-8", "surrogateescape"))
        return cls(magic, len(part), pa.scalar(part, pa.binary()))

    @classmethod
    def of_each(cls, topics: Sequence[str], counts: Sequence[int] | npt.NDArray[np.int64]) -> "TopicFields":
        """Return the fields of `counts` rows of each topic, one topic after another."""
        fields = [topic_field(topic.encode("utf-8", "surrogateescape")) for topic in topics]
        rows = np.repeat(np.arange(len(topics)), counts)
        magics = np.array([magic for magic, _ in fields], np.int64)
        lengths = np.array([len(part) for _, part in fields], np.int64)
        parts = pa.array([part for _, part in fields], pa.binary())
        return cls(magics[rows], lengths[rows], parts.take(pa.array(rows)))

    def at(self, rows: npt.NDArray[Any]) -> "TopicFields":
        if isinstance(self.part, pa.Scalar):
            return self
        return TopicFields(self.magic[rows], self.length[rows], self.part.take(pa.array(rows)))


def rebuild(rows: pa.Table, topic: str) -> Records:
    """Rebuild the records of a topic's rows."""
    return rebuild_of(rows, TopicFields.of(topic))


def rebuild_of(rows: pa.Table, topics: TopicFields) -> Records:
    """Rebuild the records of rows of several topics."""
    if not len(rows):
        return Records(memoryview(b""), np.zeros(1, np.int64))
    table = rows.combine_chunks()
    body, properties = _bytes(table, "body"), _properties(table)
    length = _packed(_lengths(properties).astype(">u2"))
    rest = pc.binary_join_element_wise(topics.part, length, properties, _EMPTY)
    joined = _woven([_heads(table, topics.magic, _lengths(body), _lengths(rest)), _Texts.of(body), _Texts.of(rest)])
    wire = _column(table, "wire")
    return _as_buffer(joined if wire.null_count == len(wire) else pc.coalesce(wire, joined))


class _Texts(NamedTuple):
    """A text for each row, anywhere in a buffer."""

    source: Any
    begins: npt.NDArray[Any]
    sizes: npt.NDArray[Any]

    @classmethod
    def of(cls, array: pa.Array) -> Self:
        _, offsets, data = array.buffers()
        ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
        return cls(memoryview(data if data is not None else b""), ends[:-1], np.diff(ends))


def _heads(
    table: pa.Table, magic: Any, body_lengths: npt.NDArray[np.int64], rest_lengths: npt.NDArray[np.int64]
) -> _Texts:
    """Build the parts before the bodies, grouped by the kinds of addresses; there is nearly always one group."""
    born, store = _Hosts.of(_column(table, "born_host")), _Hosts.of(_column(table, "store_host"))
    kinds = born.sizes * 256 + store.sizes
    widths = np.unique(kinds)
    numbers = {name: _numbers(table, name) for name in _NUMBERS}
    numbers["magic"] = np.broadcast_to(magic, len(table))
    numbers["body_length"] = body_lengths
    behind = body_lengths + rest_lengths
    sources, position = [], 0
    begins, sizes = np.empty(len(table), np.int32), np.empty(len(table), np.int32)
    for kind in widths.tolist():
        rows = slice(None) if len(widths) == 1 else np.flatnonzero(kinds == kind)
        dtype = _head(*divmod(kind, 256))
        heads = np.zeros(len(begins[rows]), dtype)
        for name, values in numbers.items():
            heads[name] = values[rows]
        heads["size"] = dtype.itemsize + behind[rows]
        heads["born_host"], heads["store_host"] = born.at(rows, kind // 256), store.at(rows, kind % 256)
        begins[rows] = np.arange(position, position + heads.nbytes, dtype.itemsize)
        sizes[rows] = dtype.itemsize
        sources.append(heads.view(np.uint8).data)
        position += heads.nbytes
    return _Texts(sources[0] if len(sources) == 1 else memoryview(b"".join(sources)), begins, sizes)


class _Hosts(NamedTuple):
    """The packed hosts of rows, each distinct one once."""

    distinct: list[bytes]
    indices: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int64]

    @classmethod
    def of(cls, texts: pa.Array) -> Self:
        encoded = texts.dictionary_encode()
        distinct = [_host_bytes(text) for text in (*encoded.dictionary.to_pylist(), None)]
        indices = encoded.indices
        if indices.null_count:
            indices = pc.fill_null(indices, len(distinct) - 1)
        numbers = indices.to_numpy()
        return cls(distinct, numbers, np.array([len(host) for host in distinct], np.int64)[numbers])

    def at(self, rows: Any, width: int) -> npt.NDArray[np.void]:
        """Return the hosts of rows, whose hosts have this width."""
        hosts = b"".join(host if len(host) == width else bytes(width) for host in self.distinct)
        found: npt.NDArray[np.void] = np.frombuffer(hosts, f"V{width}")[self.indices[rows]]
        return found


def tag_codes(rows: pa.Table, rebuilt: Records) -> npt.NDArray[np.int64]:
    """Return the Java hash of each row's tags, as in the queue entries of the hot store."""
    table = rows.combine_chunks()
    encoded = _column(table, "tags").dictionary_encode()
    known = np.array([tags_code(tags) for tags in encoded.dictionary.to_pylist()] + [0], np.int64)
    codes: npt.NDArray[np.int64] = known[encoded.indices.fill_null(len(known) - 1).to_numpy(zero_copy_only=False)]
    undecoded = pc.and_(pc.is_valid(_column(table, "wire")), pc.is_null(_column(table, "tags")))
    for row in np.flatnonzero(undecoded.to_numpy(zero_copy_only=False)):
        codes[row] = tags_code(_lenient_tags(bytes(rebuilt.record(int(row)))))
    return codes


def _lenient_tags(record: bytes) -> str | None:
    """Return the tags as RocketMQ's reader decodes invalid UTF-8; None for a damaged record."""
    try:
        return decode_record(record).properties.get(PROPERTY_TAGS)
    except MalformedRecord:
        return None


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _bytes(table: pa.Table, name: str) -> pa.Array:
    column = _column(table, name)
    return pc.fill_null(column, b"") if column.null_count else column


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    column = _column(table, name).cast(pa.int64())
    return np.asarray((pc.fill_null(column, 0) if column.null_count else column).to_numpy(), np.int64)


def _lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    return np.asarray(pc.binary_length(values).to_numpy(zero_copy_only=False), np.int64)


def _packed(values: npt.NDArray[Any]) -> pa.Array:
    """Convert a numpy array of fixed-size structures to a binary array."""
    width = pa.binary(values.dtype.itemsize)
    return pa.Array.from_buffers(width, len(values), [None, pa.py_buffer(values)]).cast(pa.binary())


def _host_bytes(text: str | None) -> bytes:
    if text is None:
        return bytes(HOST_V4_SIZE)
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + I32.pack(int(port))


def _properties(table: pa.Table) -> pa.Array:
    """Join names and values as `name 0x01 value`, separated by 0x02, with a final 0x02 if the record had one."""
    column = _column(table, "properties")
    keys, items = column.keys.cast(pa.binary()), column.items.cast(pa.binary())
    pairs = pc.binary_join_element_wise(keys, items, pa.scalar(b"\x01", pa.binary()))
    offsets = pa.Array.from_buffers(pa.int32(), len(column) + 1, [None, column.buffers()[1]], offset=column.offset)
    lists = pa.ListArray.from_arrays(offsets, pairs)
    joined = pc.fill_null(pc.binary_join(lists, b"\x02"), b"")
    tails = _column(table, "properties_tail")
    if not tails.true_count:
        return joined
    tail = pc.if_else(pc.fill_null(tails, False), pa.scalar(b"\x02"), pa.scalar(b""))
    return pc.binary_join_element_wise(joined, tail, _EMPTY)


def views(source: Any, begins: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> npt.NDArray[np.void]:
    """Return Arrow views of source[begin:begin + size], in any order."""
    described = np.empty(len(begins), _VIEW)
    _describe(described, source, begins, sizes)
    return described


def _describe(
    described: npt.NDArray[np.void], source: Any, begins: npt.NDArray[Any], sizes: npt.NDArray[Any], buffer: int = 0
) -> None:
    """Fill in views; `buffer` is the index of the source among the buffers of the views."""
    described["length"], described["position"] = sizes, begins
    described["buffer"], described["prefix"] = buffer, 0
    inline = np.flatnonzero(sizes <= _INLINE_MAX)
    if len(inline):
        data = np.frombuffer(source, np.uint8) if len(source) else np.zeros(1, np.uint8)
        columns = np.arange(_INLINE_MAX)
        within = np.minimum(begins[inline, None] + columns, len(data) - 1)
        texts = np.where(columns < sizes[inline, None], data[within], 0).astype(np.uint8)
        described.view(_INLINE)["text"][inline] = texts.view(_INLINE["text"])[:, 0]


def joined_views(described: npt.NDArray[np.void], sources: Sequence[Any]) -> pa.Array:
    """Copy the viewed texts into one array."""
    buffers = [pa.py_buffer(source) for source in sources]
    viewed = pa.Array.from_buffers(pa.binary_view(), len(described), [None, pa.py_buffer(described), *buffers])
    return viewed.cast(pa.binary())


def _woven(parts: Sequence[_Texts]) -> pa.Array:
    """Concatenate the elements of the parts row by row."""
    described = np.empty((len(parts[0].begins), len(parts)), _VIEW)
    for number, part in enumerate(parts):
        _describe(described[:, number], *part, number)
    _, offsets, data = joined_views(described.reshape(-1), [part.source for part in parts]).buffers()
    ends = np.frombuffer(offsets, np.int32)[: described.size + 1 : len(parts)]
    return pa.Array.from_buffers(pa.binary(), len(described), [None, pa.py_buffer(np.ascontiguousarray(ends)), data])


def _as_buffer(records: pa.Array) -> Records:
    _, offsets, data = records.buffers()
    positions = np.frombuffer(offsets, np.int32)[records.offset : records.offset + len(records) + 1].astype(np.int64)
    # Arrow exports signed bytes, which would differ from unsigned ones above 0x7F.
    wire = memoryview(data if data is not None else b"").cast("B")[positions[0] : positions[-1]]
    return Records(wire, positions - positions[0])
