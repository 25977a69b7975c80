"""A topic's archive as a DataFrame: the objects in the catalog at this moment, through the JVM's Parquet reader.

Listing a directory would also see objects that no COMMIT has published yet and those that have expired; so the files
are taken from the journal and pruned by time, queue and offset before any of them is opened. Spark is told of them by a
list on the driver's disk; by Spark Connect, where the driver is another machine, by their paths.
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

# Spelt out, so that Spark opens no footer to infer it; the last three come from the paths.
ROW_SCHEMA = """
    queue_id INT, queue_offset BIGINT, store_timestamp TIMESTAMP, born_timestamp TIMESTAMP, msg_id STRING, tags STRING,
    keys ARRAY<STRING>, properties MAP<STRING, STRING>, properties_tail BOOLEAN, body BINARY, body_codec STRING,
    sys_flag INT, flag INT, reconsume_times INT, body_crc INT, prepared_transaction_offset BIGINT,
    commit_log_offset BIGINT, born_host STRING, store_host STRING, wire BINARY, damaged BOOLEAN,
    topic STRING, dt STRING, broker STRING
"""
IN_PATH = ("topic", "dt", "broker")


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
    `body_error` then says why a row has none of it; `neve.spark.decode_bodies` does more.

    Raises:
        FileNotFoundError: the store holds no archive, or the topic has never been archived.
    """
    if decode is not None and decode not in DECODINGS:
        raise ValueError(f"decode is one of {', '.join(DECODINGS)}, not {decode!r}")
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
    """What `read_topic` reads, by catalogs that have been read: once for many topics, and all as of one moment."""
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
    """Paths of the objects that `read_topic` would read: pin them for a stable view of a moving archive."""
    where = parse_store(store)
    wanted = Selection(instant_ms(start), instant_ms(end), None if queues is None else frozenset(queues))
    return [where.path(name.key) for name in plan(_known(spark, topic, store, broker), topic, wanted)[0]]


def _known(spark: SparkSession, topic: str, store: str, broker: str | None) -> Mapping[str, Catalog]:
    source: Source | HadoopSource = open_source(store) if is_remote(spark) else HadoopSource(spark, parse_store(store))
    known = catalogs(source, broker)
    check_known(source, known, topic)
    return known


def plan(known: Mapping[str, Catalog], topic: str, wanted: Selection) -> tuple[list[CommittedObject], list[Minimum]]:
    """Objects to read, and the minimums that cut through one of them. Pure: catalogs in, a decision out.

    Spark reads objects whole, with the row groups that were not chosen: what has expired in those is cut off, too.
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
    """All rows of these objects of a topic, by the JVM's reader; those that have expired in them, too."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(" ".join(ROW_SCHEMA.split()))
    if not names:
        return spark.createDataFrame([], schema)
    if is_remote(spark):
        return _scan_by_paths(spark, [where.path(name.key) for name in names], topic, schema)
    frame = parquet_of(spark, [(where.path(name.key), name.size) for name in names], schema, where.root)
    # the true name, where the paths could only carry the beginning of it
    return frame if fits_key(topic) else frame.withColumn("topic", f.lit(topic))


def parquet_of(spark: SparkSession, files: Sequence[tuple[str, int]], schema: StructType | str, root: str) -> DataFrame:
    """These files (path, size), of which `root` is a folder above: what their paths say behind it are columns, too."""
    if not is_remote(spark):
        with manifest_of(files) as listed:
            return spark.read.schema(schema).parquet(listed)
    _list_by_few(spark)
    return spark.read.schema(schema).option("basePath", root).parquet(*(_without_globs(path) for path, _ in files))


def _scan_by_paths(spark: SparkSession, paths: list[str], topic: str, schema: StructType) -> DataFrame:
    """What stands in a path is taken from the row's own: Spark would make the number 7 of a broker named 007."""
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    _list_by_few(spark)
    stored = StructType(schema.fields[: -len(IN_PATH)])
    frame = spark.read.schema(stored).parquet(*map(_without_globs, paths))
    own = f.col("_metadata.file_path")  # a URI, so what the key escapes is escaped once more
    day = f.regexp_extract(own, _DAY_AND_BROKER, 1)
    broker = f.url_decode(f.url_decode(f.regexp_extract(own, _DAY_AND_BROKER, 2)))
    return frame.select("*", f.lit(topic).alias("topic"), day.alias("dt"), broker.alias("broker"))


def _list_by_few(spark: SparkSession) -> None:
    if spark.conf.get(_LISTING, None) == _LISTING_BY_DEFAULT:
        spark.conf.set(_LISTING, _LISTERS)


# Spark's default starts a task for each path of more than 32.
_LISTING = "spark.sql.sources.parallelPartitionDiscovery.parallelism"
_LISTING_BY_DEFAULT, _LISTERS = "10000", "16"
_DAY_AND_BROKER = "/dt=([^/]+)/broker=([^/]+)/[^/]+$"


def _without_globs(path: str) -> str:
    """Spark reads a path as a pattern; a directory store may lie below a directory named `[x]`."""
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
