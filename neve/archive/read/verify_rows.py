"""Are the rows of an object the ones that the journal says: decoded, rebuilt to records, counted, and checked.

Each byte is asked for once but for the footer's. What is wrong with a row group is said of its offsets, and of one row
where that can be told. Memory: a row group, compressed and decoded.

    page checksums, the rebuilt length, and SHA-256 over all records     bytes that are not those committed
    queue and offset of each row against the journal's runs              a hole, a row twice, another object's rows
    body_crc of each row that is not marked damaged                      a message that was archived broken
    records kept as they came                                            one that is framed wrongly and not marked
    store time against the row group's bounds                            what TTL and readers by time go by
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
from neve.archive.read.verify import Content, Fault, VerifySource, head_faults
from neve.archive.rows.rebuild import Records, rebuild
from neve.archive.rows.row_groups import read_group
from neve.archive.rows.schema import SCHEMA, DamagedObject, parse_footer
from neve.record.codec import MalformedRecord, decode_record

_PART = 8 << 20
_COLUMNS = tuple(SCHEMA.names)  # those too that no record is rebuilt from: who searches goes by them
_TOLD = 10  # rows of a row group that are named one by one
_CUT_SHORT = "it became shorter while it was read"
# What decoding raises on bytes that are not those written; of a damaged footer nearly anything.
_BROKEN = (DamagedObject, pa.ArrowException, ValueError, LookupError, OverflowError)


def whole_object_faults(name: CommittedObject, source: VerifySource) -> Iterator[Fault]:
    """All that can be found out about one object. Raises what the store raises, but FileNotFoundError."""
    is_whole = True
    for fault, is_readable in head_faults(name, source):
        is_whole &= is_readable
        yield fault
    if is_whole:
        try:
            yield from _Check(name, source).faults()
        except FileNotFoundError:
            yield Fault(name.topic, name.key, "the object went while it was read")


class _Check:
    def __init__(self, name: CommittedObject, source: VerifySource) -> None:
        self._name, self._source = name, source
        self._content = Content(name)
        self._wire: hashlib._Hash | None = hashlib.sha256()  # None: some rows could not be rebuilt

    def faults(self) -> Iterator[Fault]:
        name = self._name
        footer = self._source.get_range(name.key, name.size - name.footer, name.footer)
        try:
            metadata = _parsed(footer, name)
        except _BROKEN as error:
            yield from self._of_all(f"its footer is damaged: {error}")
            metadata = None
        position = 0
        for index, group in enumerate(name.row_groups):
            self._pass(position, group.offset)
            data = self._source.get_range(name.key, group.offset, group.length)
            if len(data) != group.length:
                yield from self._of_all(_CUT_SHORT)
                return
            self._content.add(data)
            position = group.offset + group.length
            if metadata is not None:
                yield from self._group_faults(metadata, index, group, data)
        self._pass(position, name.size)
        yield from self._content.faults()
        if metadata is not None and self._wire is not None and name.sha256:
            found = self._wire.hexdigest()
            if found != name.sha256:
                yield from self._of_all(f"SHA-256 of its records {found}, the journal says {name.sha256}")

    def _pass(self, start: int, end: int) -> None:
        """What lies between row groups, and behind them: filters, indexes, the footer."""
        for at in range(start, end, _PART):
            self._content.add(self._source.get_range(self._name.key, at, min(_PART, end - at)))

    def _of_all(self, text: str) -> Iterator[Fault]:
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
            for queue, offset, text in _named(table, index, group, records)
        )


def _parsed(footer: bytes, name: CommittedObject) -> pq.FileMetaData:
    metadata = parse_footer(footer)
    if metadata.num_row_groups != len(name.row_groups) or metadata.num_rows != name.rows:
        text = f"{metadata.num_rows} rows in {metadata.num_row_groups} row groups"
        raise DamagedObject(f"{text}, the journal says {name.rows} in {len(name.row_groups)}")
    return metadata


def _named(table: pa.Table, index: int, group: RowGroup, records: Records) -> Iterator[tuple[int, int, str]]:
    """(queue, offset, what is wrong) of the first rows of each kind, by what the rows themselves say."""
    queues, offsets = _numbers(table, "queue_id"), _numbers(table, "queue_offset")
    yield from _of_other_places(queues, offsets, index, group)
    for text, rows in (
        ("its body is not what its CRC says, and it is not marked as damaged", _of_wrong_crc(table)),
        ("its record is framed wrongly, and it is not marked as damaged", _framed_wrongly(table, records)),
        (f"its store time is outside what the journal says of row group {index}", _of_other_times(table, group)),
    ):
        for row in rows[:_TOLD]:
            yield int(queues[row]), int(offsets[row]), text
        if len(rows) > _TOLD:
            row = rows[_TOLD]
            yield int(queues[row]), int(offsets[row]), f"{text}; so are {len(rows) - _TOLD - 1} rows more of row group"


def _of_other_places(
    queues: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], index: int, group: RowGroup
) -> Iterator[tuple[int, int, str]]:
    expected_queues = np.concatenate([np.full(last - first + 1, queue) for queue, first, last in group.runs])
    expected_offsets = np.concatenate([np.arange(first, last + 1) for _, first, last in group.runs])
    if len(offsets) != len(expected_offsets):
        queue, first, _ = group.runs[0]
        yield queue, first, f"row group {index} has {len(offsets)} rows, the journal says {len(expected_offsets)}"
        return
    wrong = np.flatnonzero((queues != expected_queues) | (offsets != expected_offsets))
    if len(wrong):
        at = wrong[0]
        found = f"queue {queues[at]} offset {offsets[at]}"
        yield int(expected_queues[at]), int(expected_offsets[at]), f"in its place is {found} (of {len(wrong)} rows)"


def _of_wrong_crc(table: pa.Table) -> list[int]:
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


def _framed_wrongly(table: pa.Table, records: Records) -> list[int]:
    """Of those that are kept as they came; the others are framed by being rebuilt."""
    kept = pc.is_valid(_column(table, "wire"))
    sound = pc.and_(kept, pc.invert(pc.fill_null(_column(table, "damaged"), False)))
    wrong = []
    for row in np.flatnonzero(sound.to_numpy(zero_copy_only=False)).tolist():
        record = records.record(row)
        try:
            if decode_record(record).size != len(record):
                wrong.append(row)
        except MalformedRecord:
            # a magic from the future frames itself otherwise: then its size alone is known
            if int.from_bytes(record[:4], "big") != len(record):
                wrong.append(row)
    return wrong


def _of_other_times(table: pa.Table, group: RowGroup) -> list[int]:
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
