"""One broker process under the simulated loop: the real controller from its constructor to its shutdown.

Only the interfaces to the machine are replaced: ports, threads and their locks belong to the loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import greenlet

from broker.archiving.environment import Environment
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from broker.store.config import StoreConfig
from tests.simulation.messaging.faulty_disk import FaultyDisk
from tests.simulation.messaging.loop import SimClock, SimLoop, SimThread, SimThreads

T = TypeVar("T")
PORT = 10911
ROOT = "/store"
# With a slow disk, at a second per call, a start takes long; a hanging start would never end.
START_S, STOP_S = 3600.0, 120.0

small_store = functools.partial(
    StoreConfig, queue_first_step=4096, queue_file_size=8000, index_slots=64, index_entries=200, checkpoint_bytes=16000
)


class BrokerProcess:
    """One process, not started yet."""

    def __init__(self, config: BrokerConfig, clock: SimClock, disk: FaultyDisk, loop: SimLoop) -> None:
        self.disk, self.loop = disk, loop
        environment = Environment(threads=SimThreads(), ask_loop=_Ask)
        machine = Machine(clock=clock, disk=disk, environment=environment, check_port=_is_free)
        self.controller = BrokerController(config, machine, store_config=small_store)

    def start(self) -> None:
        """Start the broker; raise StartupError or the error of the disk."""
        self.loop.run(self.controller.start(), START_S)

    def shutdown(self) -> None:
        self.loop.run(self.controller.shutdown(), STOP_S)

    @property
    def wants_to_end(self) -> bool:
        return self.controller.life.end_requested.is_set()

    def die(self) -> None:
        """End the process without notice."""
        self.disk.dead = True
        self.disk.platter.kill()
        self.loop.abandon()


class _Ask:
    """A greenlet that calls its loop."""

    def __init__(self) -> None:
        self._loop = cast("SimLoop", asyncio.get_running_loop())

    def call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return self.wait(run())

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        here = greenlet.getcurrent()
        assert isinstance(here, SimThread)
        return here.wait_for(self._loop.create_task(work))


def _is_free(*_: object) -> None:
    """Return True: each machine of the simulation has its own ports."""
