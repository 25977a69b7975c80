"""A call that may hang, in a thread that does not keep the process from ending, as one of the loop's own pool would."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_bounded(work: Callable[[], T], seconds: float) -> T:
    """What the call returns or raises; TimeoutError where it takes longer: its thread is left behind."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed to who waits
            outcome.set_exception(error)

    threading.Thread(target=run, name="bounded", daemon=True).start()
    waiting = asyncio.wrap_future(outcome)
    done, _ = await asyncio.wait({waiting}, timeout=seconds)
    if not done:
        waiting.add_done_callback(_take)
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return waiting.result()


def _take(late: asyncio.Future[T]) -> None:
    """Nobody waits for it any more; an error that nobody takes would be told as a fault of the loop."""
    if not late.cancelled():
        late.exception()
