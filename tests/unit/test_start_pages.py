"""Facts on the pages for a first reading: settings, commands, versions, programs and the length of sentences."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import click
import pytest

from bench import jvm
from broker.config import BrokerConfig
from infra.config.properties import load, wire_name
from neve.cli import main
from tests.kit.server import go_build

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
REFERENCE = ("glossary", "support-matrix", "comparison", "performance", "faq")
PAGES = [
    DOCS / "index.md",
    *sorted((DOCS / "get-started").glob("*.md")),
    *(DOCS / "reference" / f"{name}.md" for name in REFERENCE),
]
KEYS = {field.metadata["name"] or wire_name(field.name): field.name for field in dataclasses.fields(BrokerConfig)}
LOCKED = dict(line.split("==") for line in (ROOT / "requirements.lock").read_text("utf-8").splitlines() if "==" in line)
LONGEST_SENTENCE = 30
LONGEST_CELL = 25


def text_of(name: str) -> str:
    return (DOCS / name).read_text("utf-8")


@pytest.fixture(params=PAGES, ids=lambda path: path.stem)
def page(request: pytest.FixtureRequest) -> str:
    return str(request.param.read_text("utf-8"))


def prose_of(page: str) -> list[str]:
    """Return the lines of a page without code blocks and tables."""
    lines = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL).splitlines()
    return [line.strip() for line in lines if not line.startswith(("|", "!["))]


def test_transitions_have_the_defaults_of_the_broker() -> None:
    rows = re.findall(r"^\| .+ → .+ \| .+ \| (.+) \| (.+) \|$", text_of("get-started/concepts.md"), re.MULTILINE)
    documented: dict[str, str] = {}
    for settings, defaults in rows:
        keys = [key for key in re.findall(r"`(\w+)`", settings) if key in KEYS]
        documented |= dict(zip(keys, re.sub(" (hours|%)", "", defaults).split(", "), strict=True))
    assert documented.pop("defaultTtlHours") == "no TTL"
    assert BrokerConfig().default_ttl_hours == -1
    assert len(documented) == 6
    for key, value in documented.items():
        given = load(BrokerConfig, None, [f"{key}={value}"])
        assert getattr(given, KEYS[key]) == getattr(BrokerConfig(), KEYS[key]), key


def test_life_of_a_message_names_the_settings_of_the_table() -> None:
    table = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| .+ → .+$", text_of("get-started/concepts.md"), re.M))))
    picture = text_of("pictures/life-of-a-message.d2")
    assert {key for key in table if key not in picture} == set()


def test_settings_and_commands_of_the_pages_exist(page: str) -> None:
    for code in re.findall(
        r"`([^`\n]+)`", "\n".join(re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S).splitlines())
    ):
        if re.fullmatch(r"(archive|cold|controller|disk|mapped)[A-Z]\w+(=\w+)?", code):
            assert code.partition("=")[0] in KEYS
        words = code.split()
        if words[0] == "neve" and len(words) > 1 and words[1].isalpha() and words[1].islower():
            command: click.Command = main.neve
            for word in words[1:]:
                if not isinstance(command, click.Group) or word.startswith("-"):
                    break
                found = command.get_command(click.Context(command), word)
                assert found is not None, code
                command = found


def test_sentences_and_cells_are_short(page: str) -> None:
    assert [line for line in prose_of(page) if re.search(r"[a-z`)][.?] [A-Z]", line)] == [], (
        "one sentence for each line"
    )
    sentences = [one for line in prose_of(page) for one in re.split(r"(?<=[.:;?]) ", line)]
    assert [one for one in sentences if len(one.split()) > LONGEST_SENTENCE] == []
    cells = [cell for line in page.splitlines() if line.startswith("|") for cell in line.split(" | ")]
    assert [cell for cell in cells if len(cell.split()) > LONGEST_CELL] == []


def test_support_matrix_has_the_versions_of_the_tests() -> None:
    matrix = text_of("reference/support-matrix.md")
    rows = {
        cells[0]: cells[1] for line in matrix.splitlines() if len(cells := re.split(r" *\| *", line.strip("| "))) > 1
    }
    assert rows["PySpark"] == LOCKED["pyspark"]
    assert rows["delta-rs (`deltalake`)"] == LOCKED["deltalake"]
    assert rows["DuckDB, rows from `neve.archive.dataset`"] == LOCKED["duckdb"]
    assert rows["Polars, pandas"] == f"{LOCKED['polars']}, {LOCKED['pandas']}"
    assert rows["official Python gRPC client"] == LOCKED["rocketmq-python-client"]
    assert rows["etcd"] == go_build.SOURCES["etcd"].version.removeprefix("v")
    old, new = jvm.CLIENT_OLD.rpartition("-")[2], jvm.SERVER.rpartition("-")[2]
    assert rows["Java client, Remoting"] == f"{old}, {new}"
    assert rows["`mqadmin`"] == new
    assert rows["Apache's gRPC proxy"] == jvm.PROXY.rpartition("-")[2]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for package, shown in re.findall(r"'?(pyspark|delta-spark|duckdb)==([\d.]+)", makefile):
        assert shown in matrix, package
    python = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["requires-python"]
    assert python == f">={rows['Python']}"


def test_performance_page_has_the_figures_of_the_other_pages() -> None:
    page = text_of("reference/performance.md")
    readme = (ROOT / "README.md").read_text("utf-8").partition("## Performance")[2].partition("## ")[0]
    for figure in re.findall(r"\b\d+,000\b", readme):
        assert figure in page
    limits = text_of("limits.md").partition("Latency of a send")[2]
    rows = re.findall(r"^\| (.+) \| ([\d. to]+) \|$", limits, re.MULTILINE)
    assert len(rows) >= 6
    for subject, figure in rows:
        assert f"| {subject} | {figure} |" in page
    for program in re.findall(r"-m bench\.(\w+)", page):
        assert (ROOT / "bench" / f"{program}.py").exists()
