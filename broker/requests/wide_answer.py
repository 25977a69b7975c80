"""Answers that may tell of tens of thousands of queues: looked up in slices, encoded as they are looked up.

A table of all of them would cost the loop as much a second time, at once, when it is given back; and a thread that
encodes it takes turns with the loop.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from infra.loop.in_steps import SLICE
from neve.remoting.body import dumps, dumps_object_keys
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand


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

    def add_numbers(self, key: str, numbers: Mapping[int, int]) -> None:
        """As `add`, of a map of numbers, which may be large: a hundredth of the work."""
        self._encode()
        row = b"%b:{%b}" % (dumps(key), ",".join(map("%d:%d".__mod__, numbers.items())).encode())
        self._encoded.append(b",%b" % row if self._encoded else row)

    def _encode(self) -> None:
        if self._slice:
            rows = dumps_object_keys(self._slice)[1:-1]
            self._encoded.append(b",%b" % rows if self._encoded else rows)
            self._slice = {}

    def parts(self, before: Mapping[str, object], name: str) -> list[bytes]:
        """The encoded object that has this map as its last field, `name`."""
        self._encode()
        head = dumps_object_keys({**before, name: {}})
        return [head[:-2], *self._encoded, b"}}"]

    def answer(self, request: RemotingCommand, before: Mapping[str, object], name: str) -> RemotingCommand:
        return RemotingCommand.response(request, ResponseCode.SUCCESS, parts=self.parts(before, name))


async def wide_answer(request: RemotingCommand, body: object) -> RemotingCommand:
    """The answer with this body, which nobody else may hold: it is encoded in a thread."""
    encoded = await asyncio.to_thread(dumps_object_keys, body)
    return RemotingCommand.response(request, ResponseCode.SUCCESS, body=encoded)
