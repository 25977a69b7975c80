"""Calls from job threads to the broker's event loop, on which the store and the tables are used."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_TIMEOUT_S = 120.0  # if the loop is busy for longer, the job fails


class Ask(Protocol):
    """Interface for threads to run work on the event loop; both methods raise the exceptions of the work.

    TimeoutError: the loop was busy for too long. The work of `call` then has not run and never will. The coroutine of
    `wait` is cancelled.
    """

    def call(self, work: Callable[[], T]) -> T:
        """Run `work` on the loop in one step."""
        ...

    def wait(self, work: Coroutine[Any, Any, T]) -> T: ...


class AskLoop:
    """Calls to the event loop of the running broker."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call(self, work: Callable[[], T]) -> T:
        answer: Future[T] = Future()

        def run() -> None:  # no task per call: jobs call once per topic
            if not answer.set_running_or_notify_cancel():
                return  # the caller has reported the timeout
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - raised in the calling thread
                answer.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        try:
            return answer.result(_TIMEOUT_S)
        except TimeoutError:
            if answer.cancel():
                raise
            return answer.result()  # the work is running, in one step of the loop, or has raised this error

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result(_TIMEOUT_S)
        except TimeoutError:
            answer.cancel()
            raise
