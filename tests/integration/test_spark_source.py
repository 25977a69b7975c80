"""`format("neve")` on a real Spark: batches, filters, SQL, Connect, and streams over restarts and compaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.objects import minio
from infra.objects.open import open_store
from neve import spark as neve_spark
from neve.archive.format.journal import Deleted, Expire
from neve.spark.builder import parse_store
from tests.integration.test_spark import TOPIC, fill
from tests.integration.test_spark_planning import through_connect
from tests.kit.archive.archive_on_paper import HOUR, T0, ArchiveOnPaper

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "1"}
    session = neve_spark.session(master="local[2]", conf=conf)
    yield session
    session.stop()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("archive [1]")
    fill(open_store(f"dir:{root}"))
    return f"dir:{root}"


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Return the URL of an empty directory: `archive` below it is for an archive, the rest for a stream's files."""
    return f"dir:{tmp_path}"


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


def test_pushed_filters_exclude_objects_from_being_opened(spark: Any, tmp_path: Path) -> None:
    archive = ArchiveOnPaper(open_store(f"dir:{tmp_path}"), "a", "orders")
    keys = [archive.write(100 * n, 0, 10 * n, 10, hour=n) for n in range(3)]
    for key in keys[::2]:
        (tmp_path / key).unlink()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    by_time = (
        f"store_timestamp >= timestamp_millis({T0 + HOUR}) AND store_timestamp < timestamp_millis({T0 + 2 * HOUR})"
    )
    for condition, offsets in (
        (by_time, range(10, 20)),
        ("queue_offset BETWEEN 12 AND 15", range(12, 16)),
        ("queue_offset > 10 AND queue_offset < 20 AND tags IN ('odd') AND queue_id = 0", range(11, 20, 2)),
        ("queue_offset >= 10 AND queue_offset < 20 AND msg_id = '0-13'", [13]),
        ("broker = 'b'", []),
    ):
        frame = spark.read.format("neve").load(path=f"dir:{tmp_path}", topic="orders", pushFilters="true")
        assert [row[2] for row in rows_of(frame.where(condition))] == list(offsets), condition
    frame = spark.read.format("neve").load(path=f"dir:{tmp_path}", topic="orders")
    with pytest.raises(Exception, match="was deleted after the query was planned"):
        frame.collect()
    lenient = spark.read.format("neve").option("failOnDataLoss", "false").load(path=f"dir:{tmp_path}", topic="orders")
    assert lenient.count() == 10


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


CONNECTED = """
import json, sys
from pyspark.sql import SparkSession
store, topic, home = sys.argv[1:]
here = SparkSession.builder
spark = (here.master("local[1]") if store.startswith("s3:") else here.remote("local[2]")).getOrCreate()
frame = spark.read.format("neve").options(store=store, subscribe=topic).load()
rows = sorted(list(row) for row in frame.select("broker", "queue_id", "queue_offset").collect())
some = frame.where("queue_offset >= 28").select("queue_offset").collect()
stream = spark.readStream.format("neve").options(store=store, subscribe=topic, startingOffsets="earliest").load()
query = stream.select("queue_offset").writeStream.format("parquet").option("checkpointLocation", home + "/c")
query = query.trigger(availableNow=True).start(home + "/t")
assert query.awaitTermination(120)
print("found", json.dumps([rows, sorted(row[0] for row in some), spark.read.parquet(home + "/t").count()]))
spark.stop()
"""


def test_bucket_is_read_without_s3_jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python reads journals and objects, so an ordinary session without S3 jars suffices."""
    with minio.running(tmp_path / "minio") as server:
        minio.create_bucket(server, "archive")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        bucket = f"s3://archive/some%20prefix?endpoint={server.endpoint}&region=us-east-1"
        fill(open_store(bucket))
        rows, some, streamed = through_connect(CONNECTED, tmp_path, bucket, TOPIC, str(tmp_path))
    assert ([tuple(row) for row in rows], some, streamed) == (IN_VIEW, [28, 29], len(IN_VIEW))


def test_spark_connect_has_the_same_batches_filters_and_streams(url: str, tmp_path: Path) -> None:
    rows, some, streamed = through_connect(CONNECTED, tmp_path, url, TOPIC, str(tmp_path))
    assert [tuple(row) for row in rows] == IN_VIEW
    assert some == [28, 29]
    assert streamed == len(IN_VIEW)
