"""Compaction: the rows of several data objects, in the order of the result -> one verified Parquet file.

    inputs ── by queue, in a queue by offset ──▶ row groups of GroupSizes ──▶ file ── read back ──▶ upload
       └─ rebuilt: SHA-256 of all of an input's rows, against the journal's       └─ rebuilt: a hash of each row group

The journal has the hash of the sealed log's bytes for each input. So the result is verified against the original
bytes, and not against a possibly wrong decoding. An input has its rows by queue and offset, as the result does. So
reading in the result's order yields each input's rows in their order, including dropped rows. The input's hash is
complete after its last row.

Memory is bounded by one row group being filled, and by GROUPS_BYTES of the row groups read last. A small object has
rows of several queues in one row group, which is then read once for each queue. Rows are copied if they are the smaller
part of their row group: otherwise a result of a few rows from each of many groups would keep all of them in memory.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_128

from neve.archive.format.journal import CommittedObject, RowGroup
from neve.archive.rows.rebuild import Records, rebuild
from neve.archive.rows.schema import SCHEMA, DamagedObject, ObjectFacts, file_metadata, writer_options
from tiered.write.merge import NOTHING, Spans, rows_left
from tiered.write.segment_writer import GROUP_SIZES, GroupSizes, describe_file

GROUPS_BYTES = 64 << 20


class Cancelled(ValueError):
    """The object is no longer wanted."""


class Input(NamedTuple):
    """A local copy of an object, and its description in the journal."""

    path: Path
    name: CommittedObject


class _Part(NamedTuple):
    """A run of a queue in a row group of an input. Parts sort in the order of the result."""

    queue: int
    first: int
    last: int
    number: int  # index of the input
    group: int
    row: int  # row of `first` in the group


class _Mark(NamedTuple):
    """The expected records of a written row group: the hash of their bytes, and their sizes."""

    digest: bytes
    sizes: npt.NDArray[np.int64]


def compact(
    inputs: Sequence[Input],
    below: Mapping[int, int],
    out_path: Path,
    *,
    erased: Spans = NOTHING,
    facts: ObjectFacts,
    key: str,
    sizes: GroupSizes = GROUP_SIZES,
    is_wanted: Callable[[], bool] = lambda: True,
) -> CommittedObject:
    """Write the inputs' rows to one verified object, without rows below the queues' offsets and erased rows.

    Leaves no file behind on failure. Raises DamagedObject if an input differs from its description in the journal, and
    Cancelled if the object is no longer wanted.
    """
    try:
        wire_bytes = sum(one.name.wire_bytes for one in inputs)
        options = writer_options(_rows_left(inputs, below, erased), wire_bytes)
        writer = _Writer(pq.ParquetWriter(out_path, SCHEMA, **options), out_path, facts, sizes)
        with writer:
            for queue, table, records in _rows(inputs, below, erased):
                if not is_wanted():
                    raise Cancelled(key)
                writer.add(queue, table, records)
        name = describe_file(out_path, key)
        if name.sha256 != writer.sha256 or name.rows != writer.rows:
            raise DamagedObject(f"{key} describes other rows than were written")
        _read_back(out_path, name, writer.marks)
    except BaseException:
        out_path.unlink(missing_ok=True)
        raise
    return name


# ---- input


def _rows_left(inputs: Sequence[Input], below: Mapping[int, int], erased: Spans) -> int:
    return sum(
        end - begin + 1
        for one in inputs
        for queue, first, last in one.name.runs
        for begin, end in rows_left(first, last, below.get(queue, 0), erased.get(queue, ()))
    )


def _parts(inputs: Sequence[Input]) -> list[_Part]:
    """Return all parts in the order of the result. Raises DamagedObject if two inputs have the same offset."""
    parts = []
    for number, one in enumerate(inputs):
        for index, group in enumerate(one.name.row_groups):
            row = 0
            for queue, first, last in group.runs:
                parts.append(_Part(queue, first, last, number, index, row))
                row += last - first + 1
    parts.sort()
    for before, part in pairwise(parts):
        if before.queue == part.queue and part.first <= before.last:
            raise DamagedObject(f"offset {part.first} of queue {part.queue} is in two of the objects")
    return parts


def _rows(inputs: Sequence[Input], below: Mapping[int, int], erased: Spans) -> Iterator[tuple[int, pa.Table, Records]]:
    """Yield (queue, rows, their rebuilt records). Raises DamagedObject at the end if an input's hash differs."""
    groups = _Groups(inputs)
    digests = [hashlib.sha256() for _ in inputs]
    for part in _parts(inputs):
        table, records = groups.read(part.number, part.group)
        count = part.last - part.first + 1
        _check_rows(table.slice(part.row, count), part, inputs[part.number].name.key)
        positions = records.positions[part.row : part.row + count + 1]
        digests[part.number].update(records.wire[positions[0] : positions[-1]])
        spans = erased.get(part.queue, ())
        for first, last in rows_left(part.first, part.last, below.get(part.queue, 0), spans):
            kept = positions[first - part.first : last + 2 - part.first]
            left = Records(records.wire[kept[0] : kept[-1]], kept - kept[0])
            rows = table.slice(part.row + first - part.first, last - first + 1)
            if 2 * len(left.wire) < len(records.wire):
                left, rows = Records(memoryview(bytes(left.wire)), left.positions), rows.take(np.arange(len(rows)))
            yield part.queue, rows, left
    for one, digest in zip(inputs, digests, strict=True):
        if digest.hexdigest() != one.name.sha256:
            raise DamagedObject(f"{one.name.key} does not rebuild to the records that the journal says it holds")


def _check_rows(table: pa.Table, part: _Part, key: str) -> None:
    queues, offsets = (table.column(name).to_numpy() for name in ("queue_id", "queue_offset"))
    if not np.array_equal(offsets, np.arange(part.first, part.last + 1)) or not (queues == part.queue).all():
        raise DamagedObject(f"{key}: row group {part.group} has other rows than the journal says")


class _Groups:
    """Row groups of the inputs, with a cache of those read last."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = inputs
        self._held: OrderedDict[tuple[int, int], tuple[pa.Table, Records]] = OrderedDict()
        self._bytes = 0

    def read(self, number: int, index: int) -> tuple[pa.Table, Records]:
        """Return a row group. Raises DamagedObject if it is unreadable or differs from the journal."""
        place = (number, index)
        if place in self._held:
            self._held.move_to_end(place)
            return self._held[place]
        path, name = self._inputs[number]
        group = name.row_groups[index]
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                table = file.read_row_group(index, use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise DamagedObject(f"{name.key}: row group {index} can't be read: {error}") from error
        records = rebuild(table, name.topic)
        if (len(table), len(records.wire)) != (group.rows, group.wire_bytes):
            raise DamagedObject(f"{name.key}: row group {index} has {len(table)} rows of {len(records.wire)} bytes")
        self._held[place] = table, records
        self._bytes += len(records.wire)
        while self._bytes > GROUPS_BYTES and len(self._held) > 1:
            self._bytes -= len(self._held.popitem(last=False)[1][1].wire)
        return table, records


# ---- output


class _Writer:
    """Collects rows in order into row groups, and writes each when it is full."""

    def __init__(self, file: pq.ParquetWriter, path: Path, facts: ObjectFacts, sizes: GroupSizes) -> None:
        self._file, self._path, self._facts, self._sizes = file, path, facts, sizes
        self._tables: list[pa.Table] = []
        self._records: list[Records] = []
        self._runs: list[tuple[int, int, int]] = []
        self._bytes = 0
        self._digest = hashlib.sha256()
        self._groups: list[RowGroup] = []
        self.marks: list[_Mark] = []
        self.rows = 0

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def add(self, queue: int, table: pa.Table, records: Records) -> None:
        """Add rows. A row group ends before a row that would make it too large.

        It also ends at a change of queue if it is large enough.
        """
        if self._runs and self._runs[-1][0] != queue and self._bytes >= self._sizes.at_queue_change:
            self._end_group()
        done, count = 0, len(table)
        while done < count:
            room = self._sizes.most - self._bytes
            fitting = int(np.searchsorted(records.positions, records.positions[done] + room, "right")) - 1 - done
            if fitting <= 0 and self._tables:
                self._end_group()
                continue
            taken = min(max(fitting, 1), count - done)
            begin, end = (int(records.positions[row]) for row in (done, done + taken))
            kept = records.positions[done : done + taken + 1] - begin
            self._take(queue, table.slice(done, taken), Records(records.wire[begin:end], kept))
            done += taken

    def _take(self, queue: int, table: pa.Table, records: Records) -> None:
        first = table.column("queue_offset")[0].as_py()
        last = first + len(table) - 1
        if self._runs and self._runs[-1][0] == queue and self._runs[-1][2] + 1 == first:
            self._runs[-1] = (queue, self._runs[-1][1], last)
        else:
            self._runs.append((queue, first, last))
        self._tables.append(table)
        self._records.append(records)
        self._bytes += len(records.wire)

    def _end_group(self) -> None:
        columns = [
            pa.chunked_array([chunk for table in self._tables for chunk in table.column(field.name).chunks], field.type)
            for field in SCHEMA
        ]
        table = pa.table(columns, SCHEMA).combine_chunks()
        self._file.write_table(table, row_group_size=len(table))
        hashed = xxh3_128()
        for records in self._records:
            hashed.update(records.wire)
            self._digest.update(records.wire)
        sizes = np.concatenate([np.diff(records.positions) for records in self._records])
        self.marks.append(_Mark(hashed.digest(), sizes))
        bounds = pc.min_max(table.column("store_timestamp").cast(pa.int64())).as_py()
        newest, oldest = (-1 if bounds[side] is None else bounds[side] for side in ("max", "min"))
        self._groups.append(RowGroup(self.rows, len(table), 0, 0, newest, oldest, self._bytes, self._runs))
        self.rows += len(table)
        self._tables, self._records, self._runs, self._bytes = [], [], [], 0

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                if self._tables:
                    self._end_group()
                if not self.rows:
                    raise DamagedObject("an object without rows is not written")
                self._file.add_key_value_metadata(file_metadata(self._facts, self.sha256, self._groups))
        finally:
            self._file.close()
        if kind is None:
            with self._path.open("rb") as written:
                os.fsync(written.fileno())


def _read_back(path: Path, name: CommittedObject, marks: Sequence[_Mark]) -> None:
    """Read the file back. Raises DamagedObject if its rows do not rebuild to the records that were written."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for index, mark in enumerate(marks):
                rebuilt = rebuild(file.read_row_group(index, use_threads=False), name.topic)
                same = xxh3_128(rebuilt.wire).digest() == mark.digest
                if not same or not np.array_equal(np.diff(rebuilt.positions), mark.sizes):
                    raise DamagedObject(f"{name.key} does not rebuild to the records of its inputs")
    except (pa.ArrowException, OSError) as error:
        raise DamagedObject(f"{name.key} can't be read back: {error}") from error
