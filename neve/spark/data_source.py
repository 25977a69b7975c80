"""`format("neve")`: batches, streams, SQL views, through Spark Connect too.

What is read is decided in `planning`; `sink` is what writes.

The planning half runs in a Python of the driver, reads journals and, where `namesrv` is told, asks brokers for the ends
of queues; tasks are sent slices of objects, and offsets of queues to pull.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition

from neve.spark.planning.options import BadOption, Options, options_of_batch, options_of_stream
from neve.spark.planning.planner import StreamPlanner, Task, Wanted, plan_batch
from neve.spark.planning.positions import decoded, encoded
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

    from neve.archive.store.source import Source
    from neve.spark.tiers.queues import HotTask


class NeveDataSource(DataSource):  # type: ignore[misc]  # untyped there
    """Archived topics."""

    @classmethod
    def name(cls) -> str:
        """What `format` is given."""
        return "neve"

    def schema(self) -> str:
        """All columns; fewer are read of whoever names them by `.schema(...)`."""
        return " ".join(ROW_SCHEMA.split())

    def reader(self, schema: StructType) -> BatchReader:
        """Filters are taken by who asks for it.

        Spark refuses a reader that takes them where it is not set to push them; and where it is, a frame, or a view,
        keeps what its last filters chose: a later query of it that has none would silently miss rows.
        """
        options = _signing(options_of_batch(self.options))
        return (PushedReader if options.pushes_filters else BatchReader)(options, schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802 - Spark's name
        """Streams take rate limits by an interface that came with PySpark 4.2."""
        if not HAS_STREAMS:
            raise BadOption('streams of format("neve") need PySpark 4.2 or later')
        return StreamReader(_signing(options_of_stream(self.options)), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Rows to topics. The client is loaded by who writes."""
        from neve.spark.sink.options import options_of_sink
        from neve.spark.sink.writer import BatchWriter

        return BatchWriter(options_of_sink(self.options, os.environ), schema, overwrites=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        """The same, a batch after the other."""
        from neve.spark.sink.options import options_of_sink
        from neve.spark.sink.writer import StreamWriter

        return StreamWriter(options_of_sink(self.options, os.environ), schema, overwrites=overwrite)


class TaskPartition(InputPartition):  # type: ignore[misc]  # untyped there
    """What one task reads."""

    def __init__(self, task: Task, wanted: Wanted, hot: HotTask | None = None) -> None:
        self.task, self.wanted, self.hot = task, wanted, hot


class _RowReader:
    """What a task does, of a batch or a stream. It travels to the machines that run tasks."""

    def __init__(self, options: Options, schema: StructType) -> None:
        _check_columns(schema)
        self._options, self._schema = options, schema

    def read(self, partition: TaskPartition) -> Iterator[pa.RecordBatch]:
        """Arrow batches."""
        from pyspark.sql.pandas.types import to_arrow_schema

        from neve.spark.batches import rows_of_task

        target = to_arrow_schema(self._schema, timezone="UTC")
        if partition.hot is not None:
            from neve.spark.tiers.hot_rows import rows_of_hot_task

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
    """What the archive holds when it is planned."""

    _pushed = Wanted()

    def partitions(self) -> Sequence[InputPartition]:
        """Tasks of as many bytes each."""
        from neve.archive.store.source import open_source

        pushed = self._pushed.within(self._options.since, self._options.until)
        wanted = pushed.having(self._options.tags, self._options.key)
        source = open_source(self._options.store)
        if self._options.cluster is None:
            return _partitions(plan_batch(source, self._options, wanted), [], wanted)
        from neve.spark.tiers import planner
        from neve.spark.tiers.brokers import Brokers

        brokers = Brokers(self._options.cluster)
        try:
            plan = planner.plan_batch(source, brokers, self._options, wanted)
        finally:
            brokers.close()
        return _partitions(plan.archived, plan.hot, wanted)


class PushedReader(BatchReader):
    """The same, where Spark tells filters."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Takes what it can use, and leaves all to Spark as well."""
        self._pushed = wanted_by(filters)
        return filters


class StreamReader(_RowReader, DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]  # untyped there
    """Batches between positions: in the journals, or of queues over both tiers."""

    def __init__(self, options: Options, schema: StructType) -> None:
        super().__init__(options, schema)
        self._stream: _Stream | None = None  # stays on the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Of a stream without a checkpoint."""
        return self._planning().initial()

    def getDefaultReadLimit(self) -> Any:  # noqa: N802 - Spark's name
        """maxOffsetsPerTrigger."""
        most = self._options.most_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def latestOffset(self, start: Mapping[str, Any], limit: Any) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Where the next batch ends."""
        return self._planning().latest(start, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """The end of what there is, in a query's progress."""
        return self._planning().newest()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """What comes from here on is another run's."""
        self._planning().stop_at_now()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> Sequence[InputPartition]:
        """The rows between two positions, the same ones whenever it is asked."""
        return self._planning().partitions(start, end)

    def commit(self, end: Mapping[str, Any]) -> None:
        """The checkpoint has it."""
        self._planning().forget(end)

    def _planning(self) -> _Stream:
        if self._stream is None:
            from neve.archive.store.source import open_source

            source = open_source(self._options.store)
            is_of_both = self._options.cluster is not None
            self._stream = _OfBothTiers(source, self._options) if is_of_both else _OfTheArchive(source, self._options)
        return self._stream


class _Stream(Protocol):
    """What a stream's planner is asked, in the offsets that Spark keeps."""

    def initial(self) -> dict[str, Any]: ...

    def latest(self, start: Mapping[str, Any], most: int | None) -> dict[str, Any]: ...

    def newest(self) -> dict[str, Any]: ...

    def stop_at_now(self) -> None: ...

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[TaskPartition]: ...

    def forget(self, end: Mapping[str, Any]) -> None: ...


class _OfTheArchive:
    def __init__(self, source: Source, options: Options) -> None:
        self._planner, self._options = StreamPlanner(source, options), options

    def initial(self) -> dict[str, Any]:
        return encoded(self._planner.initial())

    def latest(self, start: Mapping[str, Any], most: int | None) -> dict[str, Any]:
        return encoded(self._planner.latest(decoded(start), most))

    def newest(self) -> dict[str, Any]:
        return encoded(self._planner.newest())

    def stop_at_now(self) -> None:
        self._planner.stop_at_now()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[TaskPartition]:
        position = decoded(end)
        wanted = Wanted(since=position.since).having(self._options.tags, self._options.key)
        tasks = self._planner.tasks(decoded(start), position)
        return [TaskPartition(task, wanted) for task in tasks]

    def forget(self, end: Mapping[str, Any]) -> None:
        self._planner.forget(decoded(end))


class _OfBothTiers:
    def __init__(self, source: Source, options: Options) -> None:
        from neve.spark.tiers import positions
        from neve.spark.tiers.brokers import Brokers
        from neve.spark.tiers.planner import TiersPlanner

        assert options.cluster is not None
        self._planner, self._options = TiersPlanner(source, Brokers(options.cluster), options), options
        self._encoded, self._decoded = positions.encoded, positions.decoded

    def initial(self) -> dict[str, Any]:
        return self._encoded(self._planner.initial())

    def latest(self, start: Mapping[str, Any], most: int | None) -> dict[str, Any]:
        return self._encoded(self._planner.latest(self._decoded(start), most))

    def newest(self) -> dict[str, Any]:
        return self._encoded(self._planner.newest())

    def stop_at_now(self) -> None:
        self._planner.stop_at_now()

    def partitions(self, start: Mapping[str, Any], end: Mapping[str, Any]) -> list[TaskPartition]:
        position = self._decoded(end)
        wanted = Wanted(since=position.since).having(self._options.tags, self._options.key)
        plan = self._planner.tasks(self._decoded(start), position)
        return [*(TaskPartition(one, wanted) for one in plan.archived), *_hot(plan.hot, wanted)]

    def forget(self, end: Mapping[str, Any]) -> None:
        self._planner.forget(self._decoded(end))


def _partitions(tasks: list[Task], hot: list[HotTask], wanted: Wanted) -> list[TaskPartition]:
    """At least one."""
    return [*(TaskPartition(one, wanted) for one in tasks), *_hot(hot, wanted)] or [TaskPartition([], wanted)]


def _hot(tasks: list[HotTask], wanted: Wanted) -> list[TaskPartition]:
    return [TaskPartition([], wanted, one) for one in tasks]


def _signing(options: Options) -> Options:
    """With the credentials that the driver finds, where brokers are asked."""
    if options.cluster is None:
        return options
    from neve.spark.tiers.brokers import with_credentials

    return options._replace(cluster=with_credentials(options.cluster, os.environ))


def _check_columns(schema: StructType) -> None:
    """Raises BadOption."""
    for field in schema.fields:
        if field.name not in _TYPES:
            raise BadOption(f"there is no column {field.name}; there are {', '.join(_TYPES)}")
        if field.dataType.simpleString() != _TYPES[field.name]:
            raise BadOption(f"column {field.name} is of type {_TYPES[field.name]}: cast it in the query")


# name -> type as Spark spells it; without a JVM nobody reads DDL here
_TYPES = {
    name: kind.lower().replace(" ", "") for name, kind in re.findall(r"(\w+) ((?:ARRAY|MAP)<[^>]*>|\w+)", ROW_SCHEMA)
}
