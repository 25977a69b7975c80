"""Stored records to rows, one by one: understands every shape, and is the yardstick for the vectorised path.

A value that its column cannot hold exactly is left out; the segment writer then compares what the row rebuilds with the
record and keeps the record itself in `wire` where they differ. So exactness never rests on this parser knowing
every variant.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from neve.archive.rebuild import rebuild
from neve.archive.schema import SCHEMA, TIME_END_MS, body_codec
from neve.message import (
    MAGIC_V1,
    MAGIC_V2,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    MalformedRecord,
    MessageRecord,
    decode_record,
)


class QueueEntry(NamedTuple):
    """What the ConsumeQueue says of a record; for a damaged one, all that is left to trust."""

    queue_id: int
    queue_offset: int
    physical_offset: int
    size: int


def table_of(entries: Sequence[QueueEntry], records: Sequence[memoryview], topic: str) -> pa.Table:
    """Rows that rebuild to exactly these records."""
    rows = [_row(entry, record, topic) for entry, record in zip(entries, records, strict=True)]
    table = pa.Table.from_pylist(rows, SCHEMA)
    return with_wire(table, records, topic)


def with_wire(table: pa.Table, records: Sequence[memoryview], topic: str) -> pa.Table:
    """The table, with `wire` wherever the other columns do not rebuild the record."""
    rebuilt = rebuild(table, topic)
    wire = [None if rebuilt.record(row) == record else bytes(record) for row, record in enumerate(records)]
    if not any(value is not None for value in wire):
        return table
    kept = table.column("wire").to_pylist()
    column = [new if new is not None else old for new, old in zip(wire, kept, strict=True)]
    return table.set_column(table.schema.get_field_index("wire"), "wire", pa.array(column, pa.binary()))


def _row(entry: QueueEntry, raw: memoryview, topic: str) -> dict[str, Any]:
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
        # A magic from the future may frame itself otherwise; only a known one can be said to be broken.
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


def _agrees(record: MessageRecord, entry: QueueEntry, topic: str, length: int) -> bool:
    """Whether the record is the one that its queue entry means."""
    said = QueueEntry(record.queue_id, record.queue_offset, record.physical_offset, record.size)
    return said == entry and record.size == length and record.topic == topic


def _columns(record: MessageRecord) -> dict[str, Any]:
    pairs, tail = split_properties(record.properties_raw)
    named = dict(pairs)
    return {
        "store_timestamp": _time(record.store_timestamp),
        "born_timestamp": _time(record.born_timestamp),
        "msg_id": named.get(PROPERTY_UNIQUE_KEY),
        "tags": named.get(PROPERTY_TAGS),
        "keys": [key for key in named.get(PROPERTY_KEYS, "").split(" ") if key],
        "properties": pairs,
        "properties_tail": tail,
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


def split_properties(raw: bytes) -> tuple[list[tuple[str, str]], bool]:
    """The pairs that a map can hold, in wire order, and whether the string ended with 0x02."""
    tail = raw.endswith(b"\x02")
    pairs: dict[str, str] = {}
    for part in (raw[:-1] if tail else raw).split(b"\x02"):
        name, separator, value = part.partition(b"\x01")
        if not separator:
            continue
        try:
            pairs.setdefault(name.decode(), value.decode())
        except UnicodeDecodeError:
            continue
    return list(pairs.items()), tail


def _time(value: int) -> int | None:
    return value if 0 <= value < TIME_END_MS else None
