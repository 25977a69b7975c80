"""`report`: what came in by topic and day, from whom, how large, what was tried again and what died, as small tables.

Rows are read once, by the JVM, and counted by topic, hour, tag, producer and size; all tables come from those counts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from neve.archive.catalog.journal_reader import catalogs
from neve.archive.read.selection import Instant, Selection, instant_ms
from neve.archive.store.source import open_source
from neve.spark.known_topics import check_known
from neve.spark.reader import topic_frame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MOST_NAMES = 20  # tags, or producers, of a topic and day that are told one by one
OTHERS = "(others)"
RETRY, DEAD = "%RETRY%", "%DLQ%"
_ORIGIN = "RETRY_TOPIC"  # the property in which a message that comes back says where it was first

Tables = dict[str, list[dict[str, Any]]]


def report(
    spark: SparkSession,
    *,
    store: str,
    topics: Collection[str] | None = None,
    broker: str | None = None,
    start: Instant | None = None,
    end: Instant | None = None,
) -> Tables:
    """Tables by name, of all topics of an archive or of some, whose rows are ready for JSON; times are milliseconds.

        traffic        topic, dt, messages, bytes, largest, damaged, first, last (ISO 8601)
        hours          topic, hour_ms, messages, bytes
        sizes          topic, up_to (bytes, a power of two), messages
        tags           topic, dt, tag, messages, bytes: the MOST_NAMES with the most messages, and OTHERS
        producers      topic, dt, producer (an address without its port), messages, bytes: so, too
        retries        group, dt, origin (topic), attempt, messages
        dead_letters   group, dt, origin (topic), messages

    Raises:
        FileNotFoundError: the store holds no archive, or one of the topics is not in it.
    """
    source = open_source(store)
    known = catalogs(source, broker)
    for topic in topics or ():
        check_known(source, known, topic)
    told = sorted(topics if topics is not None else {one for of in known.values() for one in of.topics_with_objects()})
    if not told:
        return {name: [] for name in ("traffic", "hours", "sizes", "tags", "producers", "retries", "dead_letters")}
    wanted = Selection(instant_ms(start), instant_ms(end))
    frames = [_looked_at(topic_frame(spark, one, known, wanted, store=store)) for one in told]
    counted = _counted(_all_of(frames)).persist()
    try:
        return {
            "traffic": _traffic(counted),
            "hours": _hours(counted),
            "sizes": _sizes(counted),
            "tags": _named(counted, "tag"),
            "producers": _named(counted, "producer"),
            "retries": _again(counted, RETRY, ["group", "dt", "origin", "attempt"]),
            "dead_letters": _again(counted, DEAD, ["group", "dt", "origin"]),
        }
    finally:
        counted.unpersist()


def _all_of(frames: Sequence[DataFrame]) -> DataFrame:
    """In halves: Spark goes through a union by recursion, and through all of it each time that one more is added."""
    if len(frames) == 1:
        return frames[0]
    middle = len(frames) // 2
    return _all_of(frames[:middle]).unionByName(_all_of(frames[middle:]))


def _looked_at(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    size = f.coalesce(f.octet_length("body"), f.lit(0)).cast("bigint")
    hour = f.unix_millis(f.date_trunc("hour", "store_timestamp"))
    return rows.select(
        "topic", "dt", hour.alias("hour_ms"), f.coalesce("tags", f.lit("")).alias("tag"),
        f.regexp_replace(f.coalesce("born_host", f.lit("")), ":[0-9]+$", "").alias("producer"),
        f.coalesce(f.col("properties").getItem(_ORIGIN), f.lit("")).alias("origin"),
        f.coalesce("reconsume_times", f.lit(0)).alias("attempt"),
        f.when(size > 0, f.ceil(f.log2(size.cast("double"))).cast("int")).otherwise(0).alias("size_class"),
        size.alias("size"), f.coalesce("damaged", f.lit(False)).cast("int").alias("damaged"),
        f.unix_millis("store_timestamp").alias("at"),
    )  # fmt: skip


def _counted(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    by = ("topic", "dt", "hour_ms", "tag", "producer", "origin", "attempt", "size_class")
    return rows.groupBy(*by).agg(
        f.count("*").alias("messages"), f.sum("size").alias("bytes"), f.max("size").alias("largest"),
        f.sum("damaged").alias("damaged"), f.min("at").alias("first"), f.max("at").alias("last"),
    )  # fmt: skip


def _traffic(counted: DataFrame) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    def time(name: str) -> Any:
        return f.date_format(f.timestamp_millis(name), "yyyy-MM-dd'T'HH:mm:ss'Z'").alias(name)

    sums = [f.sum(name).alias(name) for name in ("messages", "bytes", "damaged")]
    edges = [f.max("largest").alias("largest"), f.min("first").alias("first"), f.max("last").alias("last")]
    rows = counted.groupBy("topic", "dt").agg(*sums, *edges)
    return _rows(
        rows.select("topic", "dt", "messages", "bytes", "largest", "damaged", time("first"), time("last")),
        "topic",
        "dt",
    )


def _hours(counted: DataFrame) -> list[dict[str, Any]]:
    known = counted.where("hour_ms IS NOT NULL")
    return _rows(_summed(known, "topic", "hour_ms"), "topic", "hour_ms")


def _sizes(counted: DataFrame) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    up_to = f.pow(f.lit(2.0), f.col("size_class")).cast("bigint").alias("up_to")
    rows = counted.groupBy("topic", "size_class").agg(f.sum("messages").alias("messages"))
    return _rows(rows.select("topic", up_to, "messages"), "topic", "up_to")


def _named(counted: DataFrame, name: str) -> list[dict[str, Any]]:
    """Of names there may be as many as messages: those with the most are told, and the others together."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    place = f.row_number().over(Window.partitionBy("topic", "dt").orderBy(f.desc("messages"), name))
    ranked = _summed(counted, "topic", "dt", name).withColumn("place", place)
    told = ranked.withColumn(name, f.when(f.col("place") <= MOST_NAMES, f.col(name)).otherwise(f.lit(OTHERS)))
    return _rows(_summed(told, "topic", "dt", name), "topic", "dt", "-messages", name)


def _again(counted: DataFrame, prefix: str, by: list[str]) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    of = counted.where(f.col("topic").startswith(prefix))
    of = of.withColumn("group", f.substring("topic", len(prefix) + 1, 1 << 20))
    return _rows(of.groupBy(*by).agg(f.sum("messages").alias("messages")), *by)


def _summed(counted: DataFrame, *by: str) -> DataFrame:
    from pyspark.sql import functions as f

    return counted.groupBy(*by).agg(f.sum("messages").alias("messages"), f.sum("bytes").alias("bytes"))


def _rows(frame: DataFrame, *order: str) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    columns = [f.desc(name[1:]) if name.startswith("-") else f.asc(name) for name in order]
    return [row.asDict() for row in frame.orderBy(*columns).collect()]
