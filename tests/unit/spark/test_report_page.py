"""The page of a report: well-formed, of itself alone, and no name in it is taken for anything but text."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from neve.spark.jobs.report_files import write_report
from neve.spark.jobs.report_page import PLOTTED_TOPICS, page

EVIL = "<script>alert('1')</script>&\"\x07é"


def tables(topic: str = EVIL, topics: int = 1) -> dict[str, list[dict[str, Any]]]:
    names = [topic, *(f"t{number}" for number in range(1, topics))]
    counts = {"messages": 12, "bytes": 3456}
    return {
        "traffic": [
            {"topic": one, "dt": "2026-01-01", **counts, "largest": 999, "damaged": 0, "first": EVIL, "last": None}
            for one in names
        ],
        "hours": [{"topic": one, "hour_ms": 1_767_225_600_000 + 3_600_000 * at, **counts}
                  for one in names for at in (0, 2)],
        "sizes": [{"topic": one, "up_to": 256, "messages": 12} for one in names],
        "tags": [{"topic": one, "dt": "2026-01-01", "tag": EVIL * 9, **counts} for one in names],
        "producers": [{"topic": one, "dt": "2026-01-01", "producer": EVIL, **counts} for one in names],
        "retries": [{"group": EVIL, "dt": "2026-01-01", "origin": EVIL, "attempt": 2, "messages": 1}],
        "dead_letters": [],
        "lag": [{"group": EVIL, "type": "pull", "model": "m", "members": 1, "lag": 5, "cold": None}],
    }  # fmt: skip


def parsed(text: str) -> ET.Element:
    assert text.startswith("<!DOCTYPE html>\n")
    return ET.fromstring(text.partition("\n")[2])


def test_the_page_is_well_formed_and_shows_every_table() -> None:
    root = parsed(page(tables(), store="s3://b/p?x=1&y=<2>", made_ms=1_767_225_600_000))
    said = " ".join(root.itertext())
    assert "As of 2026-01-01 00:00 UTC" in said
    assert "s3://b/p?x=1&y=<2>" in said
    headings = [one.text for one in root.iter("h2")]
    assert headings == ["By topic", "By topic and day", EVIL.replace("\x07", "\ufffd"), "Retries", "Dead letters",
                        "Lag of consumer groups"]  # fmt: skip
    assert len(list(root.iter("svg"))) == 4
    assert len([one for one in root.iter("rect") if one.get("class") == "bar"]) == 2 + 1 + 1 + 1


def test_no_name_becomes_a_tag_and_nothing_is_asked_of_a_network() -> None:
    text = page(tables(), store="dir:/x", made_ms=0)
    root = parsed(text)
    assert {one.tag for one in root.iter()} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "table", "tr", "th", "td"),
        *("svg", "rect", "line", "text"),
    }
    assert not {name for one in root.iter() for name in one.attrib if name in ("src", "href") or name.startswith("on")}
    assert "\x07" not in text
    assert not re.search(r"https?:|@import|url\(", text)


def test_a_page_of_many_topics_plots_the_largest_alone() -> None:
    text = page(tables("orders", topics=PLOTTED_TOPICS + 5), store="dir:/x", made_ms=0)
    root = parsed(text)
    assert len(list(root.iter("svg"))) == 4 * PLOTTED_TOPICS
    assert len(text) < 200_000


def test_a_report_of_nothing_is_a_page_too() -> None:
    empty: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("traffic", "hours", "sizes", "tags", "producers", "retries", "dead_letters")
    }
    assert "None." in " ".join(parsed(page(empty, store="dir:/x", made_ms=0)).itertext())


def test_each_table_is_there_as_json_and_parquet(tmp_path: Path) -> None:
    told = tables("orders")
    names = write_report(tmp_path / "new", told, store="dir:/x", made_ms=0)
    assert names[-1] == "report.html"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(names)
    for name, rows in told.items():
        assert json.loads((tmp_path / "new" / f"{name}.json").read_text()) == rows
        assert pq.read_table(tmp_path / "new" / f"{name}.parquet").to_pylist() == rows
