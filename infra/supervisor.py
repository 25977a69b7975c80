"""Background tasks with a name: errors are logged and counted, never lost, and a loop goes on after a failure."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Supervisor:
    """Owns the tasks of one server; `stop` ends them all."""

    def __init__(self, name: str, *, limit: int = 4096) -> None:
        self._name = name
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self.failures: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[None]:
        """Run `work` once in the background."""
        if len(self._tasks) >= self._limit:
            work.close()
            raise RuntimeError(f"{self._name} has {self._limit} background tasks already")
        task = asyncio.get_running_loop().create_task(self._guard(name, work), name=f"{self._name}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before it began: nobody else would end it
        return task

    def every(
        self, name: str, period_s: float, work: Callable[[], Awaitable[object] | None], *, first_s: float | None = None
    ) -> asyncio.Task[None]:
        """Run `work` after `first_s` (default: one period) and then `period_s` after each end."""
        return self.spawn(name, self._loop(name, period_s, work, period_s if first_s is None else first_s))

    async def stop(self) -> None:
        """Cancel everything and wait until it has ended."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _loop(
        self, name: str, period_s: float, work: Callable[[], Awaitable[object] | None], first_s: float
    ) -> None:
        await asyncio.sleep(first_s)
        while True:
            await self._guard(name, _call(work))
            await asyncio.sleep(period_s)

    async def _guard(self, name: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except Exception:
            self.failures[name] += 1
            log.exception("background task %s/%s failed", self._name, name)


async def _call(work: Callable[[], Awaitable[object] | None]) -> None:
    result = work()
    if result is not None:
        await result
