"""DuckDB's own reader of Delta tables, for tests: run by a Python with matching versions of DuckDB and its extension.

It reads one query per line and writes the rows as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import duckdb


def main() -> None:
    """Answer queries until the input ends."""
    folder = Path(str(importlib.import_module("duckdb_extension_delta").__file__)).parent
    (extension,) = folder.rglob("delta.duckdb_extension")
    database = duckdb.connect(config={"allow_unsigned_extensions": "true"})
    database.execute(f"LOAD '{extension}'")
    for line in sys.stdin:
        print(json.dumps(database.execute(line).fetchall()), flush=True)


if __name__ == "__main__":
    main()
