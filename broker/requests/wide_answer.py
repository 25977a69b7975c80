"""Answers about tens of thousands of queues: collected in slices and encoded as they are collected.

Freeing a table of all queues would block the event loop as long as building it. Encoding it in a thread would compete
with the event loop for the interpreter.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from infra.loop.in_steps import SLICE
from neve.remoting.body import dumps, dumps_object_keys
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand


class WideMap:
    """A map in RocketMQ's JSON dialect; at most one slice of it exists as objects, the rest as bytes."""

    def __init__(self) -> None:
        self._slice: dict[Any, Any] = {}
        self._encoded: list[bytes] = []

    def add(self, key: object, value: object) -> None:
        """Add a key, which must be new."""
        self._slice[key] = value
        if len(self._slice) == SLICE:
            self._encode()

    def add_numbers(self, key: str, numbers: Mapping[int, int]) -> None:
        """Add a key with a map of numbers, which may be large; costs a hundredth of `add`."""
        self._encode()
        row = b"%b:{%b}" % (dumps(key), ",".join(map("%d:%d".__mod__, numbers.items())).encode())
        self._encoded.append(b",%b" % row if self._encoded else row)

    def _encode(self) -> None:
        if self._slice:
            rows = dumps_object_keys(self._slice)[1:-1]
            self._encoded.append(b",%b" % rows if self._encoded else rows)
            self._slice = {}

    def parts(self, before: Mapping[str, object], name: str) -> list[bytes]:
        """Return the encoded object that has the fields `before` and this map as its last field, `name`."""
        self._encode()
        head = dumps_object_keys({**before, name: {}})
        return [head[:-2], *self._encoded, b"}}"]

    def answer(self, request: RemotingCommand, before: Mapping[str, object], name: str) -> RemotingCommand:
        return RemotingCommand.response(request, ResponseCode.SUCCESS, parts=self.parts(before, name))


async def wide_answer(request: RemotingCommand, body: object) -> RemotingCommand:
    """Return an answer whose body is encoded in a thread, so no other code may modify it."""
    encoded = await asyncio.to_thread(dumps_object_keys, body)
    return RemotingCommand.response(request, ResponseCode.SUCCESS, body=encoded)
