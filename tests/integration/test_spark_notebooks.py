"""Run the notebooks of `examples/notebooks` on one day of flights; their output equals the results of pandas."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient

from examples.day import day

pytestmark = [pytest.mark.servers, pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")]

Up = Callable[..., AbstractContextManager[Any]]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "notebooks"
DATE = "2013-01-01"
CELL_S = 240


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory, neve_up: Up) -> Iterator[pd.DataFrame]:
    """Archive one day of flights and set the archive in the environment; each notebook has its own JVM."""
    home = tmp_path_factory.mktemp("day")
    store = f"dir:{home / 'archive'}"
    with neve_up(home / "up", "--store", store) as server, pytest.MonkeyPatch.context() as patch:
        command = [sys.executable, "-m", "examples.day", "--namesrv", server.namesrv]
        done = subprocess.run(
            [*command, "--date", DATE], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stderr[-4000:]
        for name, value in {"NEVE_STORE": store, "NEVE_NAMESRV": server.namesrv, "MASTER": "local[2]"}.items():
            patch.setenv(name, value)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
        patch.setenv("IPYTHONDIR", str(home / "ipython"))
        patch.setenv("MPLCONFIGDIR", str(home / "matplotlib"))
        flights, _ = day(DATE)
        yield flights


def run(name: str) -> list[Any]:
    """Run a notebook; return its code cells with their outputs."""
    notebook = nbformat.read(FOLDER / name, as_version=4)  # type: ignore[no-untyped-call]
    NotebookClient(
        notebook, timeout=CELL_S, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}
    ).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


def test_first_look_takes_five_lines(archive: pd.DataFrame) -> None:
    first, _, fields, by_sql, _ = run("1-first-look.ipynb")
    lines = [line for line in first.source.splitlines() if line and not line.startswith(("import os", "store = "))]
    assert len(lines) <= 5
    table = re.findall(r"^\|\s*(\w+)\|\s*(-?[\d.]+|NULL)\|", printed(first), re.MULTILINE)
    wanted = archive.groupby("carrier").dep_delay.mean()
    assert {name: pytest.approx(float(value)) for name, value in table} == wanted.to_dict()
    assert "dep_delay:" in printed(fields)
    origins = re.findall(r"^\|\s*(\w+)\|\s*(\d+)\|", printed(by_sql), re.MULTILINE)
    assert {name: int(count) for name, count in origins} == archive.groupby("origin").size().to_dict()


def test_restarted_stream_has_each_row_once(archive: pd.DataFrame) -> None:
    _, _, _, stopped, _, again, _ = run("3-a-stream-into-a-table.ipynb")
    before = re.search(r"stopped with (\d+) rows", printed(stopped))
    assert before
    assert 100 <= int(before[1]) < 500
    assert "550 rows, 550 different ones" in printed(again)


def test_day_notebook_counts_flights_and_plots(archive: pd.DataFrame) -> None:
    """The third notebook has run before, but its synthetic flights are in another topic."""
    cells = run("2-a-day-with-plots.ipynb")
    assert f"{len(archive)} flights in {archive.time_hour.nunique()} hours" in printed(cells[1])
    assert len(plots(cells)) == 2


def test_archive_traffic_counts_each_message_once(archive: pd.DataFrame) -> None:
    cells = run("4-archive-traffic.ipynb")
    traffic = re.findall(r"^\|flights\s*\|[\d-]+\|(\d+)\s*\|", printed(cells[1]), re.MULTILINE)
    assert sum(map(int, traffic)) == len(archive)
    tags = re.findall(r"^\|flights\s*\|(\w+)\s*\|(\d+)\s*\|", printed(cells[2]), re.MULTILINE)
    assert {tag: int(count) for tag, count in tags} == archive.groupby("origin").size().to_dict()
    assert len(plots(cells)) == 1


def plots(cells: list[Any]) -> list[Any]:
    return [out for cell in cells for out in cell.outputs if "image/png" in out.get("data", {})]


def test_notebooks_are_committed_without_outputs() -> None:
    found = sorted(FOLDER.glob("*.ipynb"))
    assert len(found) == 4
    for path in found:
        notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        nbformat.validate(notebook)
        for cell in notebook.cells:
            assert not cell.get("outputs"), f"{path.name} has outputs"
            assert cell.get("execution_count") is None, path.name
