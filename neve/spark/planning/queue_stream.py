"""The planner of a stream of archive and brokers: the rows between two offsets of each queue."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import JournalSource, brokers
from neve.spark.planning.journals import BrokerJournal, retry_with_new_catalogs
from neve.spark.planning.options import Options
from neve.spark.planning.planner import Catalogs, DataLoss, Plan, PlanParts, Run, Subscribed, Whole, lose, ranges_text
from neve.spark.planning.queue_positions import QueuePosition, advanced, between, follows
from neve.spark.planning.queues import HotTier, Queue, Seen
from neve.spark.planning.rows import joined
from neve.spark.planning.wanted import RequestedRows


class _Until(NamedTuple):
    """The queues at the start of a run with availableNow, which stops there."""

    queues: dict[Queue, Whole]
    seen: Seen


class QueueStream:
    """A `StreamPlanner` of both tiers. Methods raise as `plan_batch` does."""

    def __init__(self, source: JournalSource, hot: HotTier, options: Options) -> None:
        self._source, self._hot, self._options = source, hot, options
        self._subscribed = Subscribed(options)
        self._journals: dict[str, BrokerJournal] = {}
        self._until: _Until | None = None
        self._newest: dict[Queue, int] = {}
        self._reported: Mapping[Queue, int] = {}

    def initial(self) -> QueuePosition:
        return retry_with_new_catalogs(self._journals, self._initial)

    def latest(self, start: QueuePosition, most: int | None) -> QueuePosition:
        # Spark calls this when `start` is in the checkpoint, and once more after the last batch of a run.
        self.forget(start)
        return retry_with_new_catalogs(self._journals, lambda: self._latest(start, most))

    def tasks(self, start: QueuePosition, end: QueuePosition) -> Plan:
        return retry_with_new_catalogs(self._journals, lambda: self._tasks(start, end))

    def newest(self) -> QueuePosition:
        return QueuePosition(dict(self._newest), self._options.since)

    def stop_at_now(self) -> None:
        self._until = retry_with_new_catalogs(self._journals, self._look_up_to_holes)

    def forget(self, end: QueuePosition) -> None:
        """Report the position to the brokers, or at the next call if they do not accept it now."""
        reported, retired = self._reported, self._subscribed.retired
        moved = {q: at for q, at in end.queues.items() if reported.get(q) != at and q.broker not in retired}
        if not moved or self._hot.report(moved):
            self._reported = end.queues

    # ---- internals

    def _catalogs(self) -> Catalogs:
        for broker in brokers(self._source):
            if self._options.broker not in (None, broker):
                continue
            if broker in self._journals:
                self._journals[broker].refresh()
            else:
                self._journals[broker] = BrokerJournal(self._source, broker, lambda _: False)
            self._journals[broker].forget(self._journals[broker].end)
        return {broker: journal.catalog for broker, journal in self._journals.items()}

    def _look(self) -> tuple[dict[Queue, Whole], Seen]:
        known, seen = self._subscribed.look(self._source, self._hot, self._catalogs)
        found = dict(self._subscribed.queues(known, seen))
        self._newest = {queue: whole.end for queue, whole in found.items()}
        return found, seen

    def _look_up_to_holes(self) -> _Until:
        found, seen = self._look()
        for queue, whole in found.items():
            if whole.spans and queue.broker not in self._subscribed.retired:
                end = _dense_end(self._journals[queue.broker].catalog, queue, whole.first)
                found[queue] = whole._replace(end=end)
        return _Until(found, seen)

    def _initial(self) -> QueuePosition:
        found, _ = self._look()
        begins = {queue: self._subscribed.range_asked_for(queue, whole)[0] for queue, whole in found.items()}
        return QueuePosition(begins, self._options.since, is_initial=True)

    def _latest(self, start: QueuePosition, most: int | None) -> QueuePosition:
        if self._until is None:
            known, seen = self._subscribed.look(self._source, self._hot, self._catalogs)
            self._subscribed.require_brokers({queue.broker for queue in start.queues}, seen)
            ends = {queue: self._end(queue, at, known, seen) for queue, at in start.queues.items()}
            new = dict(self._subscribed.queues(known, seen, without=start.queues))
        else:
            found, seen = self._until
            self._subscribed.require_brokers({queue.broker for queue in start.queues}, seen)
            ends = {queue: whole.end for queue, whole in found.items()}
            for queue in set(seen.bounds) & set(start.queues) & set(ends):
                _require_no_less(queue, start.queues[queue], ends[queue], seen)
            new = {queue: whole for queue, whole in found.items() if queue not in start.queues}
        self._newest = ends | {queue: whole.end for queue, whole in new.items()}
        moved = advanced(start, ends, most)
        if not new:
            return moved
        begins = {queue: whole.first for queue, whole in new.items()}
        return follows(start, {**moved.queues, **begins})

    def _end(self, queue: Queue, at: int, known: Catalogs, seen: Seen) -> int:
        """Return the offset up to which a queue can be read from offset `at` on."""
        catalog = known.get(queue.broker)
        bounds = seen.bounds.get(queue)
        archived = 0 if catalog is None else catalog.max_offset(queue.topic, queue.queue_id) or 0
        if bounds is None:
            if catalog is not None and queue.broker not in self._subscribed.retired:
                archived = _dense_end(catalog, queue, at)
            return max(at, archived)
        end = max(bounds.maximum, archived)
        _require_no_less(queue, at, end, seen)
        return max(end, at)

    def _tasks(self, start: QueuePosition, end: QueuePosition) -> Plan:
        known = self._catalogs()
        parts = PlanParts(self._options)
        for broker, runs in _by_broker(between(start, end)):
            lost = parts.add(broker, known.get(broker), runs, RequestedRows(since=end.since))
            if lost:
                lose(self._options, f"broker {broker}: {ranges_text(lost)}")
        return parts.divided()


def _by_broker(ranges: Mapping[Queue, tuple[int, int]]) -> Iterator[tuple[str, Iterable[Run]]]:
    found: dict[str, list[Run]] = {}
    for queue, (first, end) in sorted(ranges.items()):
        found.setdefault(queue.broker, []).append((queue.topic, queue.queue_id, first, end - 1))
    yield from found.items()


def _require_no_less(queue: Queue, at: int, end: int, seen: Seen) -> None:
    """Raise DataLoss if a queue ends before the offset up to which the stream has read it."""
    if end >= at or queue.broker in seen.without_master:  # a slave may lag
        return
    raise DataLoss(
        f"{queue.text()}: it ends at {end}, and the stream has read up to {at}. The topic was deleted and created "
        "again, or its broker lost messages, so offsets are reused. Begin with a new checkpoint"
    )


def _dense_end(catalog: Catalog, queue: Queue, at: int) -> int:
    """Return the end of the rows from `at` on that the archive has without a hole; a round may commit out of order."""
    spans = [(run.first, run.last) for run in catalog.queue(queue.topic, queue.queue_id).runs_in_view()]
    end = at
    for first, last in joined([*spans, *catalog.queue(queue.topic, queue.queue_id).gap_spans()]):
        if first > max(end, catalog.recorded_minimum(queue.topic, queue.queue_id)):
            break
        end = max(end, last + 1)
    return end
