"""Tests of TTLs as text, and of the TTL plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Commit, CommittedObject, Expire, RowGroup
from neve.archive.policy.expiry import plan_expiry
from neve.archive.policy.ttl import FOR_EVER_HOURS
from neve.cli import broker, main, topic_ttl
from neve.cli.topic_ttl import expiry_plan, hours_of
from neve.cli.ttl import format_ttl, parse_ttl, shorter

HOUR = 3_600_000
NOW = 1_000 * HOUR


@pytest.mark.parametrize(
    ("text", "hours"),
    [("1h", 1), ("36h", 36), ("90d", 2160), ("2w", 336), ("120m", 2), ("forever", FOR_EVER_HOURS), (" 7D ", 168)],
)
def test_ttl_is_parsed_as_whole_hours(text: str, hours: int) -> None:
    assert parse_ttl(text) == hours


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("90m", "the nearest are 1h and 2h"),
        ("1m", "whole hours, days or weeks, as 36h, 90d, 2w, or forever; the shortest is 1h"),
        ("0h", "at once"),
        ("0d", "at once"),
        ("36", "not a TTL"),
        ("1.5h", "not a TTL"),
        ("-1h", "not a TTL"),
        ("", "not a TTL"),
        ("1000000h", "write forever"),
        ("٣h٣", "not a TTL"),
    ],
)
def test_invalid_ttl_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_ttl(text)


@pytest.mark.parametrize("hours", [1, 23, 24, 36, 720, FOR_EVER_HOURS])
def test_ttl_format_round_trips(hours: int) -> None:
    assert parse_ttl(format_ttl(hours)) == hours


def test_default_ttl_has_a_format() -> None:
    assert format_ttl(None) == format_ttl(-1) == "default"


def test_shorter_ttl_is_detected() -> None:
    assert shorter(24, 48)
    assert shorter(24, None)  # the default may be forever
    assert not shorter(48, 24)
    assert not shorter(FOR_EVER_HOURS, None)


def test_hours_are_read_from_the_topic_attribute() -> None:
    assert hours_of({}) is None
    assert hours_of({"reserve.time": "-1"}) is None
    assert hours_of({"reserve.time": "720"}) == 720
    assert hours_of({"reserve.time": "2000000"}) == FOR_EVER_HOURS


def catalog_of(*objects: tuple[int, ...]) -> Catalog:
    """Return a catalog of consecutive objects in queue 0, with ten rows per given newest store time."""
    names, first = [], 0
    for number, newest in enumerate(objects):
        starts = range(first, first + 10 * len(newest), 10)
        groups = [
            RowGroup(start - first, 10, 4, 100, at, at, 1000, [(0, start, start + 9)])
            for start, at in zip(starts, newest, strict=True)
        ]
        rows = 10 * len(newest)
        names.append(
            CommittedObject(
                key=f"k{number}", topic="t", day="2026-01-01", start=number, end=number + 1, size=500, footer=0,
                etag="", checksum=("", ""), sha256="", rows=rows, wire_bytes=0, min_time=0, max_time=0,
                queues={0: (first, first + rows - 1, 0)}, row_groups=groups,
            )
        )  # fmt: skip
        first += rows
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=names))
    return catalog


def test_plan_counts_by_row_group() -> None:
    catalog = catalog_of((NOW - 50 * HOUR, NOW - 40 * HOUR), (NOW - 30 * HOUR, NOW - 10 * HOUR), (-1,))
    plan = expiry_plan("t", [catalog], 24, NOW)
    assert (plan["objects_deleted"], plan["objects_cut"]) == (1, 1)
    assert (plan["rows_deleted"], plan["rows_kept"], plan["bytes_deleted"]) == (30, 20, 500)
    catalog.apply(1, Expire(keys=[], delete_after_ms=0, minimums={"t": {0: 25}}))
    again = expiry_plan("t", [catalog, catalog_of((NOW,))], 24, NOW)
    assert (again["rows_deleted"], again["rows_kept"]) == (5, 30), "what has expired already does not go again"


def test_ttl_plan_deletes_nothing_early() -> None:
    """The plan deletes at the same millisecond as the job of the broker."""
    exactly = catalog_of((NOW - 24 * HOUR,))
    assert expiry_plan("t", [exactly], 24, NOW - 1)["rows_deleted"] == 0
    assert expiry_plan("t", [exactly], 24, NOW)["rows_deleted"] == 10
    assert expiry_plan("t", [catalog_of((0,))], FOR_EVER_HOURS, NOW)["rows_deleted"] == 0


@pytest.mark.parametrize("live", [NOW, -1])
def test_objects_above_a_live_one_stay_in_every_plan(live: int) -> None:
    old = NOW - 50 * HOUR
    catalog = catalog_of((old,), (live,), (old, old), (old,))
    plan = expiry_plan("t", [catalog], 24, NOW)
    assert (plan["objects_deleted"], plan["objects_cut"], plan["rows_deleted"], plan["rows_kept"]) == (1, 0, 10, 40)
    assert plan_expiry(catalog.topic("t").names(), 24 * HOUR, NOW) == (["k0"], {0: 10})


@pytest.mark.parametrize(
    ("text", "meant"), [("720", "720h"), ("unlimited", "forever"), ("-1", "forever, or `unset`"), ("1x", None)]
)
def test_refused_ttl_names_the_accepted_spelling(text: str, meant: str | None) -> None:
    with pytest.raises(ValueError, match="is not a TTL: write whole hours") as refused:
        parse_ttl(text)
    assert str(refused.value).endswith("or forever" if meant is None else f"did you mean {meant}?")


def test_plan_refuses_an_unusable_store_without_any_ttl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def none(*_: object) -> tuple[list[tuple[str, int | None]], list[str]]:
        return [("orders", None)], []

    monkeypatch.setattr(topic_ttl, "_all", none)
    assert main.run(["topic", "ttl", "plan", "--store", f"dir:{tmp_path / 'nowhere'}"]) == 3
    assert "nowhere" in capsys.readouterr().err


def test_config_get_prints_known_keys_before_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def found(*_: object) -> tuple[dict[str, str], None]:
        return {"listenPort": "10911", "logLevel": "INFO"}, None

    monkeypatch.setattr(broker, "_configuration", found)
    assert main.run(["broker", "config", "show", "b", "log*", "nosuch"]) == 3
    said = capsys.readouterr()
    assert "logLevel  INFO" in said.out
    assert "broker b has no key nosuch" in said.err
