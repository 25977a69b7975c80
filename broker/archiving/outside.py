"""Dependencies of the archive on the environment: threads, object store, workers. Simulations replace them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from broker.archiving.ask_loop import Ask, AskLoop
from infra.disk.filesystem import Disk
from infra.loop.bounded_thread import run_bounded
from infra.loop.threads import SYSTEM_THREADS, Threads
from infra.objects.open import open_store
from infra.objects.store import ObjectStore
from tiered.worker.client import WorkerClient

T = TypeVar("T")


class InThread(Protocol):
    """Runs a call in a thread."""

    def __call__(self, work: Callable[..., T], /, *arguments: Any) -> Awaitable[T]: ...


class Bounded(Protocol):
    """Runs a call that may hang in a thread, and waits at most `seconds` for it."""

    def __call__(self, work: Callable[[], T], seconds: float, /) -> Awaitable[T]: ...


def _used_share(disk: Disk, root: Path) -> float:
    return disk.room(root).used_ratio


def _ask_running_loop() -> Ask:
    return AskLoop(asyncio.get_running_loop())


@dataclass(frozen=True, slots=True)
class Outside:
    """Environment of a running broker."""

    threads: Threads = SYSTEM_THREADS
    bounded: Bounded = run_bounded
    ask_loop: Callable[[], Ask] = _ask_running_loop
    open_store: Callable[[str], ObjectStore] = open_store
    make_worker: Callable[..., WorkerClient] = WorkerClient
    disk_ratio: Callable[[Disk, Path], float] = _used_share

    @property
    def in_thread(self) -> InThread:
        return self.threads.run
