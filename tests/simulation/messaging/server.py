"""One broker process under the simulated loop: the real controller from its constructor to its shutdown.

Only what would reach the real machine is another: ports are the loop's own, locks are the loop's, and the jobs'
scheduler runs them as threads of the loop by its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import patch

import greenlet

from broker import archive_wiring, broker_controller, loop_hot_store, state_file
from broker.broker_controller import BrokerController
from broker.store import appender, commit_log
from broker.store.config import StoreConfig
from infra.clock import Clock
from infra.config import BrokerConfig
from lifecycle import archiver
from tests.simulation.messaging.faulty_disk import FaultyDisk
from tests.simulation.messaging.loop import SimClock, SimLock, SimLoop, SimThread

T = TypeVar("T")
PORT = 10911
ROOT = "/store"
START_S, STOP_S = 60.0, 120.0

small_store = functools.partial(
    StoreConfig, queue_first_step=4096, queue_file_size=8000, index_slots=64, index_entries=200, checkpoint_bytes=16000
)


class Server:
    """Not started yet."""

    def __init__(self, config: BrokerConfig, clock: SimClock, disk: FaultyDisk, loop: SimLoop) -> None:
        self.disk, self.loop = disk, loop
        self.controller = BrokerController(config, clock, disk, store_config=small_store)
        self.context = self.controller.context

    def start(self) -> None:
        """Raises StartupError or what the disk did."""
        self.loop.run(self.controller.start(), START_S)

    def shutdown(self) -> None:
        self.loop.run(self.controller.shutdown(), STOP_S)

    @property
    def wants_to_end(self) -> bool:
        return self.controller.stopped.is_set()

    def die(self) -> None:
        """Without a word."""
        self.disk.dead = True
        self.disk.platter.kill()
        self.loop.abandon()


class _Jobs:
    """`JobScheduler` by the loop's time: each job in a thread, never two runs of one at once."""

    def __init__(self, clock: Clock) -> None:
        self._jobs: dict[str, tuple[float, Callable[[], object]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.runs: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.last_error: dict[str, str] = {}

    def every(self, name: str, seconds: float, job: Callable[[], object]) -> None:
        self._jobs[name] = seconds, job

    def start(self) -> None:
        # called on the loop, as the broker does
        self._tasks = [asyncio.create_task(self._repeat(name, *what)) for name, what in self._jobs.items()]

    async def _repeat(self, name: str, seconds: float, job: Callable[[], object]) -> None:
        while True:
            await cast("SimLoop", asyncio.get_running_loop()).after(seconds)
            try:
                await asyncio.to_thread(job)
            except Exception as error:  # noqa: BLE001 - as the scheduler: told, and the job comes again
                self.failures[name] += 1
                self.last_error[name] = f"{type(error).__name__}: {error}"
            self.runs[name] += 1

    def shutdown(self) -> None:
        """Called in a thread: the running jobs have ended."""
        for task in self._tasks:
            task.get_loop().call_soon(task.cancel)


class _Outcome:
    """What a thread gets that has asked the loop."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task

    def result(self, timeout: float | None = None) -> Any:
        here = greenlet.getcurrent()
        assert isinstance(here, SimThread)
        return here.wait_for(self._task)


def _ask_loop(work: Coroutine[Any, Any, Any], loop: SimLoop) -> _Outcome:
    return _Outcome(loop.create_task(work))


@contextlib.contextmanager
def under_the_loop() -> Iterator[None]:
    """While this holds, brokers that are made live under a simulated loop."""
    locks = SimpleNamespace(Lock=SimLock)
    ask = SimpleNamespace(run_coroutine_threadsafe=_ask_loop)
    with (
        patch.object(broker_controller, "check_port", _is_free),
        patch.object(appender, "threading", locks),
        patch.object(commit_log, "threading", locks),
        patch.object(state_file, "threading", locks),
        patch.object(archiver, "threading", locks),
        patch.object(loop_hot_store, "asyncio", ask),
        patch.object(archive_wiring, "JobScheduler", cast("Any", _Jobs)),
    ):
        yield


def _is_free(*_: object) -> None:
    """Each machine of the simulation has its own ports."""
