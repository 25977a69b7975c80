"""The quick start and the example of the README work and print what it shows."""

from __future__ import annotations

import json
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
MESSAGES = 1000
pytestmark = pytest.mark.servers


def block(language: str) -> str:
    """Return the only code block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    return str(found)


def steps() -> list[tuple[str, list[str]]]:
    """Return each command of the quick start with the lines that it prints."""
    found: list[tuple[str, list[str]]] = []
    for line in block("console").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        else:
            found[-1][1].append(line)
    return found


def shape(command: str, line: str) -> str:
    """Return a printed line without the day, and without bodies, because queues are read in any order."""
    if command.startswith("neve consume") and line.isdigit() and 1 <= int(line) <= MESSAGES:
        return "body"
    return re.sub(r"\d{4}-\d\d-\d\d", "DAY", line)


def run(command: str, neve: Any, directory: Path) -> list[str]:
    """Return the lines on stdout and stderr."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=directory, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PATH": path, "NAMESRV_ADDR": neve.namesrv, "NEVE_ADMIN": neve.admin},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return [line for line in lines if not line.startswith("asking the broker at")]  # The test sets NEVE_ADMIN.


def test_quick_start_prints_the_documented_output(tmp_path: Path, neve_up: Up) -> None:
    setup, up, *rest = steps()
    assert setup == ("make setup && . .venv/bin/activate", [])
    assert up[0] == "neve up --data /tmp/neve --store dir:/tmp/neve-archive &"
    (ready,) = map(json.loads, up[1])
    archive = str(tmp_path / "archive")
    with neve_up(tmp_path, "--store", f"dir:{archive}") as neve:
        assert neve.ready.keys() == ready.keys()
        for command, expected in rest:
            printed = run(command.replace("/tmp/neve-archive", archive), neve, tmp_path)
            documented = [line.replace("/tmp/neve-archive", archive) for line in expected]
            assert [shape(command, line) for line in printed] == [shape(command, line) for line in documented], command


def test_example_sends_a_message(tmp_path: Path, neve_up: Up) -> None:
    with neve_up(tmp_path) as neve:
        program = block("python").replace("127.0.0.1:9876", neve.namesrv)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        assert run("neve consume orders --count 1 2> consume.log", neve, tmp_path) == ["hello"]
