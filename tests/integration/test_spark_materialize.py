"""A table of a topic on a real Spark: typed, incremental, read by who knows nothing of it, and whole after kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import duckdb
import pytest

from infra.objects import minio
from infra.objects.open import open_store
from neve import spark as neve_spark
from neve.archive.format.journal import Expire
from neve.spark.jobs.materialize import materialize
from neve.spark.jobs.table_log import NoTable
from neve.spark.jobs.table_store import open_table
from tests.doubles.archive_on_paper import T0, ArchiveOnPaper
from tests.unit.spark.test_materialize import Killed, Mortal

pytestmark = [
    pytest.mark.servers,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
JSON: dict[str, Any] = {"kind": "json", "schema": "n INT, q INT", "flat": True}


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR", "spark.sql.shuffle.partitions": "1"}
    session = neve_spark.session(master="local[2]", conf=conf)
    yield session
    session.stop()


def found(spark: Any, table: Path) -> list[int]:
    """As Spark reads the directory, with nothing of ours."""
    return sorted(row.n for row in spark.read.parquet(str(table)).select("n").collect())


def test_a_table_is_typed_grows_by_what_is_new_and_goes_with_what_expired(spark: Any, tmp_path: Path) -> None:
    url, table = f"dir:{tmp_path}/archive", tmp_path / "table 1"
    archive = ArchiveOnPaper(open_store(url), "a", "orders")
    for number in range(2):
        archive.write(100 * number, 0, 10 * number, 10, hour=0)
    told: list[Any] = []
    done = materialize(
        spark, "orders", store=url, table=f"dir:{table}", rows_per_commit=15, progress=told.append, **JSON
    )
    assert (done.rows, done.table_rows, [one.rows for one in told]) == (20, 20, [15, 20])
    frame = spark.read.parquet(str(table))
    assert {"broker", "queue_offset", "n", "q", "body_error", "dt"} <= set(frame.columns)
    assert dict(frame.dtypes)["n"] == "int"
    assert sorted((row.queue_offset, row.n, row.tags) for row in frame.collect()) == [
        (n, n, "odd" if n % 2 else "even") for n in range(20)
    ]
    archive.write(200, 0, 20, 5, hour=1)
    archive.replace(0, 0, 25, hour=0)
    assert materialize(spark, "orders", store=url, table=f"dir:{table}", **JSON).rows == 5
    assert found(spark, table) == list(range(25))
    archive.append(Expire(keys=[], delete_after_ms=T0, minimums={"orders": {0: 12}}))
    assert materialize(spark, "orders", store=url, table=f"dir:{table}", **JSON).table_rows == 25
    done = materialize(spark, "orders", store=url, table=f"dir:{table}", expired="drop", **JSON)
    assert (done.dropped_rows, done.table_rows) == (12, 13)
    assert found(spark, table) == list(range(12, 25))
    by_glob = f"SELECT count(*), min(n), max(n) FROM read_parquet('{table}/dt=*/*.parquet')"
    assert duckdb.connect().execute(by_glob).fetchone() == (13, 12, 24)
    with pytest.raises(NoTable, match="begun with columns"):
        materialize(spark, "orders", store=url, table=f"dir:{table}", kind="text")
    with pytest.raises(FileNotFoundError, match="topic nope"):
        materialize(spark, "nope", store=url, table=f"dir:{tmp_path}/other")
    with pytest.raises(ValueError, match="columns tags already"):
        materialize(spark, "orders", store=url, table=f"dir:{tmp_path}/o", kind="json", schema="tags INT", flat=True)


@pytest.mark.parametrize("at", [0, 2, 3, 5])
def test_a_run_that_dies_leaves_what_was_there_and_the_next_has_all(spark: Any, tmp_path: Path, at: int) -> None:
    url, table = f"dir:{tmp_path}/archive", tmp_path / "table"
    archive = ArchiveOnPaper(open_store(url), "a", "orders")
    archive.write(0, 0, 0, 10, hour=0)
    materialize(spark, "orders", store=url, table=f"dir:{table}", **JSON)
    archive.write(100, 0, 10, 10, hour=0)
    with pytest.raises(Killed):
        materialize(spark, "orders", store=url, table=f"dir:{table}", table_store=Mortal(table, at), **JSON)
    assert found(spark, table) in (list(range(10)), list(range(20)))
    assert materialize(spark, "orders", store=url, table=f"dir:{table}", **JSON).table_rows == 20
    assert found(spark, table) == list(range(20))


def bad(row: dict[str, Any]) -> dict[str, Any]:
    """Each fourth body is none: half of them do not inflate."""
    offset = row["queue_offset"]
    return (
        {**row, "body": b"no zlib" if offset % 8 == 3 else b"{", "sys_flag": int(offset % 8 == 3)}
        if offset % 4 == 3
        else row
    )


def test_dead_letters_have_a_table_of_their_own_and_each_row_is_in_one_of_the_two(spark: Any, tmp_path: Path) -> None:
    url, table, dead = f"dir:{tmp_path}/archive", tmp_path / "table", tmp_path / "dead"
    archive = ArchiveOnPaper(open_store(url), "a", "orders")
    archive.write(0, 0, 0, 10, hour=0, change=bad)
    options: dict[str, Any] = {**JSON, "dead_letters": f"dir:{dead}"}
    done = materialize(spark, "orders", store=url, table=f"dir:{table}", **options)
    assert (done.rows, done.table_rows, done.dead_rows) == (8, 8, 2)
    archive.write(100, 0, 10, 10, hour=0, change=bad)
    with pytest.raises(Killed):  # between the two
        materialize(spark, "orders", store=url, table=f"dir:{table}", table_store=Mortal(table, 1), **options)
    letters = [3, 7, 11, 15, 19]
    assert found(spark, table) == [n for n in range(10) if n not in letters]
    done = materialize(spark, "orders", store=url, table=f"dir:{table}", **options)
    assert (done.rows, done.table_rows, done.dead_rows) == (10 - 3, 15, 5)
    assert found(spark, table) == [n for n in range(20) if n not in letters]
    assert "body_error" not in spark.read.parquet(str(table)).columns
    rows = {row.queue_offset: row for row in spark.read.parquet(str(dead)).collect()}
    assert sorted(rows) == letters
    assert (bytes(rows[3].body), bytes(rows[7].body)) == (b"no zlib", b"{"), "as they are stored"
    assert rows[3].body_error.startswith("the body is not what its sysFlag says")
    assert (rows[7].body_error, rows[7].broker, rows[7].body_codec) == ("the body is not JSON", "a", "zlib")

    archive.append(Expire(keys=[], delete_after_ms=T0, minimums={"orders": {0: 12}}))
    done = materialize(spark, "orders", store=url, table=f"dir:{table}", expired="drop", **options)
    assert (done.dropped_rows, done.table_rows, done.dead_rows) == (9, 6, 2)
    assert found(spark, table) == [12, 13, 14, 16, 17, 18]
    with pytest.raises(NoTable, match="begun with on_error 'dead letters'"):
        materialize(spark, "orders", store=url, table=f"dir:{table}", **JSON)
    with pytest.raises(ValueError, match="another table"):
        materialize(spark, "orders", store=url, table=f"dir:{table}", **JSON, dead_letters=f"dir:{table}")


def test_a_topic_without_dead_letters_has_an_empty_table_of_them(spark: Any, tmp_path: Path) -> None:
    url, table, dead = f"dir:{tmp_path}/archive", tmp_path / "table", tmp_path / "dead"
    ArchiveOnPaper(open_store(url), "a", "orders").write(0, 0, 0, 10, hour=0)
    done = materialize(spark, "orders", store=url, table=f"dir:{table}", dead_letters=f"dir:{dead}", **JSON)
    assert (done.table_rows, done.dead_rows) == (10, 0)
    assert spark.read.schema("queue_offset BIGINT, body_error STRING").parquet(str(dead)).count() == 0


DIES = """
import os, signal, sys
from neve import spark as neve_spark
from neve.spark.jobs.materialize import materialize
url, table, at = sys.argv[1:]
def die(done):
    if done.rows == int(at):
        os.kill(os.getpid(), signal.SIGKILL)
conf = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
spark = neve_spark.session(master="local[1]", conf=conf)
options = {"kind": "json", "schema": "n INT, q INT", "flat": True, "rows_per_commit": 10}
materialize(spark, "orders", store=url, table=table, progress=die, **options)
"""


def test_a_driver_that_is_killed_between_commits_loses_none_and_doubles_none(spark: Any, tmp_path: Path) -> None:
    url, table = f"dir:{tmp_path}/archive", tmp_path / "table"
    archive = ArchiveOnPaper(open_store(url), "a", "orders")
    for number in range(4):
        archive.write(100 * number, 0, 10 * number, 10, hour=0)
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    places = {**os.environ, "PYSPARK_PYTHON": sys.executable, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, str(script), url, f"dir:{table}", "20"]
    done = subprocess.run(command, env=places, capture_output=True, timeout=240, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert found(spark, table) == list(range(20))
    assert materialize(spark, "orders", store=url, table=f"dir:{table}", **JSON).rows == 20
    assert found(spark, table) == list(range(40))


@pytest.mark.parametrize("kind", ["dir", "s3"])
def test_a_store_of_tables_puts_once_moves_once_and_deletes(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        url = f"dir:{tmp_path}/table"
        if kind == "s3":
            server = stack.enter_context(minio.running(tmp_path / "minio"))
            minio.create_bucket(server, "tables")
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
            url = f"s3://tables/some%20prefix?endpoint={server.endpoint}&region=us-east-1"
        store = open_table(url)
        assert store.sizes("") == {}
        store.put_new("a/x", b"one")
        with pytest.raises(FileExistsError):
            store.put_new("a/x", b"two")
        store.settle("a/x")
        assert (store.get("a/x"), store.sizes("a/")) == (b"one", {"a/x": 3})
        store.move("a/x", "dt=1/y")
        store.move("a/x", "dt=1/y")
        store.put_new("a/x", b"another")
        store.move("a/x", "dt=1/y")
        assert (store.get("dt=1/y"), store.sizes("a/"), store.sizes("dt=")) == (b"one", {}, {"dt=1/y": 3})
        with pytest.raises(FileNotFoundError):
            store.move("a/none", "dt=1/none")
        with pytest.raises(FileNotFoundError):
            store.get("a/none")
        store.put_new("a/b/z", b"")
        store.delete_below("a/")
        store.delete("dt=1/y")
        store.delete("dt=1/y")
        assert store.sizes("") == {}
