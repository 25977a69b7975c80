"""A call that may hang, on a daemon thread: unlike a thread of the loop's pool, it does not keep the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def run_bounded(work: Callable[[], T], seconds: float) -> T:
    """Return or raise the outcome of the call. After a TimeoutError its thread is abandoned."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - passed to the caller
            outcome.set_exception(error)

    threading.Thread(target=run, name="bounded", daemon=True).start()
    waiting = asyncio.wrap_future(outcome)
    done, _ = await asyncio.wait({waiting}, timeout=seconds)
    if not done:
        waiting.add_done_callback(_take)
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return waiting.result()


def _take(late: asyncio.Future[T]) -> None:
    """Retrieve the error of an abandoned call, which asyncio would log otherwise."""
    if not late.cancelled():
        late.exception()
