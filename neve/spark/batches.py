"""The rows of a task as Arrow batches, read from objects on the machine that runs it.

The columns of the filters are read before the other columns of a row group. A group without a matching row costs these
columns, or nothing if the statistics in the footer exclude it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from neve.archive.read.topic_dataset import open_files, with_key
from neve.archive.rows.schema import SCHEMA
from neve.spark.planning.planner import Task
from neve.spark.planning.slices import Cut, Slice
from neve.spark.planning.wanted import RequestedRows

log = logging.getLogger(__name__)

BATCH_ROWS = 10_000


class ObjectDeleted(RuntimeError):
    """An object was deleted between plan and read: its rows expired or were rewritten."""


def rows_of_task(
    store: str, task: Task, wanted: RequestedRows, target: pa.Schema, *, fails_on_data_loss: bool = True
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task in the columns and types of `target`. Raises ObjectGone."""
    files, root = open_files(store)
    for one in task:
        try:
            raw = files.open_input_file(root + one.key)
        except FileNotFoundError as error:
            reason = f"{one.key} was deleted after the query was planned: load the frame again"
            if fails_on_data_loss:
                raise ObjectDeleted(f"{reason}, or set failOnDataLoss=false to skip its rows") from error
            log.warning("rows are lost: %s", reason)
            continue
        with raw, pq.ParquetFile(raw, pre_buffer=True, page_checksum_verification=True) as file:
            for cut in one.cuts:
                if _may_hold(file.metadata.row_group(cut.group), wanted):
                    yield from _batches(file, cut, one, wanted, target)


def _may_hold(group: Any, wanted: RequestedRows) -> bool:
    """Return whether the statistics in the footer, if any, allow a matching row."""
    asked = {"tags": wanted.tags, "msg_id": wanted.msg_ids}
    for index in range(group.num_columns):
        chunk = group.column(index)
        values = asked.get(chunk.path_in_schema)
        if values is None or not chunk.is_stats_set or not chunk.statistics.has_min_max:
            continue
        low, high = chunk.statistics.min, chunk.statistics.max
        if not any(low <= value <= high for value in values):
            return False
    return True


def _batches(file: Any, cut: Cut, of: Slice, wanted: RequestedRows, target: pa.Schema) -> Iterator[pa.RecordBatch]:
    columns = filter_columns(wanted)
    mask = None
    if columns:
        mask = matching(_read(file, cut, columns), wanted)
        if not pc.any(mask).as_py():
            return
    stored = [name for name in target.names if name in SCHEMA.names]
    rows = _read(file, cut, stored or ["queue_id"])
    if mask is not None:
        rows = rows.filter(mask)
    for first in range(0, rows.num_rows, BATCH_ROWS):
        yield shaped(rows.slice(first, BATCH_ROWS), of, target)


def _read(file: Any, cut: Cut, columns: list[str]) -> pa.RecordBatch:
    table = file.read_row_group(cut.group, columns=columns, use_threads=False)
    if cut.spans != ((0, table.num_rows - 1),):
        table = pa.concat_tables([table.slice(first, last - first + 1) for first, last in cut.spans])
    return pa.RecordBatch.from_arrays(
        [_one_array(column) for column in table.columns], names=[str(name) for name in table.column_names]
    )


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def filter_columns(wanted: RequestedRows) -> list[str]:
    """Return the columns that a filter needs."""
    names = []
    if wanted.since is not None or wanted.until is not None:
        names.append("store_timestamp")
    if wanted.tags is not None:
        names.append("tags")
    if wanted.msg_ids is not None or wanted.key is not None:
        names.append("msg_id")
    if wanted.key is not None:
        names.append("keys")
    return names


def matching(rows: pa.RecordBatch, wanted: RequestedRows) -> pa.Array:
    """Return a mask of the wanted rows; a row without the time or tag that is required is not wanted."""
    masks = []
    if wanted.since is not None or wanted.until is not None:
        times = rows["store_timestamp"].cast(pa.int64())
        if wanted.since is not None:
            masks.append(pc.greater_equal(times, wanted.since))
        if wanted.until is not None:
            masks.append(pc.less(times, wanted.until))
    for name, values in (("tags", wanted.tags), ("msg_id", wanted.msg_ids)):
        if values is not None:
            masks.append(pc.is_in(rows[name], pa.array(sorted(values), pa.string())))
    if wanted.key is not None:
        masks.append(with_key(rows, frozenset({wanted.key})))
    mask = masks[0]
    for other in masks[1:]:
        mask = pc.and_kleene(mask, other)
    return pc.fill_null(mask, fill_value=False)


class KeyColumns(Protocol):
    """The columns of rows that their records do not have."""

    @property
    def topic(self) -> str: ...

    @property
    def day(self) -> str | None: ...

    @property
    def broker(self) -> str: ...


def shaped(rows: pa.RecordBatch, of: KeyColumns, target: pa.Schema) -> pa.RecordBatch:
    """Return rows as Spark expects them: times in microseconds, its names in lists and maps, the columns of the key."""
    constant = {"topic": of.topic, "dt": of.day, "broker": of.broker}
    columns = [
        pa.repeat(pa.scalar(constant[field.name], field.type), rows.num_rows)
        if field.name in constant
        else rows[field.name].cast(field.type)
        for field in target
    ]
    return pa.RecordBatch.from_arrays(columns, schema=target)
