"""Tests of the Spark data source that run locally and on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from infra.objects.open import open_store
from neve import spark as neve_spark
from neve.archive.format.journal import Deleted, Expire
from neve.spark.builder import parse_store
from tests.integration.spark_archive import TOPIC
from tests.kit.archive.archive_on_paper import T0, ArchiveOnPaper


def rows_of(frame: Any) -> list[tuple[str, int, int]]:
    return sorted((row.broker, row.queue_id, row.queue_offset) for row in frame.collect())


IN_VIEW = [("a", 0, offset) for offset in range(15, 30)] + [("b", 1, offset) for offset in range(10)]


def test_batch_equals_read_topic_in_all_columns(spark: Any, url: str) -> None:
    frame = spark.read.format("neve").option("store", url).option("subscribe", TOPIC).load()
    other = neve_spark.read_topic(spark, TOPIC, store=url)
    assert frame.columns == other.columns
    assert [field.dataType for field in frame.schema] == [field.dataType for field in other.schema]
    order = ["broker", "queue_id", "queue_offset"]
    assert frame.orderBy(*order).collect() == other.orderBy(*order).collect()
    assert rows_of(frame) == IN_VIEW


def test_source_options_select_columns_key_tag_and_offsets(spark: Any, url: str) -> None:
    def source() -> Any:
        return spark.read.format("neve").options(store=url, subscribe=TOPIC)

    ends = f'{{"{TOPIC}": {{"a": {{"0": 18}}}}}}'
    few = source().schema("broker STRING, queue_offset BIGINT").option("endingOffsets", ends).load()
    assert sorted(tuple(row) for row in few.where("broker = 'a'").collect()) == [("a", n) for n in (15, 16, 17)]
    assert source().option("key", "k").load().count() == 25
    assert source().option("key", "none").load().count() == 0
    assert sorted(row[2] for row in rows_of(source().option("tag", "odd || other").load().where("broker = 'b'"))) == [
        *range(1, 10, 2)
    ]
    with pytest.raises(Exception, match="cast it in the query"):
        source().schema("body STRING").load().collect()
    with pytest.raises(Exception, match="option subscribepatern: unknown"):
        source().option("subscribePatern", "x").load().collect()


@pytest.mark.parametrize("pushing", ["true", "false"])
def test_unfiltered_query_after_a_filtered_one_has_all_rows(spark: Any, url: str, pushing: str) -> None:
    """Spark keeps the filter selection of a frame's last query, so filters are pushed down only with an option."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", pushing)
    frame = spark.read.format("neve").options(store=url, subscribe=TOPIC).load()
    assert (frame.where("broker = 'b'").count(), frame.count()) == (10, 25)


def test_sql_reads_a_topic_as_a_view(spark: Any, url: str) -> None:
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW flights USING neve OPTIONS (store '{url}', subscribePattern '.*x')")
    found = spark.sql("SELECT broker, count(*), min(queue_offset) FROM flights GROUP BY 1 ORDER BY 1").collect()
    assert [tuple(row) for row in found] == [("a", 15, 15), ("b", 10, 0)]


def below(place: str, name: str) -> str:
    """Return the URL of the entry with this name below `place`."""
    where, question, options = place.partition("?")
    return f"{where}/{name}{question}{options}"


def started(spark: Any, place: str, **options: str) -> Any:
    home = parse_store(place).root
    told = {"store": below(place, "archive"), "subscribePattern": "orders.*", "startingOffsets": "earliest", **options}
    frame = spark.readStream.format("neve").options(**told).load()
    columns = frame.select("topic", "broker", "queue_id", "queue_offset", "body")
    return (
        columns.writeStream.format("parquet")
        .option("checkpointLocation", f"{home}/checkpoint")
        .option("path", f"{home}/table")
    )


def run_to_end(spark: Any, place: str, **options: str) -> Any:
    query = started(spark, place, **options).trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(200)
    finally:
        query.stop()
    return query


def table(spark: Any, place: str) -> list[tuple[str, str, int]]:
    rows = spark.read.parquet(parse_store(place).path("table")).select("topic", "broker", "queue_offset").collect()
    return sorted(tuple(row) for row in rows)


def test_stream_returns_each_row_once_over_restarts_and_compaction(spark: Any, place: str) -> None:
    store = open_store(below(place, "archive"))
    a = ArchiveOnPaper(store, "a", "orders")
    keys = [a.write(100 * n, 0, 10 * n, 10, hour=n) for n in range(3)]
    query = run_to_end(spark, place, maxOffsetsPerTrigger="12")
    assert [int(one["numInputRows"]) for one in query.recentProgress if one["numInputRows"]] == [12, 12, 6]
    expected = [("orders", "a", n) for n in range(30)]
    assert table(spark, place) == expected

    a.write(300, 0, 30, 10, hour=3)
    b = ArchiveOnPaper(store, "b", "orders-2")
    b.write(0, 0, 0, 7, hour=0)
    a.replace(0, 0, 40, hour=0)
    a.append(Deleted(keys=keys))
    store.delete_many(keys)
    a.append(Expire(keys=[], delete_after_ms=T0, minimums={"orders": {0: 28}}))
    # Remove the last commit from the checkpoint, as if the driver had died before writing it: Spark repeats the batch.
    whole = open_store(place)
    commits = {Path(one.key).name: one.key for one in whole.list("checkpoint/commits/")}
    newest = max((name for name in commits if name.isdigit()), key=int)
    whole.delete_many([commits[newest], commits[newest].replace(newest, f".{newest}.crc")])
    run_to_end(spark, place)
    run_to_end(spark, place)
    expected += [("orders", "a", n) for n in range(30, 40)] + [("orders-2", "b", n) for n in range(7)]
    assert table(spark, place) == expected
    run_to_end(spark, place)
    assert table(spark, place) == expected


def test_stream_reports_which_rows_were_lost(spark: Any, place: str) -> None:
    archive = ArchiveOnPaper(open_store(below(place, "archive")), "a", "orders")
    archive.write(0, 0, 0, 5, hour=0)
    run_to_end(spark, place)
    key = archive.write(100, 0, 5, 5, hour=1)
    archive.append(Expire(keys=[key], delete_after_ms=T0, minimums={"orders": {0: 10}}))
    archive.append(Deleted(keys=[key]))
    with pytest.raises(Exception, match="queue 0, offsets 5 to 9: they expired before this stream read them"):
        run_to_end(spark, place)
    run_to_end(spark, place, failOnDataLoss="false")
    assert table(spark, place) == [("orders", "a", n) for n in range(5)]
