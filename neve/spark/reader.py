"""A topic's archive as a DataFrame: the objects in the catalog at this moment, through the JVM's Parquet reader.

Listing a directory would also see objects that no COMMIT has published yet and those that have expired; so the files
are taken from the journal and pruned by time, queue and offset before any of them is opened.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.archive.follow import catalogs
from neve.archive.keys import fits_key
from neve.spark.bodies import INFLATED_LENGTH_MAX, inflated_body
from neve.spark.builder import HadoopStore, parse_store
from neve.spark.hadoop_source import HadoopSource

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from neve.archive.catalog import Catalog
    from neve.archive.journal import CommittedName

Instant = datetime | int | str
DECODINGS = ("text", "json", "bytes")

# Spelt out, so that Spark opens no footer to infer it; the last three come from the paths.
ROW_SCHEMA = """
    queue_id INT, queue_offset BIGINT, store_timestamp TIMESTAMP, born_timestamp TIMESTAMP, msg_id STRING, tags STRING,
    keys ARRAY<STRING>, properties MAP<STRING, STRING>, properties_tail BOOLEAN, body BINARY, body_codec STRING,
    sys_flag INT, flag INT, reconsume_times INT, body_crc INT, prepared_transaction_offset BIGINT,
    commit_log_offset BIGINT, born_host STRING, store_host STRING, wire BINARY, damaged BOOLEAN,
    topic STRING, dt STRING, broker STRING
"""


class RowFilter(NamedTuple):
    """Which rows: store time in [start, end) in milliseconds, queues, offsets in [first, last]."""

    start: int | None = None
    end: int | None = None
    queues: frozenset[int] | None = None
    first: int | None = None
    last: int | None = None


class Minimum(NamedTuple):
    """Rows of a queue below `offset` have expired although their object is still there."""

    broker: str
    queue: int
    offset: int


def read_topic(
    spark: SparkSession,
    topic: str,
    *,
    store: str,
    start: Instant | None = None,
    end: Instant | None = None,
    queues: Collection[int] | None = None,
    offsets: tuple[int | None, int | None] = (None, None),
    broker: str | None = None,
    decode: str | None = None,
    schema: StructType | str | None = None,
    max_body: int = INFLATED_LENGTH_MAX,
) -> DataFrame:
    """The archived messages of a topic, exactly as the catalog has them now.

    `start` and `end` bound the store time (end excluded): a datetime, milliseconds, or ISO 8601 text; without a zone
    they are UTC. `offsets` bounds the queue offset (both included). `decode` adds to the archive's columns: "bytes"
    inflates `body`; "text" adds `text`; "json" adds `value`, typed by `schema` (StructType or DDL), else a VARIANT.

    Raises:
        FileNotFoundError: the store holds no archive, or the topic has never been archived.
    """
    if decode is not None and decode not in DECODINGS:
        raise ValueError(f"decode is one of {', '.join(DECODINGS)}, not {decode!r}")
    wanted = RowFilter(
        instant_ms(start), instant_ms(end), None if queues is None else frozenset(queues), offsets[0], offsets[1]
    )
    where = parse_store(store)
    files, minimums = _plan(spark, topic, where, broker, wanted)
    frame = _scan(spark, where, files)
    frame = _restrict(_named(frame, topic), wanted, minimums)
    return frame if decode is None else _decoded(frame, decode, schema, max_body)


def archive_files(
    spark: SparkSession,
    topic: str,
    *,
    store: str,
    start: Instant | None = None,
    end: Instant | None = None,
    queues: Collection[int] | None = None,
    broker: str | None = None,
) -> list[str]:
    """Paths of the objects that `read_topic` would read: pin them for a stable view of a moving archive."""
    where = parse_store(store)
    wanted = RowFilter(instant_ms(start), instant_ms(end), None if queues is None else frozenset(queues))
    return [where.path(key) for key in _plan(spark, topic, where, broker, wanted)[0]]


def instant_ms(value: Instant | None) -> int | None:
    """Milliseconds since 1970; what carries no zone is UTC."""
    if value is None or isinstance(value, int):
        return value
    moment = datetime.fromisoformat(value) if isinstance(value, str) else value
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _plan(
    spark: SparkSession, topic: str, where: HadoopStore, broker: str | None, wanted: RowFilter
) -> tuple[list[str], list[Minimum]]:
    known = catalogs(HadoopSource(spark, where), broker)
    if not any(topic in catalog.topics() for catalog in known.values()):
        raise FileNotFoundError(f"topic {topic} is not in this archive")
    return plan(known, topic, wanted)


def plan(known: Mapping[str, Catalog], topic: str, wanted: RowFilter) -> tuple[list[str], list[Minimum]]:
    """Keys to read, and the minimums that cut through one of them. Pure: catalogs in, a decision out."""
    keys: list[str] = []
    minimums: set[Minimum] = set()
    for broker, catalog in sorted(known.items()):
        floors = {queue: catalog.recorded_minimum(topic, queue) for queue in catalog.queues(topic)}
        for name in catalog.objects(topic):
            if not _holds(name, floors, wanted):
                continue
            keys.append(name.key)
            cut = [queue for queue, (first, _, _) in name.queues.items() if first < floors.get(queue, 0)]
            minimums.update(Minimum(broker, queue, floors[queue]) for queue in cut)
    return keys, sorted(minimums)


def _holds(name: CommittedName, floors: Mapping[int, int], wanted: RowFilter) -> bool:
    """Whether a row group of the object may hold a row that is wanted and has not expired; unknown times may."""
    for group in name.row_groups:
        if wanted.start is not None and 0 <= group.newest_ms < wanted.start:
            continue
        if wanted.end is not None and group.oldest_ms >= wanted.end:
            continue
        for queue, first, last in group.runs:
            floor = max(floors.get(queue, 0), wanted.first or 0)
            in_offsets = last >= floor and (wanted.last is None or first <= wanted.last)
            if in_offsets and (wanted.queues is None or queue in wanted.queues):
                return True
    return False


def _scan(spark: SparkSession, where: HadoopStore, keys: list[str]) -> DataFrame:
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(" ".join(ROW_SCHEMA.split()))
    if not keys:
        return spark.createDataFrame([], schema)
    # per read: the session may not be of our making, and a topic named 007 must not become the number 7
    conf_key = "spark.sql.sources.partitionColumnTypeInference.enabled"
    before = spark.conf.get(conf_key, None)
    spark.conf.set(conf_key, "false")
    try:
        paths = [_without_globs(where.path(key)) for key in keys]
        return spark.read.schema(schema).option("basePath", where.root).parquet(*paths)
    finally:
        if before is not None:
            spark.conf.set(conf_key, before)


def _named(frame: DataFrame, topic: str) -> DataFrame:
    """The true name, where the paths could only carry the beginning of it."""
    from pyspark.sql import functions as f

    return frame if fits_key(topic) else frame.withColumn("topic", f.lit(topic))


def _without_globs(path: str) -> str:
    """Spark reads a path as a pattern; a directory store may lie below a directory named `[x]`."""
    return "".join(f"\\{letter}" if letter in "{}[]*?\\" else letter for letter in path)


def _restrict(frame: DataFrame, wanted: RowFilter, minimums: list[Minimum]) -> DataFrame:
    from pyspark.sql import functions as f

    if wanted.start is not None:
        frame = frame.where(f.col("store_timestamp") >= f.timestamp_millis(f.lit(wanted.start)))
    if wanted.end is not None:
        frame = frame.where(f.col("store_timestamp") < f.timestamp_millis(f.lit(wanted.end)))
    if wanted.queues is not None:
        frame = frame.where(f.col("queue_id").isin(sorted(wanted.queues)))
    if wanted.first is not None:
        frame = frame.where(f.col("queue_offset") >= wanted.first)
    if wanted.last is not None:
        frame = frame.where(f.col("queue_offset") <= wanted.last)
    for minimum in minimums:
        of_queue = (f.col("broker") == minimum.broker) & (f.col("queue_id") == minimum.queue)
        frame = frame.where(~of_queue | (f.col("queue_offset") >= minimum.offset))
    return frame


def _decoded(frame: DataFrame, decode: str, schema: StructType | str | None, max_body: int) -> DataFrame:
    from pyspark.sql import functions as f

    body: Any = inflated_body(max_body)
    if decode == "bytes":
        return frame.withColumn("body", body)
    text = body.cast("string")
    if decode == "text":
        return frame.withColumn("text", text)
    value = f.try_parse_json(text) if schema is None else f.from_json(text, schema)
    return frame.withColumn("value", value)
