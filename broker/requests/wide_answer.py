"""Answers that may tell of tens of thousands of queues: looked up in slices, encoded as they are looked up.

A table of all of them would cost the loop as much a second time, at once, when it is given back; and a thread that
encodes it takes turns with the loop.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any, TypeVar

from neve.remoting.body import dumps_object_keys
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

T = TypeVar("T")
# Queues looked at before other requests get their turn: each may be a file that has to be opened.
SLICE = 32


async def in_slices(queues: Iterable[T]) -> AsyncIterator[T]:
    """The same queues, or whatever costs as much; other requests are served in between."""
    turns = Turns()
    for queue in queues:
        yield queue
        await turns.take()


class Turns:
    """Others have theirs after each slice, however what is looked at is nested."""

    def __init__(self) -> None:
        self._taken = 0

    async def take(self) -> None:
        self._taken += 1
        if self._taken % SLICE == 0:
            await asyncio.sleep(0)


class WideMap:
    """A map in the dialect, of which no more than a slice is anything but bytes."""

    def __init__(self) -> None:
        self._slice: dict[Any, Any] = {}
        self._encoded: list[bytes] = []

    def add(self, key: object, value: object) -> None:
        """Each key once."""
        self._slice[key] = value
        if len(self._slice) == SLICE:
            self._encode()

    def _encode(self) -> None:
        if self._slice:
            rows = dumps_object_keys(self._slice)[1:-1]
            self._encoded.append(b",%b" % rows if self._encoded else rows)
            self._slice = {}

    def answer(self, request: RemotingCommand, before: Mapping[str, object], name: str) -> RemotingCommand:
        """An object with this map as its last field, `name`."""
        self._encode()
        head = dumps_object_keys({**before, name: {}})
        parts = [head[:-2], *self._encoded, b"}}"]
        return RemotingCommand.response(request, ResponseCode.SUCCESS, parts=parts)


async def wide_answer(request: RemotingCommand, body: object) -> RemotingCommand:
    """The answer with this body, which nobody else may hold: it is encoded in a thread."""
    encoded = await asyncio.to_thread(dumps_object_keys, body)
    return RemotingCommand.response(request, ResponseCode.SUCCESS, body=encoded)
