"""Detects a pull that makes no progress below the end of a queue.

A slave that lacks messages of its master answers in this way, and the next pull goes to the master. A reader that took
the answer for the end of the queue would lose the messages after it.
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
    """Counts pulls without progress during one read of a queue up to `end`."""

    def __init__(self, queue: MessageQueue, end: int) -> None:
        self._queue, self._end = queue, end
        self._offset, self._times = -1, 0

    async def is_at(self, offset: int, next_offset: int) -> bool:
        """Return whether a pull at `offset` must be repeated, after a pause.

        Raises:
            Failure: it was repeated too often.
        """
        if next_offset > offset or offset >= self._end:
            return False
        self._times = self._times + 1 if offset == self._offset else 1
        self._offset = offset
        if self._times > _TIMES:
            where = f"queue {self._queue.queue_id} of {self._queue.topic} at {self._queue.broker_name}"
            raise Failure(FAILED, f"{where} returns no message from offset {offset} on, but ends at {self._end}")
        await asyncio.sleep(_PAUSE_S)
        return True
