"""Makes one data object of several: their rows in the order of the result -> a verified Parquet file.

    inputs ── by queue, in a queue by offset ──▶ row groups of GroupSizes ──▶ file ── read back ──▶ upload
       └─ rebuilt: SHA-256 of all of an input's rows, against the journal's       └─ rebuilt: a hash of each row group

What the journal says of an input is the hash of the sealed log's bytes, so a made object holds those, not what somebody
read of them. An input's rows lie by queue and offset as the result's do: taken in the result's order, each input's come
in its own, and its hash is known when they all have come, also those that are left out.

Memory: one row group that is being filled, and GROUPS_BYTES of those that were read last. A small object has the rows
of several queues in one row group, which is then read for one queue after the other. What is taken of a row group is
copied where it is the smaller part of it: a row group made of a few rows each of many would hold all of those.
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


class NotWanted(ValueError):
    """Nobody wants the object any more."""


class Input(NamedTuple):
    """A copy of an object, and what the journal says of it."""

    path: Path
    name: CommittedObject


class _Part(NamedTuple):
    """A run of a queue in a row group of an input; sorted, they are in the order of the result."""

    queue: int
    first: int
    last: int
    number: int  # of the input
    group: int
    row: int  # in the group, of `first`


class _Mark(NamedTuple):
    """Of a written row group: what its rows must rebuild to."""

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
    """The inputs' rows in one verified object, but for those below these offsets of their queues, and those erased.

    Nothing stays behind on failure. Raises DamagedObject where an input does not hold what the journal says,
    NotWanted where the object is not wanted any more.
    """
    try:
        wire_bytes = sum(one.name.wire_bytes for one in inputs)
        options = writer_options(_rows_left(inputs, below, erased), wire_bytes)
        writer = _Writer(pq.ParquetWriter(out_path, SCHEMA, **options), out_path, facts, sizes)
        with writer:
            for queue, table, records in _rows(inputs, below, erased):
                if not is_wanted():
                    raise NotWanted(key)
                writer.add(queue, table, records)
        name = describe_file(out_path, key)
        if name.sha256 != writer.sha256 or name.rows != writer.rows:
            raise DamagedObject(f"{key} describes other rows than were written")
        _read_back(out_path, name, writer.marks)
    except BaseException:
        out_path.unlink(missing_ok=True)
        raise
    return name


# ---- reading


def _rows_left(inputs: Sequence[Input], below: Mapping[int, int], erased: Spans) -> int:
    return sum(
        end - begin + 1
        for one in inputs
        for queue, first, last in one.name.runs
        for begin, end in rows_left(first, last, below.get(queue, 0), erased.get(queue, ()))
    )


def _parts(inputs: Sequence[Input]) -> list[_Part]:
    """Raises DamagedObject where two inputs hold the same offset."""
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
    """(queue, rows, the records that they rebuild to). Raises DamagedObject at the end where an input is another."""
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
    """Row groups of the inputs, those that were read last at hand."""

    def __init__(self, inputs: Sequence[Input]) -> None:
        self._inputs = inputs
        self._held: OrderedDict[tuple[int, int], tuple[pa.Table, Records]] = OrderedDict()
        self._bytes = 0

    def read(self, number: int, index: int) -> tuple[pa.Table, Records]:
        """Raises DamagedObject where it can't be read, or is not what the journal says."""
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


# ---- writing


class _Writer:
    """Rows in their order -> row groups; each is written when it is full."""

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
        """A row group ends before the row that would make it too large, and at a change of queue when it is large
        enough."""
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
    """Raises DamagedObject where the file's rows do not rebuild to the records that went into it."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            for index, mark in enumerate(marks):
                rebuilt = rebuild(file.read_row_group(index, use_threads=False), name.topic)
                same = xxh3_128(rebuilt.wire).digest() == mark.digest
                if not same or not np.array_equal(np.diff(rebuilt.positions), mark.sizes):
                    raise DamagedObject(f"{name.key} does not rebuild to the records of its inputs")
    except (pa.ArrowException, OSError) as error:
        raise DamagedObject(f"{name.key} can't be read back: {error}") from error
