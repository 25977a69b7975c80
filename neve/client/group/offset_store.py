"""Where a consumer keeps how far it is: at the brokers (a group in clustering mode) or in a file (broadcasting).

The file is RocketMQ's LocalFileOffsetStore: <directory>/<client id>/<group>/offsets.json with the one before it
beside it as offsets.json.bak,

    {"offsetTable":{{"brokerName":"broker-a","queueId":0,"topic":"t"}:42}}

It is replaced as a whole, never written in place.
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
    """The next offset to consume, by queue."""

    async def load(self) -> None:
        """Called once, before all else."""

    async def read(self, queue: MessageQueue) -> int | None:
        """None when nothing is stored for the queue."""

    async def write(self, offsets: Mapping[MessageQueue, int], *, once: bool = False) -> Mapping[MessageQueue, object]:
        """Stores them. Who has what was written, by queue; `once`: who calls will come again, one try is enough."""

    def keeper(self, queue: MessageQueue) -> object:
        """Who is to have it now; where that is another than has it, it has to be told."""


class BrokerOffsetStore:
    """The group's offsets at the brokers of the queues."""

    def __init__(self, puller: Puller, group: str) -> None:
        self._puller = puller
        self._group = group

    async def load(self) -> None:
        """The brokers have it."""

    async def read(self, queue: MessageQueue) -> int | None:
        return await self._puller.committed(self._group, queue)

    async def write(self, offsets: Mapping[MessageQueue, int], *, once: bool = False) -> Mapping[MessageQueue, object]:
        """One broker that fails does not keep the others from storing theirs.

        Raises:
            NeveError: of the first that failed.
        """
        work = (self._puller.commit(self._group, queue, offset, once=once) for queue, offset in offsets.items())
        kept: dict[MessageQueue, object] = {}
        for queue, found in zip(offsets, await asyncio.gather(*work, return_exceptions=True), strict=True):
            if isinstance(found, BaseException):
                raise found
            kept[queue] = found
        return kept

    def keeper(self, queue: MessageQueue) -> object:
        """A connection: what was said over one that broke may be lost, and a new master may not have heard of it."""
        return self._puller.keeper(queue)


class LocalFileOffsetStore:
    """Every member of a broadcasting group reads all queues, so each keeps its own offsets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[MessageQueue, int] = {}

    async def load(self) -> None:
        """Reads the file, or where it is missing or broken the one before it.

        Raises:
            ClientError: there are files and none can be read.
        """
        self._offsets = await asyncio.to_thread(_read_either, self._path)

    async def read(self, queue: MessageQueue) -> int | None:
        return self._offsets.get(queue)

    async def write(self, offsets: Mapping[MessageQueue, int], *, once: bool = False) -> Mapping[MessageQueue, object]:
        """
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
        """The file."""
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
            problem = ClientError(f"{candidate} holds no offsets: {error.remark}")
    if problem is not None:
        raise problem
    return {}


def _parse(content: bytes) -> dict[MessageQueue, int]:
    data = lenient_loads(content, NodeBudget(ANSWER_NODES))
    table = data.get("offsetTable") if isinstance(data, dict) else None
    if not isinstance(table, dict):
        raise ProtocolError("there is no offsetTable")
    return {key: offset for key, offset in table.items() if isinstance(key, MessageQueue) and type(offset) is int}


def _replace(path: Path, content: bytes) -> None:
    """At every instant the path, or the previous file beside it, holds a whole table."""
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
