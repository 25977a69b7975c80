"""Stores committed offsets: at the brokers in clustering mode, in a file in broadcasting mode.

The file is that of RocketMQ's LocalFileOffsetStore: <directory>/<client id>/<group>/offsets.json, with its predecessor
beside it as offsets.json.bak:

    {"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"t"}:42}}

It is replaced atomically.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from neve.client.group.pull import Puller
from neve.client.model import MessageQueue
from neve.errors import ClientError, NeveError, ProtocolError
from neve.remoting.body import ANSWER_NODES, NodeBudget, dumps_object_keys, lenient_loads


class OffsetStore(Protocol):
    """Stores the offset of the next message to consume of each queue."""

    async def load(self) -> None:
        """Load stored offsets. Called once, before the other methods."""

    async def read(self, queue: MessageQueue) -> int | None:
        """Return the stored offset of a queue, or None."""

    async def write(self, offsets: Mapping[MessageQueue, int], *, once: bool = False) -> Mapping[MessageQueue, object]:
        """Store offsets; return the keeper of each queue's offset.

        With `once` a failed request is not retried: the caller writes again later.
        """

    def keeper(self, queue: MessageQueue) -> object:
        """Return the present keeper of a queue's offset. If it differs from the one that stored it, store it again."""


class BrokerOffsetStore:
    """Stores the offsets of a group at the brokers of the queues."""

    def __init__(self, puller: Puller, group: str) -> None:
        self._puller = puller
        self._group = group

    async def load(self) -> None:
        """Do nothing: brokers have the offsets."""

    async def read(self, queue: MessageQueue) -> int | None:
        return await self._puller.committed(self._group, queue)

    async def write(self, offsets: Mapping[MessageQueue, int], *, once: bool = False) -> Mapping[MessageQueue, object]:
        """Store offsets at all brokers, also if some of them fail.

        Raises:
            NeveError: the first error.
        """
        work = (self._puller.commit(self._group, queue, offset, once=once) for queue, offset in offsets.items())
        kept: dict[MessageQueue, object] = {}
        for queue, found in zip(offsets, await asyncio.gather(*work, return_exceptions=True), strict=True):
            if isinstance(found, BaseException):
                raise found
            kept[queue] = found
        return kept

    def keeper(self, queue: MessageQueue) -> object:
        """Return the connection to the master, because a commit over a broken connection may be lost."""
        return self._puller.keeper(queue)


class LocalFileOffsetStore:
    """Stores the offsets of one broadcasting member in a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[MessageQueue, int] = {}

    async def load(self) -> None:
        """Read the file, or its predecessor if it is missing or damaged.

        Raises:
            ClientError: there are files, and none is readable.
        """
        self._offsets = await asyncio.to_thread(_read_either, self._path)

    async def read(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    async def write(self, offsets: Mapping[MessageQueue, int], *, once: bool = False) -> Mapping[MessageQueue, object]:
        """Replace the file.

        Raises:
            ClientError: the file cannot be written.
        """
        if not offsets:
            return {}
        self._offsets.update(offsets)
        try:
            await asyncio.to_thread(_replace, self._path, dumps_object_keys({"offsetTable": self._offsets}))
        except OSError as error:
            raise ClientError(f"{self._path} cannot be written: {error}") from error
        return dict.fromkeys(offsets, self)

    def keeper(self, queue: MessageQueue) -> object:
        """Return this store."""
        return self


def _read_either(path: Path) -> dict[MessageQueue, int]:
    problem: NeveError | None = None
    for candidate in (path, _previous(path)):
        try:
            return _parse(candidate.read_bytes())
        except FileNotFoundError:
            continue
        except OSError as error:
            problem = ClientError(f"{candidate} cannot be read: {error}")
        except ProtocolError as error:
            problem = ClientError(f"{candidate} has no offsets: {error.remark}")
    if problem is not None:
        raise problem
    return {}


def _parse(content: bytes) -> dict[MessageQueue, int]:
    data = lenient_loads(content, NodeBudget(ANSWER_NODES))
    table = data.get("offsetTable") if isinstance(data, dict) else None
    if not isinstance(table, dict):
        raise ProtocolError("offsetTable is missing")
    return {key: offset for key, offset in table.items() if isinstance(key, MessageQueue) and type(offset) is int}


def _replace(path: Path, content: bytes) -> None:
    """Replace the file so that, after a crash at any point, it or its predecessor is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".tmp")
    with fresh.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        path.replace(_previous(path))
    fresh.replace(path)


def _previous(path: Path) -> Path:
    return path.with_name(path.name + ".bak")
