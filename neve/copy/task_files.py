"""The files of tasks: NAME.json has the task, the process that runs it locks NAME.lock, NAME.cancel asks it to stop.

The file of a task is replaced atomically, and is durable when `save` returns.
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

from neve.copy.task import CANCELLED, DONE, Task

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")


class BadName(ValueError):
    """A name that is not a valid file name."""


class Busy(Exception):
    """Another process runs the task."""

    code = 205  # the response code of a conflict, which determines the exit code


def _has_name(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


class TaskBook:
    """The tasks in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def names(self) -> list[str]:
        """Return the names of all tasks, sorted."""
        if not self._directory.is_dir():
            return []
        return sorted(path.stem for path in self._directory.glob("*.json"))

    def load(self, name: str) -> Task:
        """Return a task. Raises BadName, FileNotFoundError."""
        path = self._path(name, "json")
        try:
            return msgspec.json.decode(path.read_bytes(), type=Task)
        except FileNotFoundError:
            raise FileNotFoundError(f"replay {name} does not exist in {self._directory}") from None
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is not a task of a replay: {error}") from error

    def has(self, name: str) -> bool:
        """Return whether a task exists. Raises BadName."""
        return self._path(name, "json").exists()

    def save(self, task: Task) -> None:
        """Write a task durably."""
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
        """Lock a task for this process; the lock ends with the process. Raises Busy."""
        path = self._path(name, "lock")
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            with path.open("ab") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise Busy(f"another process runs replay {name}") from error
                # `forget` may have deleted the file meanwhile; a lock of a deleted file excludes no other process.
                if _has_name(file, path):
                    yield
                    return

    def is_locked(self, name: str) -> bool:
        """Return whether a process runs the task."""
        try:
            with self.locked(name):
                return False
        except Busy:
            return True

    def cancel(self, name: str) -> Task:
        """Cancel a task, at once or when the process that runs it sees the mark."""
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
        """Return whether the task was asked to stop."""
        return self._path(name, "cancel").exists()

    def settle_cancel(self, name: str) -> None:
        """Delete the mark."""
        self._path(name, "cancel").unlink(missing_ok=True)

    def forget(self, name: str) -> None:
        """Delete the files of a task. Raises Busy, FileNotFoundError."""
        self.load(name)
        with self.locked(name):
            for kind in ("json", "new", "cancel", "lock"):
                self._path(name, kind).unlink(missing_ok=True)

    def _path(self, name: str, kind: str) -> Path:
        if _NAME.fullmatch(name) is None:
            raise BadName(f"{name!r} is not a valid name of a replay: use letters, digits and . _ -")
        return self._directory / f"{name}.{kind}"
