"""Tests of `neve demo` without servers: its requirements, comparisons, progress and report."""

from __future__ import annotations

import io
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from neve.cli import main
from neve.client import Message
from neve.demo import command, story, tour
from neve.demo.flights import Different, compare_numbers, compare_table
from neve.demo.report import ArchivedTopic, Results, page
from neve.demo.servers import Servers
from tests.kit.clock.waiting import wait_until


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Page(HTMLParser):
    """Collects the tags of a page with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_demo_without_its_packages_prints_how_to_install_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name in ("pandas", "pyspark") else object())
    assert main.run(["demo"]) == 2
    assert re.search(r"needs pandas, pyspark: pip install .*\[demo\]'", capsys.readouterr().err)


def test_demo_without_java_prints_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main.run(["demo"]) == 1
    assert "Spark needs Java 17 or 21" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"), [([1, 2, 2], "1 flights were received twice"), ([1, 3], "1 flights are missing, 1 are")]
)
def test_received_flights_that_differ_are_reported(rows: list[int], message: str) -> None:
    compare_numbers([2, 1], {1, 2}, "replaying")
    with pytest.raises(Different, match=f"replaying: {message}"):
        compare_numbers(rows, {1, 2}, "replaying")


@pytest.mark.parametrize("row", [("AA", 3, 1.1), ("AA", 4, 1.0), ("AA", 3, None)])
def test_spark_rows_that_differ_are_reported(row: tuple[str, int, float | None]) -> None:
    compare_table([("AA", 3, 1.0), ("UA", 1, None)], [("AA", 3, 1.0 + 1e-12), ("UA", 1, float("nan"))], "by carrier")
    with pytest.raises(Different, match="by carrier: Spark returns"):
        compare_table([row], [("AA", 3, 1.0)], "by carrier")


def test_progress_is_shown_on_a_terminal_and_erased(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(story, "_PROGRESS_S", 0.001)
    with story.Story().step("flights", 1000) as step:
        step.done = 250
        wait_until(lambda: "250 of 1,000 flights … 0 s" in terminal.getvalue())
    *_, before, last = terminal.getvalue().split("\r\x1b[K")
    assert before != last
    assert re.fullmatch(r"   1,000 flights: \d+\.\d s, [\d,]+/s\n", last)


def test_report_is_one_file_with_plots_and_loads_nothing() -> None:
    told = story.Story()
    told.section("Publish <all>")
    with told.step("flights", 3000):
        pass
    told.prove("all flights & no other")
    results = Results([ArchivedTopic("flights", 1, 3000, 2048, 8192)], [("AA", 3, 1.5), ("UA", 1, -2.5)])
    results.hours = [(5, 3, 1.5, 30.0, None), (6, 1, None, 31.0, 12.0)]
    text = page(told, results, [("neve help", "the help pages")], 12.3)
    for shown in ("Publish &lt;all&gt;", "all flights &amp; no other", "2.0 KiB", "AA: 1.50", "UA: -2.50", "neve help"):
        assert shown in text
    tags = Page(text).tags
    assert [tag for tag, _ in tags].count("svg") == 2
    assert [tag for tag, _ in tags].count("rect") == 3, "a bar for each known value"
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in tags}
    assert not {"src", "href"} & {name for _, attributes in tags for name in attributes}
    assert not re.search(r"https?:|@import|url\(", text)


class Refusing:
    """A client whose sends fail."""

    async def __aenter__(self) -> Refusing:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def send_batch(self, topic: str, batch: list[Message], queue: int) -> SimpleNamespace:
        return SimpleNamespace(status="FLUSH_DISK_TIMEOUT")


async def test_failed_batch_is_reported_as_the_error_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tour, "connect", lambda *_, **__: Refusing())
    step = story.TimedStep("Publish", "flights", 1)
    servers = Servers("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "dir:/nowhere", Path())
    with pytest.raises(Different, match="a batch to flights was answered FLUSH_DISK_TIMEOUT"):
        await tour._send(servers, "flights", iter([Message("flights", b"{}")]), step)
