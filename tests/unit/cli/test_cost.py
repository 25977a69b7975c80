"""Tests of `neve archive cost` with given rates, rates of an archive, and the price table of conf/."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neve.cli import main
from tests.unit.cli.written_archive import write_archive

PRICES = Path(__file__).parents[3] / "conf" / "prices.toml"
RATES = ["--messages", "24", "--message-bytes", "1k", "--max-age", "1h", "--max-age", "1d"]


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    assert main.run(["archive", "cost", *arguments, "-o", "json"]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


def test_cost_is_printed_for_given_rates_and_settings(capsys: pytest.CaptureFixture[str]) -> None:
    found = rows(capsys, "orders", *RATES, "--topics", "2", "--replicas", "1", "--replicas", "3")
    settings = [(age, compaction, count) for count in (1, 3) for age in ("1h", "1d") for compaction in (False, True)]
    names = ["orders-1", "orders-2", "(broker)", "(all)"]
    assert [(row["archiveMaxAge"], row["compaction"], row["replicas"], row["topic"]) for row in found] == [
        (*setting, name) for setting in settings for name in names
    ]
    by_place = {(row["replicas"], row["archiveMaxAge"], row["compaction"], row["topic"]): row for row in found}
    assert by_place[1, "1h", False, "orders-1"]["objects_a_day"] == 12.5
    assert by_place[1, "1h", False, "(all)"]["local_bytes"] == 2 * 3 * 24 * 1024
    assert by_place[3, "1h", False, "(all)"]["local_bytes"] == 3 * 2 * 3 * 24 * 1024
    assert {row["money"] for row in found} == {0}


def test_price_table_of_the_example_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    (total,) = rows(capsys, *RATES[:-2], "--no-compaction", "--total", "--prices", str(PRICES))
    puts, gets = 375 + 30 * (25 + 8640), 30 * 28_800
    stored, local = 30 * (24 * 1024 * 0.45 + 12.5 * 3400), 3 * 24 * 1024
    assert total["money"] == pytest.approx(puts * 5e-6 + gets * 5e-7 + stored * 2e-11 + local * 1e-10, rel=1e-9)
    assert total["currency"] == "EUR"
    assert main.run(["archive", "cost", *RATES, "--prices", str(PRICES)]) == 0
    said = capsys.readouterr()
    assert "1.73 EUR" in said.out
    assert "24 messages a day, 24.0 KiB in the log" in said.err


def test_cost_uses_the_rates_of_an_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_archive(tmp_path)
    found = rows(capsys, "t", "--store", f"dir:{tmp_path}", "--max-age", "1h", "--no-compaction")
    assert [(row["topic"], row["objects_a_day"]) for row in found[:1]] == [("t", 90_000 / (3600 + 360))]
    assert main.run(["archive", "cost", "gone", "--store", f"dir:{tmp_path}"]) != 0
    assert "topic gone has no messages in this archive" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give --store of an archive"),
        (["--messages", "5"], "--messages needs --message-bytes"),
        ([*RATES, "--max-age", "1x"], "'1x' is not a duration"),
        ([*RATES, "--min-bytes", "0"], "'0' is not a size"),
    ],
)
def test_wrong_usage_is_explained(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NEVE_STORE", raising=False)
    assert main.run(["archive", "cost", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [("[store]\nput = 1\n", "unknown field `put`"), ("[store\n", "--prices"), ('currency = "\xff"', "--prices")],
)
def test_malformed_price_table_is_refused(
    tmp_path: Path, content: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prices.toml"
    path.write_bytes(content.encode("latin-1"))
    assert main.run(["archive", "cost", *RATES, "--prices", str(path)]) == 2
    assert said in capsys.readouterr().err
