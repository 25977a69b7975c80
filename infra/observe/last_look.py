"""A look at everything that is told from time to time: one for all who ask, and the last one where it takes long.

Who asks gets what is found if that is soon; else what was found the last time, and how old that is. So a look may take
as long as it should to be no burden.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, NamedTuple, TypeVar

from infra.clock import Clock

T = TypeVar("T")

_PATIENCE_S = 0.5


class Seen(NamedTuple, Generic[T]):
    """`age_s`: since the look began."""

    found: T
    age_s: float


class LastLook(Generic[T]):
    """Of the loop. `look(is_first)`: the first one is waited for, however long it takes."""

    def __init__(
        self, name: str, look: Callable[[bool], Coroutine[Any, Any, T]], clock: Clock, patience_s: float = _PATIENCE_S
    ) -> None:
        self._name, self._look, self._clock, self._patience_s = name, look, clock, patience_s
        self._last: tuple[T, float] | None = None
        self._under_way: asyncio.Task[None] | None = None

    async def get(self) -> Seen[T]:
        """Raises what the look raises, if it ends in time; of one that fails later the loop tells."""
        if self._under_way is None:
            self._under_way = asyncio.get_running_loop().create_task(self._looks(), name=self._name)
        looking = self._under_way
        ended, _ = await asyncio.wait({looking}, timeout=None if self._last is None else self._patience_s)
        if ended:
            looking.result()
        assert self._last is not None, "the first one was waited for"
        found, began = self._last
        return Seen(found, self._clock.monotonic() - began)

    async def _looks(self) -> None:
        began = self._clock.monotonic()
        try:
            self._last = await self._look(self._last is None), began
        finally:
            self._under_way = None

    def close(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
