"""Rows that a task pulls from brokers, with the columns and values that they will have in the archive.

A broker returns a row from its log or from the archive. A row that it does not return is looked up in the archive,
where expired objects are kept for a grace period. A row that is in neither, and is no gap, is lost.

An answer contains consecutive records, which are separated by their heads. If a head is invalid, it and the record
before it are requested again one by one: the broker's queue then determines the limits of each, as for the archive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from neve.archive.catalog.journal_reader import brokers, read_catalog
from neve.archive.rows.column_encoder import table_of
from neve.archive.rows.rebuild import Records
from neve.archive.rows.row_encoder import Entries
from neve.archive.store.source import open_source
from neve.client import AsyncClient, PullStatus, StoredPull
from neve.client.group.pull import TOOLS_GROUP
from neve.errors import BrokerError, NeveError
from neve.record.layout import HEAD_V4
from neve.remoting.codes import ResponseCode
from neve.spark import brokers as cluster_brokers
from neve.spark.batches import BATCH_ROWS, filter_columns, matching, rows_of_task, shaped
from neve.spark.planning.options import Cluster, Options
from neve.spark.planning.planner import lose, ranges_text
from neve.spark.planning.queues import BrokerAway, HotSlice, HotTask, Queue
from neve.spark.planning.rows import Span, minus, rows_of
from neve.spark.planning.slices import found_in
from neve.spark.planning.wanted import RequestedRows

log = logging.getLogger(__name__)

_PULL_ROWS, _PULL_BYTES = 1024, 4 << 20
_LONG_POLL_S = 1.0
_PAUSE_S = 0.2
_DAY_MS = 86_400_000


def rows_of_hot_task(
    options: Options, cluster: Cluster, task: HotTask, wanted: RequestedRows, target: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a task in the columns and types of `target`.

    Raises:
        BrokerAway, BrokerRefused: a broker did not return rows that it has.
        DataLoss: rows are in neither tier.
    """
    loop = cluster_brokers.ClientLoop(cluster)
    try:
        for one in task:
            missing: list[Span] = []
            yield from _pulled(loop, cluster, one, missing, _Shape(wanted, target))
            if missing:
                yield from _found_in_archive(options, one.queue, missing, wanted, target)
    finally:
        loop.close()


# ---- pulling


class _Shape(NamedTuple):
    """The filter and the columns of a task."""

    wanted: RequestedRows
    target: pa.Schema


class _Pulled(NamedTuple):
    """The records that one pull returned of the offsets [first, end); some offsets may have none."""

    records: bytes
    first: int
    end: int


def _pulled(
    loop: cluster_brokers.ClientLoop, cluster: Cluster, one: HotSlice, missing: list[Span], shape: _Shape
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a slice; the next pull is in flight while rows are decoded. Adds offsets to `missing`."""
    client = loop.client
    place = _Place(one.queue)
    alone = 0  # number of records that are requested one by one
    next_pull: Future[_Pulled] | None = loop.submit(_pull(client, cluster, one, one.first, _PULL_ROWS))
    while next_pull is not None:
        got = next_pull.result()
        framed = _alone(one.queue, got) if alone else _framed(one.queue, got)
        alone = max(alone - 1, 0)
        if framed.end < got.end:
            log.warning("record has an invalid head: %s, offset=%d", one.queue.text(), framed.end)
            framed, alone = framed.without_last(), 2
        count = 1 if alone else _PULL_ROWS
        next_pull = loop.submit(_pull(client, cluster, one, framed.end, count)) if framed.end <= one.last else None
        entries, records = framed.entries, framed.records
        inside = entries.queue_offset <= one.last
        if not inside.all():
            count = int(np.count_nonzero(inside))
            entries = entries.at(slice(0, count))
            records = Records(records.wire[: records.positions[count]], records.positions[: count + 1])
        _note_missing(missing, entries.queue_offset.tolist(), got.first, min(framed.end - 1, one.last))
        if len(entries.size):
            yield from _rows(entries, records, place, shape)


async def _pull(client: AsyncClient, cluster: Cluster, one: HotSlice, offset: int, most: int) -> _Pulled:
    """Pull until the broker returns a larger offset, or until the timeout of the options."""
    now = asyncio.get_running_loop().time
    deadline = now() + cluster.patience_s
    count = min(one.last - offset + 1, most)
    what = f"{one.queue.text()}, offset {offset}"
    while True:
        answer: StoredPull | None = None
        problem: NeveError | None = None
        try:
            answer = await client.pull_records(
                cluster_brokers.message_queue(one.queue),
                offset,
                count,
                group=cluster.group or TOOLS_GROUP,
                wait=_LONG_POLL_S,
                max_bytes=_PULL_BYTES,
            )
        except NeveError as error:
            if not cluster_brokers.is_temporary(error):
                raise cluster_brokers.failure(what, error) from error
            problem = error
        if answer is not None and answer.next_offset > offset and answer.status is not PullStatus.NO_NEW_MESSAGE:
            return _Pulled(answer.records, offset, answer.next_offset)
        if now() >= deadline:
            break
        await asyncio.sleep(_PAUSE_S)
    if isinstance(problem, BrokerError) and problem.code == ResponseCode.TOPIC_NOT_EXIST:
        return _Pulled(b"", offset, one.last + 1)  # the topic was deleted; the archive may have the rows
    tried = f"tried for {cluster.patience_s:g} s"
    if problem is not None:
        raise cluster_brokers.failure(f"{what}: {tried}", problem) from problem
    assert answer is not None
    has = f"it has {answer.min_offset} to {answer.max_offset - 1}"
    raise BrokerAway(f"{what}: the broker reported it when the query was planned, and now {has}: {tried}")


class _Framed(NamedTuple):
    """Records with their entries, and the offset up to which they are known."""

    entries: Entries
    records: Records
    end: int

    def without_last(self) -> _Framed:
        """Drop the last record: its size may be the damaged field."""
        count = len(self.entries.size) - 1
        if count < 0:
            return self
        offsets, (wire, positions) = self.entries.queue_offset, self.records
        cut = Records(wire[: positions[count]], positions[: count + 1])
        return _Framed(self.entries.at(slice(0, count)), cut, int(offsets[count]))


def _framed(queue: Queue, got: _Pulled) -> _Framed:
    """Separate records up to the first invalid head."""
    view, found = memoryview(got.records), list[_Found]()
    begin, lowest = 0, got.first
    while len(view) - begin >= HEAD_V4.size:
        size, _, _, of, _, offset, place, *_ = HEAD_V4.unpack_from(view, begin)
        if not HEAD_V4.size <= size <= len(view) - begin or of != queue.queue_id or not lowest <= offset < got.end:
            break
        begin, lowest = begin + size, offset + 1
        found.append(_Found(offset, place, begin))
    return _of_found(queue, view[:begin], found, got.end if begin == len(view) else lowest)


def _alone(queue: Queue, got: _Pulled) -> _Framed:
    """Return one record with the offset and limits that the broker's queue determined, whatever its head contains."""
    view, offset, place = memoryview(got.records), got.end - 1, _NOWHERE
    if not view:
        return _of_found(queue, view, [], got.end)
    if len(view) >= HEAD_V4.size:
        size, _, _, of, _, in_head, position, *_ = HEAD_V4.unpack_from(view)
        if (size, of, in_head) == (len(view), queue.queue_id, offset):
            place = position
    return _of_found(queue, view, [_Found(offset, place, len(view))], got.end)


class _Found(NamedTuple):
    """A record: its offset, its position in the log, and its end in the answer."""

    offset: int
    place: int
    ends_at: int


def _of_found(queue: Queue, view: memoryview, found: Sequence[_Found], end: int) -> _Framed:
    at = np.array([0, *(one.ends_at for one in found)], np.int64)
    entries = Entries(
        np.full(len(found), queue.queue_id, np.int32),
        np.array([one.offset for one in found], np.int64),
        np.array([one.place for one in found], np.int64),
        np.diff(at).astype(np.int32),
    )
    return _Framed(entries, Records(view, at), end)


#: The position in the log of a record with an invalid head.
_NOWHERE = -1


def _note_missing(missing: list[Span], offsets: Sequence[int], first: int, last: int) -> None:
    """Add the offsets of first ... last that are not in `offsets`."""
    for offset in (*offsets, last + 1):
        if offset > first:
            missing.append((first, offset - 1))
        first = offset + 1


# ---- rows


class _Place:
    """The columns that an object's key has for archived rows; `day` is of the present rows."""

    def __init__(self, queue: Queue) -> None:
        self.topic, self.broker = queue.topic, queue.broker
        self.day: str | None = None


def _rows(entries: Entries, records: Records, place: _Place, shape: _Shape) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one pull, divided by day."""
    table = table_of(entries, records, place.topic).combine_chunks()
    if (entries.physical == _NOWHERE).any():
        at = table.schema.get_field_index("commit_log_offset")
        known = pa.array(entries.physical, pa.int64(), mask=entries.physical == _NOWHERE)
        table = table.set_column(at, table.schema.field(at), known)
    times = pc.fill_null(table.column("store_timestamp").cast(pa.int64()), -1).to_numpy()
    days = np.where(times >= 0, times // _DAY_MS, -1)
    known = np.maximum.accumulate(np.where(days >= 0, np.arange(len(days)), -1))
    days = np.where(known >= 0, days[known], -1)  # a record without a time gets the day of the one before
    borders = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
    for begin, end in pairwise(borders):
        if days[begin] >= 0:
            place.day = datetime.fromtimestamp(int(days[begin]) * 86_400, UTC).strftime("%Y-%m-%d")
        (rows,) = table.slice(begin, end - begin).to_batches()
        if filter_columns(shape.wanted):
            rows = rows.filter(matching(rows, shape.wanted))
        for first in range(0, rows.num_rows, BATCH_ROWS):
            yield shaped(rows.slice(first, BATCH_ROWS), place, shape.target)


# ---- rows that a broker did not return


def _found_in_archive(
    options: Options, queue: Queue, missing: Sequence[Span], wanted: RequestedRows, target: pa.Schema
) -> Iterator[pa.RecordBatch]:
    rows = rows_of((queue.topic, queue.queue_id, first, last) for first, last in missing)
    source = open_source(options.store)
    if queue.broker in brokers(source):
        catalog = read_catalog(source, queue.broker)
        slices, lost = found_in(catalog, queue.broker, rows, wanted.may_hold)
        log.info("rows are read from the archive: %s: %s", queue.text(), ranges_text(minus(rows, lost)))
        yield from rows_of_task(options.store, slices, wanted, target, fails_on_data_loss=options.fails_on_data_loss)
        rows = lost
    if rows:
        lose(options, f"broker {queue.broker}: {ranges_text(rows)}")
