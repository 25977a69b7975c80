"""Work of the loop that may take long: a generator, which others may have the loop of wherever it yields.

What it has seen before it yields may have changed after: it looks again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from typing import Any, TypeVar, overload

from infra.clock import Clock
from infra.loop.pace import LONGEST_S, SHARE
from infra.loop.parts import Parts

T = TypeVar("T")
# Queues looked at before others get the loop: each may be a file that has to be opened.
SLICE = 32
Steps = Generator[None, None, T]
_NOT_SHARED = contextlib.nullcontext()


def at_once(steps: Steps[T]) -> T:
    """For who can't wait, or where nobody does."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@overload
async def in_turns(steps: Steps[T], *, shared: asyncio.Lock | None = None) -> T: ...
@overload
async def in_turns(steps: Steps[T], *, given_up: Callable[[], bool]) -> T | None: ...
async def in_turns(
    steps: Steps[T], *, given_up: Callable[[], bool] = lambda: False, shared: asyncio.Lock | None = None
) -> T | None:
    """Take one step in each turn of the loop; returns None if `given_up` returns true between two steps.

    Calls with the same `shared` lock take turns: together they take one step in each turn of the loop.
    """
    while not given_up():
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
        """After a piece of work that is as much as `weight` queues."""
        self._taken += weight
        if self._taken >= SLICE:
            self._taken = 0
            await asyncio.sleep(0)


async def in_slices(items: Iterable[T]) -> AsyncIterator[T]:
    """Yield the items; other requests are served after each slice of them."""
    slices = LoopSlices()
    for item in items:
        yield item
        await slices.step()


async def run_beside(parts: Parts[T], run: Callable[[Callable[[], object]], Coroutine[Any, Any, object]]) -> T:
    """Run the parts by `run`, on a thread, and what is between two of them in a turn of the loop.

    A cancellation is raised when all of it has run: nothing is left half done.
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
        running = asyncio.ensure_future(run(part))
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
