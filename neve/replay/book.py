"""The tasks' files: NAME.json is the task, NAME.lock is locked by who carries it out, NAME.cancel asks that one to end.

A task's file is replaced as a whole, and is on the disk before its writer goes on.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import msgspec

from neve.replay.task import CANCELLED, DONE, Task

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class BadName(ValueError):
    """A name that can't be a file's."""


class Busy(Exception):
    """Another process carries the task out."""

    code = 205  # a conflict, for who goes by codes


def _has_name(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class TaskBook:
    """All tasks of a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> list[str]:
        """Sorted."""
        if not self._directory.is_dir():
            return []
        return sorted(path.stem for path in self._directory.glob("*.json"))

    def load(self, name: str) -> Task:
        """Raises BadName, FileNotFoundError."""
        path = self._path(name, "json")
        try:
            return msgspec.json.decode(path.read_bytes(), type=Task)
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no replay {name} in {self._directory}") from None
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no task of a replay: {error}") from error

    def has(self, name: str) -> bool:
        """Raises BadName."""
        return self._path(name, "json").exists()

    def save(self, task: Task) -> None:
        """Returns when it is on the disk."""
        path, fresh = self._path(task.name, "json"), self._path(task.name, "new")
        self._directory.mkdir(parents=True, exist_ok=True)
        with fresh.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(task), indent=1))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """As the only process that does anything with the task; a process that dies lets go. Raises Busy."""
        path = self._path(name, "lock")
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            with path.open("ab") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise Busy(f"replay {name} is being carried out by another process") from error
                # Who forgot the replay meanwhile took this file's name away: it keeps nobody out.
                if _has_name(file, path):
                    yield
                    return

    def is_locked(self, name: str) -> bool:
        """Whether somebody carries it out now."""
        try:
            with self.locked(name):
                return False
        except Busy:
            return True

    def cancel(self, name: str) -> Task:
        """Ends a task for good: at once, or as soon as whoever carries it out sees the mark."""
        task = self.load(name)
        try:
            with self.locked(name):
                task = self.load(name)
                if task.state != DONE:
                    task.state = CANCELLED
                    self.save(task)
        except Busy:
            self._path(name, "cancel").touch()
        return task

    def is_to_cancel(self, name: str) -> bool:
        """Whether somebody asked for its end."""
        return self._path(name, "cancel").exists()

    def settle_cancel(self, name: str) -> None:
        """Takes the mark away."""
        self._path(name, "cancel").unlink(missing_ok=True)

    def forget(self, name: str) -> None:
        """Removes the task's files; what it sent stays. Raises Busy, FileNotFoundError."""
        self.load(name)
        with self.locked(name):
            for kind in ("json", "new", "cancel", "lock"):
                self._path(name, kind).unlink(missing_ok=True)

    def _path(self, name: str, kind: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise BadName(f"{name!r} can't be a replay's name: letters, digits and . _ - only")
        return self._directory / f"{name}.{kind}"
