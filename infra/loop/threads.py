"""Threads beside the event loop, their locks, and work that the loop hands to a thread.

All of it is one protocol, so that a simulation can schedule the threads, or run their work inline.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, Protocol, TypeVar

from infra.loop.locks import Event, Lock

P = ParamSpec("P")
T = TypeVar("T")


class RunInThread(Protocol):
    """Runs work on a thread for a coroutine."""

    async def __call__(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T: ...


class Thread(Protocol):
    """A started thread."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


class Threads(Protocol):
    """Makes threads, locks and events."""

    def lock(self) -> Lock: ...

    def event(self) -> Event: ...

    def start(self, name: str, work: Callable[[], object]) -> Thread:
        """Start a daemon thread."""

    async def run(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        """Run `work` on a thread of a shared pool; return or raise its outcome."""

    def in_line(self, name: str) -> RunInThread:
        """Return a runner with its own thread, for work that may hang: it blocks no thread of the shared pool."""


class SystemThreads:
    """Real threads."""

    __slots__ = ()

    def lock(self) -> Lock:
        return threading.Lock()

    def event(self) -> Event:
        return threading.Event()

    def start(self, name: str, work: Callable[[], object]) -> Thread:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
        return thread

    async def run(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return await asyncio.to_thread(work, *arguments, **keywords)

    def in_line(self, name: str) -> RunInThread:
        return _Line(name)


class _Line:
    """One thread, started by the first work."""

    __slots__ = ("_pool",)

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)

    async def __call__(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        call = functools.partial(work, *arguments, **keywords)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


SYSTEM_THREADS = SystemThreads()
