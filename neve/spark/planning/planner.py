"""What one query reads: of a batch the archive as it stands, of a stream what lies between two positions.

Nothing here is Spark's. It asks the store for the journals alone; which rows a position, or two, mean is arithmetic
(`positions`), where they are is looked up in the catalogs (`slices`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import JournalSource, brokers, catalogs
from neve.archive.format.journal import CommittedObject, RowGroup
from neve.spark.known_topics import check_known
from neve.spark.planning.journals import Journal, JournalBeginsLater, by_what_is_kept
from neve.spark.planning.options import EARLIEST, LATEST, BadOption, Offsets, Options
from neve.spark.planning.positions import Place, Position, advanced, available, begin_of, between, follows
from neve.spark.planning.rows import Rows, Span, rows_of, runs_of, share
from neve.spark.planning.slices import Slice, found_in, in_view, tasks_of

log = logging.getLogger(__name__)

Task = list[Slice]


class DataLoss(RuntimeError):
    """Rows that the query was to have are in the archive no more."""


class Wanted(NamedTuple):
    """What rows must be like, as far as objects and row groups tell; None: whatever they are.

    Store time in [since, until) in milliseconds, offsets in [first, last]; what it lets through may still be unwanted.
    """

    since: int | None = None
    until: int | None = None
    first: int | None = None
    last: int | None = None
    topics: frozenset[str] | None = None
    brokers: frozenset[str] | None = None
    days: frozenset[str] | None = None
    queues: frozenset[int] | None = None
    tags: frozenset[str] | None = None
    msg_ids: frozenset[str] | None = None
    key: str | None = None

    def within(self, since: int | None, until: int | None) -> Wanted:
        """And stored in this time."""
        low = [one for one in (self.since, since) if one is not None]
        high = [one for one in (self.until, until) if one is not None]
        return self._replace(since=max(low, default=None), until=min(high, default=None))

    def having(self, tags: frozenset[str] | None, key: str | None) -> Wanted:
        """And with one of these tags, and this key."""
        both = tags if self.tags is None else self.tags if tags is None else self.tags & tags
        return self._replace(tags=both, key=key)

    def may_hold(self, name: CommittedObject, group: RowGroup) -> bool:
        """Whether a row group may have such a row; one of unknown times may."""
        if self.days is not None and name.day not in self.days:
            return False
        if self.since is not None and 0 <= group.newest_ms < self.since:
            return False
        return self.until is None or group.oldest_ms < self.until

    def cut(self, rows: Rows) -> Rows:
        """Those of the queues and offsets that are wanted."""
        return rows_of(
            (topic, queue, max(first, self.first or 0), last if self.last is None else min(last, self.last))
            for topic, queue, first, last in runs_of(rows)
            if (self.topics is None or topic in self.topics) and (self.queues is None or queue in self.queues)
        )


def plan_batch(source: JournalSource, options: Options, wanted: Wanted) -> list[Task]:
    """All that the archive has now of what the options and filters ask for.

    Raises:
        FileNotFoundError: there is no archive, or no such topic.
        DataLoss: rows from an offset on were asked for that have expired.
    """
    known = catalogs(source, options.broker)
    _check_known(source, known, options)
    slices: list[Slice] = []
    for broker, catalog in sorted(known.items()):
        if wanted.brokers is not None and broker not in wanted.brokers:
            continue
        rows = _bounded(catalog, broker, options)
        found = found_in(catalog, broker, wanted.cut(rows), wanted.may_hold)
        assert not found.lost, "what is in view is in an object"
        slices += found.slices
    return tasks_of(slices, options.task_bytes, options.least_tasks)


class StreamPlanner:
    """Of one stream, for as long as it runs. Between two calls it keeps the journals that it has read."""

    def __init__(self, source: JournalSource, options: Options) -> None:
        self._source, self._options = source, options
        self._journals: dict[str, Journal] = {}
        self._until: dict[str, int] | None = None  # the ends that a run through what is available stops at

    def initial(self) -> Position:
        """Where a stream begins that has no checkpoint. Raises FileNotFoundError: there is no such topic."""
        return by_what_is_kept(self._journals, self._initial)

    def latest(self, start: Position, most: int | None) -> Position:
        """The position after at most so many rows; `start` where there are none.

        A broker whose archive is new begins here, with all that it has; the next batch reads it.
        """
        return by_what_is_kept(self._journals, lambda: self._latest(start, most))

    def tasks(self, start: Position, end: Position) -> list[Task]:
        """What lies between two positions; the same rows whenever it is asked. Raises DataLoss."""
        return by_what_is_kept(self._journals, lambda: self._tasks(start, end))

    def newest(self) -> Position:
        """The end of all journals, for who shows how far behind a stream is."""
        return Position({broker: Place(end, {}) for broker, end in self._ends().items()}, self._options.since)

    def stop_at_now(self) -> None:
        """`latest` goes no further than what is there now."""
        self._refresh()
        self._until = self._ends()

    def forget(self, end: Position) -> None:
        """Nothing before this position is asked for any more."""
        for broker, place in end.brokers.items():
            if broker in self._journals:
                self._journals[broker].forget(place.through)

    # ---- inside

    def _initial(self) -> Position:
        self._refresh()
        _check_known(self._source, {name: one.catalog for name, one in self._journals.items()}, self._options)
        places = {}
        for broker, journal in self._journals.items():
            places[broker] = Place(journal.end, _bounded(journal.catalog, broker, self._options))
        return Position(places, self._options.since, is_initial=True)

    def _latest(self, start: Position, most: int | None) -> Position:
        if self._until is None:
            self._refresh()
        ends = self._ends()
        places, brought = dict(start.brokers), {}
        for broker, place in start.brokers.items():
            try:
                brought[broker] = self._brought(broker, place.through, ends.get(broker, -1))
            except JournalBeginsLater as error:
                self._lose(f"{error}: what it brought since is not known")
                places[broker] = Place(ends[broker], place.left)
                brought[broker] = []
        rows = [available(place, brought[broker]) for broker, place in places.items()]
        shares = rows if most is None else share(most, [min(one, most) for one in rows])
        for (broker, place), some in zip(list(places.items()), shares, strict=True):
            if some or not available(place, brought[broker]):
                places[broker] = advanced(place, brought[broker], None if most is None else some)
        for broker in sorted(set(ends) - set(places)):
            journal = self._journals[broker]
            places[broker] = Place(journal.end, self._subscribed(journal.catalog, broker))
        return follows(start, places)

    def _tasks(self, start: Position, end: Position) -> list[Task]:
        self._refresh()  # what has been written anew, or deleted, since the position was told
        start = begin_of(start, end)
        wanted = Wanted(since=end.since)
        slices: list[Slice] = []
        for broker, place in sorted(end.brokers.items()):
            before = start.brokers.get(broker)
            if before is None or before == place:
                continue
            if broker not in self._journals:
                raise FileNotFoundError(f"the archive of broker {broker} is gone from {self._options.store}")
            try:
                brought = self._brought(broker, before.through, place.through)
            except JournalBeginsLater as error:
                self._lose(f"{error}: what it brought since is not known")
                brought = []
            found = found_in(self._journals[broker].catalog, broker, between(before, place, brought), wanted.may_hold)
            if found.lost:
                self._lose(f"broker {broker}: {told(found.lost)} expired before this stream read them")
            slices += found.slices
        return tasks_of(slices, self._options.task_bytes, self._options.least_tasks)

    def _refresh(self) -> None:
        for broker in brokers(self._source):
            if self._options.broker not in (None, broker):
                continue
            if broker in self._journals:
                self._journals[broker].refresh()
            else:
                self._journals[broker] = Journal(self._source, broker, self._options.subscription.has)

    def _ends(self) -> dict[str, int]:
        """broker -> the entry up to which a batch may go."""
        return self._until or {broker: journal.end for broker, journal in self._journals.items()}

    def _brought(self, broker: str, after: int, through: int) -> list[tuple[int, Rows]]:
        journal = self._journals.get(broker)
        brought = [] if journal is None else journal.brought(after, through)
        return [(seq, self._of_queues(rows)) for seq, rows in brought]

    def _of_queues(self, rows: Rows) -> Rows:
        of = self._options.subscription
        return rows if of.queues is None else rows_of(run for run in runs_of(rows) if of.has_queue(run[0], run[1]))

    def _subscribed(self, catalog: Catalog, broker: str) -> Rows:
        return _bounded(catalog, broker, self._options._replace(starting=Offsets({}, EARLIEST)))

    def _lose(self, what: str) -> None:
        loss = f"{what}. failOnDataLoss=false goes on without them"
        if self._options.fails_on_data_loss:
            raise DataLoss(loss)
        log.warning("%s", loss)


def _check_known(source: JournalSource, known: Mapping[str, Catalog], options: Options) -> None:
    """Raises FileNotFoundError where a topic that is named is at no broker."""
    if known:
        for topic in sorted(options.subscription.names):
            check_known(source, known, topic)


def _bounded(catalog: Catalog, broker: str, options: Options) -> Rows:
    """The rows in view of all topics that are subscribed to, between the offsets that the options tell."""
    of = options.subscription
    topics = sorted(topic for topic in (of.names if of.pattern is None else catalog.topics()) if of.has(topic))
    found: list[tuple[str, int, int, int]] = []
    in_time = Wanted(options.since)  # an end in time moves no offset: what lies behind it is left out where it is found
    for topic in topics:
        for queue, spans in in_view(catalog, topic, in_time.may_hold).items():
            if spans and of.has_queue(topic, queue):
                found += _cut(catalog, (topic, broker, queue), options, spans)
    return rows_of(found)


def _cut(
    catalog: Catalog, of: tuple[str, str, int], options: Options, spans: Sequence[Span]
) -> Iterator[tuple[str, int, int, int]]:
    """What lies between the offsets that are told. Those that the archive does not reach are an error, as Kafka's."""
    topic, broker, queue = of
    lowest, highest = spans[0][0], spans[-1][1] + 1
    first, end = (
        {EARLIEST: lowest, LATEST: highest}[asked] if isinstance(asked, str) else asked
        for asked in (options.starting.of(topic, broker, queue), options.ending.of(topic, broker, queue))
    )
    if first > highest:
        raise BadOption(
            f"startingOffsets: topic {topic}, broker {broker}, queue {queue}: the archive ends before {highest}, "
            f"{first} is above it"
        )
    if first < catalog.recorded_minimum(topic, queue) and options.fails_on_data_loss:
        raise DataLoss(
            f"topic {topic}, broker {broker}, queue {queue}: offsets {first} to {lowest - 1} have expired. "
            "failOnDataLoss=false goes on without them"
        )
    for low, high in spans:
        yield topic, queue, max(low, first), min(high, end - 1)


def told(rows: Rows) -> str:
    """As an error names rows."""
    several = [
        f"topic {topic}, queue {queue}, offsets {first} to {last}" for topic, queue, first, last in runs_of(rows)
    ]
    more = f" and {len(several) - _TOLD} ranges more" if len(several) > _TOLD else ""
    return "; ".join(several[:_TOLD]) + more


_TOLD = 5
