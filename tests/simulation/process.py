"""One broker process without its sockets and tasks: the broker's own start, jobs and topic deletion, run synchronously.

Work for threads runs in the caller, and so do calls from threads to the loop. The process is created by the
constructors that `broker.command` uses, and started by the same steps, as far as the archive needs them.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

from broker.archiving.environment import Environment
from broker.archiving.restore import Restore
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.loop.locks import Event, Lock
from infra.loop.threads import RunInThread, Thread
from neve.remoting.names import METADATA_LOG
from tests.kit.store.sim_disk import SimDisk
from tests.simulation.faulty_store import FaultyStore
from tests.simulation.workers import AnyWorker

P = ParamSpec("P")
T = TypeVar("T")
BROKER = "b"

_small_store = functools.partial(
    StoreConfig, queue_first_step=4096, queue_file_size=8000, index_slots=64, index_entries=200, checkpoint_bytes=8000
)


class Killed(BaseException):
    """The process is killed at this line."""


def drive(coroutine: Awaitable[T]) -> T:
    """Run a coroutine whose work for threads runs in the caller: inside an event loop, one that never suspends."""
    assert isinstance(coroutine, Coroutine)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        with asyncio.Runner() as runner:
            result: T = runner.run(coroutine)
            return result
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    coroutine.close()
    raise AssertionError("the coroutine waits for something")


class InLine:
    """An executor with one thread only, which is the loop's as well."""

    def lock(self) -> Lock:
        return threading.Lock()

    def event(self) -> Event:
        return threading.Event()

    def start(self, name: str, work: Callable[[], object]) -> Thread:
        raise AssertionError(f"{name} has no thread here: jobs are called")

    async def run(self, work: Callable[P, T], /, *arguments: P.args, **keywords: P.kwargs) -> T:
        return work(*arguments, **keywords)

    def in_line(self, name: str) -> RunInThread:
        return self.run


class _InLine:
    """Calls the loop where there is one thread only."""

    def call(self, work: Callable[[], T]) -> T:
        return work()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return drive(work)


async def _at_once(work: Callable[[], T], seconds: float) -> T:
    return work()


def make_environment(
    make_worker: Callable[[], AnyWorker], open_store: Callable[[], FaultyStore], is_crowded: Callable[[], bool]
) -> Environment:
    """Return the archive's environment: the caller's thread, and the simulated store."""
    return Environment(
        threads=InLine(),
        bounded=_at_once,
        ask_loop=_InLine,
        open_store=lambda url: open_store(),
        make_worker=lambda **keywords: make_worker(),  # type: ignore[arg-type]
        disk_ratio=lambda disk, root: 0.99 if is_crowded() else 0.1,
    )


class Process:
    """A process that is not started yet; `start` may raise StartupError or die."""

    def __init__(
        self,
        disk: SimDisk,
        clock: ManualClock,
        config: BrokerConfig,
        environment: Environment,
        *,
        restore: bool = False,
    ) -> None:
        self.pinned: int | None = None
        machine = Machine(clock=clock, disk=disk, environment=environment, check_port=_is_free)
        restoring = Restore(config, disk) if restore else None
        self.broker = BrokerController(config, machine, restoring, store_config=_small_store, pins=_Pins(self))
        self.store = self.broker.store

    def start(self, loaded: Callable[[], None]) -> None:
        """Start the process; `loaded` is called between the log's recovery and the archive's attachment."""
        undo: list[Callable[[], Awaitable[object]]] = []
        try:
            for step in self.broker.starting:
                if step.name == "archive":
                    loaded()
                if step.name == "ports":
                    break
                drive(step.do())
                if step.undo is not None:
                    undo.append(step.undo)
        except Exception:
            while undo:
                drive(undo.pop()())
            raise

    @property
    def archive(self) -> Any:
        return self.broker.archive

    @property
    def lifecycle(self) -> Any:
        return self.archive.lifecycle

    @property
    def journal(self) -> Any:
        return self.archive.journal

    def flush(self) -> None:
        self.store.after_flush(self.store.visibility.flush())
        self.store.upkeep()

    def write_state(self) -> None:
        self.archive.state_job()()

    def drop_topic(self, topic: str) -> None:
        drive(self.broker.topic_deletion.delete(topic))

    def stop(self) -> None:
        """Stop like `BrokerController.shutdown`, without the parts that concern clients."""
        drive(self.archive.shutdown())
        if self.store.end.failure is None:
            for table in (self.broker.topics, self.broker.groups, self.broker.offsets):
                table.file.save_now()
            self.flush()
            drive(self.archive.write_last_state())
        self.store.shutdown()

    def told_minimum(self, topic: str, queue: int) -> int:
        return int(self.broker.tiered.min_offset(topic, queue))


class _Pins:
    """Pending messages, controlled by the history."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def lowest(self) -> int | None:
        return self._process.pinned

    def undelivered_from(self) -> int | None:
        return self._process.pinned

    def reappend(self, below: int) -> bool:
        return False

    async def save(self) -> None:
        """Do nothing: the pins are on the disk."""

    def counts(self) -> dict[str, int]:
        return {"timers": 0, "delayed": 0, "half_messages": 0}


def _is_free(*_: object) -> None:
    """Return True: each machine of the simulation has its own ports."""


def queues_of(store: MessageStore) -> Sequence[tuple[str, int]]:
    """Return the queues that clients know."""
    return [
        (topic, queue) for topic, queues in store.queues.names().items() for queue in queues if topic != METADATA_LOG
    ]
