"""Run the program of docs/analysts.md that maintains a decoded table, as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pytest

from infra.objects.open import open_store
from tests.kit.archive.archive_on_paper import ArchiveOnPaper

pytestmark = pytest.mark.servers

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "analysts.md").read_text()


def rows(folder: Path) -> list[dict[str, Any]]:
    table = ds.dataset(folder, format="parquet", partitioning="hive", exclude_invalid_files=True).to_table()
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def test_decoded_table_has_each_row_once_over_runs(tmp_path: Path) -> None:
    (program,) = re.findall(
        r"```python\n(.*?)```", PAGE.partition("### A decoded table\n")[2].partition("\n## ")[0], re.S
    )
    program = program.replace("/var/lib/neve/archive", str(tmp_path / "archive"))
    program = program.replace("/srv/tables", str(tmp_path / "tables")).replace(
        "carrier STRING, dep_delay DOUBLE", "n INT, q INT"
    )

    def body(row: dict[str, Any]) -> dict[str, Any]:
        return row if row["queue_offset"] % 5 else row | {"body": b"not JSON", "body_codec": "none", "sys_flag": 0}

    archive = ArchiveOnPaper(open_store(f"dir:{tmp_path / 'archive'}"), "a", "flights")
    for first in (0, 10):
        archive.write(10 * first, 0, first, 10, hour=first, change=body)
        environment = {**os.environ, "MASTER": "local[2]", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        good, dead = rows(tmp_path / "tables" / "flights"), rows(tmp_path / "tables" / "flights_dead")
        offsets = range(first + 10)
        assert sorted(row["n"] for row in good) == [offset for offset in offsets if offset % 5]
        assert sorted((row["queue_offset"], row["body"]) for row in dead) == [
            (offset, b"not JSON") for offset in offsets if offset % 5 == 0
        ]
