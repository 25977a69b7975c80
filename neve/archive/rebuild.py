"""Rows back to records, byte for byte; vectorised, so that a cold read costs no Python per message.

A record is the join of these parts (layout: neve.message); numbers come out of numpy as big-endian structures, the
texts are Arrow arrays, and the joined array's data and offset buffers are the answer:

    _FRONT 48 | born host 8/20 | store time 8 | store host 8/20 | _REAR 16 | body
    | topic length 1/2, topic | properties length 2, properties

Not stored, because it follows: the size; the magic and the width of the topic length (version 2 exactly when the topic
is longer than 127 bytes). A row that this would rebuild differently has `wire`, and that wins.
"""

import ipaddress
from collections.abc import Callable
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from neve.message import MAGIC_V1, MAGIC_V2, PROPERTY_TAGS, MalformedRecord, decode_record, tags_code

_FRONT = np.dtype(
    [
        ("size", ">i4"),
        ("magic", ">i4"),
        ("body_crc", ">i4"),
        ("queue_id", ">i4"),
        ("flag", ">i4"),
        ("queue_offset", ">i8"),
        ("commit_log_offset", ">i8"),
        ("sys_flag", ">i4"),
        ("born_timestamp", ">i8"),
    ]
)
_REAR = np.dtype([("reconsume_times", ">i4"), ("prepared_transaction_offset", ">i8"), ("body_length", ">i4")])
_PORT = Struct(">i")
_EMPTY = pa.scalar(b"", pa.binary())


class Records(NamedTuple):
    """Records one after another; record i is wire[positions[i]:positions[i + 1]]."""

    wire: memoryview
    positions: npt.NDArray[np.int64]

    def record(self, row: int) -> memoryview:
        return self.wire[self.positions[row] : self.positions[row + 1]]


def rebuild(rows: pa.Table, topic: str) -> Records:
    """The stored records of a topic's rows."""
    table = rows.combine_chunks()
    topic_bytes = topic.encode("utf-8", "surrogateescape")
    is_v1 = len(topic_bytes) <= 127
    topic_part = len(topic_bytes).to_bytes(1 if is_v1 else 2, "big") + topic_bytes
    body, properties = _bytes(table, "body"), _properties(table)
    born, store = (_mapped(_column(table, name), _host_bytes) for name in ("born_host", "store_host"))
    rear = np.zeros(len(table), _REAR)
    for name in ("reconsume_times", "prepared_transaction_offset"):
        rear[name] = _numbers(table, name)
    rear["body_length"] = _lengths(body)
    front = np.zeros(len(table), _FRONT)
    for name in ("body_crc", "queue_id", "flag", "queue_offset", "commit_log_offset", "sys_flag", "born_timestamp"):
        front[name] = _numbers(table, name)
    front["magic"] = MAGIC_V1 if is_v1 else MAGIC_V2
    fixed = _FRONT.itemsize + 8 + _REAR.itemsize + len(topic_part) + 2
    front["size"] = fixed + _lengths(born) + _lengths(store) + _lengths(body) + _lengths(properties)
    store_time = _packed(_numbers(table, "store_timestamp").astype(">i8"))
    parts = [_packed(front), born, store_time, store, _packed(rear), body, pa.scalar(topic_part, pa.binary())]
    length = _packed(_lengths(properties).astype(">u2"))
    joined = pc.binary_join_element_wise(*parts, length, properties, _EMPTY)
    return _as_buffer(pc.coalesce(_column(table, "wire"), joined))


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
        return bytes(8)
    address, _, port = text.rpartition(":")
    return ipaddress.ip_address(address.strip("[]")).packed + _PORT.pack(int(port))


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


def _as_buffer(records: pa.Array) -> Records:
    if not len(records):
        return Records(memoryview(b""), np.zeros(1, np.int64))
    _, offsets, data = records.buffers()
    positions = np.frombuffer(offsets, np.int32)[records.offset : records.offset + len(records) + 1].astype(np.int64)
    # Arrow exports signed bytes; compared with ordinary ones they would differ above 0x7F.
    wire = memoryview(data if data is not None else b"").cast("B")[positions[0] : positions[-1]]
    return Records(wire, positions - positions[0])
