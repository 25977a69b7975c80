"""Notes of an interrupted archive check, from which the next call resumes: a file on the driver.

    {"store": URL, "deep": whether objects are read whole}
    {"key": ..., "sha256": ..., "faults": [[topic, key, text, queue, first, last], ...]}    one line per object

A truncated line is ignored: its object is checked again. The file is deleted when the check is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neve.archive.format.journal import CommittedObject
from neve.archive.read.verify import Fault


class OtherCheck(ValueError):
    """The file contains notes of another store or depth, or something else."""


class VerifyNotes:
    """Faults by object, in memory and in a file; without a path nothing is stored."""

    def __init__(self, path: Path | None, store: str, *, deep: bool) -> None:
        """Read the notes of an interrupted check, or begin new ones.

        Raises:
            OtherCheck: the file belongs to something else; it is left unchanged.
        """
        self._path = path
        self._done: dict[tuple[str, str], list[Fault]] = {}
        if path is None:
            return
        header = {"store": store, "deep": deep}
        lines = path.read_text("ascii", errors="replace").split("\n") if path.exists() else [""]
        if lines[0]:
            self._read(path, lines, header)
        else:
            path.write_text(json.dumps(header) + "\n", "ascii")

    def faults_of(self, name: CommittedObject) -> list[Fault] | None:
        """Return the faults of an object, or None if it has not been checked."""
        return self._done.get((name.key, name.sha256))

    def add(self, found: Iterable[tuple[CommittedObject, list[Fault]]]) -> None:
        """Append objects that were checked, with their faults."""
        lines = [json.dumps({"key": name.key, "sha256": name.sha256, "faults": faults}) for name, faults in found]
        if self._path is not None and lines:
            with self._path.open("a", encoding="ascii") as file:
                file.write("".join(f"{line}\n" for line in lines))

    def finish(self) -> None:
        """Delete the file, so that the next check starts from the beginning."""
        if self._path is not None:
            self._path.unlink()

    def _read(self, path: Path, lines: list[str], header: dict[str, Any]) -> None:
        found = _parsed(lines[0])
        if found != header:
            content = json.dumps(found)[:200] if found else lines[0][:100]
            raise OtherCheck(f"{path} belongs to another check: it contains {content}, this is {json.dumps(header)}")
        for line in lines[1:]:
            note = _parsed(line)
            if {"key", "sha256", "faults"} <= note.keys():
                self._done[note["key"], note["sha256"]] = [Fault(*fault) for fault in note["faults"]]
        if not path.read_bytes().endswith(b"\n"):
            with path.open("a", encoding="ascii") as file:
                file.write("\n")


def _parsed(line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
