"""`docs/operate`: each alert has a runbook, and the pages name only metrics, commands and keys that exist."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
import yaml  # type: ignore[import-untyped]

from broker.config import BrokerConfig
from infra.config.properties import wire_name
from neve.cli.main import neve

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "operate").glob("*.md"))
RUNBOOKS = (ROOT / "docs" / "operate" / "runbooks.md").read_text("utf-8")
#: Suffixes of the series of a histogram.
_PARTS = re.compile("_(bucket|count|sum)$")
#: Placeholders of the pages with a value of the same kind.
_VALUES = {"T": "-1h", "N": "1", "Q": "0", "B": "broker-a", "FIRST:END": "0:1", "URL": "dir:/tmp", "…": "x"}


class Alert(NamedTuple):
    """An alert and its annotations."""

    name: str
    annotations: dict[str, str]


def alerts() -> list[Alert]:
    rules = yaml.safe_load((ROOT / "conf" / "prometheus-rules.yml").read_text("utf-8"))
    return [Alert(rule["alert"], rule["annotations"]) for group in rules["groups"] for rule in group["rules"]]


def sections() -> dict[str, str]:
    """Return the text of each section by its heading."""
    _, *parts = re.split(r"^## ", RUNBOOKS, flags=re.MULTILINE)
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in parts}


def test_each_alert_has_a_runbook_in_the_order_of_the_rules() -> None:
    assert list(sections()) == [alert.name for alert in alerts()]


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_runbook_annotation_names_the_section_of_the_alert(alert: Alert) -> None:
    assert alert.annotations["runbook"] == f"docs/operate/runbooks.md#{alert.name.lower()}"


def test_command_of_the_monitor_page_turns_runbooks_into_addresses(tmp_path: Path) -> None:
    rules = tmp_path / "prometheus-rules.yml"
    rules.write_bytes((ROOT / "conf" / rules.name).read_bytes())
    (command,) = re.findall(r"^```bash\n(sed .+)$", (ROOT / "docs/operate/monitor.md").read_text("utf-8"), re.MULTILINE)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    found = re.findall(
        r'runbook_url: "https://docs\.example\.com/operate/runbooks\.html#(\w+)"', rules.read_text("utf-8")
    )
    assert found == [alert.name.lower() for alert in alerts()]


@pytest.mark.parametrize("name", sorted(sections()))
def test_runbook_has_meaning_impact_check_and_fix(name: str) -> None:
    assert re.findall(r"^\*\*(\w+):\*\* \S", sections()[name] + "x", re.MULTILINE | re.DOTALL)[:3] == [
        "Meaning",
        "Impact",
        "Check",
    ]
    assert "\n**Fix:**" in sections()[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_existing_alerts(page: Path) -> None:
    named = set(re.findall(r"\bNeve[A-Z]\w+\b", page.read_text("utf-8")))
    assert named <= {alert.name for alert in alerts()}


def metrics() -> set[str]:
    page = ROOT / "docs" / "reference" / "metrics.md"
    return set(re.findall(r"^\| `(\w+)` \| ", page.read_text("utf-8"), re.MULTILINE))


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_pages_name_existing_metrics(page: Path) -> None:
    """A prefix such as `neve_set_…` is no metric. `test_reference_page.py` compares the metrics with the code."""
    named = set(re.findall(r"\bneve_[a-z_]+[a-z]\b(?!\.)", page.read_text("utf-8")))
    assert {_PARTS.sub("", name) for name in named} <= metrics()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_name_existing_keys(page: Path) -> None:
    keys = {item.metadata["name"] or wire_name(item.name) for item in dataclasses.fields(BrokerConfig)}
    assigned = set(re.findall(r"`([a-z]\w+)=[\w-]+`", page.read_text("utf-8")))
    assert assigned <= keys | {"up", "jars", "failOnDataLoss", "reserve"}


def commands() -> Iterator[str]:
    """Yield each command of the pages without its output, pipes and redirections."""
    for page in PAGES:
        text = page.read_text("utf-8")
        quoted = re.findall(r"`(neve [a-z][^`]*)`", text)
        lines = re.findall(r"^ *\$ (?:.+ \| )?(neve [^|>\n]+)", text, re.MULTILINE)
        yield from ((one.removesuffix("2").strip()) for one in (*quoted, *lines))


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_pages_name_existing_commands(command: str) -> None:
    """A command that is named without arguments only has to exist."""
    _, *words = shlex.split(command)
    found: click.Command = neve
    at = click.Context(neve, info_name="neve")
    while isinstance(found, click.Group) and words:
        name, following, rest = found.resolve_command(at, words)
        assert following is not None, name
        if isinstance(following, click.Group) and rest and rest[0].startswith("-"):
            following.make_context(name, [_VALUES.get(word, word) for word in rest], parent=at, resilient_parsing=True)
            return
        found, words, at = following, rest, click.Context(following, info_name=name, parent=at)
    options = {text for one in found.params for text in (*one.opts, *one.secondary_opts)}
    assert {word for word in words if word.startswith("-")} <= options, command
    arguments = [_VALUES.get(word, word) for word in words]
    if arguments:
        with found.make_context(command, arguments, parent=at.parent, resilient_parsing=True):
            pass
