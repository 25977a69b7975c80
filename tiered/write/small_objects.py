"""Encoding of many small objects together: their columns are built and verified in one batch.

For an object with few rows, nearly all work is independent of the rows, so it is done once per group. Each object
becomes a file of its own in memory, equal to the one that `segment_writer.encode` would write. It is read back with
page checksums as there, and its rebuilt records are compared with the sealed bytes. An object with a row of uncommon
shape, or one that does not rebuild, is left to `encode`.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from zlib_ng.zlib_ng import crc32

from neve.archive.format.journal import CommittedObject, RowGroup
from neve.archive.rows.column_encoder import common_tables
from neve.archive.rows.rebuild import Records, TopicFields, rebuild_of
from neve.archive.rows.row_encoder import Entries
from neve.archive.rows.schema import SCHEMA, DamagedObject, ObjectFacts, describe, file_metadata, writer_options
from tiered.write.segment_writer import GroupSizes, LogFiles, WrittenObject
from tiered.write.uploader import SMALL_BYTES


class SmallObject(NamedTuple):
    """An object's name and facts, and its entries: queue, first offset, count, in the order of the queues."""

    key: str
    facts: ObjectFacts
    runs: Sequence[tuple[int, int, int]]

    @property
    def rows(self) -> int:
        return sum(count for _, _, count in self.runs)


class _Made(NamedTuple):
    """A file that was read back, and the bytes that its rows must rebuild to."""

    number: int
    content: pa.Buffer
    name: CommittedObject
    rows: pa.Table
    wire: memoryview


def is_small(wire_bytes: int, sizes: GroupSizes) -> bool:
    """Whether an object of this many wire bytes has one row group and may be encoded with others."""
    return 0 < wire_bytes <= SMALL_BYTES and wire_bytes < sizes.at_queue_change


def encode_small(objects: Sequence[SmallObject], entries: Entries, log: LogFiles) -> list[WrittenObject | None]:
    """Return a verified object for each, or None if it must be encoded alone. `entries`: of all objects, in order.

    Raises MissingBytes.
    """
    counts = np.array([one.rows for one in objects], np.int64)
    borders = np.concatenate([[0], np.cumsum(counts)])
    sealed = log.records(entries)
    table, found = _common(entries, sealed, objects, counts)
    first = np.searchsorted(found, borders)  # first row of each object in the table
    made: list[_Made] = []
    for number in np.flatnonzero(np.diff(first) == counts).tolist():
        wire = sealed.wire[sealed.positions[borders[number]] : sealed.positions[borders[number + 1]]]
        try:
            made.append(_make(number, objects[number], table.slice(first[number], counts[number]), wire))
        except (DamagedObject, pa.ArrowException):
            continue  # `encode` reports the fault
    written: list[WrittenObject | None] = [None] * len(objects)
    for one in _proved(made, np.diff(sealed.positions), borders):
        written[one.number] = WrittenObject(one.content, one.name, 0, 0)
    return written


def _common(
    entries: Entries, sealed: Records, objects: Sequence[SmallObject], counts: npt.NDArray[np.int64]
) -> tuple[pa.Table, npt.NDArray[np.int64]]:
    """Return the rows of the common shape, in order, and their indices."""
    topics = TopicFields.of_each([one.facts.topic for one in objects], counts)
    parts, rows = common_tables(entries, sealed, topics)
    if not parts:
        return SCHEMA.empty_table(), np.empty(0, np.int64)
    if len(parts) == 1:
        return parts[0], rows[0]
    found = np.concatenate(rows)
    order = np.argsort(found)
    return pa.concat_tables(parts).take(pa.array(order)), found[order]


def _make(number: int, one: SmallObject, table: pa.Table, wire: memoryview) -> _Made:
    times = table.column("store_timestamp").cast(pa.int64()).to_numpy()
    runs = [(queue, first, first + count - 1) for queue, first, count in one.runs]
    group = RowGroup(0, len(table), 0, 0, int(times.max()), int(times.min()), len(wire), runs)
    sha256 = hashlib.sha256(wire).hexdigest()
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, SCHEMA, **writer_options(len(table), len(wire))) as writer:
        writer.write_table(table, row_group_size=len(table))
        writer.add_key_value_metadata(file_metadata(one.facts, sha256, [group]))
    content = sink.getvalue()
    file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
    name = describe(
        file.metadata,
        key=one.key,
        size=content.size,
        footer=int.from_bytes(content.slice(content.size - 8, 4), "little") + 8,
        etag="",
        checksum=("crc32", f"{crc32(content):08x}"),
    )
    if name.sha256 != sha256 or name.rows != len(table):
        raise DamagedObject(f"{one.key} describes other rows than were written")
    return _Made(number, content, name, file.read_row_group(0, use_threads=False), wire)


def _proved(made: Sequence[_Made], sizes: npt.NDArray[np.int64], borders: npt.NDArray[np.int64]) -> list[_Made]:
    """Return the objects that rebuild to the sealed bytes. `sizes`: of all records; `borders`: of the objects."""
    if not made:
        return []
    counts = [len(one.rows) for one in made]
    topics = TopicFields.of_each([one.name.topic for one in made], counts)
    rebuilt = rebuild_of(pa.concat_tables([one.rows for one in made]), topics)
    proved, at = [], 0
    for one, count in zip(made, counts, strict=True):
        positions = rebuilt.positions[at : at + count + 1]
        sealed = sizes[borders[one.number] : borders[one.number + 1]]
        wire = pa.py_buffer(rebuilt.wire[positions[0] : positions[-1]])
        if np.array_equal(np.diff(positions), sealed) and wire.equals(pa.py_buffer(one.wire)):
            proved.append(one)
        at += count
    return proved
