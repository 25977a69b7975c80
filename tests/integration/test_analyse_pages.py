"""The pages of docs/analyse about DuckDB, Polars, pandas and Delta tables: each program prints what the page shows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from tests.integration.page_blocks import blocks, normalized
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE

Up = Callable[..., AbstractContextManager[Any]]
ENGINES, DELTA = "duckdb-polars.md", "delta.md"


def run(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def delta_rows(store: Path) -> int:
    if not DeltaTable.is_deltatable(str(store / "topic=orders")):
        return 0
    rows = QueryBuilder().register("rows", DeltaTable(str(store / "topic=orders"))).execute("SELECT queue_id FROM rows")
    return int(pa.table(rows.read_all()).num_rows)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, neve_up: Up) -> Iterator[Path]:
    """Return the directory of an archive with the messages of the quick start, also as a Delta table."""
    home = tmp_path_factory.mktemp("engines")
    store = home / "archive"
    settings = ("archiveDeltaTopics=orders", "archiveDeltaPeriod=1s")
    with neve_up(home, "--store", f"dir:{store}", *(word for one in settings for word in ("--set", one))) as neve:
        produce = [block.text for block in blocks("spark-quickstart.md") if "neve produce" in block.text]
        for command in ("neve topic create orders --queues 2", *produce):
            run("bash", "-c", command.replace("neve ", f"NAMESRV_ADDR={neve.namesrv} {NEVE} "))
        run(NEVE, "archive", "offload", "--roll", "--admin", neve.admin)
        wait_until(lambda: delta_rows(store) == 9, "the Delta table has what the archive has")
        yield store


def printed(page: str, store: Path, language: str) -> list[list[str]]:
    """Run the programs of a page in one process; return the lines that each prints."""
    end = "#end#"
    programs = [block for block in blocks(page) if block.language == language]
    if language == "sql":
        queries = [f"found = duckdb.sql({query!r})" for block in programs for query in block.text.split(";")[:-1]]
        text = "\n".join(["import duckdb", *(f"{query}\nif found: print(found)" for query in queries)])
    else:
        text = "\n".join(f"{block.text}\nprint({end!r})" for block in programs)
    out = run(sys.executable, "-c", text.replace("/tmp/neve-archive", str(store)))
    return [normalized(part) for part in out.split(end)]


@pytest.mark.parametrize("page", [ENGINES, DELTA])
def test_programs_print_the_outputs_that_the_page_shows(store: Path, page: str) -> None:
    expected = [normalized(block.output) for block in blocks(page) if block.language == "python"]
    assert printed(page, store, "python")[:-1] == expected


def test_queries_on_files_and_manifests_return_the_counts_of_the_page(store: Path) -> None:
    first = next(block for block in blocks(ENGINES) if block.language == "python")
    counts = normalized(first.output)[: normalized(first.output).index("└─────────┴──────────┘") + 1]
    assert printed(ENGINES, store, "sql") == [counts * 2]


def test_log_of_the_delta_table_has_the_files_of_the_page(store: Path) -> None:
    (listing,) = [block for block in blocks(DELTA) if block.text.startswith("ls ")]
    found = run("bash", "-c", listing.text.replace("/tmp/neve-archive", str(store)))
    assert normalized(found) == normalized(listing.output)
