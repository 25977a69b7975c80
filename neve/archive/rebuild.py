"""Rows back to records, byte for byte; vectorised, so that a cold read costs no Python per message.

A record is the join of these parts (layout: neve.record.layout); numbers come out of numpy as big-endian structures,
the texts are Arrow arrays. What stands before and after the body is joined first; head, body and rest are then
described as Arrow views, which one cast copies together, so a body is copied once. The cast's buffers are the answer:

    _FRONT 48 | born host 8/20 | store time 8 | store host 8/20 | _REAR 16 | body
    | topic length 1/2, topic | properties length 2, properties

Not stored, because it follows: the size; the magic and the width of the topic length (version 2 exactly when the topic
is longer than 127 bytes). A row that this would rebuild differently has `wire`, and that wins.
"""

import ipaddress
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from neve.record.codec import MalformedRecord, decode_record
from neve.record.layout import HOST_V4_SIZE, I32, dtype_of, topic_field
from neve.record.properties import PROPERTY_TAGS, tags_code

#: Columns that have another name than the field of the record.
COLUMN_OF = {"physical_offset": "commit_log_offset"}


def _part(first: str, last: str) -> np.dtype[np.void]:
    return np.dtype([(COLUMN_OF.get(name, name), kind) for name, kind in dtype_of(first, last)])


_FRONT = _part("size", "born_timestamp")
_REAR = _part("reconsume_times", "body_length")
assert (_FRONT.itemsize, _REAR.itemsize) == (48, 16)

# Arrow's view of a string: up to 12 bytes stand in it, of a longer one the first 4 and where it lies.
_VIEW = np.dtype([("length", "<i4"), ("prefix", "V4"), ("buffer", "<i4"), ("position", "<i4")])
_INLINE_MAX = 12
_EMPTY = pa.scalar(b"", pa.binary())


class Records(NamedTuple):
    """Records one after another; record i is wire[positions[i]:positions[i + 1]]."""

    wire: memoryview
    positions: npt.NDArray[np.int64]

    @staticmethod
    def of(records: Sequence[bytes | memoryview]) -> "Records":
        return Records(memoryview(b"".join(records)), np.cumsum([0, *map(len, records)], dtype=np.int64))

    def record(self, row: int) -> memoryview:
        return self.wire[self.positions[row] : self.positions[row + 1]]

    def same_as(self, other: "Records") -> bool:
        # Arrow compares buffers as memory; memoryview goes byte by byte.
        same_bytes: bool = pa.py_buffer(self.wire).equals(pa.py_buffer(other.wire))
        return same_bytes and np.array_equal(self.positions, other.positions)


def rebuild(rows: pa.Table, topic: str) -> Records:
    """The stored records of a topic's rows."""
    if not len(rows):
        return Records(memoryview(b""), np.zeros(1, np.int64))
    table = rows.combine_chunks()
    topic_bytes = topic.encode("utf-8", "surrogateescape")
    magic, topic_part = topic_field(topic_bytes)
    body, properties = _bytes(table, "body"), _properties(table)
    born, store = (_mapped(_column(table, name), _host_bytes) for name in ("born_host", "store_host"))
    rear = np.zeros(len(table), _REAR)
    for name in ("reconsume_times", "prepared_transaction_offset"):
        rear[name] = _numbers(table, name)
    rear["body_length"] = _lengths(body)
    front = np.zeros(len(table), _FRONT)
    for name in ("body_crc", "queue_id", "flag", "queue_offset", "commit_log_offset", "sys_flag", "born_timestamp"):
        front[name] = _numbers(table, name)
    front["magic"] = magic
    fixed = _FRONT.itemsize + 8 + _REAR.itemsize + len(topic_part) + 2
    front["size"] = fixed + _lengths(born) + _lengths(store) + _lengths(body) + _lengths(properties)
    store_time = _packed(_numbers(table, "store_timestamp").astype(">i8"))
    head = pc.binary_join_element_wise(_packed(front), born, store_time, store, _packed(rear), _EMPTY)
    length = _packed(_lengths(properties).astype(">u2"))
    rest = pc.binary_join_element_wise(pa.scalar(topic_part, pa.binary()), length, properties, _EMPTY)
    joined = _woven([head, body, rest])
    wire = _column(table, "wire")
    return _as_buffer(joined if wire.null_count == len(wire) else pc.coalesce(wire, joined))


def tag_codes(rows: pa.Table, rebuilt: Records) -> npt.NDArray[np.int64]:
    """Java's hash of each row's tags, as the queue entries of the hot store have it."""
    table = rows.combine_chunks()
    encoded = _column(table, "tags").dictionary_encode()
    known = np.array([tags_code(tags) for tags in encoded.dictionary.to_pylist()] + [0], np.int64)
    codes: npt.NDArray[np.int64] = known[encoded.indices.fill_null(len(known) - 1).to_numpy(zero_copy_only=False)]
    undecoded = pc.and_(pc.is_valid(_column(table, "wire")), pc.is_null(_column(table, "tags")))
    for row in np.flatnonzero(undecoded.to_numpy(zero_copy_only=False)):
        codes[row] = tags_code(_lenient_tags(bytes(rebuilt.record(int(row)))))
    return codes


def _lenient_tags(record: bytes) -> str | None:
    """Tags that are no valid UTF-8 hash as RocketMQ's reader would see them; a damaged record has none."""
    try:
        return decode_record(record).properties.get(PROPERTY_TAGS)
    except MalformedRecord:
        return None


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _bytes(table: pa.Table, name: str) -> pa.Array:
    return pc.fill_null(_column(table, name), b"")


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    column = _column(table, name).cast(pa.int64())
    return np.asarray(pc.fill_null(column, 0).to_numpy(zero_copy_only=False), np.int64)


def _lengths(values: pa.Array) -> npt.NDArray[np.int64]:
    return np.asarray(pc.binary_length(values).to_numpy(zero_copy_only=False), np.int64)


def _packed(values: npt.NDArray[Any]) -> pa.Array:
    """A numpy array of fixed structures as a binary array."""
    width = pa.binary(values.dtype.itemsize)
    return pa.Array.from_buffers(width, len(values), [None, pa.py_buffer(values)]).cast(pa.binary())


def _mapped(texts: pa.Array, function: Callable[[str | None], bytes]) -> pa.Array:
    """Applies a function once per distinct text."""
    encoded = texts.dictionary_encode()
    distinct = pa.array([function(text) for text in encoded.dictionary.to_pylist()] + [function(None)], pa.binary())
    return distinct.take(pc.fill_null(encoded.indices, len(distinct) - 1))


def _host_bytes(text: str | None) -> bytes:
    if text is None:
        return bytes(HOST_V4_SIZE)
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + I32.pack(int(port))


def _properties(table: pa.Table) -> pa.Array:
    """name 0x01 value, joined by 0x02, and the last 0x02 where it stood."""
    column = _column(table, "properties")
    keys, items = column.keys.cast(pa.binary()), column.items.cast(pa.binary())
    pairs = pc.binary_join_element_wise(keys, items, pa.scalar(b"\x01", pa.binary()))
    offsets = pa.Array.from_buffers(pa.int32(), len(column) + 1, [None, column.buffers()[1]], offset=column.offset)
    lists = pa.ListArray.from_arrays(offsets, pairs)
    joined = pc.fill_null(pc.binary_join(lists, b"\x02"), b"")
    tail = pc.if_else(pc.fill_null(_column(table, "properties_tail"), False), pa.scalar(b"\x02"), pa.scalar(b""))
    return pc.binary_join_element_wise(joined, tail, _EMPTY)


def views(source: Any, begins: npt.NDArray[Any], sizes: npt.NDArray[Any], buffer: int = 0) -> npt.NDArray[np.void]:
    """Arrow's views of source[begin:begin + size], which may lie in any order; `buffer` is the source's number."""
    described = np.zeros(len(begins), _VIEW)
    described["length"], described["position"], described["buffer"] = sizes, begins, buffer
    inline = np.flatnonzero(sizes <= _INLINE_MAX)
    long = slice(None) if not len(inline) else np.flatnonzero(sizes > _INLINE_MAX)
    if len(inline) < len(begins):
        prefixes = np.ndarray((len(source) - 3,), "V4", source, strides=(1,))
        described["prefix"][long] = prefixes[begins[long]]
    if len(inline):
        data = np.frombuffer(source, np.uint8) if len(source) else np.zeros(1, np.uint8)
        columns = np.arange(_INLINE_MAX)
        within = np.minimum(begins[inline, None] + columns, len(data) - 1)
        texts = np.where(columns < sizes[inline, None], data[within], 0).astype(np.uint8)
        described.view(np.uint8).reshape(-1, _VIEW.itemsize)[inline, 4:] = texts
    return described


def joined_views(described: npt.NDArray[np.void], sources: Sequence[Any]) -> pa.Array:
    """What the views show, copied together."""
    buffers = [pa.py_buffer(source) for source in sources]
    viewed = pa.Array.from_buffers(pa.binary_view(), len(described), [None, pa.py_buffer(described), *buffers])
    return viewed.cast(pa.binary())


def _woven(parts: Sequence[pa.Array]) -> pa.Array:
    """The parts' elements joined row by row."""
    described = np.empty((len(parts[0]), len(parts)), _VIEW)
    sources = []
    for number, part in enumerate(parts):
        _, offsets, data = part.buffers()
        sources.append(memoryview(data if data is not None else b""))
        ends = np.frombuffer(offsets, np.int32)[part.offset : part.offset + len(part) + 1]
        described[:, number] = views(sources[-1], ends[:-1], np.diff(ends), number)
    _, offsets, data = joined_views(described.reshape(-1), sources).buffers()
    ends = np.frombuffer(offsets, np.int32)[: described.size + 1 : len(parts)]
    return pa.Array.from_buffers(pa.binary(), len(described), [None, pa.py_buffer(np.ascontiguousarray(ends)), data])


def _as_buffer(records: pa.Array) -> Records:
    _, offsets, data = records.buffers()
    positions = np.frombuffer(offsets, np.int32)[records.offset : records.offset + len(records) + 1].astype(np.int64)
    # Arrow exports signed bytes; compared with ordinary ones they would differ above 0x7F.
    wire = memoryview(data if data is not None else b"").cast("B")[positions[0] : positions[-1]]
    return Records(wire, positions - positions[0])
