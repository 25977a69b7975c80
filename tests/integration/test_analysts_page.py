"""Run the examples of docs/analysts.md that do not need Spark, exactly as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE

Up = Callable[..., AbstractContextManager[Any]]
PAGE = (Path(__file__).parents[2] / "docs" / "analysts.md").read_text()


def block(heading: str, language: str, number: int = 0) -> str:
    return str(re.findall(rf"```{language}\n(.*?)```", PAGE.partition(f"## {heading}\n")[2], re.DOTALL)[number])


def run(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def delta_rows(store: Path) -> int:
    if not DeltaTable.is_deltatable(str(store / "topic=flights")):
        return 0
    rows = (
        QueryBuilder().register("rows", DeltaTable(str(store / "topic=flights"))).execute("SELECT queue_id FROM rows")
    )
    return int(pa.table(rows.read_all()).num_rows)


def test_page_examples_read_the_archive(tmp_path: Path, neve_up: Up) -> None:
    store = tmp_path / "archive"
    settings = ("mappedFileSizeCommitLog=64k", "archiveDeltaTopics=flights", "archiveDeltaPeriod=1s")
    with neve_up(tmp_path, "--store", f"dir:{store}", *(word for one in settings for word in ("--set", one))) as neve:
        lines = "\n".join(f"message {number}" for number in range(150))
        run(NEVE, "produce", "flights", "--queue", "0", "--tags", "EWR", "-n", neve.namesrv, given=lines)
        run(NEVE, "archive", "offload", "--roll", "--admin", neve.admin)
        wait_until(lambda: delta_rows(store) == 150, "the Delta table has what the archive has")
    programs = {
        "engines": block("DuckDB, Polars, pandas", "python"),
        "delta": block("Delta tables", "python") + "print(rows)",
        "records": block("Read single messages in Python", "python"),
        "manifest": "import duckdb\nfor query in "
        f"{block('DuckDB, Polars, pandas', 'sql', 1).split(';')[:2]!r}: found = duckdb.sql(query)\nprint(found)",
        "sql": f"import duckdb\nprint(duckdb.sql({block('DuckDB, Polars, pandas', 'sql')!r}))",
    }
    said = {}
    for name, program in programs.items():
        here = program.replace("/var/lib/neve/archive", str(store)).replace("'archive/", f"'{store}/")
        said[name] = run(sys.executable, "-c", here)
    assert re.search(r"EWR\W+150\b", said["engines"])
    assert re.search(r"message \d+", said["engines"])
    assert re.search(r"EWR.*150\b", said["delta"], re.DOTALL)
    assert re.search(r"EWR\W+150\b", said["sql"])
    assert re.search(r"EWR\W+150\b", said["manifest"])
    assert re.match(r"100 \d{13} \{.*'TAGS': 'EWR'.*\} b'message \d+'\n$", said["records"])
