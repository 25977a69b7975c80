"""One run over a table, from what it finds to the archive's end; all but what Spark does is decided here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from neve.archive.catalog.journal_reader import catalogs
from neve.spark.jobs.table_log import Commit, TableFile, TableLog
from neve.spark.jobs.table_rows import Output, Written, hit, rows_in, went
from neve.spark.planning.options import Options
from neve.spark.planning.planner import StreamPlanner
from neve.spark.planning.positions import decoded, encoded
from neve.spark.planning.rows import Rows, count, minus, union
from neve.spark.planning.slices import Slice

if TYPE_CHECKING:
    from neve.archive.catalog.journal_reader import JournalSource
    from neve.archive.format.journal import CommittedObject


class RowsDiffer(RuntimeError):
    """What was written is not what was planned: nothing of it is committed."""


class ObjectGone(RuntimeError):
    """The archive deleted an object between plan and read."""


class Writer(Protocol):
    """What a run asks of Spark. `staged`: where in the staging, below which a file's day is a folder.

    `is_half`: of the rows that it is given, some belong into another table.
    """

    @property
    def is_half(self) -> bool: ...

    def write(self, slices: Sequence[Slice], names: Mapping[str, CommittedObject], staged: str) -> Output: ...

    def rewrite(self, files: Sequence[TableFile], without: Mapping[str, Rows], staged: str) -> list[Written]: ...


class MaterializeJob(NamedTuple):
    """What a run did, and what the table holds after it; `commits` is the number of its newest.

    `dead_rows`: those that the table of dead letters holds, where there is one.
    """

    topic: str
    table: str
    rows: int
    dropped_rows: int
    commits: int
    table_rows: int
    table_files: int
    table_bytes: int
    dead_rows: int = 0

    def as_json(self) -> dict[str, Any]:
        """The report that a program reads."""
        return {"job": "materialize", **self._asdict()}


Progress = Callable[[MaterializeJob], None]


class Run:
    """`writer` does what Spark is for."""

    def __init__(
        self,
        source: JournalSource,
        options: Options,
        *,
        table: str,
        log: TableLog,
        writer: Writer,
        progress: Progress = lambda _: None,
    ) -> None:
        (self._topic,) = options.subscription.names
        self._source, self._options, self._table = source, options, table
        self._log, self._writer, self._progress = log, writer, progress
        self._rows = self._dropped = 0

    def to_the_end(self, settings: Mapping[str, str], rows_per_commit: int, *, drops_expired: bool) -> MaterializeJob:
        state = self._log.begin(settings)
        try:
            state = self._without_what_went(state, drops_expired=drops_expired)
            planner = StreamPlanner(self._source, self._options)
            position = planner.initial() if state.position is None else decoded(state.position)
            planner.stop_at_now()
            while (end := planner.latest(position, rows_per_commit)) != position:
                slices = [one for task in planner.tasks(position, end) for one in task]
                state = self._add(state, slices, encoded(end))
                position = end
                self._progress(self._told(state))
        finally:
            self._log.clear()
        return self._told(state)

    def _add(self, state: Commit, slices: Sequence[Slice], position: Mapping[str, Any]) -> Commit:
        if not slices:
            return self._log.commit(state._replace(position=position))
        names = self._names(slices)
        planned = rows_in(slices, names, self._topic)
        written, seen = self._writer.write(slices, names, self._log.staging(state, "new"))
        _check(seen, sum(map(count, planned.values())))
        assert self._writer.is_half or seen == sum(one.rows for one in written)
        brokers = sorted({*state.rows, *planned})
        rows = {broker: union(state.rows.get(broker, {}), planned.get(broker, {})) for broker in brokers}
        files = (*state.files, *self._files(state, written))
        added = sum(one.rows for one in written)
        state = self._log.commit(state._replace(position=position, rows=rows, files=files))
        self._rows += added
        self._log.clear()
        return state

    def _without_what_went(self, state: Commit, *, drops_expired: bool) -> Commit:
        """What was erased, and what has expired if it is to go, in one commit of its own."""
        known = catalogs(self._source, self._options.broker)
        gone = went(state.rows, known, self._topic, expired=drops_expired)
        if not gone:
            return state
        whole, cut = hit(state, gone)
        written: list[Written] = []
        if cut:
            written = self._writer.rewrite(cut, gone, self._log.staging(state, "cut"))
        had, has = sum(file.rows for file in (*whole, *cut)), sum(one.rows for one in written)
        rows_gone = sum(map(count, gone.values()))
        if not self._writer.is_half:
            _check(has, had - rows_gone)
        elif not had - rows_gone <= has <= had:  # which of those that went it had is not known
            _check(has, max(had - rows_gone, 0))
        paths = {file.path for file in (*whole, *cut)}
        files = (*(file for file in state.files if file.path not in paths), *self._files(state, written))
        rows = {broker: minus(rows, gone.get(broker, {})) for broker, rows in state.rows.items()}
        state = self._log.commit(state._replace(rows=rows, files=files, dropped=tuple(sorted(paths))))
        self._dropped += had - has
        self._log.clear()
        return state

    def _files(self, state: Commit, written: Iterable[Written]) -> list[TableFile]:
        made = f"{state.number + 1:08d}-{self._log.attempt[:8]}"
        return [
            TableFile(f"dt={one.day}/{made}-{at:05d}.parquet", one.size, one.rows, one.spans, one.key)
            for at, one in enumerate(written)
        ]

    def _names(self, slices: Sequence[Slice]) -> dict[str, CommittedObject]:
        """Also of what has left the readers' view and is not deleted yet: rows may still be read from there."""
        known = catalogs(self._source, self._options.broker)
        names = {name.key: name for catalog in known.values() for _, name in catalog.each_of(self._topic)}
        for one in slices:
            if one.key not in names:
                raise ObjectGone(f"{one.key} was deleted after the run had been planned: run it again")
        return names

    def _told(self, state: Commit) -> MaterializeJob:
        size = sum(file.size for file in state.files)
        return MaterializeJob(
            self._topic,
            self._table,
            self._rows,
            self._dropped,
            state.number + 1,
            state.file_rows,
            len(state.files),
            size,
        )


def _check(found: int, planned: int) -> None:
    """Raises RowsDiffer."""
    if found != planned:
        raise RowsDiffer(f"{found} rows were written of {planned} that were planned: nothing of them is committed")
