"""The queues of a query in the archive and, with a cluster, at its brokers; and the plan of a batch.

The brokers are asked first and the journals are read second: what a broker deletes in between is in the archive. Rows
that are in neither, and are not declared as gaps, are left to the broker. A task that does not receive them looks in
the archive once more, and then reports them as lost (`hot_rows`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from neve.archive.catalog import journal_reader
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import JournalSource
from neve.remoting.names import may_be_sent_to
from neve.spark.known_topics import check_known
from neve.spark.planning.options import EARLIEST, LATEST, BadOption, Options
from neve.spark.planning.queues import (
    Bounds,
    BrokerAway,
    BrokerRefused,
    HotSlice,
    HotTask,
    HotTier,
    Queue,
    Seen,
    hot_slices,
    hot_tasks_of,
)
from neve.spark.planning.rows import Rows, Span, rows_of, runs_of
from neve.spark.planning.slices import Slice, found_in, in_view, tasks_of
from neve.spark.planning.wanted import RequestedRows

log = logging.getLogger(__name__)

P = TypeVar("P")

Task = list[Slice]
Catalogs = Mapping[str, Catalog]
Run = tuple[str, int, int, int]  # topic, queue, first, last

_RANGES_SHOWN = 5


class DataLoss(RuntimeError):
    """Rows of the query no longer exist."""


class Plan(NamedTuple):
    """Tasks that read objects, and tasks that pull from brokers."""

    archived: list[Task]
    hot: list[HotTask]


class StreamPlanner(Protocol[P]):
    """The planner of one stream, for as long as it runs; `P` is its kind of position."""

    def initial(self) -> P:
        """Return the position at which a stream without a checkpoint begins. Raises FileNotFoundError."""
        ...

    def latest(self, start: P, most: int | None) -> P:
        """Return the position after at most `most` rows; `start` if there are none.

        HotTier and queues that are new begin at the returned position; the next batch reads them.
        """
        ...

    def tasks(self, start: P, end: P) -> Plan:
        """Plan the rows between two positions, the same rows at each call. Raises DataLoss."""
        ...

    def newest(self) -> P:
        """Return the end of all rows, for the progress of a query."""
        ...

    def stop_at_now(self) -> None:
        """Let `latest` stop at the present end."""
        ...

    def forget(self, end: P) -> None:
        """Drop state before a position that is in the checkpoint."""
        ...


class Whole(NamedTuple):
    """The rows [first, end) of a queue, without gaps; if only the archive has it, those in `spans`.

    Offsets below `minimum` have expired.
    """

    first: int
    end: int
    spans: Sequence[Span]
    minimum: int


def plan_batch(source: JournalSource, options: Options, wanted: RequestedRows, brokers: HotTier | None = None) -> Plan:
    """Plan all rows that exist now, within the options and the filter.

    Args:
        brokers: of the cluster in the options; None: read the archive only.

    Raises:
        FileNotFoundError: there is no archive, no such topic or no such broker.
        DataLoss: requested rows have expired.
        BrokerAway, BrokerRefused: a broker that may have rows cannot be asked.
    """
    queues = Subscribed(options)
    known, seen = queues.look(source, brokers, lambda: _catalogs(source, options))
    parts = PlanParts(options)
    for broker, runs in sorted(queues.asked_for(known, seen).items()):
        if wanted.brokers is None or broker in wanted.brokers:
            lost = parts.add(broker, known.get(broker), runs, wanted)
            if lost:
                lose(options, f"broker {broker}: {ranges_text(lost)}")
    return parts.divided()


def _catalogs(source: JournalSource, options: Options) -> Catalogs:
    if options.cluster is None:
        return journal_reader.catalogs(source, options.broker)
    several = (one for one in journal_reader.brokers(source) if options.broker in (None, one))
    return {one: journal_reader.read_catalog(source, one) for one in several}


class PlanParts:
    """The slices of a plan, as it is made."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._slices: list[Slice] = []
        self._hot: list[HotSlice] = []

    def add(self, broker: str, catalog: Catalog | None, runs: Iterable[Run], wanted: RequestedRows) -> Rows:
        """Add rows of a broker, and return those that are in no object while the broker cannot be asked."""
        rows = wanted.cut(rows_of(runs))
        if catalog is not None:
            slices, rows = found_in(catalog, broker, rows, wanted.may_hold)
            self._slices += slices
        cluster = self._options.cluster
        if cluster is None or broker in cluster.retired:
            return rows
        self._hot += hot_slices(broker, rows)
        return {}

    def divided(self) -> Plan:
        """Return the plan, divided into tasks."""
        options = self._options
        archived = tasks_of(self._slices, options.task_bytes, options.least_tasks)
        return Plan(archived, hot_tasks_of(self._hot, options.least_tasks))


class Subscribed:
    """The queues to which a query is subscribed, and the rows that each has."""

    def __init__(self, options: Options) -> None:
        """Raises BadOption for a topic that clients may not read."""
        self._options = options
        self.retired = frozenset[str]() if options.cluster is None else options.cluster.retired
        for topic in options.subscription.names if options.cluster is not None else ():
            if not may_be_sent_to(topic):
                raise BadOption(f"topic {topic} is internal to brokers and not for clients")

    def look(
        self, source: JournalSource, brokers: HotTier | None, catalogs: Callable[[], Catalogs]
    ) -> tuple[Catalogs, Seen]:
        """Return the catalogs and the state of the cluster. Raises as `plan_batch`."""
        if brokers is None:
            known = catalogs()
            for topic in sorted(self._options.subscription.names if known else ()):
                check_known(source, known, topic)
            return known, Seen()
        of, broker = self._options.subscription, self._options.broker
        topics = of.names if of.pattern is None else [one for one in brokers.topics() if of.has(one)]
        seen = brokers.seen(topics)
        seen = seen._replace(bounds={queue: one for queue, one in seen.bounds.items() if self._has(queue)})
        known = catalogs()
        for (at, topic), reason in sorted(seen.unreadable.items()):
            if broker in (None, at):
                raise BrokerRefused(f"topic {topic} at broker {at}: {reason}")
        archived = {name for name, catalog in known.items() if any(map(catalog.has_topic, self._topics_of(catalog)))}
        self.require_brokers(archived, seen)
        if broker is not None and broker not in known and broker not in seen.brokers:
            raise FileNotFoundError(f"there is no broker {broker}, in the archive or at the name servers")
        for topic in sorted(of.names):
            if not any(catalog.has_topic(topic) for catalog in known.values()) and not any(
                queue.topic == topic for queue in seen.bounds
            ):
                raise FileNotFoundError(f"topic {topic} is at no broker, and not in this archive")
        return known, self._with_unrouted(brokers, known, seen)

    def require_brokers(self, brokers: Iterable[str], seen: Seen) -> None:
        """Raise BrokerAway for brokers that the name servers do not know."""
        away = sorted(set(brokers) - seen.brokers - self.retired)
        if away:
            raise BrokerAway(
                f"broker {', '.join(away)}: the name servers do not know it, so its rows are unknown. If it "
                f"is removed for good, set the option retiredBrokers={','.join(away)} to read only its archive"
            )

    def asked_for(self, known: Catalogs, seen: Seen) -> dict[str, list[Run]]:
        """Return the rows between the offsets of the options, by broker. Raises BadOption, DataLoss."""
        found: dict[str, list[Run]] = {}
        for queue, whole in self.queues(known, seen):
            first, end = self.range_asked_for(queue, whole)
            spans = whole.spans or [(whole.first, whole.end - 1)]
            found.setdefault(queue.broker, []).extend(
                (queue.topic, queue.queue_id, max(low, first), min(high, end - 1)) for low, high in spans
            )
        return found

    def queues(
        self, known: Catalogs, seen: Seen, without: Mapping[Queue, int] | None = None
    ) -> Iterator[tuple[Queue, Whole]]:
        """Yield the subscribed queues that have rows or bounds, in order, without some."""
        skipped = without or {}
        is_archive_only = self._options.cluster is None
        in_time = RequestedRows(self._options.since if is_archive_only else None)
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
                spans[queue.broker, queue.topic] = in_view(catalog, queue.topic, in_time.may_hold)
            of_queue = spans.get((queue.broker, queue.topic), {}).get(queue.queue_id, ())
            whole = _whole(catalog, queue, of_queue, seen.bounds.get(queue))
            if whole is not None:
                if is_archive_only and catalog is not None:
                    whole = whole._replace(minimum=catalog.recorded_minimum(queue.topic, queue.queue_id))
                yield queue, whole

    def range_asked_for(self, queue: Queue, whole: Whole) -> tuple[int, int]:
        """Return the range [first, end) of a queue within the offsets of the options. Raises BadOption, DataLoss."""
        first, end = (
            {EARLIEST: whole.first, LATEST: whole.end}[asked] if isinstance(asked, str) else asked
            for asked in (
                of.of(queue.topic, queue.broker, queue.queue_id)
                for of in (self._options.starting, self._options.ending)
            )
        )
        if first > whole.end:
            raise BadOption(f"option startingOffsets: {queue.text()} ends at {whole.end}, got {first}")
        if first < whole.minimum and self._options.fails_on_data_loss:
            raise DataLoss(
                f"{queue.text()}: offsets {first} to {whole.first - 1} have expired. failOnDataLoss=false skips them"
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

    def _with_unrouted(self, brokers: HotTier, known: Catalogs, seen: Seen) -> Seen:
        """Add queues that are in no route since their topic has fewer queues now."""
        routed = {(queue.broker, queue.topic) for queue in seen.bounds}
        more = [
            queue
            for broker, topic in sorted(routed)
            if broker in known
            for number in known[broker].queues(topic)
            if (queue := Queue(broker, topic, number)) not in seen.bounds and self._has(queue)
        ]
        return seen if not more else seen._replace(bounds={**seen.bounds, **brokers.bounds(more)})


def _whole(catalog: Catalog | None, queue: Queue, spans: Sequence[Span], bounds: Bounds | None) -> Whole | None:
    """Join archive and broker; None if neither has the queue."""
    if bounds is None:
        return None if not spans else Whole(spans[0][0], spans[-1][1] + 1, spans, spans[0][0])
    recorded = 0 if catalog is None else catalog.recorded_minimum(queue.topic, queue.queue_id)
    low = max(bounds.minimum, recorded)
    if not spans:
        return Whole(low, max(bounds.maximum, low), (), low)
    first = min(spans[0][0], low) if low < bounds.maximum else spans[0][0]
    return Whole(first, max(bounds.maximum, spans[-1][1] + 1), (), first)


def lose(options: Options, rows: str, reason: str = "neither at their broker nor in the archive") -> None:
    """Raise DataLoss, or log a warning if the options accept it."""
    loss = f"{rows}: {reason}. failOnDataLoss=false skips them"
    if options.fails_on_data_loss:
        raise DataLoss(loss)
    log.warning("rows are lost: %s", loss)


def ranges_text(rows: Rows) -> str:
    """Return the first ranges of rows as an error message names them."""
    several = [
        f"topic {topic}, queue {queue}, offsets {first} to {last}" for topic, queue, first, last in runs_of(rows)
    ]
    more = f" and {len(several) - _RANGES_SHOWN} more ranges" if len(several) > _RANGES_SHOWN else ""
    return "; ".join(several[:_RANGES_SHOWN]) + more
