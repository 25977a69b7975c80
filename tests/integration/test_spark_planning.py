"""Spark plans from the files of the journal without listing the store, in a session and through Spark Connect."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.objects.open import open_store
from neve import spark as neve_spark
from neve.archive.format.broker_state import BrokerState, encode_state
from neve.archive.format.keys import state_key
from tests.integration.spark_archive import TOPIC, fill
from tests.integration.spark_connect import through_connect
from tests.kit.archive.archive_on_paper import ArchiveOnPaper

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    session = neve_spark.session(master="local[2]", conf={"spark.ui.enabled": "false"})
    yield session
    session.stop()


def test_planning_accesses_no_object(spark: Any, tmp_path: Path) -> None:
    """There are forty objects, more than Spark lists without a job. All are absent during planning."""
    store = open_store(f"dir:{tmp_path}")
    archive = ArchiveOnPaper(store, "007", "orders")
    keys = [archive.write(100 * n, 0, n, 1, hour=1) for n in range(40)]
    for key in keys:
        (tmp_path / key).rename(tmp_path / key.replace("/", "_"))
    frame = neve_spark.read_topic(spark, "orders", store=f"dir:{tmp_path}")
    assert len(frame.inputFiles()) == 40
    for key in keys:
        (tmp_path / key.replace("/", "_")).rename(tmp_path / key)
    assert sorted((row.broker, row.queue_offset) for row in frame.collect()) == [("007", n) for n in range(40)]


def test_topic_without_archived_messages_is_an_empty_frame(spark: Any, tmp_path: Path) -> None:
    store = open_store(f"dir:{tmp_path}")
    ArchiveOnPaper(store, "a", "orders").write(0, 0, 0, 3, hour=0)
    state = BrokerState(broker="a", number=1, topics=[{"topicName": "new", "readQueueNums": 4}])
    store.put(state_key("", "a", 0), encode_state(state))
    frame = neve_spark.read_topic(spark, "new", store=f"dir:{tmp_path}", decode="text")
    assert frame.columns == [*neve_spark.read_topic(spark, "orders", store=f"dir:{tmp_path}", decode="text").columns]
    assert frame.count() == 0
    with pytest.raises(FileNotFoundError, match="topic nope"):
        neve_spark.read_topic(spark, "nope", store=f"dir:{tmp_path}")


CONNECTED = """
import json, sys
from pyspark.sql import SparkSession
from neve.spark import read_topic
store, topic = sys.argv[1:]
spark = SparkSession.builder.remote("local[2]").getOrCreate()
assert type(spark).__module__.startswith("pyspark.sql.connect")
frame = read_topic(spark, topic, store=store, decode="text")
rows = frame.select("broker", "dt", "topic", "queue_id", "queue_offset", "text").collect()
print("found", json.dumps(sorted(list(row) for row in rows)))
spark.stop()
"""


def test_spark_connect_reads_the_same_rows(spark: Any, tmp_path: Path) -> None:
    """Spark Connect runs in another process because this one has a JVM."""
    store = open_store(f"dir:{tmp_path}/archive [1]")
    fill(store)
    ArchiveOnPaper(store, "00%7", TOPIC).write(0, 3, 0, 2, hour=1)
    url = f"dir:{tmp_path}/archive [1]"
    here = neve_spark.read_topic(spark, TOPIC, store=url, decode="text")
    expected = sorted(
        list(row) for row in here.select("broker", "dt", "topic", "queue_id", "queue_offset", "text").collect()
    )
    assert len(expected) == 27
    assert through_connect(CONNECTED, tmp_path, url, TOPIC) == expected
