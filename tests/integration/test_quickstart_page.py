"""Each command of docs/get-started/quickstart.md runs and prints what the page shows."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.docs.page import Page
from tests.kit.server.neve import NeveServer

PAGE = Page("get-started/quickstart.md")
ARCHIVE = "/tmp/neve-archive"
NAME_SERVER = "127.0.0.1:9876"
pytestmark = pytest.mark.servers


def steps() -> Iterator[tuple[str, list[str]]]:
    """Yield each command with the lines that it prints, and each program as (its file, its lines)."""
    for language, file, block in PAGE.fences():
        if language == "python":
            yield file, block.splitlines()
        if language != "console":
            continue
        for command in re.split(r"^\$ ", block, flags=re.M)[1:]:
            line, *expected = command.splitlines()
            yield line, expected


def masked(line: str) -> str:
    """Return a line without its times, sizes, message ids and ports."""
    line = re.sub(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?", "TIME", line)
    line = re.sub(r"\d+\.\d KiB", "SIZE", line)
    line = re.sub(r'"[0-9A-F]{32}"', "MSG_ID", line)
    return re.sub(r"127\.0\.0\.1:\d+", "ADDRESS", line)


def test_commands_print_the_documented_output(tmp_path: Path) -> None:
    (up, (ready,)), *rest, stop, clean = steps()
    assert up == f"neve up --data /tmp/neve --store dir:{ARCHIVE} &"
    assert stop == ("kill %1 && wait", [])
    assert clean == (f"rm -r /tmp/neve {ARCHIVE}", [])
    archive = str(tmp_path / "archive")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with NeveServer(tmp_path, store=f"dir:{archive}") as neve:
        assert neve.ready.keys() == json.loads(ready).keys()
        for command, expected in rest:
            if command.endswith(".py") and not command.startswith("python "):
                program = "\n".join(expected).replace(ARCHIVE, archive).replace(NAME_SERVER, neve.namesrv)
                (tmp_path / command).write_text(program)
                continue
            done = subprocess.run(
                ["bash", "-c", command.replace(ARCHIVE, archive)],
                cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
                env={**os.environ, "PATH": path, "NAMESRV_ADDR": neve.namesrv},
            )  # fmt: skip
            assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
            printed = [*done.stdout.splitlines(), *done.stderr.splitlines()]
            assert [masked(line) for line in printed] == [masked(line) for line in expected], command
