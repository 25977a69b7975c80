"""`format("neve")`: batches, streams, SQL views and writes, also through Spark Connect.

The driver plans what is read: it reads journals and, with the option `namesrv`, asks brokers for the ends of queues.
Tasks receive slices of objects, and offsets of queues to pull.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from neve.spark.planning import journal_positions, queue_positions
from neve.spark.planning.journal_stream import JournalStream
from neve.spark.planning.options import BadOption, Options, options_of_batch, options_of_stream
from neve.spark.planning.planner import Plan, StreamPlanner, Task, plan_batch
from neve.spark.planning.queue_stream import QueueStream
from neve.spark.planning.wanted import RequestedRows
from neve.spark.pushed import wanted_by
from neve.spark.reader import ROW_SCHEMA

try:
    from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows, SupportsTriggerAvailableNow
except ImportError:  # before PySpark 4.2
    HAS_STREAMS = False
    SupportsTriggerAvailableNow = object
else:
    HAS_STREAMS = True

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import DataSourceStreamWriter, DataSourceWriter, Filter
    from pyspark.sql.types import StructType

    from neve.spark.planning.queues import HotTask

P = TypeVar("P", bound="journal_positions.Position | queue_positions.QueuePosition")


class NeveDataSource(DataSource):  # type: ignore[misc]  # untyped there
    """Archived topics; with `namesrv` also unarchived messages, and topics to write to."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "neve"

    def schema(self) -> str:
        """Return all columns; `.schema(...)` of a query selects some."""
        return " ".join(ROW_SCHEMA.split())

    def reader(self, schema: StructType) -> BatchReader:
        """Return a reader, which accepts filters only if the option pushFilters is set.

        Spark rejects a reader that accepts filters while pushdown is disabled. If it is enabled, a frame or view keeps
        the selection of its last filters, so a later query without filters would miss rows.
        """
        options = _with_credentials(options_of_batch(self.options))
        return (PushedReader if options.pushes_filters else BatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        """Return a reader of a stream. Its rate limits need an interface of PySpark 4.2."""
        if not HAS_STREAMS:
            raise BadOption('streams of format("neve") need PySpark 4.2 or later')
        return StreamReader(_with_credentials(options_of_stream(self.options)), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return a writer of rows to topics."""
        from neve.spark.sink.options import options_of_sink
        from neve.spark.sink.writer import BatchWriter

        return BatchWriter(options_of_sink(self.options, os.environ), schema, overwrites=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """Return a writer of the batches of a stream to topics."""
        from neve.spark.sink.options import options_of_sink
        from neve.spark.sink.writer import StreamWriter

        return StreamWriter(options_of_sink(self.options, os.environ), schema, overwrites=overwrite)


class TaskPartition(InputPartition):  # type: ignore[misc]  # untyped there
    """The rows of one task: slices of objects or, if `hot` is given, offsets of queues."""

    def __init__(self, task: Task, wanted: RequestedRows, hot: HotTask | None = None) -> None:
        self.task, self.wanted, self.hot = task, wanted, hot


class _RowReader:
    """The part of a reader that runs in tasks, for batches and streams."""

    def __init__(self, options: Options, schema: StructType) -> None:
        _check_columns(schema)
        self._options, self._schema = options, schema

    def read(self, partition: TaskPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        from pyspark.sql.pandas.types import to_arrow_schema

        from neve.spark.batches import rows_of_task

        target = to_arrow_schema(self._schema, timezone="UTC")
        if partition.hot is not None:
            from neve.spark.hot_rows import rows_of_hot_task

            assert self._options.cluster is not None
            return rows_of_hot_task(self._options, self._options.cluster, partition.hot, partition.wanted, target)
        return rows_of_task(
            self._options.store,
            partition.task,
            partition.wanted,
            target,
            fails_on_data_loss=self._options.fails_on_data_loss,
        )


class BatchReader(_RowReader, DataSourceReader):  # type: ignore[misc]  # untyped there
    """The rows that exist when the query is planned."""

    _pushed = RequestedRows()

    def partitions(self) -> Sequence[InputPartition]:
        """Plan the tasks; Spark needs at least one."""
        from neve.archive.store.source import open_source

        pushed = self._pushed.within(self._options.since, self._options.until)
        wanted = pushed.having(self._options.tags, self._options.key)
        source = open_source(self._options.store)
        if self._options.cluster is None:
            plan = plan_batch(source, self._options, wanted)
        else:
            from neve.spark.brokers import ClusterBrokers

            brokers = ClusterBrokers(self._options.cluster)
            try:
                plan = plan_batch(source, self._options, wanted, brokers)
            finally:
                brokers.close()
        return _partitions(plan, wanted) or [TaskPartition([], wanted)]


class PushedReader(BatchReader):
    """A reader that accepts filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Use filters for planning, and return all of them: Spark applies them to each row."""
        self._pushed = wanted_by(filters)
        return filters


class StreamReader(_RowReader, DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # untyped there
    """The rows between two positions: in the journals or, with a cluster, of queues."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._stream: _Stream[Any] | None = None  # on the driver only

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the position of a stream without a checkpoint."""
        stream = self._planning()
        return stream.encoded(stream.planner.initial())

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        """Return the option maxOffsetsPerTrigger."""
        most = self._options.most_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: Mapping[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of the next batch."""
        stream = self._planning()
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return stream.encoded(stream.planner.latest(stream.decoded(start), most))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Return the end of all rows, for the progress of the query."""
        stream = self._planning()
        return stream.encoded(stream.planner.newest())

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Let the run stop at the present end."""
        self._planning().planner.stop_at_now()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """Plan the rows between two positions, the same rows at each call."""
        stream = self._planning()
        position = stream.decoded(end)
        wanted = RequestedRows(since=position.since).having(self._options.tags, self._options.key)
        return _partitions(stream.planner.tasks(stream.decoded(start), position), wanted)

    def commit(self, end: Mapping[str, Any]) -> None:
        """Accept that the checkpoint has a position."""
        stream = self._planning()
        stream.planner.forget(stream.decoded(end))

    def _planning(self) -> _Stream[Any]:
        if self._stream is None:
            self._stream = _stream(self._options)
        return self._stream


class _Stream(Generic[P]):
    """A planner, with the JSON of its positions."""

    def __init__(
        self,
        planner: StreamPlanner[P],
        encoded: Callable[[P], dict[str, Any]],
        decoded: Callable[[Mapping[str, Any]], P],
    ) -> None:
        self.planner, self.encoded, self.decoded = planner, encoded, decoded


def _stream(options: Options) -> _Stream[Any]:
    from neve.archive.store.source import open_source

    source = open_source(options.store)
    if options.cluster is None:
        return _Stream(JournalStream(source, options), journal_positions.encoded, journal_positions.decoded)
    from neve.spark.brokers import ClusterBrokers

    planner = QueueStream(source, ClusterBrokers(options.cluster), options)
    return _Stream(planner, queue_positions.encoded, queue_positions.decoded)


def _partitions(plan: Plan, wanted: RequestedRows) -> list[TaskPartition]:
    archived = [TaskPartition(task, wanted) for task in plan.archived]
    return archived + [TaskPartition([], wanted, task) for task in plan.hot]


def _with_credentials(options: Options) -> Options:
    """Add the credentials of the driver, if brokers are asked."""
    if options.cluster is None:
        return options
    from neve.spark.brokers import with_credentials

    return options._replace(cluster=with_credentials(options.cluster, os.environ))


def _check_columns(schema: StructType) -> None:
    """Raise BadOption for a column that does not exist or has another type."""
    for field in schema.fields:
        if field.name not in _TYPES:
            raise BadOption(f"column {field.name} does not exist; columns are {', '.join(_TYPES)}")
        if field.dataType.simpleString() != _TYPES[field.name]:
            raise BadOption(f"column {field.name} has type {_TYPES[field.name]}: cast it in the query")


# name -> type as Spark spells it; DDL cannot be parsed without a JVM
_TYPES = {
    name: kind.lower().replace(" ", "") for name, kind in re.findall(r"(\w+) ((?:ARRAY|MAP)<[^>]*>|\w+)", ROW_SCHEMA)
}
