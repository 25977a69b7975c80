"""Error messages for queries that cannot be answered, in one process without S3 jars and with a wrong secret.

A missing or old Java is an error before a JVM starts: `unit/cli/test_spark_setup.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.objects import minio
from infra.objects.open import open_store
from infra.objects.store import ObjectStore
from neve.archive.format.broker_state import BrokerState, encode_state
from neve.archive.format.journal import Expire
from neve.archive.format.keys import state_key
from tests.kit.archive.archive_on_paper import T0, ArchiveOnPaper
from tests.kit.server.neve import NEVE

pytestmark = pytest.mark.servers

CASES = """
import json, sys
from pyspark.sql import SparkSession
from neve.spark import read_topic, session
store, bucket, empty, out = sys.argv[1:]
plain = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
spark = plain.config("spark.log.level", "FATAL").getOrCreate()
told = {}

def case(name, what):
    try:
        told[name] = ["rows", str(what())]
    except Exception as error:
        told[name] = [type(error).__name__, str(error)]

def source(where, topic, **options):
    return lambda: spark.read.format("neve").options(store=where, topic=topic, **options).load().count()

case("no jars", lambda: read_topic(spark, "orders", store=bucket))
case("no topic", lambda: read_topic(spark, "nope", store=store))
case("no topic by format", source(store, "nope"))
case("nothing archived yet", lambda: read_topic(spark, "new", store=store).count())
case("nothing archived yet by format", source(store, "new"))
case("no archive", lambda: read_topic(spark, "orders", store=empty))
case("no archive by format", source(empty, "orders"))
case("expired by format", source(store, "orders", startingOffsets='{"orders": {"0": 3}}'))
case("what is left by format", source(store, "orders", startingOffsets='{"orders": {"0": 3}}', failOnDataLoss="false"))
case("no rights by format", source(bucket, "orders"))
session(bucket)
case("no rights", lambda: read_topic(spark, "orders", store=bucket))
with open(out, "w") as file:
    json.dump(told, file)
spark.stop()
"""


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return a bucket with an archive, and set a wrong secret in the environment."""
    with minio.running(tmp_path_factory.mktemp("minio")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        minio.create_bucket(server, "archive")
        url = server.url("archive", "some%20prefix")
        fill(open_store(url))
        patch.setenv("AWS_SECRET_ACCESS_KEY", "somebody else's")
        yield url


def fill(store: ObjectStore) -> None:
    """Fill topic orders (0 to 9 expired, 10 to 19 visible) and create topic new, which has no archive yet."""
    archive = ArchiveOnPaper(store, "a", "orders")
    gone = archive.write(0, 0, 0, 10, hour=0)
    archive.write(100, 0, 10, 10, hour=1)
    archive.append(Expire(keys=[gone], delete_after_ms=T0, minimums={"orders": {0: 10}}))
    state = BrokerState(broker="a", number=1, topics=[{"topicName": "new", "readQueueNums": 4}])
    store.put(state_key("", "a", 0), encode_state(state))


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory, bucket: str) -> dict[str, list[str]]:
    """Return for each case the error type with its message, or the number of rows."""
    home = tmp_path_factory.mktemp("words")
    fill(open_store(f"dir:{home / 'archive'}"))
    (home / "empty").mkdir()
    (home / "cases.py").write_text(CASES)
    places = [f"dir:{home / 'archive'}", bucket, f"dir:{home / 'empty'}", str(home / "told.json")]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    command = [sys.executable, str(home / "cases.py"), *places]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[str]] = json.loads((home / "told.json").read_text())
    return found


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("no jars", "SparkSetupError", "this Spark has no jars for s3a://archive/some prefix: call neve.spark.session"),
        ("no topic", "FileNotFoundError", "topic nope is not in this archive"),
        ("no topic by format", "AnalysisException", "topic nope is not in this archive"),
        ("nothing archived yet", "rows", "0"),
        ("nothing archived yet by format", "rows", "0"),
        ("no archive", "FileNotFoundError", "no archive here: nothing below _neve/"),
        ("no archive by format", "AnalysisException", "no archive here: nothing below _neve/"),
        ("expired by format", "AnalysisException", "topic orders, broker a, queue 0: offsets 3 to 9 have expired."),
        ("expired by format", "AnalysisException", "failOnDataLoss=false skips them"),
        ("what is left by format", "rows", "10"),
        ("no rights", "PermissionError", "some prefix"),
        ("no rights", "PermissionError", "no rights"),
        ("no rights by format", "AnalysisException", "PermissionError: no rights"),
    ],
)
def test_unanswerable_query_has_a_clear_error(told: dict[str, list[str]], case: str, kind: str, words: str) -> None:
    found, text = told[case]
    assert found == kind
    assert words in text, text


def test_command_line_prints_one_line_and_sets_exit_code(bucket: str, tmp_path: Path) -> None:
    """The errors are raised before any JVM is started."""
    (tmp_path / "empty").mkdir()
    for store, code, words in (
        (bucket, 4, "SignatureDoesNotMatch"),
        (f"dir:{tmp_path / 'empty'}", 3, "no archive here"),
    ):
        done = subprocess.run(
            [NEVE, "spark", "sql", "--store", store, "SELECT 1"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1
