"""What runs beside the event loop: threads, what they wait for, and work that the loop hands to one.

One seam for all of it, so that a simulation can let threads take turns, or do in line what they would do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar

from infra.locks import Event, Lock

P = ParamSpec("P")
T = TypeVar("T")


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


SYSTEM_THREADS = SystemThreads()
