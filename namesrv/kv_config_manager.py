"""Key-value settings by namespace: the only persistent state of a name server.

File: {"version":1,"configTable":{namespace:{key:value}}}, replaced as a whole by one write for all pending changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import msgspec

from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.process.startup import StartupError
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

log = logging.getLogger(__name__)

ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
MAX_ENTRIES = 100_000
MAX_NAME = 1024
MAX_VALUE = 64 * 1024
MAX_BYTES = 16 * 1024 * 1024  # of names and values: an answer may contain a whole namespace

Table = dict[str, dict[str, str]]
_Change = tuple[str, str, str | None]


class _File(msgspec.Struct, rename="camel"):
    version: int = 1
    config_table: Table = {}


class KvConfigManager:
    """The settings. A change is visible once it is durable; a write completes even if its client disconnects."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._disk = disk
        self._file = VersionedFile(disk, path, _File, StartupError, indent=True)
        self._table: Table = {}
        # Including pending changes:
        self._entries = 0
        self._bytes = 0
        self._waiting: list[tuple[_Change, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Read the file, if there is one. Raises StartupError if it is unreadable."""
        content = self._file.read()
        if content is not None:
            self._table = content.config_table
            self._count()

    def get(self, namespace: str, key: str) -> str | None:
        """Return the value of a key, or None."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> Mapping[str, str] | None:
        """Return a namespace, or None if nothing was ever written to it."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set a key; durable when this returns. Raises BrokerError above a limit."""
        if len(namespace) > MAX_NAME or len(key) > MAX_NAME or len(value) > MAX_VALUE:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, "a name or value of the KV configuration is too long")
        size = len(namespace) + len(key) + len(value)
        is_new = self.get(namespace, key) is None
        if (is_new and self._entries >= MAX_ENTRIES) or self._bytes + size > MAX_BYTES:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"the KV configuration is full: {self._entries} entries")
        self._entries, self._bytes = self._entries + 1, self._bytes + size
        await self._change((namespace, key, value))
        log.info("KV key set: namespace=%r key=%r", namespace, key)

    async def delete(self, namespace: str, key: str) -> None:
        """Delete a key, which may be missing; durable when this returns."""
        if self.get(namespace, key) is None and not self._waiting:
            return
        await self._change((namespace, key, None))
        log.info("KV key deleted: namespace=%r key=%r", namespace, key)

    def print_all(self) -> None:
        """Log the whole table, as RocketMQ's name server does."""
        for namespace, entries in self._table.items():
            for key, value in entries.items():
                log.info("config NS: %r Key: %r Value: %r", namespace, key, value)

    async def _change(self, change: _Change) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_waiting())
        await done

    async def _write_waiting(self) -> None:
        """Write pending changes until there are none; each write contains all changes since the last one began."""
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            table = self._with([change for change, _ in waiting])
            fault: Exception | None = None
            try:
                await asyncio.to_thread(self._write, table)
                self._table = table
            except Exception as error:  # noqa: BLE001 - raised in all callers of this write
                fault = error
            self._count()
            for _, done in waiting:
                if done.done():
                    continue
                if fault is None:
                    done.set_result(None)
                else:
                    done.set_exception(fault)

    def _with(self, changes: list[_Change]) -> Table:
        """Return a new table with some changes; unchanged namespaces are shared with the current one."""
        table = dict(self._table)
        own: set[str] = set()
        for namespace, key, value in changes:
            if namespace not in own:
                own.add(namespace)
                table[namespace] = dict(table.get(namespace, {}))
            if value is None:
                table[namespace].pop(key, None)
            else:
                table[namespace][key] = value
        for namespace in own:
            if not table[namespace] and namespace not in self._table:
                del table[namespace]  # a key of a missing namespace was deleted
        return table

    def _count(self) -> None:
        """Count entries and bytes exactly; until the next write each change counts as an addition."""
        self._entries = sum(map(len, self._table.values())) + len(self._waiting)
        self._bytes = sum(
            len(namespace) + len(key) + len(value)
            for namespace, entries in self._table.items()
            for key, value in entries.items()
        ) + sum(len(namespace) + len(key) + len(value or "") for (namespace, key, value), _ in self._waiting)

    def _write(self, table: Table) -> None:
        """Write on a thread: a table is not changed once it is handed over."""
        self._disk.make_dirs(self._file.path.parent)
        self._file.write(_File(config_table=table))
