"""Work of the loop that may take long: a generator, which others may have the loop of wherever it yields.

What it has seen before it yields may have changed after: it looks again.
"""

import asyncio
from collections.abc import Callable, Generator
from typing import TypeVar, overload

T = TypeVar("T")
Steps = Generator[None, None, T]


def at_once(steps: Steps[T]) -> T:
    """For who can't wait, or where nobody does."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


@overload
async def in_turns(steps: Steps[T]) -> T: ...
@overload
async def in_turns(steps: Steps[T], *, given_up: Callable[[], bool]) -> T | None: ...
async def in_turns(steps: Steps[T], *, given_up: Callable[[], bool] = lambda: False) -> T | None:
    """A step in each turn of the loop; None when it was given up between two of them."""
    while not given_up():
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)
    steps.close()
    return None
