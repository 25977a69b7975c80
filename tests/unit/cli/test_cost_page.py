"""docs/deploy/cost.md: the commands print its tables, and its sums follow from its prices."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import msgspec
import pytest

from neve.archive.policy.cost import Prices
from neve.cli import main
from tests.kit.docs.page import Page, Step
from tests.unit.cli.written_archive import write_archive

PAGE = Page("deploy/cost.md")
ROOT = Path(__file__).parents[3]
PRICES = ROOT / "conf" / "prices.toml"
DISKS, AGES = "Compare the archive with disks", "Choose archiveMaxAge"


def arguments(step: Step) -> list[str]:
    return shlex.split(step.command.replace("conf/prices.toml", str(PRICES)))[1:]


@pytest.mark.parametrize("step", [*PAGE.steps(DISKS), *PAGE.steps(AGES)])
def test_command_prints_the_table_of_the_page(step: Step, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments(step)) == 0
    printed = capsys.readouterr()
    assert [*printed.err.splitlines(), *printed.out.splitlines()] == step.printed


def test_comparison_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    prices = msgspec.toml.decode(PRICES.read_bytes(), type=Prices)
    (shown,) = PAGE.blocks("Enter your prices", "toml")
    assert msgspec.toml.decode(shown, type=Prices) == prices
    with_archive: list[float] = []
    on_disks: list[float] = []
    for step, column in zip(PAGE.steps(DISKS), (with_archive, on_disks), strict=True):
        assert main.run([*arguments(step), "-o", "json"]) == 0
        (total,) = json.loads(capsys.readouterr().out)
        disks = total["local_bytes"] * prices.disk.gb_month / 1e9
        stored = total["billed_bytes"] * prices.store.gb_month / 1e9
        column += [disks, stored, total["money"] - disks - stored, total["money"]]
    disks_only = [on_disks[0], 0, 0, on_disks[0]]
    rows = re.findall(r"^\| [a-z ]+ \| ([\d,.]+) \| ([\d,.]+) \|$", PAGE.section(DISKS), re.MULTILINE)
    assert [[float(cell.replace(",", "")) for cell in row] for row in rows] == [
        pytest.approx(row, abs=0.01) for row in zip(with_archive, disks_only, strict=True)
    ]


def test_rates_of_an_archive_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_archive(tmp_path)
    (command,) = PAGE.commands("Use the rates of an existing archive")
    words = command.replace("prices.toml", str(PRICES)).replace(
        "s3://archive/neve?region=eu-central-1", f"dir:{tmp_path}"
    )
    assert main.run(shlex.split(words)[1:]) == 0
    assert "EUR" in capsys.readouterr().out
