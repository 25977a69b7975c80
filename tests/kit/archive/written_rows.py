"""Rows of a data object, written without a broker."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from neve.archive.format.journal import CommittedObject, RowGroup
from neve.archive.rows.rebuild import rebuild
from neve.archive.rows.schema import SCHEMA, ObjectFacts, describe, file_metadata, parse_footer


def row(queue: int, offset: int) -> dict[str, Any]:
    body = f"body {offset} of queue {queue} ".encode() * 40
    return {
        "queue_id": queue, "queue_offset": offset, "store_timestamp": 1_700_000_000_000 + offset,
        "born_timestamp": 1_700_000_000_000, "msg_id": f"{queue}-{offset}", "tags": "t", "keys": [],
        "properties": [("TAGS", "t")], "properties_tail": True, "body": body, "body_codec": "none", "sys_flag": 0,
        "flag": 0, "reconsume_times": 0, "body_crc": zlib.crc32(body) & 0x7FFFFFFF, "prepared_transaction_offset": 0,
        "commit_log_offset": 1000 * queue + offset, "born_host": "127.0.0.1:1", "store_host": "127.0.0.1:2",
        "wire": None, "damaged": False,
    }  # fmt: skip


def written(groups: Sequence[Sequence[dict[str, Any]]], topic: str = "t") -> tuple[CommittedObject, bytes]:
    """Return a committed object with these row groups, and its bytes."""
    sink, digest, told = pa.BufferOutputStream(), hashlib.sha256(), []
    with pq.ParquetWriter(sink, SCHEMA, compression="zstd", write_page_checksum=True) as writer:
        for rows in groups:
            table = pa.Table.from_pylist(list(rows), SCHEMA)
            writer.write_table(table, row_group_size=len(rows))
            wire = rebuild(table, topic).wire
            digest.update(wire)
            times = [one["store_timestamp"] for one in rows]
            told.append(RowGroup(0, len(rows), 0, 0, max(times), min(times), len(wire), runs(rows)))
        facts = ObjectFacts(cluster="c", broker="b", topic=topic, day="2026-01-01", round=0, start=0, end=1)
        writer.add_key_value_metadata(file_metadata(facts, digest.hexdigest(), told))
    data = sink.getvalue().to_pybytes()
    footer = int.from_bytes(data[-8:-4], "little") + 8
    checksum = ("SHA256", hashlib.sha256(data).hexdigest())
    metadata = parse_footer(data[-footer:])
    return describe(metadata, key=f"of {topic}", size=len(data), footer=footer, etag="", checksum=checksum), data


def runs(rows: Sequence[dict[str, Any]]) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for one in rows:
        queue, offset = one["queue_id"], one["queue_offset"]
        if found and found[-1][0] == queue:
            found[-1] = (queue, found[-1][1], offset)
        else:
            found.append((queue, offset, offset))
    return found
