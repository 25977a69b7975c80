"""One broker process under the simulated loop: the real controller from its constructor to its shutdown.

Only what would reach the real machine is another: ports, threads and their locks are the loop's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import greenlet

from broker import broker_controller
from broker.archiving import ask_loop
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.store import checkpointer, commit_log, log_end, queue_state, visibility
from broker.store.config import StoreConfig
from broker.tables import state_file
from lifecycle import rounds, scheduler, turns
from tests.simulation.messaging.faulty_disk import FaultyDisk
from tests.simulation.messaging.loop import Event, SimClock, SimLock, SimLoop, SimThread, Thread

T = TypeVar("T")
PORT = 10911
ROOT = "/store"
# A slow disk makes a start long, at a second for each call; one that hangs would never end.
START_S, STOP_S = 3600.0, 120.0

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
        return self.controller.life.end_wanted.is_set()

    def die(self) -> None:
        """Without a word."""
        self.disk.dead = True
        self.disk.platter.kill()
        self.loop.abandon()


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
        patch.object(checkpointer, "threading", locks),
        patch.object(log_end, "threading", locks),
        patch.object(queue_state, "threading", locks),
        patch.object(visibility, "threading", locks),
        patch.object(commit_log, "threading", locks),
        patch.object(state_file, "threading", locks),
        patch.object(rounds, "threading", locks),
        patch.object(ask_loop, "asyncio", ask),
        patch.object(scheduler, "threading", SimpleNamespace(Event=Event, Thread=Thread)),
        patch.object(turns, "threading", SimpleNamespace(Event=Event, Lock=SimLock)),
    ):
        yield


def _is_free(*_: object) -> None:
    """Each machine of the simulation has its own ports."""
