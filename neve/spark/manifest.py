"""The list from which Spark takes a topic's files: sizes and paths come from the journal, the store is asked nothing.

    <folder>/_spark_metadata/0      v1
                                    {"path": URI, "size": n, "isDir": false, …, "action": "add"}       one for each file

That is what Spark's own file sink leaves beside its files; a reader that finds it lists nothing. Only the driver reads
it, while the frame is made, so the folder is one of the driver's and may go after that. Without it Spark asks the store
three times for each path, and starts a task for each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

# What Spark divides a file by when it makes tasks of it, where the store does not say; ours only fill the field.
_BLOCK_BYTES = 32 << 20


@contextmanager
def manifest_of(files: Iterable[tuple[str, int]]) -> Iterator[str]:
    """Where Spark finds the list of these (path, size), as a URI."""
    with tempfile.TemporaryDirectory(prefix="neve-plan-") as folder:
        home = Path(folder) / "_spark_metadata"
        home.mkdir()
        (home / "0").write_text(manifest(files), "utf-8")
        yield Path(folder).as_uri()


def manifest(files: Iterable[tuple[str, int]]) -> str:
    """The list itself."""
    return "\n".join(("v1", *(_line(path, size) for path, size in files)))


def _line(path: str, size: int) -> str:
    scheme, colon, rest = path.partition(":")
    told = {
        "path": scheme + colon + quote(rest, safe="/="),  # a URI: `%` itself is written %25
        "size": size,
        "isDir": False,
        "modificationTime": 0,
        "blockReplication": 1,
        "blockSize": _BLOCK_BYTES,
        "action": "add",
    }
    return json.dumps(told)
