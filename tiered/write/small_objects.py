"""Many small objects at once: their columns are made together, and what they rebuild is proved together.

Of an object of few rows nearly all the work is the same whatever is in it, so it is done once for a whole group. Each
becomes a file of its own, in memory, that `segment_writer.encode` would write in the same way, and is read back with
page checksums as there; what all of them rebuild is compared with the sealed bytes. One with a row that is not of the
common shape, or that does not rebuild, is left to `encode`.
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
    """What an object is of, and which entries it has: queue, first offset, count, in the order of the queues."""

    key: str
    facts: ObjectFacts
    runs: Sequence[tuple[int, int, int]]

    @property
    def rows(self) -> int:
        return sum(count for _, _, count in self.runs)


class _Made(NamedTuple):
    """A file that was read back, and the bytes that its rows have to rebuild."""

    number: int
    content: pa.Buffer
    name: CommittedObject
    rows: pa.Table
    wire: memoryview


def is_small(wire_bytes: int, sizes: GroupSizes) -> bool:
    """Whether so many wire bytes make an object of one row group, which may be made beside others."""
    return 0 < wire_bytes <= SMALL_BYTES and wire_bytes < sizes.at_queue_change


def encode_small(objects: Sequence[SmallObject], entries: Entries, log: LogFiles) -> list[WrittenObject | None]:
    """For each the verified object, or None where it has to be made alone. `entries`: of all, one after the other.

    Raises MissingBytes.
    """
    counts = np.array([one.rows for one in objects], np.int64)
    borders = np.concatenate([[0], np.cumsum(counts)])
    sealed = log.records(entries)
    table, found = _common(entries, sealed, objects, counts)
    first = np.searchsorted(found, borders)  # where each object's rows begin in the table
    made: list[_Made] = []
    for number in np.flatnonzero(np.diff(first) == counts).tolist():
        wire = sealed.wire[sealed.positions[borders[number]] : sealed.positions[borders[number + 1]]]
        try:
            made.append(_make(number, objects[number], table.slice(first[number], counts[number]), wire))
        except (DamagedObject, pa.ArrowException):
            continue  # what is wrong with it says `encode`
    written: list[WrittenObject | None] = [None] * len(objects)
    for one in _proved(made, np.diff(sealed.positions), borders):
        written[one.number] = WrittenObject(one.content, one.name, 0, 0)
    return written


def _common(
    entries: Entries, sealed: Records, objects: Sequence[SmallObject], counts: npt.NDArray[np.int64]
) -> tuple[pa.Table, npt.NDArray[np.int64]]:
    """The rows of the common shape, in order, and which they are."""
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
    """Those whose rows rebuild to the sealed bytes; `sizes` of all records, `borders` of all objects among them."""
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
