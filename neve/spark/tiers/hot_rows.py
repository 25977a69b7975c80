"""Rows that a task pulls from brokers, as the archive will have them: the same columns of the same records.

A broker has a row whether it is still in its log or in the archive by now. What it does not give is looked for in the
archive once more, where what has expired meanwhile is kept for a while; a row that is in neither is lost, but for gaps.

An answer has records one after another, told apart by their heads. Where a head does not hold, it and the record before
it are asked for again, each alone: its queue then says where it begins and ends, as it does when it is archived.
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
from neve.spark.batches import BATCH_ROWS, looked_at, matching, rows_of_task, shaped
from neve.spark.planning.options import Cluster, Options
from neve.spark.planning.planner import Wanted, told
from neve.spark.planning.rows import Span, minus, rows_of
from neve.spark.planning.slices import found_in
from neve.spark.tiers import brokers as asked
from neve.spark.tiers.planner import lose
from neve.spark.tiers.queues import HotSlice, HotTask, Queue

log = logging.getLogger(__name__)

_PULL_ROWS, _PULL_BYTES = 1024, 4 << 20
_HELD_S = 1.0  # so long a broker holds a pull of what it does not show yet
_PAUSE_S = 0.2
_DAY_MS = 86_400_000


def rows_of_hot_task(
    options: Options, cluster: Cluster, task: HotTask, wanted: Wanted, target: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """In the columns and types of `target`.

    Raises:
        BrokerAway, BrokerRefused: a broker did not give what it has.
        DataLoss: rows are gone from both tiers.
    """
    loop = asked.ClientLoop(cluster)
    try:
        for one in task:
            missing: list[Span] = []
            yield from _pulled(loop, cluster, one, missing, _Shape(wanted, target))
            if missing:
                yield from _looked_for_again(options, one.queue, missing, wanted, target)
    finally:
        loop.close()


# ---- pulling


class _Shape(NamedTuple):
    """What becomes of rows."""

    wanted: Wanted
    target: pa.Schema


class _Pulled(NamedTuple):
    """What one pull gave of [first, end): records, and offsets of which there was none."""

    records: bytes
    first: int
    end: int


def _pulled(
    loop: asked.ClientLoop, cluster: Cluster, one: HotSlice, missing: list[Span], shape: _Shape
) -> Iterator[pa.RecordBatch]:
    """The next pull is on its way while the rows of this one are made."""
    client = loop.client
    place = _Place(one.queue)
    alone = 0  # so many records are asked for one by one
    coming: Future[_Pulled] | None = loop.submit(_pull(client, cluster, one, one.first, _PULL_ROWS))
    while coming is not None:
        got = coming.result()
        framed = _alone(one.queue, got) if alone else _framed(one.queue, got)
        alone = max(alone - 1, 0)
        if framed.end < got.end:
            log.warning("%s: the record from offset %d on can't be told by its head", one.queue.told(), framed.end)
            framed, alone = framed.without_last(), 2
        count = 1 if alone else _PULL_ROWS
        coming = loop.submit(_pull(client, cluster, one, framed.end, count)) if framed.end <= one.last else None
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
    """Asks until the broker has an answer that leads on, or its time is up."""
    now = asyncio.get_running_loop().time
    deadline = now() + cluster.patience_s
    count = min(one.last - offset + 1, most)
    what = f"{one.queue.told()}, offset {offset}"
    while True:
        answer: StoredPull | None = None
        problem: NeveError | None = None
        try:
            answer = await client.pull_records(
                asked.message_queue(one.queue),
                offset,
                count,
                group=cluster.group or TOOLS_GROUP,
                wait=_HELD_S,
                max_bytes=_PULL_BYTES,
            )
        except NeveError as error:
            if not asked.passes(error):
                raise asked.told(what, error) from error
            problem = error
        if answer is not None and answer.next_offset > offset and answer.status is not PullStatus.NO_NEW_MESSAGE:
            return _Pulled(answer.records, offset, answer.next_offset)
        if now() >= deadline:
            break
        await asyncio.sleep(_PAUSE_S)
    if isinstance(problem, BrokerError) and problem.code == ResponseCode.TOPIC_NOT_EXIST:
        return _Pulled(b"", offset, one.last + 1)  # whoever had it has let go of it
    tried = f"tried for {cluster.patience_s:g} s"
    if problem is not None:
        raise asked.told(f"{what}: {tried}", problem) from problem
    assert answer is not None
    has = f"it has {answer.min_offset} to {answer.max_offset - 1}"
    raise asked.BrokerAway(f"{what}: the broker showed it when the query was planned, and now says that {has}: {tried}")


class _Framed(NamedTuple):
    """The records one by one, what their queue says of each, and the offset up to which that is known."""

    entries: Entries
    records: Records
    end: int

    def without_last(self) -> _Framed:
        """The size of the last may be what is damaged: it would end where the next begins by its head alone."""
        count = len(self.entries.size) - 1
        if count < 0:
            return self
        offsets, (wire, positions) = self.entries.queue_offset, self.records
        cut = Records(wire[: positions[count]], positions[: count + 1])
        return _Framed(self.entries.at(slice(0, count)), cut, int(offsets[count]))


def _framed(queue: Queue, got: _Pulled) -> _Framed:
    """Up to the first record whose head does not hold."""
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
    """One record, whatever its head says: which it is, and where it ends, the broker's queue has told."""
    view, offset, place = memoryview(got.records), got.end - 1, _NOWHERE
    if not view:
        return _of_found(queue, view, [], got.end)
    if len(view) >= HEAD_V4.size:
        size, _, _, of, _, stands, told, *_ = HEAD_V4.unpack_from(view)
        if (size, of, stands) == (len(view), queue.queue_id, offset):
            place = told
    return _of_found(queue, view, [_Found(offset, place, len(view))], got.end)


class _Found(NamedTuple):
    """A record: its offset, its place in the log, and where it ends in an answer."""

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


#: The place in the log of a record that does not say it.
_NOWHERE = -1


def _note_missing(missing: list[Span], offsets: Sequence[int], first: int, last: int) -> None:
    """Of first … last, those that are not there."""
    for offset in (*offsets, last + 1):
        if offset > first:
            missing.append((first, offset - 1))
        first = offset + 1


# ---- rows


class _Place:
    """What an object's key says of archived rows; the day is of the rows at hand."""

    def __init__(self, queue: Queue) -> None:
        self.topic, self.broker = queue.topic, queue.broker
        self.day: str | None = None


def _rows(entries: Entries, records: Records, place: _Place, shape: _Shape) -> Iterator[pa.RecordBatch]:
    """Of one pull, the rows of a day together."""
    table = table_of(entries, records, place.topic).combine_chunks()
    if (entries.physical == _NOWHERE).any():
        at = table.schema.get_field_index("commit_log_offset")
        known = pa.array(entries.physical, pa.int64(), mask=entries.physical == _NOWHERE)
        table = table.set_column(at, table.schema.field(at), known)
    times = pc.fill_null(table.column("store_timestamp").cast(pa.int64()), -1).to_numpy()
    days = np.where(times >= 0, times // _DAY_MS, -1)
    known = np.maximum.accumulate(np.where(days >= 0, np.arange(len(days)), -1))
    days = np.where(known >= 0, days[known], -1)  # a record without a time stays with the day found last
    borders = [0, *(np.flatnonzero(np.diff(days)) + 1).tolist(), len(days)]
    for begin, end in pairwise(borders):
        if days[begin] >= 0:
            place.day = datetime.fromtimestamp(int(days[begin]) * 86_400, UTC).strftime("%Y-%m-%d")
        (rows,) = table.slice(begin, end - begin).to_batches()
        if looked_at(shape.wanted):
            rows = rows.filter(matching(rows, shape.wanted))
        for first in range(0, rows.num_rows, BATCH_ROWS):
            yield shaped(rows.slice(first, BATCH_ROWS), place, shape.target)


# ---- what a broker did not give


def _looked_for_again(
    options: Options, queue: Queue, missing: Sequence[Span], wanted: Wanted, target: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """In the archive, as it is now."""
    rows = rows_of((queue.topic, queue.queue_id, first, last) for first, last in missing)
    source = open_source(options.store)
    if queue.broker in brokers(source):
        catalog = read_catalog(source, queue.broker)
        slices, lost = found_in(catalog, queue.broker, rows, wanted.may_hold)
        log.info("%s: %s looked for in the archive", queue.told(), told(minus(rows, lost)))
        yield from rows_of_task(options.store, slices, wanted, target, fails_on_data_loss=options.fails_on_data_loss)
        rows = lost
    if rows:
        lose(options, f"broker {queue.broker}: {told(rows)}")
