"""A report in a directory: each table as JSON and Parquet, and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from neve.spark.jobs.report_page import page

_TEXTS = frozenset({"topic", "dt", "tag", "producer", "group", "origin", "first", "last", "type", "model"})


def write_report(
    folder: str | Path, tables: Mapping[str, Sequence[Mapping[str, Any]]], *, store: str, made_ms: int
) -> list[str]:
    """Returns the names of the files: `<table>.json` and `<table>.parquet`, and last `report.html`."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    names = []
    for name, rows in tables.items():
        (home / f"{name}.json").write_text(json.dumps(rows, ensure_ascii=False, indent=1) + "\n", "utf-8")
        pq.write_table(_table(rows), home / f"{name}.parquet")
        names += [f"{name}.json", f"{name}.parquet"]
    (home / "report.html").write_text(page(tables, store=store, made_ms=made_ms), "utf-8")
    return [*names, "report.html"]


def _table(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    columns = list(rows[0]) if rows else []
    return pa.table({name: pa.array([row[name] for row in rows], _kind(name)) for name in columns})


def _kind(name: str) -> pa.DataType:
    return pa.string() if name in _TEXTS else pa.int64()
