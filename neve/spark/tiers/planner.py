"""What a query over both tiers reads: rows by queue and offset, out of an object if one has them, else from the broker.

Brokers are asked first, the journals are read then: what a broker has let go of meanwhile is in the archive. What is
in neither, and is no gap, is left to the broker as well; a task that does not get it looks into the archive once more,
and then it is lost, and said so (`hot_rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import JournalSource, brokers, read_catalog
from neve.remoting.names import may_be_sent_to
from neve.spark.planning.journals import Journal, by_what_is_kept
from neve.spark.planning.options import EARLIEST, LATEST, BadOption, Options
from neve.spark.planning.planner import DataLoss, Task, Wanted, told
from neve.spark.planning.rows import Span, joined, rows_of
from neve.spark.planning.slices import Slice, found_in, in_view, tasks_of
from neve.spark.tiers.brokers import BrokerAway, BrokerRefused, HotTier, Seen
from neve.spark.tiers.positions import QueuePosition, advanced, between, follows
from neve.spark.tiers.queues import Bounds, HotSlice, HotTask, Queue, by_broker, hot_slices, hot_tasks_of

log = logging.getLogger(__name__)

Catalogs = Mapping[str, Catalog]


class Plan(NamedTuple):
    """What tasks read of the archive, and what they pull."""

    archived: list[Task]
    hot: list[HotTask]


class Whole(NamedTuple):
    """A queue over both tiers: rows in [first, end), less gaps. `spans`: where only the archive has it."""

    first: int
    end: int
    spans: Sequence[Span]


def plan_batch(source: JournalSource, hot: HotTier, options: Options, wanted: Wanted) -> Plan:
    """All that there is now of what the options and filters ask for, up to each queue's end.

    Raises:
        FileNotFoundError: there is no such topic, or no such broker.
        DataLoss: rows from an offset on were asked for that are gone.
        BrokerAway, BrokerRefused: somebody who may have rows can't be asked, or does not tell.
    """
    table = _Table(options)

    def catalogs() -> Catalogs:
        return {one: read_catalog(source, one) for one in brokers(source) if options.broker in (None, one)}

    known, seen = table.looked_at(hot, catalogs)
    found: dict[str, list[tuple[str, int, int, int]]] = {}
    for queue, whole in table.queues(known, seen):
        first, end = table.range_asked_for(queue, whole)
        spans = whole.spans or [(whole.first, whole.end - 1)]
        found.setdefault(queue.broker, []).extend(
            (queue.topic, queue.queue_id, max(low, first), min(high, end - 1)) for low, high in spans
        )
    plan = _Parts(options)
    for broker, runs in sorted(found.items()):
        if wanted.brokers is None or broker in wanted.brokers:
            plan.add(broker, known.get(broker), runs, wanted)
    return plan.divided()


class _Until(NamedTuple):
    """What there was when a run through what is available began."""

    queues: dict[Queue, Whole]
    seen: Seen


class TiersPlanner:
    """Of one stream over both tiers, for as long as it runs."""

    def __init__(self, source: JournalSource, hot: HotTier, options: Options) -> None:
        self._source, self._hot, self._options = source, hot, options
        self._table = _Table(options)
        self._journals: dict[str, Journal] = {}
        self._until: _Until | None = None  # what a run through what is available stops at
        self._newest: dict[Queue, int] = {}
        self._reported: Mapping[Queue, int] = {}

    def initial(self) -> QueuePosition:
        """Where a stream begins that has no checkpoint. Raises as `plan_batch`."""
        return by_what_is_kept(self._journals, self._initial)

    def latest(self, start: QueuePosition, most: int | None) -> QueuePosition:
        """The position after at most so many offsets. A queue that is new begins here; the next batch reads it.

        All before `start` is done with: Spark asks for what comes next when the checkpoint has it, and after the last
        batch of a run, too.
        """
        self.forget(start)
        return by_what_is_kept(self._journals, lambda: self._latest(start, most))

    def tasks(self, start: QueuePosition, end: QueuePosition) -> Plan:
        """The rows between two positions, the same ones whenever it is asked."""
        return by_what_is_kept(self._journals, lambda: self._tasks(start, end))

    def newest(self) -> QueuePosition:
        """Each queue's end, as it was seen last."""
        return QueuePosition(dict(self._newest), self._options.since)

    def stop_at_now(self) -> None:
        """`latest` goes no further than what is there now."""
        self._until = by_what_is_kept(self._journals, self._look_up_to_holes)

    def forget(self, end: QueuePosition) -> None:
        """Nothing before this position is asked for any more: the brokers are told, at the next one if not now."""
        retired = self._table.retired
        was = self._reported
        moved = {q: at for q, at in end.queues.items() if was.get(q) != at and q.broker not in retired}
        if not moved or self._hot.report(moved):
            self._reported = end.queues

    # ---- inside

    def _catalogs(self) -> Catalogs:
        for broker in brokers(self._source):
            if self._options.broker not in (None, broker):
                continue
            if broker in self._journals:
                self._journals[broker].refresh()
            else:
                self._journals[broker] = Journal(self._source, broker, lambda _: False)
            self._journals[broker].forget(self._journals[broker].end)
        return {broker: journal.catalog for broker, journal in self._journals.items()}

    def _look(self) -> tuple[dict[Queue, Whole], Seen]:
        known, seen = self._table.looked_at(self._hot, self._catalogs)
        found = dict(self._table.queues(known, seen))
        self._newest = {queue: whole.end for queue, whole in found.items()}
        return found, seen

    def _look_up_to_holes(self) -> _Until:
        found, seen = self._look()
        for queue, whole in found.items():
            if whole.spans and queue.broker not in self._table.retired:
                end = _dense_end(self._journals[queue.broker].catalog, queue, whole.first)
                found[queue] = whole._replace(end=end)
        return _Until(found, seen)

    def _initial(self) -> QueuePosition:
        found, _ = self._look()
        begins = {queue: self._table.range_asked_for(queue, whole)[0] for queue, whole in found.items()}
        return QueuePosition(begins, self._options.since, is_initial=True)

    def _latest(self, start: QueuePosition, most: int | None) -> QueuePosition:
        if self._until is None:
            known, seen = self._table.looked_at(self._hot, self._catalogs)
            self._table.require_brokers({queue.broker for queue in start.queues}, seen)
            ends = {queue: self._end(queue, at, known, seen) for queue, at in start.queues.items()}
            new = dict(self._table.queues(known, seen, without=start.queues))
        else:
            found, seen = self._until
            self._table.require_brokers({queue.broker for queue in start.queues}, seen)
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
        """Up to where a queue may be read that has been read up to `at`."""
        catalog = known.get(queue.broker)
        bounds = seen.bounds.get(queue)
        archived = 0 if catalog is None else catalog.max_offset(queue.topic, queue.queue_id) or 0
        if bounds is None:
            if catalog is not None and queue.broker not in self._table.retired:
                archived = _dense_end(catalog, queue, at)
            return max(at, archived)
        end = max(bounds.maximum, archived)
        _require_no_less(queue, at, end, seen)
        return max(end, at)

    def _tasks(self, start: QueuePosition, end: QueuePosition) -> Plan:
        known = self._catalogs()
        plan = _Parts(self._options)
        for broker, runs in by_broker(between(start, end)).items():
            plan.add(broker, known.get(broker), runs, Wanted(since=end.since))
        return plan.divided()


def _require_no_less(queue: Queue, at: int, end: int, seen: Seen) -> None:
    """Raises DataLoss where a queue that a stream has read up to `at` ends before that."""
    if end >= at or queue.broker in seen.without_master:  # a replica may be behind
        return
    raise DataLoss(
        f"{queue.told()}: it ends at {end}, and the stream has read up to {at}. Offsets are given again: the topic "
        "was deleted and made anew, or its broker lost messages. The stream can't go on: begin a new checkpoint"
    )


def lose(options: Options, rows: str) -> None:
    """Raises DataLoss, where the user did not say that the query goes on."""
    what = f"{rows}: neither at their broker nor in the archive. failOnDataLoss=false goes on without them"
    if options.fails_on_data_loss:
        raise DataLoss(what)
    log.warning("%s", what)


class _Parts:
    """Of a plan, as it is made."""

    def __init__(self, options: Options) -> None:
        assert options.cluster is not None, "both tiers are asked for"
        self._options, self._retired = options, options.cluster.retired
        self._slices: list[Slice] = []
        self._hot: list[HotSlice] = []

    def add(
        self, broker: str, catalog: Catalog | None, runs: Iterable[tuple[str, int, int, int]], wanted: Wanted
    ) -> None:
        """What no object has, and is no gap, is pulled. Raises DataLoss where nobody is there who could give it."""
        rows = wanted.cut(rows_of(runs))
        if catalog is not None:
            slices, rows = found_in(catalog, broker, rows, wanted.may_hold)
            self._slices += slices
        if broker not in self._retired:
            self._hot += hot_slices(broker, rows)
        elif rows:
            lose(self._options, f"broker {broker}: {told(rows)}")

    def divided(self) -> Plan:
        """Into tasks."""
        options = self._options
        archived = tasks_of(self._slices, options.task_bytes, options.least_tasks)
        return Plan(archived, hot_tasks_of(self._hot, options.least_tasks))


class _Table:
    """Which queues a query is about, and what there is of each."""

    def __init__(self, options: Options) -> None:
        assert options.cluster is not None, "both tiers are asked for"
        self._options, self.retired = options, options.cluster.retired
        for topic in options.subscription.names:
            if not may_be_sent_to(topic):
                raise BadOption(f"{topic} is the brokers' own: what waits there is not for clients")

    def looked_at(self, hot: HotTier, catalogs: Callable[[], Catalogs]) -> tuple[Catalogs, Seen]:
        """Both tiers, the brokers first. Raises BrokerAway, BrokerRefused, FileNotFoundError."""
        of, broker = self._options.subscription, self._options.broker
        topics = of.names if of.pattern is None else [one for one in hot.topics() if of.has(one)]
        seen = hot.seen(topics)
        seen = seen._replace(bounds={queue: one for queue, one in seen.bounds.items() if self._has(queue)})
        known = catalogs()
        for (at, topic), why in sorted(seen.unreadable.items()):
            if broker in (None, at):
                raise BrokerRefused(f"topic {topic} at broker {at}: {why}")
        archived = {name for name, catalog in known.items() if any(map(catalog.has_topic, self._topics_of(catalog)))}
        self.require_brokers(archived, seen)
        if broker is not None and broker not in known and broker not in seen.brokers:
            raise FileNotFoundError(f"there is no broker {broker}, in the archive or at the name servers")
        for topic in sorted(of.names):
            if not any(catalog.has_topic(topic) for catalog in known.values()) and not any(
                queue.topic == topic for queue in seen.bounds
            ):
                raise FileNotFoundError(f"topic {topic} is at no broker, and not in this archive")
        return known, self._with_queues_of_the_archive(hot, known, seen)

    def require_brokers(self, brokers: Iterable[str], seen: Seen) -> None:
        """Raises BrokerAway for one that the name servers do not know."""
        away = sorted(set(brokers) - seen.brokers - self.retired)
        if away:
            raise BrokerAway(
                f"broker {', '.join(away)}: the name servers do not know it now, so what it has is not known. Where it "
                f"is gone for good, the option retiredBrokers={','.join(away)} takes what the archive has of it for all"
            )

    def queues(
        self, known: Catalogs, seen: Seen, without: Mapping[Queue, int] | None = None
    ) -> Iterator[tuple[Queue, Whole]]:
        """All that are subscribed to, of which there is something to be said."""
        skipped = without or {}
        spans: dict[tuple[str, str], Mapping[int, Sequence[Span]]] = {}
        archived = {
            Queue(broker, topic, number)
            for broker, catalog in known.items()
            for topic in self._topics_of(catalog)
            for number in catalog.queues(topic)
        }
        for queue in sorted(q for q in archived | set(seen.bounds) if q not in skipped and self._has(q)):
            catalog = known.get(queue.broker)
            if catalog is not None and (queue.broker, queue.topic) not in spans:
                spans[queue.broker, queue.topic] = in_view(catalog, queue.topic, lambda *_: True)
            of_queue = spans.get((queue.broker, queue.topic), {}).get(queue.queue_id, ())
            whole = _whole(catalog, queue, of_queue, seen.bounds.get(queue))
            if whole is not None:
                yield queue, whole

    def range_asked_for(self, queue: Queue, whole: Whole) -> tuple[int, int]:
        """[first, end) between the offsets that the options tell. Raises BadOption, DataLoss."""
        first, end = (
            {EARLIEST: whole.first, LATEST: whole.end}[asked] if isinstance(asked, str) else asked
            for asked in (of.of(*_place(queue)) for of in (self._options.starting, self._options.ending))
        )
        if first > whole.end:
            raise BadOption(f"startingOffsets: {queue.told()}: it ends before {whole.end}, {first} is above it")
        if first < whole.first and self._options.fails_on_data_loss:
            raise DataLoss(
                f"{queue.told()}: offsets {first} to {whole.first - 1} are gone. "
                "failOnDataLoss=false goes on without them"
            )
        return max(first, whole.first), min(end, whole.end)

    def _has(self, queue: Queue) -> bool:
        of = self._options.subscription
        return (
            self._options.broker in (None, queue.broker)
            and of.has(queue.topic)
            and of.has_queue(queue.topic, queue.queue_id)
        )

    def _topics_of(self, catalog: Catalog) -> list[str]:
        of = self._options.subscription
        return sorted(topic for topic in (of.names if of.pattern is None else catalog.topics()) if of.has(topic))

    def _with_queues_of_the_archive(self, hot: HotTier, known: Catalogs, seen: Seen) -> Seen:
        """Queues that a topic had before it was made smaller are in no route."""
        routed = {(queue.broker, queue.topic) for queue in seen.bounds}
        more = [
            queue
            for broker, topic in sorted(routed)
            if broker in known
            for number in known[broker].queues(topic)
            if (queue := Queue(broker, topic, number)) not in seen.bounds and self._has(queue)
        ]
        return seen if not more else seen._replace(bounds={**seen.bounds, **hot.bounds(more)})


def _place(queue: Queue) -> tuple[str, str, int]:
    return queue.topic, queue.broker, queue.queue_id


def _whole(catalog: Catalog | None, queue: Queue, spans: Sequence[Span], bounds: Bounds | None) -> Whole | None:
    """Both tiers together; None: nobody knows the queue."""
    if bounds is None:
        if not spans:
            return None
        return Whole(spans[0][0], spans[-1][1] + 1, spans)
    minimum = 0 if catalog is None else catalog.recorded_minimum(queue.topic, queue.queue_id)
    low = max(bounds.minimum, minimum)
    if not spans:
        return Whole(low, max(bounds.maximum, low), ())
    first = min(spans[0][0], low) if low < bounds.maximum else spans[0][0]
    return Whole(first, max(bounds.maximum, spans[-1][1] + 1), ())


def _dense_end(catalog: Catalog, queue: Queue, at: int) -> int:
    """Up to where the archive has all rows from `at` on: a round's objects may come in another order than its rows."""
    spans = [(run.first, run.last) for run in catalog.runs_in_view(queue.topic, queue.queue_id)]
    end = at
    for first, last in joined([*spans, *catalog.gap_spans(queue.topic, queue.queue_id)]):
        if first > max(end, catalog.recorded_minimum(queue.topic, queue.queue_id)):
            break
        end = max(end, last + 1)
    return end
