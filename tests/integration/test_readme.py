"""The tour and the example of the README work as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

Up = Callable[..., AbstractContextManager[Any]]
README = (Path(__file__).parents[2] / "README.md").read_text()
pytestmark = pytest.mark.servers


def block(heading: str, number: int) -> str:
    """Return a code block below a heading."""
    return str(re.findall(r"```\w*\n(.*?)```", README.partition(f"## {heading}\n")[2], re.DOTALL)[number])


def commands(tmp_path: Path) -> list[str]:
    lines = [line.partition("  #")[0].strip() for line in block("Five minutes", 0).splitlines()]
    text = "\n".join(lines).replace("/tmp/neve-archive", str(tmp_path / "archive"))
    return [line for line in text.splitlines() if line]


def run(command: str, neve: Any, directory: Path) -> str:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PATH": path, "NAMESRV_ADDR": neve.namesrv, "NEVE_ADMIN": neve.admin},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def test_tour_has_the_documented_results(tmp_path: Path, neve_up: Up) -> None:
    setup, up, *tour = commands(tmp_path)
    assert setup.startswith("make setup")
    assert up.startswith("neve up --data /tmp/neve --store dir:")
    printed: dict[str, str] = {}
    with neve_up(tmp_path, "--store", f"dir:{tmp_path / 'archive'}") as neve:
        for command in tour:
            printed[command] = run(command, neve, tmp_path)
    numbers = {str(number) for number in range(1, 1001)}
    for group in ("tour", "tour2"):
        got = printed[f"neve consume orders --group {group} --count 5"].split()
        assert len(got) == 5
        assert set(got) <= numbers
    assert len((tmp_path / "receipts.jsonl").read_text().splitlines()) == 1000
    assert printed["neve archive list"].count("topic=orders/") == 1
    counts = re.findall(r"^\W*(\d+)\W+(\d+)\W*$", printed[tour[-1]], re.MULTILINE)
    assert [int(queue) for queue, _ in counts] == [0, 1, 2, 3]
    assert sum(int(count) for _, count in counts) == 1000


def test_example_sends_a_message(tmp_path: Path, neve_up: Up) -> None:
    with neve_up(tmp_path) as neve:
        program = block("Five minutes", 1).replace("127.0.0.1:9876", neve.namesrv)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert run("neve consume orders --count 1", neve, tmp_path).strip() == "hello"
