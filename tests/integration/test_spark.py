"""Spark reads exactly the rows of the catalog, from a directory and from MinIO, with the JVM's Parquet reader."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.failpoint import FailpointError
from infra.objects import minio
from infra.objects.open import open_store
from lifecycle.erase import EraseRequest
from neve import spark as neve_spark
from neve.archive.catalog.journal_reader import catalogs
from neve.archive.format.keys import journal_key
from neve.archive.store.source import open_source
from neve.spark.builder import parse_store
from neve.spark.hadoop_source import HadoopSource
from neve.spark.jars import pyspark_jars
from tests.integration.spark_archive import LONG, TOPIC, fill
from tests.kit.archive.archive_on_paper import HOUR, T0, ArchiveOnPaper
from tests.kit.archive.hot_log import StoreAdapter, put, start
from tests.kit.server.neve import NEVE
from tiered.worker.client import WorkerClient

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """Return one Spark session for both kinds of store, and their URLs."""
    with ExitStack() as stack:
        server = stack.enter_context(minio.running(tmp_path_factory.mktemp("minio")))
        minio.create_bucket(server, "archive")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        patch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        urls = {
            "dir": f"dir:{tmp_path_factory.mktemp('archive [1]')}",
            "s3": f"s3://archive/some%20prefix?endpoint={server.endpoint}&region=us-east-1",
        }
        for url in urls.values():
            fill(open_store(url))
        spark = neve_spark.session(*urls.values(), master="local[2]", conf={"spark.ui.enabled": "false"})
        stack.callback(spark.stop)
        yield spark, urls


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_frame_has_exactly_the_rows_of_the_catalog(servers: tuple[Any, dict[str, str]], kind: str) -> None:
    spark, urls = servers
    frame = neve_spark.read_topic(spark, TOPIC, store=urls[kind])
    found = sorted((r.broker, r.queue_id, r.queue_offset, r.topic) for r in frame.collect())
    expected = [("a", 0, offset, TOPIC) for offset in range(15, 30)] + [("b", 1, n, TOPIC) for n in range(10)]
    assert found == expected


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_range_read_returns_the_range_and_nothing_beyond_the_end(
    servers: tuple[Any, dict[str, str]], kind: str
) -> None:
    spark, urls = servers
    source = HadoopSource(spark, parse_store(urls[kind]))
    key = journal_key("", "a", 0)
    whole = source.get(key)
    assert [source.get_range(key, at, 7) for at in (0, 5, len(whole) - 3)] == [whole[:7], whole[5:12], whole[-3:]]
    assert source.get_range(key, len(whole) + 1, 7) == b""
    with pytest.raises(FileNotFoundError):
        source.get_range("none", 0, 7)
    own = open_source(urls[kind])
    assert [own.get_range(key, at, 7) for at in (5, len(whole) - 3)] == [whole[5:12], whole[-3:]]
    assert own.get_range(key, len(whole) + 1, 7) == b""


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_topic_with_name_too_long_for_a_path_is_read_under_its_name(
    servers: tuple[Any, dict[str, str]], kind: str
) -> None:
    spark, urls = servers
    frame = neve_spark.read_topic(spark, LONG, store=urls[kind])
    assert sorted((r.topic, r.broker, r.queue_offset) for r in frame.collect()) == [(LONG, "c", n) for n in range(5)]


FIVE_LINES = """
from neve.spark import read_topic, session
store = {s3!r}
spark = session(store)
print("rows", read_topic(spark, {topic!r}, store=store).count())
"""
DIRECTORY_FIRST = """
from neve.spark import session
session({dir!r}, master="local[1]")
"""


def rows_counted(command: list[str], script: str, home: Path, environment: dict[str, str]) -> int:
    """Run a program in a process with its own JVM, and return the count that it prints."""
    path = home / "rows.py"
    path.write_text(script)
    done = subprocess.run(
        [*command, str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return int(done.stdout.rpartition("rows ")[2])


def test_s3_session_after_a_directory_session_reads_s3(servers: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    script = DIRECTORY_FIRST.format(**servers[1]) + FIVE_LINES.format(**servers[1], topic=TOPIC)
    assert rows_counted([sys.executable], script, tmp_path, {}) == 25


def test_invalid_query_prints_a_few_lines(servers: tuple[Any, dict[str, str]]) -> None:
    command = [NEVE, "spark", "sql", "--store", servers[1]["dir"], "--topic", TOPIC, "--master", "local[1]"]
    done = subprocess.run([*command, "SELECT FORM x"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    _, told = done.stderr.split("error: ")
    assert "line 1 pos 7" in told
    assert "org.apache" not in done.stderr
    assert told.count("\n") < 5


def test_five_line_program_of_the_page_runs_under_spark_submit(
    servers: tuple[Any, dict[str, str]], tmp_path: Path
) -> None:
    """As in an unpacked Spark distribution, pyspark is one file and the JVM runs before `session` is called."""
    home = pyspark_jars().parent
    places = {"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    submit = [str(home / "bin" / "spark-submit"), "--master", "local[1]"]
    script = FIVE_LINES.format(**servers[1], topic=TOPIC)
    assert rows_counted(submit, script, tmp_path, places) == 25


def test_objects_are_pruned_before_opening(servers: tuple[Any, dict[str, str]]) -> None:
    spark, urls = servers
    start, end = T0 + HOUR, datetime.fromtimestamp(T0 / 1000 + 3600 + 16 * 60, UTC)
    files = neve_spark.archive_files(spark, TOPIC, store=urls["dir"], start=start, end=end)
    assert len(files) == 1
    frame = neve_spark.read_topic(spark, TOPIC, store=urls["dir"], start=start, end=end)
    assert len(frame.inputFiles()) == 1
    assert sorted(r.queue_offset for r in frame.select("queue_offset").collect()) == [15, 16, 17, 18, 19]
    by_queue = neve_spark.read_topic(spark, TOPIC, store=urls["dir"], queues=[1], offsets=(3, 4))
    assert sorted((r.broker, r.queue_offset) for r in by_queue.collect()) == [("b", 3), ("b", 4)]
    assert neve_spark.read_topic(spark, TOPIC, store=urls["dir"], start="2027-01-01").count() == 0
    assert neve_spark.read_topic(spark, TOPIC, store=urls["dir"], broker="b").count() == 10


def test_bodies_equal_those_of_the_producer(servers: tuple[Any, dict[str, str]]) -> None:
    spark, urls = servers
    frame = neve_spark.read_topic(spark, TOPIC, store=urls["dir"], decode="json", schema="n INT, q INT")
    assert sorted((r.value.n, r.value.q) for r in frame.select("value").collect()) == sorted(
        [(n, 0) for n in range(15, 30)] + [(n, 1) for n in range(10)]
    )
    text = neve_spark.read_topic(spark, TOPIC, store=urls["dir"], decode="text", broker="b", offsets=(1, 1))
    assert [r.text for r in text.collect()] == ['{"n": 1, "q": 1}']
    variant = neve_spark.read_topic(spark, TOPIC, store=urls["dir"], decode="json", broker="b", offsets=(1, 1))
    assert [r.n for r in variant.selectExpr("variant_get(value, '$.n', 'int') AS n").collect()] == [1]


def test_objects_with_and_without_field_ids_are_read_together(
    servers: tuple[Any, dict[str, str]], tmp_path: Path
) -> None:
    spark, _ = servers
    archive = ArchiveOnPaper(open_store(f"dir:{tmp_path}"), "a", "orders")
    archive.write(0, 0, 0, 10, hour=0, ids=False)
    archive.write(100, 0, 10, 10, hour=1)
    archive.write(200, 0, 20, 10, hour=2, ids=False)
    plain = spark.read.parquet(f"file:{tmp_path}/topic=orders")
    for frame in (neve_spark.read_topic(spark, "orders", store=f"dir:{tmp_path}"), plain):
        found = sorted((r.queue_offset, r.tags, r.keys, dict(r.properties)) for r in frame.collect())
        tags = ["even", "odd"] * 15
        assert found == [(offset, tag, ["k"], {"TAGS": "x"}) for offset, tag in enumerate(tags)]


def test_only_selected_columns_are_read(servers: tuple[Any, dict[str, str]]) -> None:
    spark, urls = servers
    frame = neve_spark.read_topic(spark, TOPIC, store=urls["dir"]).where("tags = 'odd'").groupBy("tags").count()
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "PushedFilters: [IsNotNull(tags)" in plan
    assert "body" not in plan


def test_missing_archive_and_topic_are_errors(servers: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    spark, urls = servers
    with pytest.raises(FileNotFoundError, match="topic nope"):
        neve_spark.read_topic(spark, "nope", store=urls["dir"])
    with pytest.raises(FileNotFoundError, match="no archive"):
        neve_spark.read_topic(spark, TOPIC, store=f"dir:{tmp_path}")
    with pytest.raises(FileNotFoundError, match="broker d"):
        neve_spark.read_topic(spark, TOPIC, store=urls["s3"], broker="d")


def test_crash_within_a_round_duplicates_no_row(servers: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    """Neither the catalog nor a listing has a row twice: the second attempt adopts the objects of the first."""
    spark, _ = servers
    url = f"dir:{tmp_path}/archive"
    store = MessageStore(StoreConfig(tmp_path / "store", commit_log_file_size=1 << 18), RealDisk(), SystemClock())
    store.load()
    for queue in (0, 1):
        put(store, "orders", queue, 60)
    hot = StoreAdapter(store)
    hot.flush()
    with closing(WorkerClient(work_dir=tmp_path)) as worker:
        with failpoint.armed("offload.after_upload"), pytest.raises(FailpointError):
            start(tmp_path, url, hot, worker)[1].offload.run(roll=True)
        start(tmp_path, url, hot, worker)[1].offload.run(roll=True, evict=True)
    store.shutdown()
    sent = [(queue, offset) for queue in (0, 1) for offset in range(60)]
    for frame in (
        neve_spark.read_topic(spark, "orders", store=url),
        spark.read.parquet(f"file:{tmp_path}/archive/topic=orders"),
    ):
        assert sorted((row.queue_id, row.queue_offset) for row in frame.collect()) == sent


def test_erasure_between_plan_and_read_duplicates_no_row(servers: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    """A frame reads the objects that were current when it was created; they are kept for the grace period."""
    spark, _ = servers
    objects, each = 4, 25  # The number of messages of each of two queues in one object.
    url = f"dir:{tmp_path}/archive"
    store = MessageStore(StoreConfig(tmp_path / "store", commit_log_file_size=1 << 18), RealDisk(), SystemClock())
    store.load()
    hot = StoreAdapter(store)
    with closing(WorkerClient(work_dir=tmp_path)) as worker:
        _, lifecycle = start(tmp_path, url, hot, worker)
        for _ in range(objects):
            for queue in (0, 1):
                put(store, "orders", queue, each)
            hot.flush()
            lifecycle.offload.run(roll=True)
        planned = neve_spark.read_topic(spark, "orders", store=url)
        assert len(planned.inputFiles()) == objects
        assert lifecycle.compact.now("orders") == 1
        after = neve_spark.read_topic(spark, "orders", store=url)
        assert len(after.inputFiles()) == 1
        rows = [
            sorted((row.queue_id, row.queue_offset, bytes(row.body)) for row in frame.collect())
            for frame in (planned, after)
        ]
        assert [row[:2] for row in rows[0]] == [(queue, offset) for queue in (0, 1) for offset in range(objects * each)]
        assert rows[0] == rows[1]
        (made,) = catalogs(open_store(url))["b"].objects("orders")
        assert made.rows == len(rows[1])
        assert lifecycle.erase.now(EraseRequest("orders", "k7"))["rows"] == 2 * objects
        left = neve_spark.read_topic(spark, "orders", store=url).collect()
        kept = [row for row in rows[1] if row[1] % each != 7]
        assert sorted((row.queue_id, row.queue_offset, bytes(row.body)) for row in left) == kept
    store.shutdown()
