"""Dependencies of the archive on the environment: event loop, threads, object store, workers. Simulations replace them.

The store and the tables are used on the event loop only. Job threads call it through `LoopCaller`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from infra.disk.filesystem import Disk
from infra.loop.bounded_thread import run_bounded
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.objects.open import open_store
from infra.objects.store import ObjectStore
from tiered.worker.client import WorkerClient

T = TypeVar("T")
_TIMEOUT_S = 120.0  # if the loop is busy for longer, the job fails


class LoopCaller(Protocol):
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


class InThread(Protocol):
    """Runs a call in a thread."""

    def __call__(self, work: Callable[..., T], /, *arguments: Any) -> Awaitable[T]: ...


class Bounded(Protocol):
    """Runs a call that may hang in a thread, and waits at most `seconds` for it."""

    def __call__(self, work: Callable[[], T], seconds: float, /) -> Awaitable[T]: ...


def _used_share(disk: Disk, root: Path) -> float:
    return disk.room(root).used_ratio


def _ask_running_loop() -> LoopCaller:
    return AskLoop(asyncio.get_running_loop())


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment of a running broker."""

    threads: Threads = SYSTEM_THREADS
    bounded: Bounded = run_bounded
    ask_loop: Callable[[], LoopCaller] = _ask_running_loop
    open_store: Callable[[str], ObjectStore] = open_store
    make_worker: Callable[..., WorkerClient] = WorkerClient
    disk_ratio: Callable[[Disk, Path], float] = _used_share

    @property
    def in_thread(self) -> InThread:
        return self.threads.run
