"""Live keys that were set on a running broker, and persist over its restarts.

`broker.conf` and the command line, which others manage, are only read. Keys that were set on the running broker are in
a separate file in the data directory. They override the others until they are unset. A restored broker and one with a
new directory start without them.

File: {"neveFormat":1,"keys":{key:value}}     values as they were given, such as 64m
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from broker.config import BrokerConfig
from infra.config.properties import ConfigError, live_keys, update_live, value_texts
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.process.startup import StartupError

log = logging.getLogger(__name__)

FILE_NAME = "keptConfig.json"


class _File(msgspec.Struct, rename="camel", kw_only=True):
    neve_format: int = 1
    keys: dict[str, str]


class KeptConfig:
    """Persistent settings. A change is atomic, and takes effect once it is on the disk."""

    def __init__(self, config: BrokerConfig, disk: Disk, path: Path, threads: Threads = SYSTEM_THREADS) -> None:
        """Apply the persistent settings to `config`.

        Raises:
            StartupError: the file can't be read.
        """
        self._config, self._disk, self._threads = config, disk, threads
        self._file = VersionedFile(disk, path, _File, StartupError, indent=True)
        self._lock = asyncio.Lock()
        # Values of file and command line, which apply again when a key is unset.
        self._given = dataclasses.replace(config)
        found = self._file.read()
        self._keys = found.keys if found is not None else {}
        for key, value in self._keys.items():
            try:
                update_live(config, {key: value})
            except ConfigError as error:
                # a key of another version: kept until that version runs again
                log.warning("%s: kept without effect: %s", path, error)
            else:
                log.info("%s=%s, as set on the running broker, overrides %s", key, value, self._text(key))

    def instead_of(self) -> dict[str, str]:
        """Return the persistent keys in effect, with the values that they override."""
        live = {*live_keys(self._config)}
        return {key: self._text(key) for key in sorted(self._keys) if key in live}

    async def change(self, values: Mapping[str, str], unset: Iterable[str]) -> None:
        """Set and unset keys.

        Raises:
            ConfigError: a value is not allowed, or a key is not live or not set; then nothing is changed.
            OSError: the file can't be written; then nothing is changed before the next start.
        """
        async with self._lock:
            removed = [*unset]
            if unknown := sorted({*removed} - self._keys.keys()):
                raise ConfigError(f"{', '.join(unknown)}: not set on the running broker")
            if both := sorted({*removed} & values.keys()):
                raise ConfigError(f"{', '.join(both)}: set and unset at once")
            live = {*live_keys(self._config)}
            in_force = {**{key: self._text(key) for key in removed if key in live}, **values}
            update_live(dataclasses.replace(self._config), in_force)
            keys = {key: value for key, value in {**self._keys, **values}.items() if key not in removed}
            await self._threads.run(self._write, keys)
            self._keys = keys
            update_live(self._config, in_force)

    def _text(self, key: str) -> str:
        return value_texts(self._given)[key]

    def _write(self, keys: Mapping[str, str]) -> None:
        self._disk.make_dirs(self._file.path.parent)
        self._file.write(_File(keys=dict(sorted(keys.items()))))
