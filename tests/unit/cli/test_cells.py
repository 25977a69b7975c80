"""Tests of table cells and idle times as text."""

from __future__ import annotations

import click
import pytest

from infra.config.properties import time_ms
from neve.cli.options import DURATION
from neve.cli.output import _cell


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "yes"), (False, "no"), (None, ""), (["broker broker-a"], "broker broker-a"), ([1, 2], "1, 2"), ([], "")],
)
def test_cell_has_no_python_or_json_form(value: object, text: str) -> None:
    assert _cell(value) == text


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("0.5", 0.5), ("5s", 5.0), ("2m", 120.0)])
def test_idle_time_takes_seconds_or_a_span(text: str, seconds: float) -> None:
    assert DURATION.convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["-1", "nan", "soon", "inf"])
def test_idle_time_refuses_other_text(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        DURATION.convert(text, None, None)


def test_refused_time_names_its_unit() -> None:
    with pytest.raises(ValueError, match=r"from 1000 to 2592000000 ms \(1s to 30d\), or with a unit, as 500ms, 30s"):
        time_ms("1 fortnight", 1000, 2_592_000_000)
