"""What a Spark session is set up with, without starting one."""

from __future__ import annotations

import sys
import zlib
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest

from neve.archive.catalog import Catalog
from neve.archive.journal import Commit, CommittedName, Epoch, Expire, RowGroup
from neve.cli.spark import refused_sql
from neve.spark import SparkSetupError
from neve.spark.bodies import inflater
from neve.spark.builder import parse_store, s3_options
from neve.spark.jars import find_java, hadoop_version, pyspark_jars
from neve.spark.reader import Minimum, RowFilter, instant_ms, plan


def test_importing_needs_no_pyspark() -> None:
    assert "pyspark" not in sys.modules or sys.modules["neve.spark"].__all__


def test_missing_java_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(SparkSetupError, match="apt install openjdk-17"):
        find_java()


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.touch()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java() == str(java)


def test_hadoop_version_from_the_jars_names(tmp_path: Path) -> None:
    with pytest.raises(SparkSetupError, match="no hadoop-client-api"):
        hadoop_version(tmp_path)
    (tmp_path / "hadoop-client-api-3.4.2.jar").touch()
    (tmp_path / "hadoop-client-runtime-3.4.2.jar").touch()
    assert hadoop_version(tmp_path) == "3.4.2"


def test_a_store_url_becomes_what_spark_needs() -> None:
    s3 = parse_store("s3://bucket/a%20b/c/?endpoint=http://h:9000&region=eu-1")
    assert (s3.root, s3.bucket, s3.endpoint, s3.region) == ("s3a://bucket/a b/c", "bucket", "http://h:9000", "eu-1")
    assert parse_store("dir:/x/topic=%25").path("k") == "file:/x/topic=%25/k"
    options = s3_options(s3)
    assert options["spark.hadoop.fs.s3a.bucket.bucket.path.style.access"] == "true"
    assert options["spark.hadoop.fs.s3a.bucket.bucket.connection.ssl.enabled"] == "false"
    assert not any("secret" in name for name in options)
    with pytest.raises(ValueError, match="must be dir:PATH"):
        parse_store("/just/a/path")


def test_an_instant_may_be_given_in_four_ways() -> None:
    assert instant_ms(None) is None
    assert instant_ms(5) == 5
    assert instant_ms("1970-01-01T00:00:01") == 1000
    assert instant_ms(datetime(1970, 1, 1, 1, tzinfo=timezone(timedelta(hours=1)))) == 0
    assert instant_ms(datetime(1970, 1, 2, tzinfo=UTC)) == 86_400_000


def test_inflating_is_bounded_and_never_guesses() -> None:
    inflate = inflater(1000)
    assert inflate(zlib.compress(b"abc"), "zlib") == b"abc"
    assert inflate(b"not zlib", "zlib") is None
    assert inflate(None, "zlib") is None
    assert inflate(b"abc", "unheard-of") is None
    with pytest.raises(ValueError, match="longer than 1000"):
        inflate(zlib.compress(bytes(1001)), "zlib")


def committed(key: str, queue: int, first: int, last: int, times: tuple[int, int]) -> CommittedName:
    rows = last - first + 1
    return CommittedName(
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


def test_plan_prunes_what_cannot_hold_a_row(catalog: Catalog) -> None:
    known = {"b": catalog}
    assert sorted(plan(known, "t", RowFilter())[0]) == ["a", "b", "c"]
    assert sorted(plan(known, "t", RowFilter(start=201))[0]) == ["b", "c"]  # unknown times may match
    assert sorted(plan(known, "t", RowFilter(end=200))[0]) == ["a", "c"]
    assert sorted(plan(known, "t", RowFilter(queues=frozenset({1})))[0]) == ["c"]
    assert sorted(plan(known, "t", RowFilter(first=10))[0]) == ["b"]
    assert sorted(plan(known, "t", RowFilter(last=9))[0]) == ["a", "c"]
    assert plan(known, "other", RowFilter())[0] == []


def test_plan_cuts_at_the_recorded_minimum(catalog: Catalog) -> None:
    catalog.apply(2, Expire(keys=["a"], delete_after_ms=0, minimums={"t": {0: 15}}))
    keys, minimums = plan({"b": catalog}, "t", RowFilter())
    assert sorted(keys) == ["b", "c"]
    assert minimums == [Minimum("b", 0, 15)]


def test_the_jars_are_those_of_the_spark_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Below spark-submit pyspark is imported from a zip, which has none."""
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


def test_a_refused_query_is_told_with_its_place_and_without_plan_and_stack() -> None:
    assert refused_sql(COLUMN, "SELECT FORM x", ["orders"]) == COLUMN.split(";\n", maxsplit=1)[0]
    told = refused_sql(SYNTAX + "\nJVM stacktrace:\norg.apache.spark…\n\tat x", "SELECT * FROM FROM x", ["orders"])
    assert told.endswith("SELECT * FROM FROM x\n---------^^^")
    missing = "[TABLE_OR_VIEW_NOT_FOUND] The table `oders` cannot be found. line 1 pos 14;\n'Project [*]"
    assert refused_sql(missing, "SELECT * FROM oders", ["orders"]).endswith("the topics of this store: orders")


def test_a_topic_whose_name_needs_backticks_is_told() -> None:
    told = refused_sql(SYNTAX, "SELECT * FROM dash-topic", ["dash-topic", "orders"])
    assert told.endswith("`dash-topic`")
    assert "backticks" not in refused_sql(SYNTAX, "SELECT * FROM `dash-topic`", ["dash-topic"])
