"""Tests of durations, sizes and times as text."""

from __future__ import annotations

import pytest

from neve.units import DAY_MS, duration_text, parse_duration_ms, parse_instant_ms, parse_size_bytes


@pytest.mark.parametrize(
    ("text", "ms"),
    [("500ms", 500), ("30s", 30_000), (" 1.5H ", 5_400_000), ("2w", 14 * DAY_MS), ("0s", 0), ("10 min", 600_000)],
)
def test_duration_is_parsed(text: str, ms: int) -> None:
    assert parse_duration_ms(text) == ms


@pytest.mark.parametrize("text", ["", "5", "-5s", "s", "5y", "soon", "inf", "nan", "\u0665s", "1h30m"])
def test_duration_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration: write a number and a unit"):
        parse_duration_ms(text)


def test_duration_takes_a_bare_number_only_with_a_unit_for_it() -> None:
    assert parse_duration_ms("5", bare_unit="s") == 5_000


@pytest.mark.parametrize("ms", [1, 1_500, 60_000, 5_400_000, DAY_MS, 3 * DAY_MS])
def test_duration_text_is_parsed_again(ms: int) -> None:
    assert parse_duration_ms(duration_text(ms)) == ms


@pytest.mark.parametrize(("text", "size"), [("512", 512), ("64k", 65_536), ("8M", 8 << 20), ("1g", 1 << 30)])
def test_size_is_parsed(text: str, size: int) -> None:
    assert parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "8t", "many"])
def test_size_refuses_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size_bytes(text)


@pytest.mark.parametrize(
    ("text", "ms"),
    [("1970-01-01T00:00:01", 1_000), ("1970-01-01T01:00:01+01:00", 1_000), ("1970-01-02", DAY_MS), ("-90m", 4_600_000)],
)
def test_instant_is_parsed(text: str, ms: int) -> None:
    assert parse_instant_ms(text, 10_000_000) == ms


def test_instant_without_now_is_absolute() -> None:
    with pytest.raises(ValueError, match="write ISO 8601"):
        parse_instant_ms("-90m")
