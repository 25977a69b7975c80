"""What the runs of a pipeline did, in `.neve` beside its spec: one file, written anew at each change.

A run holds the lock of that directory, and Derby, which keeps the catalog there, serves one process. So a run that is
told as running while nobody holds the lock was killed.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

RUNS_KEPT = 20
_TRIES_S = (0.05, 0.2, 0.5)  # who only looks whether a run goes on has the lock for a moment
RUNNING, COMPLETED, FAILED, KILLED = "running", "completed", "failed", "killed"


class Busy(Exception):
    """Another run of this pipeline goes on."""


class FlowDone(msgspec.Struct):
    """A flow by what Spark said of it last."""

    state: str
    at_ms: int
    told: str = ""


class Run(msgspec.Struct):
    """One run: `kind` is run or dry-run."""

    kind: str
    began_ms: int
    state: str = RUNNING
    ended_ms: int | None = None
    error: str | None = None
    flows: dict[str, FlowDone] = msgspec.field(default_factory=dict)


class Record:
    """The runs of one pipeline, the newest last."""

    def __init__(self, home: Path) -> None:
        self.home = home / ".neve"
        self._file = self.home / "runs.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One run at a time. Raises Busy."""
        self.home.mkdir(parents=True, exist_ok=True)
        with self._lock().open("wb") as file:
            for pause in _TRIES_S:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    threading.Event().wait(pause)
            else:
                raise Busy(f"another run of this pipeline goes on: {self.home.parent}")
            yield

    def is_running(self) -> bool:
        """Whether a run holds the lock."""
        try:
            with self._lock().open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def _lock(self) -> Path:
        return self.home / "lock"

    def runs(self) -> list[Run]:
        """The last ones. Raises ValueError: the file is no record."""
        try:
            data = self._file.read_bytes()
        except FileNotFoundError:
            return []
        try:
            found = msgspec.json.decode(data, type=list[Run])
        except msgspec.MsgspecError as error:
            raise ValueError(f"{self._file} is no record of runs: {error}") from error
        if found and found[-1].state == RUNNING and not self.is_running():
            found[-1].state = KILLED
        return found

    def write(self, runs: list[Run]) -> None:
        """All that shall be known."""
        fresh = self._file.with_suffix(".new")
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(runs[-RUNS_KEPT:])))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._file)
