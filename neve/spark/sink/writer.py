"""Spark's interface of the sink: each task sends its rows with a client of its own, and ends when all are stored.

At least once, as Spark's Kafka sink: a repeated task or batch sends its rows again, with the same `rows.IDENTITY`. A
commit has nothing to do, and an abort cannot revert anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from neve.client import sync
from neve.entropy import system_entropy
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from neve.spark.planning.options import BadOption
from neve.spark.sink.options import SinkOptions
from neve.spark.sink.rows import Partition, PartitionMessages, check_columns

try:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter
except ImportError:  # before PySpark 4.1
    HAS_STREAM_WRITER = False
    DataSourceStreamArrowWriter = object
else:
    HAS_STREAM_WRITER = True

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_MESSAGES_A_PUT = 2_000  # after which a failure of sending is noticed


class Written(WriterCommitMessage):  # type: ignore[misc]  # untyped there
    """The number of messages that a task sent."""

    def __init__(self, count: int) -> None:
        self.count = count


class NoTopic(LookupError):
    """A topic does not exist, or has no queue that allows writing."""


class _RowWriter:
    """The part of a writer that runs in tasks, for batches and streams."""

    def __init__(self, options: SinkOptions, schema: StructType, job: str | None) -> None:
        check_columns(schema, has_topic=options.topic is not None)
        self._options, self._job = options, job

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        """Send the rows of a task, and return when brokers have stored all."""
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return Written(0)
        options = self._options
        messages = PartitionMessages(
            partition_of(TaskContext.get(), self._job),
            topic=options.topic,
            message_max=options.message_max,
            drops_reserved=options.drops_reserved,
        )
        with open_client(options) as client:
            sender = client.batch_sender(
                max_messages=options.batch_messages,
                max_bytes=options.batch_bytes,
                in_flight=options.in_flight,
                retry_timeout=options.patience_s,
            )
            checked: set[str] = set()
            batch: pa.RecordBatch | None = first
            while batch is not None:
                for at in range(0, batch.num_rows, _MESSAGES_A_PUT):
                    block = list(messages.of(batch.slice(at, _MESSAGES_A_PUT)))
                    for topic in messages.topics - checked:
                        check_writable(client, topic)
                        checked.add(topic)
                    sender.put_all(block)
                batch = next(batches, None)
            sender.flush()
            return Written(sender.sent)


class BatchWriter(_RowWriter, DataSourceArrowWriter):  # type: ignore[misc]  # untyped there
    """The writer of `df.write`, which checks a topic of the options before any task begins."""

    def __init__(self, options: SinkOptions, schema: StructType, *, overwrites: bool) -> None:
        if overwrites:
            raise BadOption('topics allow only appending: write with .mode("append")')
        super().__init__(options, schema, system_entropy(8).hex())
        if options.topic is not None:
            with open_client(options) as client:
                check_writable(client, options.topic)


class StreamWriter(_RowWriter, DataSourceStreamArrowWriter):  # type: ignore[misc]  # untyped there
    """The writer of `df.writeStream`. Spark creates it for every batch and commit, so the tasks check the topic."""

    def __init__(self, options: SinkOptions, schema: StructType, *, overwrites: bool) -> None:
        if not HAS_STREAM_WRITER:
            raise BadOption('writing streams by format("neve") needs PySpark 4.1 or later')
        if overwrites:
            raise BadOption('topics allow only appending: write with .outputMode("append")')
        super().__init__(options, schema, None)


def partition_of(context: TaskContext, job: str | None) -> Partition:
    """Return the partition of a task.

    Args:
        job: of a batch write; None for a stream, whose id and batch numbers Spark keeps in the checkpoint.
    """
    if job is not None:
        return Partition(job, 0, context.partitionId())
    query, batch = (context.getLocalProperty(name) for name in ("sql.streaming.queryId", "streaming.sql.batchId"))
    if not query or not batch:
        raise RuntimeError("this Spark does not pass query and batch to tasks, so rows have no identity")
    return Partition(query, int(batch), context.partitionId())


def open_client(options: SinkOptions) -> sync.Client:
    """Return a client of the cluster in the options."""
    return sync.connect(
        options.namesrv,
        credentials=options.credentials,
        tls=options.tls_here(),
        max_message_size=max(options.message_max, options.batch_bytes),
    )


def check_writable(client: sync.Client, topic: str) -> None:
    """Raise NoTopic for a missing topic, which some brokers would create."""
    try:
        route = client.admin.topic_route(topic)
    except BrokerError as error:
        if error.code != ResponseCode.TOPIC_NOT_EXIST:
            raise
        raise NoTopic(f"topic {topic} does not exist: neve topic create {topic}") from error
    if not route.write_queues and route.without_master is None:
        raise NoTopic(f"topic {topic} has no queue that allows writing")
