"""Spark reads exactly what the catalog holds: from a directory and from MinIO, through the JVM's Parquet reader."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra import failpoint, minio
from infra.clock import SystemClock
from infra.disk import RealDisk
from infra.failpoint import FailpointError
from infra.object_store.open import open_store
from infra.object_store.protocol import ObjectStore
from neve import spark as neve_spark
from neve.archive.journal import (
    AnyEntry,
    Commit,
    CommittedName,
    Epoch,
    Expire,
    Intent,
    IntentName,
    RowGroup,
    encode_entry,
)
from neve.archive.keys import data_key, journal_key
from neve.archive.schema import SCHEMA
from neve.spark.jars import pyspark_jars
from tests.integration.test_offload import StoreAdapter, put, start
from tests.servers.neve import NEVE
from tiered.worker.client import WorkerClient

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TOPIC = "%RETRY%g|x"  # the characters that Hive paths must carry escaped
LONG = "%RETRY%" + "|" * 120  # more than a path can say
HOUR = 3_600_000
T0 = int(datetime(2026, 1, 1, tzinfo=UTC).timestamp() * 1000)


# As objects were before their columns had field ids.
WITHOUT_IDS = pa.schema(
    [
        *(pa.field(field.name, field.type) for field in SCHEMA if field.name not in {"keys", "properties"}),
        pa.field("keys", pa.list_(pa.field("element", pa.string()))),
        pa.field("properties", pa.map_(pa.string(), pa.string())),
    ]
)


class ArchiveOnPaper:
    """An archive written entry by entry, so that the reader is not tested against its own writer."""

    def __init__(self, store: ObjectStore, broker: str, topic: str = TOPIC) -> None:
        self.store, self.broker, self.topic, self.seq = store, broker, topic, 0
        self.append(Epoch(epoch=1, owner="o", log_uuid="l", broker=broker))

    def append(self, entry: AnyEntry) -> None:
        self.store.put(journal_key("", self.broker, self.seq), encode_entry(entry), if_absent=True)
        self.seq += 1

    def write(
        self, start: int, queue: int, first: int, count: int, hour: int, *, commit: bool = True, ids: bool = True
    ) -> str:
        """`count` messages of one queue, a minute apart, as one object."""
        key = data_key("", self.topic, "2026-01-01", self.broker, start=start, end=start + 100, epoch=1)
        times = [T0 + hour * HOUR + number * 60_000 for number in range(count)]
        rows = [row(queue, first + number, at, start + number) for number, at in enumerate(times)]
        sink = pa.BufferOutputStream()
        table = pa.Table.from_pylist(rows, SCHEMA if ids else WITHOUT_IDS)
        pq.write_table(table, sink, compression="zstd", store_schema=not ids)
        data = sink.getvalue().to_pybytes()
        self.store.put(key, data, if_absent=True)
        run = (queue, first, first + count - 1)
        names = [IntentName(key, self.topic, "2026-01-01", start, start + 100, {queue: run[1:]})]
        self.append(Intent(round=start, names=names))
        group = RowGroup(0, count, 4, len(data), times[-1], times[0], 100, [run])
        name = CommittedName(
            key=key, topic=self.topic, day="2026-01-01", start=start, end=start + 100, size=len(data), footer=0,
            etag="", checksum=("", ""), sha256="", rows=count, wire_bytes=100, min_time=times[0], max_time=times[-1],
            queues={queue: (run[1], run[2], 0)}, row_groups=[group],
        )  # fmt: skip
        if commit:
            self.append(Commit(round=start, names=[name]))
        return key


def row(queue: int, offset: int, at: int, physical: int) -> dict[str, Any]:
    body = f'{{"n": {offset}, "q": {queue}}}'.encode()
    packed = offset % 2 == 1
    return {
        "queue_id": queue, "queue_offset": offset, "store_timestamp": at, "born_timestamp": at,
        "msg_id": f"{queue}-{offset}",
        "tags": "even" if offset % 2 == 0 else "odd", "keys": ["k"], "properties": [("TAGS", "x")],
        "properties_tail": True,
        "body": zlib.compress(body) if packed else body, "body_codec": "zlib" if packed else "none",
        "sys_flag": 1 if packed else 0, "flag": 0, "reconsume_times": 0, "body_crc": 0,
        "prepared_transaction_offset": 0,
        "commit_log_offset": physical, "born_host": "127.0.0.1:1", "store_host": "127.0.0.1:2", "damaged": False,
    }  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, dict[str, str]]]:
    """One Spark session for both kinds of store, and their URLs."""
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


def fill(store: ObjectStore) -> None:
    """Queue 0 of broker a: 0…9 expired, 10…19 cut at 15, 20…29; queue 1 of broker b; one object never published.

    Broker c has a topic whose name no path can say.
    """
    a = ArchiveOnPaper(store, "a")
    gone = a.write(0, 0, 0, 10, hour=0)
    a.write(100, 0, 10, 10, hour=1)
    a.write(200, 0, 20, 10, hour=2)
    a.append(Expire(keys=[gone], delete_after_ms=T0, minimums={TOPIC: {0: 15}}))
    a.write(300, 0, 30, 10, hour=3, commit=False)
    ArchiveOnPaper(store, "b").write(0, 1, 0, 10, hour=2)
    ArchiveOnPaper(store, "c", LONG).write(0, 0, 0, 5, hour=0)


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_exactly_what_the_catalog_holds(servers: tuple[Any, dict[str, str]], kind: str) -> None:
    spark, urls = servers
    frame = neve_spark.read_topic(spark, TOPIC, store=urls[kind])
    found = sorted((r.broker, r.queue_id, r.queue_offset, r.topic) for r in frame.collect())
    expected = [("a", 0, offset, TOPIC) for offset in range(15, 30)] + [("b", 1, n, TOPIC) for n in range(10)]
    assert found == expected


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_a_topic_whose_name_no_path_can_say_is_read_under_its_name(
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
    """What a program in a process, and a JVM, of its own prints."""
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


def test_a_session_for_s3_after_one_for_a_directory_reads_s3(
    servers: tuple[Any, dict[str, str]], tmp_path: Path
) -> None:
    script = DIRECTORY_FIRST.format(**servers[1]) + FIVE_LINES.format(**servers[1], topic=TOPIC)
    assert rows_counted([sys.executable], script, tmp_path, {}) == 25


def test_a_refused_query_is_a_few_lines(servers: tuple[Any, dict[str, str]]) -> None:
    command = [NEVE, "spark", "sql", "--store", servers[1]["dir"], "--topic", TOPIC, "--master", "local[1]"]
    done = subprocess.run([*command, "SELECT FORM x"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2
    _, told = done.stderr.split("error: ")
    assert "line 1 pos 7" in told
    assert "org.apache" not in done.stderr
    assert told.count("\n") < 5


def test_the_five_lines_of_the_page_run_below_spark_submit(servers: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    """As on a Spark that was unpacked: pyspark is one file there, and the JVM runs before `session` is called."""
    home = pyspark_jars().parent
    places = {"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    submit = [str(home / "bin" / "spark-submit"), "--master", "local[1]"]
    script = FIVE_LINES.format(**servers[1], topic=TOPIC)
    assert rows_counted(submit, script, tmp_path, places) == 25


def test_pruned_before_opening(servers: tuple[Any, dict[str, str]]) -> None:
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


def test_bodies_as_the_producer_had_them(servers: tuple[Any, dict[str, str]]) -> None:
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


def test_only_the_columns_asked_for_are_read(servers: tuple[Any, dict[str, str]]) -> None:
    spark, urls = servers
    frame = neve_spark.read_topic(spark, TOPIC, store=urls["dir"]).where("tags = 'odd'").groupBy("tags").count()
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "PushedFilters: [IsNotNull(tags)" in plan
    assert "body" not in plan


def test_what_is_not_there_is_said(servers: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    spark, urls = servers
    with pytest.raises(FileNotFoundError, match="topic nope"):
        neve_spark.read_topic(spark, "nope", store=urls["dir"])
    with pytest.raises(FileNotFoundError, match="no archive"):
        neve_spark.read_topic(spark, TOPIC, store=f"dir:{tmp_path}")
    with pytest.raises(FileNotFoundError, match="broker d"):
        neve_spark.read_topic(spark, TOPIC, store=urls["s3"], broker="d")


def test_after_a_crash_amid_a_round_no_row_is_there_twice(servers: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    """By the catalog, and for whoever only lists the directory: the second attempt adopted what the first had sent."""
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
