"""Encode stored records as rows one by one, for records of any shape; `column_encoder` encodes the common ones.

A value that its column cannot represent exactly is left out. The segment writer compares each rebuilt row with its
record, and stores the record itself in `wire` if they differ. So exactness does not depend on this parser.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from neve.archive.rows.rebuild import Records, rebuild
from neve.archive.rows.schema import SCHEMA, TIME_END_MS, body_codec
from neve.record.codec import MalformedRecord, MessageRecord, decode_record, host_text
from neve.record.layout import BORN_HOST_V6, HEAD_V4, MAGIC_V1, MAGIC_V2, STORE_HOST_V6
from neve.record.properties import PROPERTY_KEYS, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY, bytes_to_properties, exact_pairs


class QueueEntry(NamedTuple):
    """A record's entry in the ConsumeQueue; of a damaged record, only these values are reliable."""

    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int


class Entries(NamedTuple):
    """Queue entries as columns."""

    queue_id: npt.NDArray[np.int32]
    queue_offset: npt.NDArray[np.int64]
    physical: npt.NDArray[np.int64]
    size: npt.NDArray[np.int32]

    def at(self, rows: slice | npt.NDArray[Any]) -> "Entries":
        return Entries(self.queue_id[rows], self.queue_offset[rows], self.physical[rows], self.size[rows])

    def each(self) -> list[QueueEntry]:
        return [QueueEntry(*row) for row in zip(*(column.tolist() for column in self), strict=True)]


def exact_rows(entries: Sequence[QueueEntry], records: Sequence[memoryview], topic: str) -> pa.Table:
    """Encode records as rows without `wire`; `with_wire` adds it where it is needed."""
    rows = [_row(entry, record, topic) for entry, record in zip(entries, records, strict=True)]
    return pa.Table.from_pylist(rows, SCHEMA)


def with_wire(table: pa.Table, sealed: Records, topic: str) -> pa.Table:
    """Return the table with `wire` set in rows whose other columns do not rebuild the record."""
    rebuilt = rebuild(table, topic)
    if rebuilt.same_as(sealed):
        return table
    differs = pc.not_equal(_array(rebuilt), _array(sealed))
    records = _array(sealed).filter(differs)
    kept = table.column("wire").combine_chunks()
    column = pc.replace_with_mask(kept, differs, records)
    return table.set_column(table.schema.get_field_index("wire"), "wire", column)


def _array(records: Records) -> pa.Array:
    offsets, wire = records.positions.astype(np.int32), pa.py_buffer(records.wire)
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), wire])


def _row(entry: QueueEntry, raw: memoryview, topic: str) -> dict[str, Any]:
    common = _common_row(entry, raw, topic)
    if common is not None:
        return common
    row: dict[str, Any] = {
        "queue_id": entry.queue_id,
        "queue_offset": entry.queue_offset,
        "commit_log_offset": entry.physical_offset,
        "keys": [],
        "properties": [],
        "properties_tail": False,
        "damaged": True,
    }
    try:
        record = decode_record(raw)
    except MalformedRecord:
        # An unknown magic may have an unknown framing; only a known one can be called damaged.
        magic = int.from_bytes(raw[4:8], "big", signed=True)
        row["damaged"] = magic in (MAGIC_V1, MAGIC_V2) or int.from_bytes(raw[:4], "big") != len(raw)
        row["wire"] = bytes(raw)
        return row
    if not _agrees(record, entry, topic, len(raw)) or zlib.crc32(record.body) & 0x7FFFFFFF != record.body_crc:
        row["wire"] = bytes(raw)
    else:
        row["damaged"] = False
    row.update(_columns(record))
    return row


def _common_row(entry: QueueEntry, raw: memoryview, topic: str) -> dict[str, Any] | None:
    """Encode the shape of nearly all records: version 1, two IPv4 hosts, undamaged; None for any other."""
    if len(raw) < HEAD_V4.size:
        return None
    (size, magic, crc, queue, flag, offset, physical, sys_flag, born, born_host, stored, store_host,
     reconsumed, prepared, body_length) = HEAD_V4.unpack_from(raw)  # fmt: skip
    is_entry = (queue, offset, physical, size) == entry
    if magic != MAGIC_V1 or sys_flag & (BORN_HOST_V6 | STORE_HOST_V6) or not is_entry or size != len(raw):
        return None
    topic_part = topic.encode("utf-8", "surrogateescape")
    topic_at = HEAD_V4.size + body_length
    properties_at = topic_at + 1 + len(topic_part) + 2
    if body_length < 0 or properties_at > size or raw[topic_at] != len(topic_part):
        return None
    body, properties = bytes(raw[HEAD_V4.size : topic_at]), bytes(raw[properties_at:])
    length = len(properties).to_bytes(4, "big")[2:]
    if raw[topic_at + 1 : properties_at] != topic_part + length or zlib.crc32(body) & 0x7FFFFFFF != crc:
        return None
    row = _property_columns(properties)
    row.update(
        queue_id=queue,
        queue_offset=offset,
        commit_log_offset=physical,
        damaged=False,
        store_timestamp=_time(stored),
        born_timestamp=_time(born),
        body=body,
        body_codec=body_codec(sys_flag),
        sys_flag=sys_flag,
        flag=flag,
        reconsume_times=reconsumed,
        body_crc=crc,
        prepared_transaction_offset=prepared,
        born_host=_host_text(born_host),
        store_host=_host_text(store_host),
    )
    return row


_host_text = lru_cache(4096)(host_text)


def _agrees(record: MessageRecord, entry: QueueEntry, topic: str, length: int) -> bool:
    """Return whether a record matches its queue entry and topic."""
    found = QueueEntry(record.queue_id, record.queue_offset, record.physical_offset, record.size)
    return found == entry and record.size == length and record.topic == topic


def _columns(record: MessageRecord) -> dict[str, Any]:
    return {
        **_property_columns(record.properties_raw),
        "store_timestamp": _time(record.store_timestamp),
        "born_timestamp": _time(record.born_timestamp),
        "body": record.body,
        "body_codec": body_codec(record.sys_flag),
        "sys_flag": record.sys_flag,
        "flag": record.flag,
        "reconsume_times": record.reconsume_times,
        "body_crc": record.body_crc,
        "prepared_transaction_offset": record.prepared_transaction_offset,
        "born_host": record.born_host,
        "store_host": record.store_host,
    }


def _property_columns(raw: bytes) -> dict[str, Any]:
    pairs, tail = exact_pairs(raw)
    named = dict(pairs)
    seen = named | bytes_to_properties(raw)  # of a repeated name, the value that a query by key compares
    return {
        "msg_id": seen.get(PROPERTY_UNIQUE_KEY),
        "tags": named.get(PROPERTY_TAGS),
        "keys": [key for key in seen.get(PROPERTY_KEYS, "").split(" ") if key],
        "properties": pairs,
        "properties_tail": tail,
    }


def _time(value: int) -> int | None:
    return value if 0 <= value < TIME_END_MS else None
