"""Key-value settings by namespace: the only thing that a name server keeps across a restart.

File: {"version":1,"configTable":{namespace:{key:value}}}, replaced whole on every change.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from infra.disk import Disk
from infra.startup import StartupError

log = logging.getLogger(__name__)

FILE_VERSION = 1
ORDER_TOPIC_CONFIG = "ORDER_TOPIC_CONFIG"
MAX_ENTRIES = 100_000

Table = dict[str, dict[str, str]]


class _File(msgspec.Struct, rename="camel"):
    config_table: Table = {}
    version: int = FILE_VERSION


class KvConfigManager:
    """A change is visible once it is durable."""

    def __init__(self, path: Path, disk: Disk) -> None:
        self._path = path
        self._disk = disk
        self._table: Table = {}
        self._lock = asyncio.Lock()
        # a peer that leaves cancels its request, not the thread that writes for it
        self._writing = threading.Lock()
        self._newest = 0

    def load(self) -> None:
        """Read the file, if there is one; a broken one is an error, not an empty table."""
        if not self._disk.exists(self._path):
            return
        try:
            content = msgspec.json.decode(self._disk.read(self._path), type=_File)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StartupError(f"{self._path} cannot be read: {error}") from error
        if content.version > FILE_VERSION:
            raise StartupError(f"{self._path} has format {content.version}, this server knows {FILE_VERSION}")
        self._table = content.config_table

    def get(self, namespace: str, key: str) -> str | None:
        """The value, or None."""
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> Mapping[str, str] | None:
        """All of a namespace, or None when it has never been written."""
        return self._table.get(namespace)

    async def put(self, namespace: str, key: str, value: str) -> None:
        """Set and persist."""
        async with self._lock:
            table = self._copy()
            if key not in table.setdefault(namespace, {}) and sum(map(len, table.values())) >= MAX_ENTRIES:
                raise ValueError(f"more than {MAX_ENTRIES} entries")
            table[namespace][key] = value
            await self._replace(table)
        log.info("key %r of %r is set", key, namespace)

    async def delete(self, namespace: str, key: str) -> None:
        """Remove and persist; what is not there is no error."""
        async with self._lock:
            if self.get(namespace, key) is None:
                return
            table = self._copy()
            del table[namespace][key]
            await self._replace(table)
        log.info("key %r of %r is deleted", key, namespace)

    def print_all(self) -> None:
        """Write the whole table to the log, as operators of RocketMQ are used to."""
        for namespace, entries in self._table.items():
            for key, value in entries.items():
                log.info("config NS: %r Key: %r Value: %r", namespace, key, value)

    def _copy(self) -> Table:
        return {namespace: dict(entries) for namespace, entries in self._table.items()}

    async def _replace(self, table: Table) -> None:
        data = json.dumps({"version": FILE_VERSION, "configTable": table}, indent=1).encode()
        self._newest += 1
        await asyncio.to_thread(self._write, data, self._newest)
        self._table = table

    def _write(self, data: bytes, number: int) -> None:
        with self._writing:
            if number == self._newest:  # else a newer one comes
                self._write_now(data)

    def _write_now(self, data: bytes) -> None:
        self._disk.make_dirs(self._path.parent)
        self._disk.write_atomic(self._path, data)
