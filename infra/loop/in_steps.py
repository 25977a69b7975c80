"""Long work on the event loop, in slices: other tasks run between two of them.

Steps are a generator that yields between two slices. State that it read before a yield may have changed after it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar, overload

from infra.clock import Clock
from infra.loop.pace import LONGEST_S, SHARE
from infra.loop.parts import Parts, nothing

T = TypeVar("T")
# Queues per slice: each may be a file that has to be opened.
SLICE = 32
Steps = Generator[None, None, T]
_NOT_SHARED = contextlib.nullcontext()


def at_once(steps: Steps[T]) -> T:
    """Run all steps without yielding to the event loop."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@overload
async def in_turns(steps: Steps[T], *, shared: asyncio.Lock | None = None) -> T: ...
@overload
async def in_turns(steps: Steps[T], *, is_cancelled: Callable[[], bool]) -> T | None: ...
async def in_turns(
    steps: Steps[T], *, is_cancelled: Callable[[], bool] = lambda: False, shared: asyncio.Lock | None = None
) -> T | None:
    """Run one step per iteration of the event loop. Return None once `is_cancelled` returns true between two steps.

    All calls with the same `shared` lock run one step per iteration together.
    """
    while not is_cancelled():
        async with shared or _NOT_SHARED:
            try:
                next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            await asyncio.sleep(0)
    steps.close()
    return None


class LoopSlices:
    """Yields to the event loop after each slice of work, however the loops that do the work are nested."""

    def __init__(self) -> None:
        self._taken = 0

    async def step(self, weight: int = 1) -> None:
        """Count a piece of work as heavy as `weight` queues; yield if the slice is full."""
        self._taken += weight
        if self._taken >= SLICE:
            self._taken = 0
            await asyncio.sleep(0)


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """Iterate over items; other tasks run after each slice of them."""
    slices = LoopSlices()
    for item in items:
        yield item
        await slices.step()


async def run_beside(parts: Parts[T], run: Callable[[Callable[[], object]], Coroutine[Any, Any, object]]) -> T:
    """Run each part by `run` on a thread, and the code between two parts on the event loop.

    A cancellation takes effect after the last part, so the work is never half done.
    """
    error: BaseException | None = None
    is_cancelled = False
    while True:
        try:
            part = next(parts) if error is None else parts.throw(error)
        except StopIteration as end:
            if is_cancelled:
                raise asyncio.CancelledError from None
            result: T = end.value
            return result
        running = asyncio.ensure_future(asyncio.sleep(0) if part is nothing else run(part))
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                is_cancelled = True
        error = running.exception()


class LoopPace:
    """Limits one piece of work to a share of the event loop's time."""

    def __init__(self, clock: Clock, share: float = SHARE) -> None:
        """`share`: of the loop's time, above 0 and at most 1."""
        assert 0 < share <= 1, share
        self._clock, self._per_second = clock, 1 / share - 1
        self._since = clock.thread_seconds()

    async def pause(self) -> None:
        """Sleep between two slices, in proportion to the time that the last one took."""
        worked = self._clock.thread_seconds() - self._since
        await asyncio.sleep(min(worked * self._per_second, LONGEST_S))
        self._since = self._clock.thread_seconds()
