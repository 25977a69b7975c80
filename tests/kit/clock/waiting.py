"""Wait for a condition with a deadline, never for a guessed duration."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable

DEADLINE_S = 60.0
_STEP_S = 0.01


class NotWithin(AssertionError):
    """The condition was not met before the deadline."""


def wait_until(
    condition: Callable[[], bool], what: str = "what the test waits for", timeout: float = DEADLINE_S
) -> None:
    deadline, pause = time.monotonic() + timeout, threading.Event()
    while not condition():
        if time.monotonic() >= deadline:
            raise NotWithin(f"{what}: not within {timeout:g} s")
        pause.wait(_STEP_S)


async def until(
    condition: Callable[[], bool | Awaitable[bool]],
    what: str = "what the test waits for",
    timeout: float = DEADLINE_S,
) -> None:
    """Wait on an event loop, which runs other work meanwhile; the condition may ask a server."""
    never = asyncio.Event()
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            while not await _holds(condition):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STEP_S):
                        await never.wait()
    except TimeoutError:
        if not limit.expired():
            raise
        raise NotWithin(f"{what}: not within {timeout:g} s") from None


async def _holds(condition: Callable[[], bool | Awaitable[bool]]) -> bool:
    found = condition()
    return found if isinstance(found, bool) else await found
