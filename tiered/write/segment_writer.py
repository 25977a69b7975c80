"""Writing of one data object: queue entries and the log files they point into -> a verified Parquet file.

Before the upload, the whole file is read back with page checksums, and the rebuilt records are compared with the sealed
bytes: their borders, and a 128-bit hash of each row group. Rows of the common shape are not compared before they are
written. If one of them does not rebuild to its record, the read-back detects it. Then the object is written again with
each row compared.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from xxhash import xxh3_128_digest
from zlib_ng.zlib_ng import crc32

from neve.archive.format.journal import CommittedObject, RowGroup
from neve.archive.rows.column_encoder import table_of
from neve.archive.rows.rebuild import REPEATED, Records, joined_views, rebuild, views
from neve.archive.rows.row_encoder import Entries
from neve.archive.rows.schema import (
    GROUP_BYTES,
    GROUP_BYTES_AT_QUEUE_CHANGE,
    SCHEMA,
    DamagedObject,
    ObjectFacts,
    describe,
    file_metadata,
    writer_options,
)
from tiered.write.entry_run import EntryRun


class MissingBytes(ValueError):
    """A queue entry points outside the given files."""


_Mapped = tuple[int, int, mmap.mmap]  # base, end


class WrittenObject(NamedTuple):
    """A verified file, on disk or in memory, with its description for the journal, which lacks only the etag."""

    content: Path | pa.Buffer
    name: CommittedObject
    wire_rows: int  # rows that need the column `wire`
    damaged_rows: int


class _Written(NamedTuple):
    """The hash of all sealed bytes, and the hash of each row group."""

    sha256: str
    marks: list[bytes]
    wire_rows: int
    damaged_rows: int


def in_order(runs: Mapping[int, EntryRun]) -> Entries:
    """Return the entries of all rows of an object, in its order."""
    filled = [(queue, run) for queue, run in sorted(runs.items()) if len(run.physical)]
    if not filled:
        raise MissingBytes("an object without rows is not written")
    counts = [len(run.physical) for _, run in filled]
    return Entries(
        np.repeat(np.array([queue for queue, _ in filled], np.int32), counts),
        np.concatenate([np.arange(run.first_offset, run.first_offset + len(run.physical)) for _, run in filled]),
        np.concatenate([run.physical for _, run in filled]).astype(np.int64),
        np.concatenate([run.sizes for _, run in filled]).astype(np.int32),
    )


class LogFiles:
    """The sealed CommitLog files of a round, mapped for reading."""

    def __init__(self, files: Sequence[tuple[str, int, int]]) -> None:
        self._maps: list[_Mapped] = []
        for path, base, length in sorted(files, key=lambda file: file[1]):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self._maps.append((base, base + length, mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)))
            finally:
                os.close(descriptor)

    def records(self, entries: Entries) -> Records:
        """Return the concatenated bytes of these entries."""
        ends = entries.physical + entries.size
        positions = np.concatenate([[0], np.cumsum(entries.size, dtype=np.int64)])
        parts, done = [], 0
        while done < len(ends):
            mapped, count = self._within(entries.physical[done:], ends[done:])
            base = mapped[0]
            parts.append(
                _gathered(mapped[2], entries.physical[done : done + count] - base, entries.size[done:][:count])
            )
            done += count
        wire = parts[0] if len(parts) == 1 else pa.py_buffer(b"".join(parts))
        return Records(memoryview(wire).cast("B"), positions)

    def _within(self, begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> tuple[_Mapped, int]:
        """Return the file with the first record, and how many records from it on are in that file."""
        for mapped in self._maps:
            outside = (begins < mapped[0]) | (ends > mapped[1]) | (ends <= begins)
            if not outside[0]:
                return mapped, int(np.argmax(outside)) if outside.any() else len(outside)
        raise MissingBytes(f"{ends[0] - begins[0]} bytes at {begins[0]} lie in none of the files")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Dropping the references unmaps the files; an explicit close would fail while a slice is still referenced.
        self._maps = []


class GroupSizes(NamedTuple):
    """Wire bytes of a row group: the maximum, and the size from which it ends at a change of queue."""

    most: int = GROUP_BYTES
    at_queue_change: int = GROUP_BYTES_AT_QUEUE_CHANGE


GROUP_SIZES = GroupSizes()


def encode(
    runs: Mapping[int, EntryRun],
    files: Sequence[tuple[str, int, int]],
    out_path: Path,
    *,
    facts: ObjectFacts,
    key: str,
    sizes: GroupSizes = GROUP_SIZES,
) -> WrittenObject:
    """Write and verify the object. Leaves no file behind on failure."""
    entries = in_order(runs)
    try:
        with LogFiles(files) as log:
            for compare_all in (False, True):
                written = _write(entries, log, out_path, facts, sizes, compare_all=compare_all)
                name = describe_file(out_path, key)
                if name.sha256 != written.sha256 or name.rows != len(entries.size):
                    raise DamagedObject(f"{key} describes other rows than were written")
                if _rebuilds(out_path, name, entries, written.marks):
                    return WrittenObject(out_path, name, written.wire_rows, written.damaged_rows)
        raise DamagedObject(f"{key} does not rebuild to the records that were sealed")
    except BaseException:
        out_path.unlink(missing_ok=True)
        raise


def _write(
    entries: Entries, log: LogFiles, out_path: Path, facts: ObjectFacts, sizes: GroupSizes, *, compare_all: bool
) -> _Written:
    digest = hashlib.sha256()
    groups: list[RowGroup] = []
    marks: list[bytes] = []
    wire_rows = damaged_rows = 0
    options = writer_options(len(entries.size), int(entries.size.sum(dtype=np.int64)))
    with pq.ParquetWriter(out_path, SCHEMA, **options) as writer:
        for start, end in plan_groups(entries, sizes):
            part = entries.at(slice(start, end))
            sealed = log.records(part)
            digest.update(sealed.wire)
            marks.append(xxh3_128_digest(sealed.wire))
            table = table_of(part, sealed, facts.topic, compare_all=compare_all)
            writer.write_table(table, row_group_size=len(table))
            groups.append(_group(part, table, start))
            wire_rows += len(table) - table.column("wire").null_count
            damaged_rows += pc.sum(table.column("damaged")).as_py() or 0
        sha256 = digest.hexdigest()
        writer.add_key_value_metadata(file_metadata(facts, sha256, groups))
    return _Written(sha256, marks, wire_rows, damaged_rows)


def _rebuilds(path: Path, name: CommittedObject, entries: Entries, marks: Sequence[bytes]) -> bool:
    """Whether the file's rows rebuild to the sealed bytes. Raises DamagedObject if it can't be read back."""
    try:
        with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=list(REPEATED)) as file:
            for index, group in enumerate(name.row_groups):
                rebuilt = rebuild(file.read_row_group(index, use_threads=False), name.topic)
                sizes = entries.size[group.first_row : group.first_row + group.rows]
                if xxh3_128_digest(rebuilt.wire) != marks[index] or not np.array_equal(
                    np.diff(rebuilt.positions), sizes
                ):
                    return False
    except (pa.ArrowException, OSError) as error:
        raise DamagedObject(f"{name.key} can't be read back: {error}") from error
    return True


def _gathered(source: mmap.mmap, begins: npt.NDArray[np.int64], sizes: npt.NDArray[np.int32]) -> pa.Buffer:
    """Join source[begin:begin + size] for each entry; the entries may be in any order."""
    if len(source) > np.iinfo(np.int32).max:
        view = memoryview(source)
        spans = zip(begins.tolist(), sizes.tolist(), strict=True)
        return pa.py_buffer(b"".join([view[begin : begin + size] for begin, size in spans]))
    return joined_views(views(source, begins, sizes), [source]).buffers()[2]


def plan_groups(entries: Entries, sizes: GroupSizes = GROUP_SIZES) -> Iterator[tuple[int, int]]:
    """Yield the row ranges of the row groups: by wire bytes, and at a change of queue if the group is large enough."""
    ends = np.cumsum(entries.size.astype(np.int64))
    borders = [*(np.flatnonzero(np.diff(entries.queue_id)) + 1).tolist(), len(ends)]
    start, base = 0, 0
    for border in borders:
        while int(ends[border - 1]) - base > sizes.most:
            cut = max(int(np.searchsorted(ends, base + sizes.most, "right")), start + 1)
            yield start, cut
            start, base = cut, int(ends[cut - 1])
        if start < border and int(ends[border - 1]) - base >= sizes.at_queue_change:
            yield start, border
            start, base = border, int(ends[border - 1])
    if start < len(ends):
        yield start, len(ends)


def _group(part: Entries, table: pa.Table, first_row: int) -> RowGroup:
    bounds = pc.min_max(table.column("store_timestamp").cast(pa.int64())).as_py()
    borders = [0, *(np.flatnonzero(np.diff(part.queue_id)) + 1).tolist(), len(part.size)]
    runs = [
        (int(part.queue_id[begin]), int(part.queue_offset[begin]), int(part.queue_offset[end - 1]))
        for begin, end in pairwise(borders)
    ]
    newest, oldest = (-1 if bounds[side] is None else bounds[side] for side in ("max", "min"))
    return RowGroup(first_row, len(table), 0, 0, newest, oldest, int(part.size.sum(dtype=np.int64)), runs)


def describe_file(path: Path, key: str, etag: str = "") -> CommittedObject:
    """Return the journal's description of a file on disk."""
    size, crc = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            crc = crc32(chunk, crc)
            size += len(chunk)
        file.seek(-8, os.SEEK_END)
        footer = int.from_bytes(file.read(4), "little") + 8
    metadata = pq.read_metadata(path)
    return describe(metadata, key=key, size=size, footer=footer, etag=etag, checksum=("crc32", f"{crc:08x}"))
