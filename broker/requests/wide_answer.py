"""Answers that may tell of tens of thousands of queues: looked up in slices, encoded beside the loop."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from neve.remoting.body import dumps_object_keys
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

T = TypeVar("T")
# Queues looked at before other requests get their turn.
SLICE = 64


async def in_slices(queues: Iterable[T]) -> AsyncIterator[T]:
    """The same queues, or whatever costs as much; other requests are served in between."""
    for number, queue in enumerate(queues, 1):
        yield queue
        if number % SLICE == 0:
            await asyncio.sleep(0)


async def wide_answer(request: RemotingCommand, body: object) -> RemotingCommand:
    """The answer with this body, which nobody else may hold: it is encoded in a thread."""
    encoded = await asyncio.to_thread(dumps_object_keys, body)
    return RemotingCommand.response(request, ResponseCode.SUCCESS, body=encoded)
