"""A queue that gives nothing and leads nowhere below its end: asked again for a while, and then an error.

A slave that lacks what its master has answers so: the next pull goes to the master. Who took it for the end of the
queue would leave out what is behind.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from neve.cli.failures import FAILED, Failure

if TYPE_CHECKING:
    from neve.client import MessageQueue

_TIMES = 20
_PAUSE_S = 0.25


class Standstill:
    """Of one reading of a queue up to `end`."""

    def __init__(self, queue: MessageQueue, end: int) -> None:
        self._queue, self._end = queue, end
        self._offset, self._times = -1, 0

    async def is_at(self, offset: int, next_offset: int) -> bool:
        """Whether a pull at `offset` is to be done again; returns after a pause then.

        Raises:
            Failure: it was so often.
        """
        if next_offset > offset or offset >= self._end:
            return False
        self._times = self._times + 1 if offset == self._offset else 1
        self._offset = offset
        if self._times > _TIMES:
            where = f"queue {self._queue.queue_id} of {self._queue.topic} at {self._queue.broker_name}"
            raise Failure(FAILED, f"{where} gives nothing from {offset} on, and ends at {self._end}")
        await asyncio.sleep(_PAUSE_S)
        return True
