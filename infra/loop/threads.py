"""What runs beside the event loop: threads, what they wait for, and work that the loop hands to one.

One seam for all of it, so that a simulation can let threads take turns, or do in line what they would do.
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


class Run(Protocol):
    """On the loop: what `work` returns or raises, in a thread."""

    async def __call__(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T: ...


class Thread(Protocol):
    """A thread that has begun."""

    def is_alive(self) -> bool: ...

    def join(self, timeout: float | None = None) -> None: ...


class Threads(Protocol):
    """Whoever has threads of its own, or is called by them, gets what it needs here."""

    def lock(self) -> Lock: ...

    def event(self) -> Event: ...

    def start(self, name: str, work: Callable[[], object]) -> Thread:
        """A thread of its own; it does not keep the process from ending."""

    async def run(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        """On the loop: what `work` returns or raises, in a thread."""

    def in_line(self, name: str) -> Run:
        """For work that may hang, one after the other: what hangs keeps none of the threads that others wait for."""


class SystemThreads:
    """The machine's."""

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

    def in_line(self, name: str) -> Run:
        return _Line(name)


class _Line:
    """One thread, which begins with the first work."""

    __slots__ = ("_pool",)

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, name)

    async def __call__(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        call = functools.partial(work, *arguments, **keywords)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)


SYSTEM_THREADS = SystemThreads()
