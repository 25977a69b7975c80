"""How a job's thread asks the broker's loop: the store and the tables live there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
_TIMEOUT_S = 120.0  # of a loop that is busy: longer, and the job has failed


class Ask(Protocol):
    """Called in a thread; both raise the exception of the work.

    TimeoutError: the loop was busy for too long. Then `call` has not run the work and never will; `wait` has cancelled
    the coroutine.
    """

    def call(self, work: Callable[[], T]) -> T:
        """Done on the loop in one step."""
        ...

    def wait(self, work: Coroutine[Any, Any, T]) -> T: ...


class AskLoop:
    """The running broker's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def call(self, work: Callable[[], T]) -> T:
        answer: Future[T] = Future()

        def run() -> None:  # no task: jobs ask of each topic
            if not answer.set_running_or_notify_cancel():
                return  # the caller has reported the timeout
            try:
                answer.set_result(work())
            except Exception as error:  # noqa: BLE001 - the job's, as if it had called
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
