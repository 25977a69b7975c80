"""Users and policies on disk: one file, replaced whole, in a directory that only the owner may enter.

File: {"version":1,"users":{name:{password,userType,userStatus}},"policies":{subject:[{policyType,entries}]},
       "log":{"uuid","offset"}}

log   of a broker: changes below this offset of the metadata log of that CommitLog are in it
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
    """See the module."""

    uuid: str
    offset: int


class Tables(msgspec.Struct):
    """All that is known; a change makes new tables."""

    version: int = 1
    users: dict[str, User] = {}
    policies: dict[str, list[Policy]] = {}
    log: LogPlace | msgspec.UnsetType = msgspec.UNSET


class ChangeLog(Protocol):
    """Where a server keeps changes of users, too."""

    def record(self, before: Tables, after: Tables) -> None:
        """Before the change is in force. Raises BrokerError: then it is not."""

    async def settled(self) -> None:
        """Returns when the change may be answered, as far as the log goes."""


class NoChangeLog:
    """Of a server that has the file alone."""

    def record(self, before: Tables, after: Tables) -> None:
        """Nobody follows."""

    async def settled(self) -> None:
        """There is nothing to wait for."""


NO_CHANGE_LOG = NoChangeLog()


class AuthStore:
    """A change is in force once it is durable. Two servers of one machine may share the file."""

    def __init__(self, path: Path, disk: Disk, changes: ChangeLog = NO_CHANGE_LOG) -> None:
        self._path, self._disk, self._changes = path, disk, changes
        self._file = VersionedFile(disk, path, Tables, StartupError, indent=True)
        self._tables = Tables()
        self._stamp: tuple[int, int] | None = None
        self._lock = asyncio.Lock()
        self._writing = threading.Lock()
        # What a thread writes now; the next change begins with it.
        self._next: Tables | None = None

    @property
    def tables(self) -> Tables:
        """As they are now; the file is read again when another server has replaced it."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 - for each read of a connection that sends: half the time
        except FileNotFoundError:
            return self._tables
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._tables, self._stamp = self._file.read() or Tables(), stamp
        return self._tables

    def open(self) -> None:
        """Raises StartupError for a file that can't be read."""
        self._disk.make_dirs(self._path.parent)
        self._path.parent.chmod(0o700)
        _ = self.tables

    async def change(self, edit: Callable[[Tables], None]) -> None:
        """Let `edit` change a copy, and put it in force; what `edit` or the log raises changes nothing.

        Where the file can't be written behind the log, a change that is refused holds from the next start on.
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

    def change_now(self, edit: Callable[[Tables], None]) -> None:
        """At a start, or as a log says that was written by another; a change under way is in it."""
        tables = self._copy()
        edit(tables)
        if tables != self.tables or self._next is not None:
            if self._next is not None:
                self._next = tables
            self._write(tables)

    def _copy(self) -> Tables:
        known = self._next or self.tables
        policies = {name: list(of) for name, of in known.policies.items()}
        return Tables(users=dict(known.users), policies=policies, log=known.log)

    def _write(self, tables: Tables) -> None:
        with self._writing:
            newest = self._next or tables  # an older image never replaces a newer one
            self._file.write(newest)
