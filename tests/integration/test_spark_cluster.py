"""`format("neve")` and `read_topic` on a standalone cluster of two workers with the Versity S3 gateway.

The driver, the executors and the archive share no process, and no disk except for the installation: checkpoints and
tables are in the bucket as well. The tests of `test_spark_source` run here again, imported from that module.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from infra.objects.open import open_store
from infra.objects.s3_server import S3Server, create_bucket
from neve import spark as neve_spark
from neve.spark.verify import verify
from tests.integration.spark_archive import TOPIC, commit, fill
from tests.integration.spark_connect import create, received
from tests.integration.spark_source import (
    IN_VIEW,
    below,
    run_to_end,
    table,
    test_batch_equals_read_topic_in_all_columns,
    test_source_options_select_columns_key_tag_and_offsets,
    test_sql_reads_a_topic_as_a_view,
    test_stream_reports_which_rows_were_lost,
    test_stream_returns_each_row_once_over_restarts_and_compaction,
    test_unfiltered_query_after_a_filtered_one_has_all_rows,
)
from tests.kit.archive.archive_on_paper import ArchiveOnPaper
from tests.kit.server import spark_jvm, versitygw
from tests.kit.server.neve import NeveServer
from tests.kit.server.spark_cluster import SparkCluster

__all__ = [
    "test_batch_equals_read_topic_in_all_columns",
    "test_source_options_select_columns_key_tag_and_offsets",
    "test_sql_reads_a_topic_as_a_view",
    "test_stream_reports_which_rows_were_lost",
    "test_stream_returns_each_row_once_over_restarts_and_compaction",
    "test_unfiltered_query_after_a_filtered_one_has_all_rows",
]

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

BUCKET = "archive"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with versitygw.running(tmp_path_factory.mktemp("versity")) as server, pytest.MonkeyPatch.context() as patch:
        create_bucket(server, BUCKET)
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, server: S3Server) -> Iterator[SparkCluster]:
    """Run the cluster with the credentials in the environment of its workers and executors."""
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def url(server: S3Server) -> str:
    url = server.url(BUCKET, "some%20prefix")
    fill(open_store(url))
    return url


@pytest.fixture(scope="module")
def spark(cluster: SparkCluster, url: str) -> Iterator[Any]:
    conf = {
        "spark.ui.enabled": "false",
        "spark.log.level": "ERROR",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.host": "127.0.0.1",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": spark_jvm.COMPILER,
        # No task begins before both workers are registered.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
    }
    with ExitStack() as stack:
        session = neve_spark.session(url, master=cluster.master, conf=conf)
        stack.callback(session.stop)
        yield session


@pytest.fixture
def place(server: S3Server) -> str:
    return server.url(BUCKET, uuid.uuid4().hex)


def homes_of(frame: Any) -> set[str]:
    """Return the work directories of the workers whose Python processes handled rows of the frame."""

    def here(batches: Iterator[Any]) -> Iterator[Any]:
        import pyarrow

        for batch in batches:
            yield pyarrow.record_batch({"at": pyarrow.array([str(Path.cwd())] * batch.num_rows)})

    found = {Path(row.at) for row in frame.mapInArrow(here, "at STRING").distinct().collect()}
    return {next(part for part in path.parts if part.startswith("worker-")) for path in found}


def test_tasks_run_on_both_workers_and_bodies_are_inflated_there(spark: Any, url: str) -> None:
    frame = spark.read.format("neve").options(store=url, subscribe=TOPIC, minPartitions="4").load()
    assert frame.rdd.getNumPartitions() >= 3
    assert homes_of(frame) == {"worker-0", "worker-1"}
    texts = neve_spark.read_topic(spark, TOPIC, store=url, decode="text").select("queue_id", "queue_offset", "text")
    assert sorted(tuple(row) for row in texts.collect()) == sorted(
        (queue, offset, f'{{"n": {offset}, "q": {queue}}}') for _, queue, offset in IN_VIEW
    )


def test_verify_runs_on_the_workers(spark: Any, place: str) -> None:
    store = below(place, "archive")
    archive = ArchiveOnPaper(open_store(store), "007", "orders")
    for number in range(4):
        commit(archive, number, 10 * number, 10 * number + 9)
    checked = verify(spark, store=store)
    assert (checked.ok, checked.objects, checked.rows) == (True, 4, 40)


def test_rows_go_to_a_topic_from_both_workers(
    spark: Any, tmp_path: Path, neve_up: Callable[..., AbstractContextManager[NeveServer]]
) -> None:
    with neve_up(tmp_path) as server:
        asyncio.run(create("into", server.namesrv))
        rows = spark.range(0, 400, 1, 4).selectExpr("concat('n', id) AS body", "'batch' AS tags")
        assert homes_of(rows) == {"worker-0", "worker-1"}
        rows.write.format("neve").options(namesrv=server.namesrv, topic="into").mode("append").save()
        sent = asyncio.run(received("into", server.namesrv, 400))
    assert sorted(body for _, body in sent) == sorted(f"n{number}" for number in range(400))


def test_stream_resumes_when_a_worker_dies(spark: Any, cluster: SparkCluster, place: str) -> None:
    """This is the last test of the module: the worker's executor is lost and not replaced."""
    archive = ArchiveOnPaper(open_store(below(place, "archive")), "a", "orders")
    for n in range(4):
        archive.write(100 * n, 0, 10 * n, 10, hour=n)
    run_to_end(spark, place, maxOffsetsPerTrigger="25", minPartitions="4")
    archive.write(400, 0, 40, 10, hour=4)
    cluster.kill_worker(0)
    run_to_end(spark, place, minPartitions="4")
    assert table(spark, place) == [("orders", "a", n) for n in range(50)]
    frame = spark.read.format("neve").load(path=below(place, "archive"), topic="orders")
    assert homes_of(frame) == {"worker-1"}
