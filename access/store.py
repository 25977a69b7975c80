"""Users and policies on disk: one file, replaced as a whole, in a directory with mode 0700.

File: {"version":1,"users":{name:{password,userType,userStatus}},"policies":{subject:[{policyType,entries}]},
       "log":{"uuid","offset"}}

log   of a broker: the file contains all changes below this offset of the metadata log of that CommitLog
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from access.model import Policy, User
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.process.startup import StartupError


class LogPlace(msgspec.Struct, frozen=True):
    """An offset in the metadata log of a CommitLog."""

    uuid: str
    offset: int


class AuthTables(msgspec.Struct):
    """All users and policies; a change makes new tables."""

    version: int = 1
    users: dict[str, User] = {}
    policies: dict[str, list[Policy]] = {}
    log: LogPlace | msgspec.UnsetType = msgspec.UNSET


class ChangeLog(Protocol):
    """A log that replicates changes of users and policies."""

    def record(self, before: AuthTables, after: AuthTables) -> None:
        """Record a change before it takes effect. Raises BrokerError to refuse it."""

    async def settled(self) -> None:
        """Return when the recorded changes are safe enough for an answer."""


class NoChangeLog:
    """For a server without a log of changes."""

    def record(self, before: AuthTables, after: AuthTables) -> None:
        """Nothing is recorded."""

    async def settled(self) -> None:
        """There is nothing to wait for."""


NO_CHANGE_LOG = NoChangeLog()


class AuthStore:
    """Users and policies. A change takes effect once it is durable. Servers of one machine may share the file."""

    def __init__(self, path: Path, disk: Disk, changes: ChangeLog = NO_CHANGE_LOG) -> None:
        self._path, self._disk, self._changes = path, disk, changes
        self._file = VersionedFile(disk, path, AuthTables, StartupError, indent=True)
        self._tables = AuthTables()
        self._stamp: tuple[int, int] | None = None
        self._lock = asyncio.Lock()
        self._writing = threading.Lock()
        # The tables that a thread is writing; the next change starts from them.
        self._next: AuthTables | None = None

    @property
    def tables(self) -> AuthTables:
        """The current tables; reads the file again if another server has replaced it."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 - on the send path: half the time of Path.stat
        except FileNotFoundError:
            return self._tables
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._tables, self._stamp = self._file.read() or AuthTables(), stamp
        return self._tables

    def open(self) -> None:
        """Read the file. Raises StartupError if it is unreadable."""
        self._disk.make_dirs(self._path.parent)
        self._path.parent.chmod(0o700)
        _ = self.tables

    async def change(self, edit: Callable[[AuthTables], None]) -> None:
        """Apply `edit` to a copy, record it, and write it. An error of `edit` or of the log changes nothing.

        If the file cannot be written after the change was recorded, the change takes effect at the next start.
        """
        async with self._lock:
            known, tables = self.tables, self._copy()
            edit(tables)
            self._changes.record(known, tables)
            self._next = tables
            try:
                await asyncio.to_thread(self._write, tables)
            finally:
                self._next = None
            await self._changes.settled()

    def change_now(self, edit: Callable[[AuthTables], None]) -> None:
        """Apply `edit` synchronously: at a start, or from a replicated log. Includes a change that is being written."""
        tables = self._copy()
        edit(tables)
        if tables != self.tables or self._next is not None:
            if self._next is not None:
                self._next = tables
            self._write(tables)

    def _copy(self) -> AuthTables:
        known = self._next or self.tables
        policies = {name: list(of) for name, of in known.policies.items()}
        return AuthTables(users=dict(known.users), policies=policies, log=known.log)

    def _write(self, tables: AuthTables) -> None:
        with self._writing:
            newest = self._next or tables  # an older image never replaces a newer one
            self._file.write(newest)
