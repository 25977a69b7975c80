"""Verify the rows of an object: decode them, rebuild the records, and compare both with the journal.

Each byte is read once, except for the footer. A fault names a row group's offsets, or one row if that is known. The
memory used is one row group, compressed and decoded.

    page checksums, the rebuilt length, and SHA-256 over all records     detect bytes other than those committed
    queue and offset of each row against the journal's runs              detect missing, repeated and foreign rows
    body_crc of each row that is not marked damaged                      detects a message that was archived damaged
    records stored as they were                                          detect wrong framing that is not marked
    store time against the row group's bounds                            detects wrong bounds for TTL and time queries
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from neve.archive.format.journal import CommittedObject, RowGroup
from neve.archive.read.verify import PART_BYTES, Fault, ObjectChecksum, VerifySource
from neve.archive.rows.rebuild import Records, rebuild
from neve.archive.rows.row_groups import read_group
from neve.archive.rows.schema import SCHEMA, DamagedObject, parse_footer
from neve.record.codec import MalformedRecord, decode_record

_COLUMNS = tuple(SCHEMA.names)  # including those that serve queries only
_LISTED = 10  # rows of a row group that are reported one by one
_CUT_SHORT = "the object became shorter while it was read"
# Raised when damaged bytes are decoded; a damaged footer may raise any of these.
_BROKEN = (DamagedObject, pa.ArrowException, ValueError, LookupError, OverflowError)


def row_faults(name: CommittedObject, source: VerifySource) -> Iterator[Fault]:
    """Yield all faults in the content of an object: a content check of `object_faults`."""
    yield from _Check(name, source).faults()


class _Check:
    def __init__(self, name: CommittedObject, source: VerifySource) -> None:
        self._name, self._source = name, source
        self._content = ObjectChecksum(name)
        self._wire: hashlib._Hash | None = hashlib.sha256()  # None once a row group could not be rebuilt

    def faults(self) -> Iterator[Fault]:
        name = self._name
        footer = self._source.get_range(name.key, name.size - name.footer, name.footer)
        try:
            metadata = _parsed(footer, name)
        except _BROKEN as error:
            yield from self._whole(f"the footer is damaged: {error}")
            metadata = None
        position = 0
        for index, group in enumerate(name.row_groups):
            self._skip(position, group.offset)
            data = self._source.get_range(name.key, group.offset, group.length)
            if len(data) != group.length:
                yield from self._whole(_CUT_SHORT)
                return
            self._content.add(data)
            position = group.offset + group.length
            if metadata is not None:
                yield from self._group_faults(metadata, index, group, data)
        self._skip(position, name.size)
        yield from self._content.faults()
        if metadata is not None and self._wire is not None and name.sha256:
            found = self._wire.hexdigest()
            if found != name.sha256:
                yield from self._whole(f"SHA-256 of its records {found}, the journal records {name.sha256}")

    def _skip(self, start: int, end: int) -> None:
        """Add the bytes outside row groups to the checksum: filters, indexes, the footer."""
        for at in range(start, end, PART_BYTES):
            self._content.add(self._source.get_range(self._name.key, at, min(PART_BYTES, end - at)))

    def _whole(self, text: str) -> Iterator[Fault]:
        for queue, (first, last, _) in sorted(self._name.queues.items()):
            yield Fault(self._name.topic, self._name.key, text, queue, first, last)

    def _group_faults(self, metadata: pq.FileMetaData, index: int, group: RowGroup, data: bytes) -> Iterator[Fault]:
        name = self._name
        try:
            table = read_group(metadata, index, group.offset, data, size=name.size, columns=_COLUMNS)
            records = rebuild(table, name.topic)
            if len(records.wire) != group.wire_bytes:
                raise DamagedObject(f"row group {index} rebuilds to {len(records.wire)} bytes, not {group.wire_bytes}")
        except _BROKEN as error:
            self._wire = None
            for queue, first, last in group.runs:
                yield Fault(name.topic, name.key, f"row group {index} is damaged: {error}", queue, first, last)
            return
        if self._wire is not None:
            self._wire.update(records.wire)
        table = table.combine_chunks()
        yield from (
            Fault(name.topic, name.key, text, queue, offset, offset)
            for queue, offset, text in _row_problems(table, index, group, records)
        )


def _parsed(footer: bytes, name: CommittedObject) -> pq.FileMetaData:
    metadata = parse_footer(footer)
    if metadata.num_row_groups != len(name.row_groups) or metadata.num_rows != name.rows:
        text = f"{metadata.num_rows} rows in {metadata.num_row_groups} row groups"
        raise DamagedObject(f"{text}, the journal records {name.rows} in {len(name.row_groups)}")
    return metadata


def _row_problems(table: pa.Table, index: int, group: RowGroup, records: Records) -> Iterator[tuple[int, int, str]]:
    """Yield (queue, offset, problem) for the first rows of each kind of problem."""
    queues, offsets = _numbers(table, "queue_id"), _numbers(table, "queue_offset")
    yield from _misplaced(queues, offsets, index, group)
    for text, rows in (
        ("the body does not match its CRC, and the row is not marked as damaged", _wrong_crc(table)),
        ("the record is framed wrongly, and the row is not marked as damaged", _misframed(table, records)),
        (
            f"the store time is outside the recorded bounds of row group {index}",
            _outside_times(table, group),
        ),
    ):
        for row in rows[:_LISTED]:
            yield int(queues[row]), int(offsets[row]), text
        if len(rows) > _LISTED:
            row = rows[_LISTED]
            yield (
                int(queues[row]),
                int(offsets[row]),
                f"{text} (and {len(rows) - _LISTED - 1} more rows)",
            )


def _misplaced(
    queues: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], index: int, group: RowGroup
) -> Iterator[tuple[int, int, str]]:
    expected_queues = np.concatenate([np.full(last - first + 1, queue) for queue, first, last in group.runs])
    expected_offsets = np.concatenate([np.arange(first, last + 1) for _, first, last in group.runs])
    if len(offsets) != len(expected_offsets):
        queue, first, _ = group.runs[0]
        yield queue, first, f"row group {index} has {len(offsets)} rows, the journal records {len(expected_offsets)}"
        return
    wrong = np.flatnonzero((queues != expected_queues) | (offsets != expected_offsets))
    if len(wrong):
        at = wrong[0]
        found = f"queue {queues[at]} offset {offsets[at]}"
        yield (
            int(expected_queues[at]),
            int(expected_offsets[at]),
            f"the row is of {found} (one of {len(wrong)} such rows)",
        )


def _wrong_crc(table: pa.Table) -> list[int]:
    bodies, crcs = _column(table, "body"), _column(table, "body_crc").to_pylist()
    sound = pc.and_(pc.is_valid(bodies), pc.invert(pc.fill_null(_column(table, "damaged"), False)))
    _, offsets, data = bodies.buffers()
    ends = np.frombuffer(offsets, np.int32)[bodies.offset : bodies.offset + len(bodies) + 1].tolist()
    view = memoryview(data if data is not None else b"").cast("B")
    return [
        row
        for row in np.flatnonzero(sound.to_numpy(zero_copy_only=False)).tolist()
        if zlib.crc32(view[ends[row] : ends[row + 1]]) & 0x7FFFFFFF != crcs[row]
    ]


def _misframed(table: pa.Table, records: Records) -> list[int]:
    """Return the rows whose stored record is framed wrongly; rebuilt records are always framed correctly."""
    kept = pc.is_valid(_column(table, "wire"))
    sound = pc.and_(kept, pc.invert(pc.fill_null(_column(table, "damaged"), False)))
    wrong = []
    for row in np.flatnonzero(sound.to_numpy(zero_copy_only=False)).tolist():
        record = records.record(row)
        try:
            if decode_record(record).size != len(record):
                wrong.append(row)
        except MalformedRecord:
            # A record with an unknown magic has an unknown framing; only its size can be checked.
            if int.from_bytes(record[:4], "big") != len(record):
                wrong.append(row)
    return wrong


def _outside_times(table: pa.Table, group: RowGroup) -> list[int]:
    if group.newest_ms < 0:
        return []
    times = pc.fill_null(_column(table, "store_timestamp").cast(pa.int64()), group.newest_ms).to_numpy()
    outside = np.flatnonzero((times > group.newest_ms) | (times < group.oldest_ms))
    return [int(row) for row in outside]


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks else pa.array([], column.type)


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    column = _column(table, name).cast(pa.int64())
    return np.asarray(pc.fill_null(column, -1).to_numpy(), np.int64)
