"""Tests of the schema drift report: fields of the bodies by month, added and removed ones, and the sample."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from infra.objects.open import open_store
from neve.archive.read import body_fields
from neve.archive.read.body_fields import BodyFields, Field, fields_of, sampled
from neve.archive.read.selection import Chosen
from neve.cli.spark import spark
from tests.kit.archive.archive_on_paper import HOUR, T0, ArchiveOnPaper
from tests.unit.archive.hourly_catalog import name_of

DAY = 24 * HOUR


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b'{"a": 1, "b": {"c": [1.5, "x"]}, "d": null, "e": true}',
         {("a", "BIGINT"), ("b.c[]", "DOUBLE"), ("b.c[]", "STRING"), ("d", "NULL"), ("e", "BOOLEAN")}),
        (b'{"a": {}, "b": []}', {("a", "OBJECT"), ("b", "ARRAY")}),
        (b"[1]", {("(body)[]", "BIGINT")}),
        (b"{}", {("(body)", "OBJECT")}),
        (b'"text"', {("(body)", "STRING")}),
        (b"text", {("(body)", "not JSON")}),
        (b"", {("(body)", "not JSON")}),
        (b'{"a": "\xff"}', {("(body)", "not JSON")}),
        (b"[" * 100_000, {("(body)", "not JSON")}),
        (None, {("(body)", "damaged")}),
    ],
)  # fmt: skip
def test_fields_of_a_body(body: bytes | None, fields: set[tuple[str, str]]) -> None:
    assert {tuple(field) for field in fields_of(body)} == fields


def test_fields_report_lists_undecodable_and_deeply_nested_bodies() -> None:
    assert list(fields_of(None, "why")) == [Field("(body)", "does not inflate")]
    deep = b'{"a":' * 40 + b"1" + b"}" * 40
    assert list(fields_of(deep)) == [Field(".".join("a" * 12), "OBJECT")]


def rows_of(month: int, queue: int, first: int, *bodies: bytes) -> Iterator[dict[str, Any]]:
    for at, body in enumerate(bodies):
        yield {
            "broker": "a", "queue_id": queue, "queue_offset": first + at, "body": body, "body_error": None,
            "store_timestamp": datetime(2026, month, 1, 0, first + at, tzinfo=UTC),
        }  # fmt: skip


def test_fields_report_marks_added_and_removed_fields() -> None:
    found = BodyFields()
    found.add(rows_of(2, 0, 13, b'{"n": "1"}', b'{"n": "2", "m": 1}'))
    found.add(rows_of(1, 0, 10, b'{"n": 1}', b'{"n": 2, "o": 1}', b'{"n": 2}'))
    told = [
        (one.month, one.change, *one.field, one.seen.messages, one.of, one.seen.first.text(), one.seen.last.text())
        for one in found.lines()
    ]
    assert told == [
        ("2026-01", "", "n", "BIGINT", 3, 3, "a/0@10", "a/0@12"),
        ("2026-01", "", "o", "BIGINT", 1, 3, "a/0@11", "a/0@11"),
        ("2026-02", "+", "m", "BIGINT", 1, 2, "a/0@14", "a/0@14"),
        ("2026-02", "-", "n", "BIGINT", 0, 2, "a/0@10", "a/0@12"),
        ("2026-02", "+", "n", "STRING", 2, 2, "a/0@13", "a/0@14"),
        ("2026-02", "-", "o", "BIGINT", 0, 2, "a/0@11", "a/0@11"),
    ]


def test_field_names_beyond_the_limit_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_fields, "_PATHS_MAX", 3)
    found = BodyFields()
    found.add(rows_of(1, 0, 0, *(b'{"%d": 1}' % n for n in range(10))))
    assert [(one.field.name, one.seen.messages) for one in found.lines()] == [
        ("(more names)", 7), ("0", 1), ("1", 1), ("2", 1)
    ]  # fmt: skip


def test_sample_includes_first_and_last_row_group_of_each_month() -> None:
    hours = [*range(0, 700, 7), *range(31 * 24, 31 * 24 + 5)]  # January and February 1970; 10 rows an object
    chosen = [Chosen("b", name_of(hour), [0], {}) for hour in hours]
    kept = [one.name.max_time // HOUR for one in sampled(chosen, 300)]
    january = [hour for hour in kept if hour < 31 * 24]
    assert (len(january), january[0], january[-1]) == (30, 0, hours[99])
    assert max(later - one for one, later in pairwise(january)) <= 28
    assert kept[len(january) :] == hours[100:], "of few all"
    assert sampled(chosen, 10_000) == chosen
    assert sampled([], 10) == []


def test_spark_schema_command_prints_added_and_removed_fields(tmp_path: Path) -> None:
    url = f"dir:{tmp_path}"
    archive = ArchiveOnPaper(open_store(url), "a", "t")
    archive.write(0, 0, 0, 10, hour=0)
    bodies = {"body": b'{"n": "x"}', "body_codec": "none", "sys_flag": 0}
    archive.write(100, 0, 10, 10, hour=40 * 24, change=lambda row: {**row, **bodies})
    done = CliRunner().invoke(spark, ["schema", "t", "--store", url, "-o", "json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [
        (one["month"], one["change"], one["field"], one["type"], one["messages"], one["first"]) for one in told
    ] == [
        ("2026-01", "", "n", "BIGINT", 10, "a/0@0"),
        ("2026-01", "", "q", "BIGINT", 10, "a/0@0"),
        ("2026-02", "-", "n", "BIGINT", 0, "a/0@0"),
        ("2026-02", "+", "n", "STRING", 10, "a/0@10"),
        ("2026-02", "-", "q", "BIGINT", 0, "a/0@0"),
    ]
    assert "20 messages" in done.stderr
    since = datetime.fromtimestamp((T0 + 5 * DAY) / 1000, UTC).isoformat()
    later = CliRunner().invoke(spark, ["schema", "t", "--store", url, "--from", since])
    assert "2026-01" not in later.stdout
    assert "100.0%" in later.stdout
    assert isinstance(CliRunner().invoke(spark, ["schema", "nope", "--store", url]).exception, FileNotFoundError)
