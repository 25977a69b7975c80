"""A figure that takes long to compute, shared by all callers.

A caller gets a new result if the computation ends soon, else the previous result with its age. The computation may
therefore be slow enough to be no burden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

from infra.clock import Clock

T = TypeVar("T")

_WAIT_S = 0.5


class AgedResult(NamedTuple, Generic[T]):
    """A result. `age_s`: time since its computation began."""

    found: T
    age_s: float


class LatestResult(Generic[T]):
    """Runs `compute(is_first)` on the event loop. Callers wait for the first result however long it takes."""

    def __init__(
        self, name: str, compute: Callable[[bool], Coroutine[Any, Any, T]], clock: Clock, wait_s: float = _WAIT_S
    ) -> None:
        self._name, self._compute, self._clock, self._wait_s = name, compute, clock, wait_s
        self._last: tuple[T, float] | None = None
        self._running: asyncio.Task[None] | None = None

    async def get(self) -> AgedResult[T]:
        """Return the latest result. Raises the error of a computation that fails in time; asyncio logs a later one."""
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._run(), name=self._name)
        running = self._running
        ended, _ = await asyncio.wait({running}, timeout=None if self._last is None else self._wait_s)
        if ended:
            running.result()
        assert self._last is not None, "the first one was waited for"
        found, began = self._last
        return AgedResult(found, self._clock.monotonic() - began)

    async def _run(self) -> None:
        began = self._clock.monotonic()
        try:
            self._last = await self._compute(self._last is None), began
        finally:
            self._running = None

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
