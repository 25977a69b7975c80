"""The planner of a stream of the archive: the rows between two positions in the journals of its brokers."""

from __future__ import annotations

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import JournalSource, brokers
from neve.spark.planning.journal_positions import (
    Place,
    Position,
    advanced,
    available,
    begin_of,
    between,
    follows,
)
from neve.spark.planning.journals import BrokerJournal, JournalBeginsLater, retry_with_new_catalogs
from neve.spark.planning.options import EARLIEST, Offsets, Options
from neve.spark.planning.planner import Catalogs, Plan, PlanParts, Subscribed, lose, ranges_text
from neve.spark.planning.queues import Seen
from neve.spark.planning.rows import Rows, rows_of, runs_of, share
from neve.spark.planning.wanted import RequestedRows


class JournalStream:
    """A `StreamPlanner` that keeps the journals it has read between two calls."""

    def __init__(self, source: JournalSource, options: Options) -> None:
        self._source, self._options = source, options
        self._journals: dict[str, BrokerJournal] = {}
        self._until: dict[str, int] | None = None  # broker -> the last entry of a run with availableNow

    def initial(self) -> Position:
        return retry_with_new_catalogs(self._journals, self._initial)

    def latest(self, start: Position, most: int | None) -> Position:
        return retry_with_new_catalogs(self._journals, lambda: self._latest(start, most))

    def tasks(self, start: Position, end: Position) -> Plan:
        return retry_with_new_catalogs(self._journals, lambda: self._tasks(start, end))

    def newest(self) -> Position:
        return Position({broker: Place(end, {}) for broker, end in self._ends().items()}, self._options.since)

    def stop_at_now(self) -> None:
        self._refresh()
        self._until = self._ends()

    def forget(self, end: Position) -> None:
        for broker, place in end.brokers.items():
            if broker in self._journals:
                self._journals[broker].forget(place.through)

    # ---- internals

    def _initial(self) -> Position:
        subscribed = Subscribed(self._options)
        known, seen = subscribed.look(self._source, None, self._catalogs)
        rows = subscribed.asked_for(known, seen)
        places = {
            broker: Place(journal.end, rows_of(rows.get(broker, ()))) for broker, journal in self._journals.items()
        }
        return Position(places, self._options.since, is_initial=True)

    def _latest(self, start: Position, most: int | None) -> Position:
        if self._until is None:
            self._refresh()
        ends = self._ends()
        places, added = dict(start.brokers), {}
        for broker, place in start.brokers.items():
            try:
                added[broker] = self._added(broker, place.through, ends.get(broker, -1))
            except JournalBeginsLater as error:
                self._lose(error)
                places[broker] = Place(ends[broker], place.left)
                added[broker] = []
        rows = [available(place, added[broker]) for broker, place in places.items()]
        shares = rows if most is None else share(most, [min(one, most) for one in rows])
        for (broker, place), some in zip(list(places.items()), shares, strict=True):
            if some or not available(place, added[broker]):
                places[broker] = advanced(place, added[broker], None if most is None else some)
        for broker in sorted(set(ends) - set(places)):
            journal = self._journals[broker]
            places[broker] = Place(journal.end, self._all_rows(journal.catalog, broker))
        return follows(start, places)

    def _tasks(self, start: Position, end: Position) -> Plan:
        self._refresh()  # objects may have been compacted or deleted since the position was returned
        start = begin_of(start, end)
        wanted = RequestedRows(since=end.since)
        parts = PlanParts(self._options)
        for broker, place in sorted(end.brokers.items()):
            before = start.brokers.get(broker)
            if before is None or before == place:
                continue
            if broker not in self._journals:
                raise FileNotFoundError(f"the archive of broker {broker} is gone from {self._options.store}")
            try:
                added = self._added(broker, before.through, place.through)
            except JournalBeginsLater as error:
                self._lose(error)
                added = []
            rows = runs_of(between(before, place, added))
            lost = parts.add(broker, self._journals[broker].catalog, rows, wanted)
            if lost:
                lose(
                    self._options, f"broker {broker}: {ranges_text(lost)}", "they expired before this stream read them"
                )
        return parts.divided()

    def _catalogs(self) -> Catalogs:
        self._refresh()
        return {broker: journal.catalog for broker, journal in self._journals.items()}

    def _refresh(self) -> None:
        for broker in brokers(self._source):
            if self._options.broker not in (None, broker):
                continue
            if broker in self._journals:
                self._journals[broker].refresh()
            else:
                self._journals[broker] = BrokerJournal(self._source, broker, self._options.subscription.has)

    def _ends(self) -> dict[str, int]:
        return self._until or {broker: journal.end for broker, journal in self._journals.items()}

    def _added(self, broker: str, after: int, through: int) -> list[tuple[int, Rows]]:
        journal = self._journals.get(broker)
        added = [] if journal is None else journal.added(after, through)
        return [(seq, self._of_queues(rows)) for seq, rows in added]

    def _of_queues(self, rows: Rows) -> Rows:
        of = self._options.subscription
        return rows if of.queues is None else rows_of(run for run in runs_of(rows) if of.has_queue(run[0], run[1]))

    def _all_rows(self, catalog: Catalog, broker: str) -> Rows:
        from_earliest = Subscribed(self._options._replace(starting=Offsets({}, EARLIEST)))
        return rows_of(from_earliest.asked_for({broker: catalog}, Seen()).get(broker, ()))

    def _lose(self, error: JournalBeginsLater) -> None:
        lose(self._options, str(error), "the rows that they added are unknown")
