"""Storage of broker sets with compare-and-swap by revision.

Of two concurrent decisions about one set, only the one that is written first takes effect.

`FileRegister` is the register of a single controller process. It is one file on the local disk:

    neve register 1 <crc32 of the rest, 8 hex digits>\\n
    {"revision": 17, "brokerSets": {"broker-a": {"revision": 12, "value": {a broker set, see broker_set}}}}

`revision` counts all writes, including those that removed a set, so that no revision is ever used twice. A write is
complete when the whole file is replaced and fsynced. The first write creates the file. An unreadable file is an error
and not an empty register, because an empty register would let members lose acknowledged messages.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import zlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from controller.broker_set import BrokerSet, DamagedBrokerSet, decode, encode
from infra.disk.filesystem import Disk, DiskLocked, OutOfDescriptors
from infra.loop.threads import Threads
from infra.process.startup import EXIT_DISK, EXIT_IN_USE, StartupError
from neve.errors import NeveError

log = logging.getLogger(__name__)


class Revision(NamedTuple):
    """The version of a stored value.

    `number` is the revision number. `value` is the stored bytes: a restored register may use a number again.
    """

    number: int
    value: bytes = b""


class StoredSet(NamedTuple):
    """The value that a register has under a name.

    `had` is a value with higher epochs that the register had before: the register was restored or wiped.
    """

    broker_set: BrokerSet | None
    revision: Revision
    had: BrokerSet | None = None


NEVER = Revision(0)  # the revision of a missing value
MAX_BROKER_SETS = 1_000  # all sets are in one file, which is written as a whole
_HEAD = re.compile(rb"neve register 1 ([0-9a-f]{8})\n")
# After these errors the old file is unchanged and the next write may succeed. After any other, its content is unknown.
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT})


class RegisterUnavailable(NeveError):
    """The outcome of the write is unknown, or the register can't be read or written. Read again, or retry later."""


class Register(Protocol):
    """Broker sets by name, as in RocketMQ's controller: a name belongs to one cluster.

    All coroutines may raise RegisterUnavailable; a write that raises it may have been done.
    """

    async def open(self) -> None:
        """Open the register before any other call. Raises StartupError for a fault that an operator has to correct."""

    async def close(self) -> None:
        """Close the register after all other calls."""

    @property
    def broken(self) -> str:
        """The reason why the register accepts no write until a restart; empty if it does."""

    def glance(self, name: str) -> BrokerSet | None:
        """Return the value that was last read or written, without waiting; it may be stale. None if there is none."""

    async def get(self, name: str) -> StoredSet:
        """Return the value and its revision; None and NEVER if there is none."""

    async def put(self, broker_set: BrokerSet, expected: Revision) -> Revision | None:
        """Write a set and return the new revision; None if its revision is no longer the expected one."""

    async def remove(self, name: str, expected: Revision) -> bool:
        """Remove a set if it has the expected revision. Returns whether it was removed."""

    async def all(self) -> dict[str, StoredSet | DamagedBrokerSet]:
        """Return all broker sets by name; an unreadable one is represented by its error."""


class _Kept(msgspec.Struct, frozen=True):
    revision: int
    value: msgspec.Raw


class _Content(msgspec.Struct, frozen=True, rename="camel"):
    revision: int
    broker_sets: dict[str, _Kept]


class _Entry(NamedTuple):
    broker_set: BrokerSet
    revision: int


_Entries = dict[str, _Entry]
T = TypeVar("T")


class FileRegister:
    """The register in memory and in one file. A lock file beside it excludes a second process."""

    def __init__(self, path: Path, disk: Disk, threads: Threads) -> None:
        self._path, self._disk, self._threads = path, disk, threads
        self._entries: _Entries = {}
        self._revision = NEVER.number
        self._writing = asyncio.Lock()
        self._under_way: set[asyncio.Task[Any]] = set()
        self._broken = ""
        self._unlock: Callable[[], None] | None = None

    async def open(self) -> None:
        """Lock and read the file. Raises StartupError if another process has locked it, or if it is damaged."""
        self._disk.make_dirs(self._path.parent)
        try:
            self._unlock = self._disk.lock(self._path.with_name(f"{self._path.name}.lock"))
        except DiskLocked as error:
            raise StartupError(f"another controller has the register {self._path}", EXIT_IN_USE) from error
        if self._disk.exists(self._path):
            try:
                self._revision, self._entries = _read(self._disk.read(self._path))
            except (NeveError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                self._release()
                raise StartupError(
                    f"the register {self._path} is damaged: {error}. Restore the file; without it, brokers that have "
                    "messages get no master until an operator designates one",
                    EXIT_DISK,
                ) from error

    async def close(self) -> None:
        """Wait for pending writes, then unlock the file."""
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self._release()

    def _release(self) -> None:
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    @property
    def broken(self) -> str:
        """The reason why the register accepts no write until a restart; empty if it does."""
        return self._broken

    def glance(self, name: str) -> BrokerSet | None:
        entry = self._entries.get(name)
        return entry.broker_set if entry is not None else None

    async def get(self, name: str) -> StoredSet:
        entry = self._entries.get(name)
        return StoredSet(entry.broker_set, Revision(entry.revision)) if entry is not None else StoredSet(None, NEVER)

    async def put(self, broker_set: BrokerSet, expected: Revision) -> Revision | None:
        return await self._to_its_end(self._put(broker_set, expected.number))

    async def remove(self, name: str, expected: Revision) -> bool:
        return await self._to_its_end(self._remove(name, expected.number))

    async def all(self) -> dict[str, StoredSet | DamagedBrokerSet]:
        return {name: await self.get(name) for name in sorted(self._entries)}

    async def _to_its_end(self, write: Coroutine[Any, Any, T]) -> T:
        """Complete a write even if its caller is cancelled, so that the file and the memory have the same content."""
        task = asyncio.get_running_loop().create_task(write, name="controller/register")
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return await asyncio.shield(task)

    async def _put(self, broker_set: BrokerSet, expected: int) -> Revision | None:
        async with self._writing:
            before = self._entries.get(broker_set.name)
            if expected != (before.revision if before is not None else NEVER.number):
                return None
            if before is None and len(self._entries) >= MAX_BROKER_SETS:
                raise RegisterUnavailable(None, f"the register is full: {MAX_BROKER_SETS} broker sets")
            assert before is None or broker_set.epochs >= before.broker_set.epochs
            revision = self._revision + 1
            await self._replace(revision, {**self._entries, broker_set.name: _Entry(broker_set, revision)})
            return Revision(revision)

    async def _remove(self, name: str, expected: int) -> bool:
        async with self._writing:
            before = self._entries.get(name)
            if before is None or before.revision != expected:
                return False
            rest = {other: entry for other, entry in self._entries.items() if other != name}
            await self._replace(self._revision + 1, rest)
            return True

    async def _replace(self, revision: int, entries: _Entries) -> None:
        if self._broken:
            raise RegisterUnavailable(None, f"the register is no longer written: {self._broken}")
        try:
            await self._threads.run(self._disk.write_atomic, self._path, _content(revision, entries))
        except OSError as error:
            if error.errno not in _PASSING and not isinstance(error, OutOfDescriptors):
                # After a power failure the disk may have the old or the new file: no decision may depend on either.
                self._broken = str(error)
            log.error("the register %s is not written: %s", self._path, error)
            raise RegisterUnavailable(None, f"the register is not written: {error}") from error
        self._revision, self._entries = revision, entries


def _content(revision: int, entries: _Entries) -> bytes:
    kept = {name: _Kept(entry.revision, msgspec.Raw(encode(entry.broker_set))) for name, entry in entries.items()}
    body = msgspec.json.encode(_Content(revision, kept))
    return b"neve register 1 %08x\n" % zlib.crc32(body) + body


def _read(data: bytes) -> tuple[int, _Entries]:
    head = _HEAD.match(data)
    if head is None:
        raise DamagedBrokerSet(None, "its head is not that of a register, or of another version")
    body = data[head.end() :]
    if zlib.crc32(body) != int(head[1], 16):
        raise DamagedBrokerSet(None, "its checksum does not match")
    content = msgspec.json.decode(body, type=_Content)
    entries = {name: _Entry(decode(bytes(kept.value)), kept.revision) for name, kept in content.broker_sets.items()}
    for name, entry in entries.items():
        if entry.broker_set.name != name or not NEVER.number < entry.revision <= content.revision:
            raise DamagedBrokerSet(None, f"the entry of {name!r} contradicts itself")
    return content.revision, entries
