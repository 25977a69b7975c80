"""The list from which Spark takes the files of a topic: paths and sizes come from the journal, without requests.

    <folder>/_spark_metadata/0      v1
                                    {"path": URI, "size": n, "isDir": false, ..., "action": "add"}      one per file

This is the format of Spark's file sink; a reader that finds the list does not list the store. Only the driver reads it,
while the frame is created, so the directory is a temporary one of the driver. Without the list Spark sends three
requests per path, and starts a task for each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

# Spark divides files by this value if the store reports none.
_BLOCK_BYTES = 32 << 20


@contextmanager
def manifest_of(files: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Yield the URI of a temporary directory with the list of these (path, size)."""
    with tempfile.TemporaryDirectory(prefix="neve-plan-") as folder:
        home = Path(folder) / "_spark_metadata"
        home.mkdir()
        (home / "0").write_text(manifest(files), "utf-8")
        yield Path(folder).as_uri()


def manifest(files: Iterable[tuple[str, int]]) -> str:
    """Return the text of the list."""
    return "\n".join(("v1", *(_line(path, size) for path, size in files)))


def _line(path: str, size: int) -> str:
    scheme, colon, rest = path.partition(":")
    line = {
        "path": scheme + colon + quote(rest, safe="/="),  # a URI, in which `%` is written %25
        "size": size,
        "isDir": False,
        "modificationTime": 0,
        "blockReplication": 1,
        "blockSize": _BLOCK_BYTES,
        "action": "add",
    }
    return json.dumps(line)
