"""Tests of the setup of Spark sessions, without a session."""

from __future__ import annotations

import json
import subprocess
import sys
import zlib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Commit, CommittedObject, Epoch, Expire, RowGroup
from neve.archive.read.selection import Selection, instant_ms
from neve.cli.spark import refused_sql
from neve.spark import SparkSetupError
from neve.spark.bodies import batch_inflater, inflater
from neve.spark.builder import parse_store, s3_options
from neve.spark.jars import find_java, hadoop_version, pyspark_jars
from neve.spark.manifest import manifest
from neve.spark.reader import Minimum, plan


def test_importing_needs_no_pyspark() -> None:
    assert "pyspark" not in sys.modules or sys.modules["neve.spark"].__all__


def test_missing_java_error_names_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(SparkSetupError, match="apt install openjdk-17"):
        find_java()


def test_java_home_takes_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() == str(java)


@pytest.mark.parametrize(("told", "version"), [("11.0.2", 11), ("1.8.0_392", 8)])
def test_unsupported_java_is_refused_before_it_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, version: int
) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch()
    (tmp_path / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{told}"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkSetupError, match=f"needs Java 17 or 21, and {java} is Java {version}"):
        find_java()
    (tmp_path / "release").write_text('JAVA_VERSION="17.0.15"\n')
    assert find_java() == str(java)


def test_hadoop_version_is_read_from_jar_names(tmp_path: Path) -> None:
    with pytest.raises(SparkSetupError, match="no hadoop-client-api"):
        hadoop_version(tmp_path)
    (tmp_path / "hadoop-client-api-3.4.2.jar").touch()
    (tmp_path / "hadoop-client-runtime-3.4.2.jar").touch()
    assert hadoop_version(tmp_path) == "3.4.2"


def test_store_url_is_converted_to_spark_options() -> None:
    s3 = parse_store("s3://bucket/a%20b/c/?endpoint=http://h:9000&region=eu-1")
    assert (s3.root, s3.bucket, s3.endpoint, s3.region) == ("s3a://bucket/a b/c", "bucket", "http://h:9000", "eu-1")
    assert parse_store("dir:/x/topic=%25").path("k") == "file:/x/topic=%25/k"
    options = s3_options(s3)
    assert options["spark.hadoop.fs.s3a.bucket.bucket.path.style.access"] == "true"
    assert options["spark.hadoop.fs.s3a.bucket.bucket.connection.ssl.enabled"] == "false"
    assert not any("secret" in name for name in options)
    with pytest.raises(ValueError, match="must be dir:PATH"):
        parse_store("/just/a/path")


def test_instant_is_accepted_in_four_forms() -> None:
    assert instant_ms(None) is None
    assert instant_ms(5) == 5
    assert instant_ms("1970-01-01T00:00:01") == 1000
    assert instant_ms(datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))) == 0
    assert instant_ms(datetime(1970, 1, 2, tzinfo=UTC)) == 86_400_000


def test_inflater_bounds_bodies_and_reports_damage() -> None:
    inflate = inflater(1000)
    assert inflate(zlib.compress(b"abc"), 1) == (b"abc", None)
    assert inflate(b"as it is", 0) == (b"as it is", None)
    assert inflate(None, 1) == (None, None)
    assert inflate(zlib.compress(bytes(1001)), 1) == (None, "the body is longer than 1000 bytes when inflated")
    body, error = inflate(b"not zlib", 1)
    assert body is None
    assert "not match the compression in its sysFlag" in str(error)


def test_bodies_beyond_one_array_are_refused_before_inflating() -> None:
    packed = pa.array([zlib.compress(bytes(1000)), zlib.compress(bytes(1000)), zlib.compress(b"never inflated")])
    flags = pa.array([1, 1, 1])
    with pytest.raises(ValueError, match=r"the first 2 of 3 bodies are more than 1999 bytes.*maxRecordsPerBatch"):
        batch_inflater(1000, most=1999)(packed, flags)
    assert len(batch_inflater(1000, most=2014)(packed, flags)) == 3


def test_workers_inflate_without_neve() -> None:
    packed = cloudpickle.dumps(batch_inflater(1000))
    code = (
        "import sys; sys.modules['neve'] = None\n"
        "import pickle, zlib, pyarrow as pa\n"
        "run = pickle.loads(sys.stdin.buffer.read())\n"
        "print(run(pa.array([zlib.compress(b'abc'), None, b'no']), pa.array([1, None, 1])).to_pylist())"
    )
    done = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (
        b"[{'body': b'abc', 'error': None}, {'body': None, 'error': None}, {'body': None, 'error': 'the b"
        in done.stdout
    )


def committed(key: str, queue: int, first: int, last: int, times: tuple[int, int]) -> CommittedObject:
    rows = last - first + 1
    return CommittedObject(
        key=key, topic="t", day="2026-01-01", start=first, end=last + 1, size=1, footer=0, etag="", checksum=("", ""),
        sha256="", rows=rows, wire_bytes=0, min_time=times[0], max_time=times[1], queues={queue: (first, last, 0)},
        row_groups=[RowGroup(0, rows, 4, 1, times[1], times[0], 1, [(queue, first, last)])],
    )  # fmt: skip


@pytest.fixture
def catalog() -> Catalog:
    made = Catalog()
    made.apply(0, Epoch(epoch=1, owner="o", log_uuid="l"))
    names = [
        committed("a", 0, 0, 9, (100, 200)),
        committed("b", 0, 10, 19, (200, 300)),
        committed("c", 1, 0, 9, (-1, -1)),
    ]
    made.apply(1, Commit(round=1, names=names))
    return made


def keys(catalog: Catalog, wanted: Selection, topic: str = "t") -> list[str]:
    return sorted(name.key for name in plan({"b": catalog}, topic, wanted)[0])


def test_plan_skips_objects_without_matching_rows(catalog: Catalog) -> None:
    assert keys(catalog, Selection()) == ["a", "b", "c"]
    assert keys(catalog, Selection(start=201)) == ["b", "c"]  # unknown times may match
    assert keys(catalog, Selection(end=200)) == ["a", "c"]
    assert keys(catalog, Selection(queues=frozenset({1}))) == ["c"]
    assert keys(catalog, Selection(first=10)) == ["b"]
    assert keys(catalog, Selection(last=9)) == ["a", "c"]
    assert keys(catalog, Selection(), "other") == []


def test_plan_begins_at_the_recorded_minimum(catalog: Catalog) -> None:
    catalog.apply(2, Expire(keys=["a"], delete_after_ms=0, minimums={"t": {0: 15}}))
    names, minimums = plan({"b": catalog}, "t", Selection())
    assert sorted(name.key for name in names) == ["b", "c"]
    assert minimums == [Minimum("b", 0, 15)]


def test_manifest_has_file_paths_as_uris() -> None:
    """A `%` in a store key is literal, but an escape in a URI."""
    lines = manifest([("file:/a [1]/topic=%25R/x.parquet", 7), ("s3a://b/k", 8)]).split("\n")
    assert lines[0] == "v1"
    told = [json.loads(line) for line in lines[1:]]
    assert [(one["path"], one["size"]) for one in told] == [
        ("file:/a%20%5B1%5D/topic=%2525R/x.parquet", 7),
        ("s3a://b/k", 8),
    ]
    assert {one["action"] for one in told} == {"add"}


def test_jars_are_those_of_the_running_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With spark-submit, pyspark is imported from a zip file without jars."""
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert pyspark_jars() == tmp_path / "jars"
    with pytest.raises(SparkSetupError, match="set SPARK_HOME"):
        hadoop_version(pyspark_jars())
    monkeypatch.delenv("SPARK_HOME")
    assert hadoop_version(pyspark_jars())


COLUMN = """[UNRESOLVED_COLUMN.WITHOUT_SUGGESTION] A column `FORM` cannot be resolved. SQLSTATE: 42703; line 1 pos 7;
'Project ['FORM AS x#27]
+- OneRowRelation
"""
SYNTAX = """
[PARSE_SYNTAX_ERROR] Syntax error at or near 'FROM'. SQLSTATE: 42601 (line 1, pos 9)

== SQL ==
SELECT * FROM FROM x
---------^^^
"""


def test_refused_query_error_has_its_place_but_no_plan_or_stack() -> None:
    assert refused_sql(COLUMN, "SELECT FORM x", ["orders"]) == COLUMN.split(";\n", maxsplit=1)[0]
    told = refused_sql(SYNTAX + "\nJVM stacktrace:\norg.apache.spark…\n\tat x", "SELECT * FROM FROM x", ["orders"])
    assert told.endswith("SELECT * FROM FROM x\n---------^^^")
    missing = "[TABLE_OR_VIEW_NOT_FOUND] The table `oders` cannot be found. line 1 pos 14;\n'Project [*]"
    assert refused_sql(missing, "SELECT * FROM oders", ["orders"]).endswith("the topics of this store: orders")


def test_error_suggests_backticks_for_a_topic_name() -> None:
    told = refused_sql(SYNTAX, "SELECT * FROM dash-topic", ["dash-topic", "orders"])
    assert told.endswith("`dash-topic`")
    assert "backticks" not in refused_sql(SYNTAX, "SELECT * FROM `dash-topic`", ["dash-topic"])
