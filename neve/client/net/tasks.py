"""The background tasks of a client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Tasks:
    """Runs background tasks until the client closes."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()
        self.are_closing = False

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the background until it ends or the client closes; log its error."""
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("background task failed: task=%s error=%s", task.get_name(), error, exc_info=error)

    async def close(self) -> None:
        """Cancel all tasks, and wait for their end."""
        self.are_closing = True
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


async def ended(run: asyncio.Future[Any]) -> None:
    """Wait for the end of `run`. If the caller is cancelled, cancel `run` and wait for its end."""
    try:
        await asyncio.wait({run})
    finally:
        if not run.done():
            run.cancel()
            await asyncio.wait({run})
