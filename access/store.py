"""Users and policies on disk: one file, replaced whole, in a directory that only the owner may enter.

File: {"version":1,"users":{name:{password,userType,userStatus}},"policies":{subject:[{policyType,entries}]}}
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from access.model import Policy, User
from infra.disk import Disk
from infra.startup import StartupError

VERSION = 1


class _Version(msgspec.Struct):
    version: int = 0


class Tables(msgspec.Struct):
    """All that is known; a change makes new tables."""

    version: int = VERSION
    users: dict[str, User] = {}
    policies: dict[str, list[Policy]] = {}


class AuthStore:
    """A change is in force once it is durable. Two servers of one machine may share the file."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path, self._disk = path, disk
        self._tables = Tables()
        self._stamp: tuple[int, int] | None = None
        self._lock = asyncio.Lock()

    @property
    def tables(self) -> Tables:
        """As they are now; the file is read again when another server has replaced it."""
        try:
            status = os.stat(self._path)  # noqa: PTH116 - for each read of a connection that sends: half the time
        except FileNotFoundError:
            return self._tables
        stamp = (status.st_mtime_ns, status.st_ino)
        if stamp != self._stamp:
            self._tables, self._stamp = self._read(), stamp
        return self._tables

    def open(self) -> None:
        """Raises StartupError for a file that can't be read."""
        self._disk.make_dirs(self._path.parent)
        self._path.parent.chmod(0o700)
        _ = self.tables

    async def change(self, edit: Callable[[Tables], None]) -> None:
        """Let `edit` change a copy, and put it in force; what `edit` raises changes nothing."""
        async with self._lock:
            tables = self._copy()
            edit(tables)
            await asyncio.to_thread(self._write, tables)

    def change_now(self, edit: Callable[[Tables], None]) -> None:
        """At start, when nothing else runs."""
        tables = self._copy()
        edit(tables)
        if tables != self._tables:
            self._write(tables)

    def _copy(self) -> Tables:
        known = self.tables
        return Tables(users=dict(known.users), policies={name: list(of) for name, of in known.policies.items()})

    def _write(self, tables: Tables) -> None:
        self._disk.write_atomic(self._path, msgspec.json.format(msgspec.json.encode(tables)))

    def _read(self) -> Tables:
        data = self._disk.read(self._path)
        try:
            found = msgspec.json.decode(data, type=_Version).version
            if found != VERSION:
                raise StartupError(f"{self._path} has format {found}, this server knows {VERSION}")
            return msgspec.json.decode(data, type=Tables)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            # its text may quote a secret
            raise StartupError(f"{self._path} cannot be read: {type(error).__name__}") from None
