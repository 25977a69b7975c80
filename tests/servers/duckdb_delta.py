"""DuckDB's own reader of Delta tables, for tests: run by a Python that has DuckDB and its extension of one version.

A query a line comes in; its rows go out, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import duckdb


def main() -> None:
    """Until the input ends."""
    folder = Path(str(importlib.import_module("duckdb_extension_delta").__file__)).parent
    (extension,) = folder.rglob("delta.duckdb_extension")
    database = duckdb.connect(config={"allow_unsigned_extensions": "true"})
    database.execute(f"LOAD '{extension}'")
    for line in sys.stdin:
        print(json.dumps(database.execute(line).fetchall()), flush=True)


if __name__ == "__main__":
    main()
