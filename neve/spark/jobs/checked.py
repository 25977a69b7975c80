"""Which objects a check has behind it: a file on the driver, with which a check that was broken off goes on.

    {"store": URL, "deep": whether objects are read whole}
    {"key": …, "sha256": …, "faults": [[topic, key, text, queue, first, last], …]}       a line for each object

A line that was cut short is of an object that is checked again. The file goes when the check has come to its end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neve.archive.format.journal import CommittedObject
from neve.archive.read.verify import Fault


class OtherCheck(ValueError):
    """The file is of a check of another store, or of the other depth, or none of a check."""


class Checked:
    """Without a path nothing is kept."""

    def __init__(self, path: Path | None, store: str, *, deep: bool) -> None:
        """Raises OtherCheck."""
        self._path = path
        told = {"store": store, "deep": deep}
        self._done: dict[tuple[str, str], list[Fault]] = {}
        if path is None:
            return
        lines = path.read_text("ascii", errors="replace").split("\n") if path.exists() else [""]
        if lines[0]:
            self._take(lines, told)
        else:
            path.write_text(json.dumps(told) + "\n", "ascii")

    def faults_of(self, name: CommittedObject) -> list[Fault] | None:
        """What was found wrong with an object; None: it is still to be checked."""
        return self._done.get((name.key, name.sha256))

    def add(self, found: Iterable[tuple[CommittedObject, list[Fault]]]) -> None:
        """Of objects that were just checked."""
        lines = [json.dumps({"key": name.key, "sha256": name.sha256, "faults": faults}) for name, faults in found]
        if self._path is not None and lines:
            with self._path.open("a", encoding="ascii") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def finish(self) -> None:
        """The check has come to its end: the next one begins anew."""
        if self._path is not None:
            self._path.unlink()

    def _take(self, lines: list[str], wanted: dict[str, Any]) -> None:
        found = _object(lines[0])
        if found != wanted:
            told = json.dumps(found)[:200] if found else lines[0][:100]
            raise OtherCheck(f"{self._path} is not of this check, which is {json.dumps(wanted)}: it says {told}")
        for line in lines[1:]:
            one = _object(line)
            if {"key", "sha256", "faults"} <= one.keys():
                self._done[one["key"], one["sha256"]] = [Fault(*fault) for fault in one["faults"]]
        if self._path is not None and not self._path.read_bytes().endswith(b"\n"):
            with self._path.open("a", encoding="ascii") as file:
                file.write("\n")


def _object(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
