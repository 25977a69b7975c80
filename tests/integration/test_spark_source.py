"""`format("neve")` on a real Spark: batches, filters, SQL, Connect, and streams over restarts and compaction."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.objects import minio
from infra.objects.open import open_store
from neve import spark as neve_spark
from tests.integration.spark_archive import TOPIC, fill
from tests.integration.spark_connect import through_connect
from tests.integration.spark_source import (
    IN_VIEW,
    rows_of,
)
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
