"""A topic's archive as a DataFrame: the objects in the catalog at the time of the call, by the JVM's Parquet reader.

A listing of the directory would include unpublished and expired objects, so the files are taken from the journal, and
pruned by time, queue and offset before any is opened. Spark receives them as a list on the driver's disk; with Spark
Connect, whose driver is another machine, as paths.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from neve.archive.catalog.journal_reader import catalogs
from neve.archive.format.keys import fits_key
from neve.archive.read.selection import Instant, Selection, choose, instant_ms
from neve.archive.store.source import Source, open_source
from neve.record.bodies import INFLATED_LENGTH_MAX
from neve.spark.bodies import decode_bodies
from neve.spark.builder import HadoopStore, is_remote, parse_store
from neve.spark.hadoop_source import HadoopSource
from neve.spark.known_topics import check_known
from neve.spark.manifest import manifest_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from neve.archive.catalog.catalog import Catalog
    from neve.archive.format.journal import CommittedObject

DECODINGS = ("text", "json", "bytes")

# Explicit, so that Spark opens no footer to infer it; the last three columns come from the paths.
ROW_SCHEMA = """
    queue_id INT, queue_offset BIGINT, store_timestamp TIMESTAMP, born_timestamp TIMESTAMP, msg_id STRING, tags STRING,
    keys ARRAY<STRING>, properties MAP<STRING, STRING>, properties_tail BOOLEAN, body BINARY, body_codec STRING,
    sys_flag INT, flag INT, reconsume_times INT, body_crc INT, prepared_transaction_offset BIGINT,
    commit_log_offset BIGINT, born_host STRING, store_host STRING, wire BINARY, damaged BOOLEAN,
    topic STRING, dt STRING, broker STRING
"""
IN_PATH = ("topic", "dt", "broker")


class Minimum(NamedTuple):
    """Rows of a queue below `offset` have expired, although their object is live."""

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
    """Return the archived messages of a topic, exactly those in the catalog now.

    Args:
        start: the lowest store time: a datetime, milliseconds, or ISO 8601 text; UTC without a zone.
        end: the store time after the last one, in the same forms.
        queues: only these queue ids.
        offsets: bounds of the queue offset, both inclusive.
        broker: only the archive of this broker.
        decode: "bytes" inflates `body`; "text" adds `text`; "json" adds `value`. Rows without a result have the reason
            in `body_error`. `neve.spark.decode_bodies` supports more kinds.
        schema: the type of `value`, as StructType or DDL; without it `value` is a VARIANT.
        max_body: the maximum size of an inflated body, bytes.

    Raises:
        FileNotFoundError: the store has no archive, or no broker of it has the topic.
    """
    if decode is not None and decode not in DECODINGS:
        raise ValueError(f"decode must be one of {', '.join(DECODINGS)}, got {decode!r}")
    wanted = Selection(
        instant_ms(start), instant_ms(end), None if queues is None else frozenset(queues), offsets[0], offsets[1]
    )
    frame = topic_frame(spark, topic, _known(spark, topic, store, broker), wanted, store=store)
    if decode is None:
        return frame
    return decode_bodies(frame, decode, schema=schema if decode == "json" else None, max_body=max_body)


def topic_frame(
    spark: SparkSession, topic: str, known: Mapping[str, Catalog], wanted: Selection, *, store: str
) -> DataFrame:
    """Return the rows of a topic by catalogs that were read before, so that many topics have one consistent view."""
    names, minimums = plan(known, topic, wanted)
    return _restrict(scan(spark, parse_store(store), topic, names), wanted, minimums)


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
    """Return the paths of the objects that `read_topic` would read: keep them to read the same state again."""
    where = parse_store(store)
    wanted = Selection(instant_ms(start), instant_ms(end), None if queues is None else frozenset(queues))
    return [where.path(name.key) for name in plan(_known(spark, topic, store, broker), topic, wanted)[0]]


def _known(spark: SparkSession, topic: str, store: str, broker: str | None) -> Mapping[str, Catalog]:
    source: Source | HadoopSource = open_source(store) if is_remote(spark) else HadoopSource(spark, parse_store(store))
    known = catalogs(source, broker)
    check_known(source, known, topic)
    return known


def plan(known: Mapping[str, Catalog], topic: str, wanted: Selection) -> tuple[list[CommittedObject], list[Minimum]]:
    """Return the objects to read, and the minimums within them. Pure.

    Spark reads objects whole, including row groups that were not selected, so minimums are returned for these as well.
    """
    names: list[CommittedObject] = []
    minimums: set[Minimum] = set()
    for broker, name, _, _ in choose(known, topic, wanted):
        names.append(name)
        for queue, (first, _, _) in name.queues.items():
            minimum = known[broker].recorded_minimum(topic, queue)
            if first < minimum:
                minimums.add(Minimum(broker, queue, minimum))
    return names, sorted(minimums)


def scan(spark: SparkSession, where: HadoopStore, topic: str, names: Sequence[CommittedObject]) -> DataFrame:
    """Return all rows of these objects of a topic, including expired ones."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(" ".join(ROW_SCHEMA.split()))
    if not names:
        return spark.createDataFrame([], schema)
    if is_remote(spark):
        return _scan_by_paths(spark, [where.path(name.key) for name in names], topic, schema)
    frame = parquet_of(spark, [(where.path(name.key), name.size) for name in names], schema, where.root)
    # The path of a long name contains only its beginning.
    return frame if fits_key(topic) else frame.withColumn("topic", f.lit(topic))


def parquet_of(spark: SparkSession, files: Sequence[tuple[str, int]], schema: StructType | str, root: str) -> DataFrame:
    """Return the rows of files (path, size) below `root`, with the partition columns of their paths."""
    if not is_remote(spark):
        with manifest_of(files) as listed:
            return spark.read.schema(schema).parquet(listed)
    _list_by_few(spark)
    return spark.read.schema(schema).option("basePath", root).parquet(*(_without_globs(path) for path, _ in files))


def _scan_by_paths(spark: SparkSession, paths: list[str], topic: str, schema: StructType) -> DataFrame:
    """Return the rows with partition columns from `_metadata`: Spark would read a broker named 007 as a number."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    _list_by_few(spark)
    stored = StructType(schema.fields[: -len(IN_PATH)])
    frame = spark.read.schema(stored).parquet(*map(_without_globs, paths))
    own = f.col("_metadata.file_path")  # a URI, so the escapes of the key are escaped again
    day = f.regexp_extract(own, _DAY_AND_BROKER, 1)
    broker = f.url_decode(f.url_decode(f.regexp_extract(own, _DAY_AND_BROKER, 2)))
    return frame.select("*", f.lit(topic).alias("topic"), day.alias("dt"), broker.alias("broker"))


def _list_by_few(spark: SparkSession) -> None:
    if spark.conf.get(_LISTING, None) == _LISTING_BY_DEFAULT:
        spark.conf.set(_LISTING, _LISTERS)


# By default Spark starts a task per path if there are more than 32.
_LISTING = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
_LISTING_BY_DEFAULT, _LISTERS = "10000", "16"
_DAY_AND_BROKER = "/dt=([^/]+)/broker=([^/]+)/[^/]+$"


def _without_globs(path: str) -> str:
    """Escape a path, which Spark reads as a pattern."""
    return "".join(f"\\{letter}" if letter in "{}[]*?\\" else letter for letter in path)


def _restrict(frame: DataFrame, wanted: Selection, minimums: list[Minimum]) -> DataFrame:
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
