"""One broker process without its sockets and threads: the broker's own start, jobs and topic deletion, run in line.

What the broker hands to threads runs where it stands, so a coroutine of the start ends in one go. Nothing of the
start's order is told here a second time: `BrokerController._load`, `open_archive` and `_drop_topic` are driven.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from broker.archiving.archive import open_archive
from broker.archiving.local_side import LocalSide
from broker.archiving.outside import Outside
from broker.archiving.restore import Restore, refuse_unfinished
from broker.archiving.state import Tables
from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.reading.tiered_store import TieredStore
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from broker.tables import state_file
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import ManualClock
from tests.doubles.sim_disk import SimDisk
from tests.simulation.faulty_store import FaultyStore
from tests.simulation.workers import AnyWorker
from tests.synced import nothing_to_sync

T = TypeVar("T")
BROKER = "b"


class Killed(BaseException):
    """The process is gone, at this very line."""


def drive(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    coroutine.close()
    raise AssertionError("the coroutine waits for something")


async def _in_line(work: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
    return work(*arguments, **keywords)


class _InLine:
    """Asks the loop where there is one thread only."""

    def call(self, work: Callable[[], T]) -> T:
        return work()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return drive(work)


class _Flusher:
    """Makes the log durable where it stands."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.flushed_offset = 0

    async def flush_now(self) -> None:
        self.flushed_offset = self._store.flush()
        self._store.after_flush(self.flushed_offset)

    async def upkeep_now(self) -> None:
        self._store.upkeep()


def outside(
    make_worker: Callable[[], AnyWorker], open_store: Callable[[], FaultyStore], is_crowded: Callable[[], bool]
) -> Outside:
    """What the archive has of the machine: the caller's thread, and the simulated store."""
    return Outside(
        in_thread=_in_line,
        bounded=lambda work, seconds: _in_line(work),
        ask_loop=_InLine,
        open_store=lambda url: open_store(),
        make_worker=lambda **keywords: make_worker(),  # type: ignore[arg-type]
        disk_ratio=lambda disk, root: 0.99 if is_crowded() else 0.1,
    )


@contextlib.contextmanager
def in_line() -> Iterator[None]:
    """While this holds, tables are saved in the caller's thread."""
    with patch.object(state_file.asyncio, "to_thread", _in_line):  # type: ignore[attr-defined]
        yield


class Process:
    """Not started yet; `start` may raise StartupError or die."""

    def __init__(
        self, disk: SimDisk, clock: ManualClock, config: BrokerConfig, machine: Outside, *, restore: bool = False
    ) -> None:
        self.disk, self.clock, self.config = disk, clock, config
        self.pinned: int | None = None
        root = config.root
        self.store = MessageStore(_store_config(root, config), disk, clock)
        tables = root / "config"
        nothing = SimpleNamespace(load=lambda: None, pending=lambda: 0, __len__=lambda: 0)
        topics = TopicConfigManager(disk, tables / "topics.json", clock)
        groups = SubscriptionGroupManager(disk, tables / "subscriptionGroup.json", clock)
        offsets = ConsumerOffsetManager(disk, tables / "consumerOffset.json", nothing_to_sync)
        self.context: Any = SimpleNamespace(
            config=config,
            clock=clock,
            root=root,
            store=self.store,
            tiered=TieredStore(self.store, config),
            topics=topics,
            groups=groups,
            offsets=offsets,
            retry_names=RetryNames(topics.topics, groups.groups, offsets.stands, lambda: False),
            schedule=nothing,
            modes=nothing,
            timers=_Nothing(),
            transactions=_Nothing(),
            hold=SimpleNamespace(release_topic=lambda topic: None),
            polling=SimpleNamespace(wake_topic=lambda topic: None),
            pops=SimpleNamespace(drop=lambda topic: None),
        )
        flusher: Any = _Flusher(self.store)
        self.local_side = LocalSide(
            config, self.store, flusher, Tables(topics, groups, offsets), _Pins(self), clock, disk, machine
        )
        self.archive: Any = None
        self._restore = Restore(config, disk) if restore else None
        self._controller: Any = SimpleNamespace(
            context=self.context,
            config=config,
            registration=SimpleNamespace(now=_registered),
            _drop_topic=self._dropped,
        )

    def start(self, loaded: Callable[[], None]) -> None:
        """`loaded` is called between the log's recovery and the archive's attachment."""
        if self._restore is not None:
            self._restore.begin()
        else:
            refuse_unfinished(self.config, self.disk)
        self.disk.make_dirs(self.config.root / "config")
        BrokerController._load(self._controller)
        try:
            loaded()
            self.archive = self._controller.archive = drive(open_archive(self.local_side, self._restore, cold_groups=4))
            if self.archive.reader is not None:
                self.context.tiered.attach(self.archive.reader)
            self.context.offsets.clip(self.store.max_offset)
        except Exception:
            if self.archive is not None:
                drive(self.archive.shutdown())
            self.store.shutdown()
            raise

    @property
    def lifecycle(self) -> Any:
        return self.archive.lifecycle

    @property
    def journal(self) -> Any:
        return self.archive.journal

    def flush(self) -> None:
        self.store.after_flush(self.store.flush())
        self.store.upkeep()

    def write_state(self) -> None:
        self.archive.state_job()()

    def drop_topic(self, topic: str) -> None:
        drive(self._dropped(topic))

    async def _dropped(self, topic: str) -> None:
        await BrokerController._drop_topic(self._controller, topic)

    def stop(self) -> None:
        """As `BrokerController.shutdown`, without what it has to do with clients."""
        drive(self.archive.shutdown())
        if self.store.failed is None:
            for table in (self.context.topics, self.context.groups, self.context.offsets):
                table.file.save_now()
            self.flush()
            drive(self.archive.write_last_state())
        self.store.shutdown()

    def told_minimum(self, topic: str, queue: int) -> int:
        return int(self.context.tiered.min_offset(topic, queue))


class _Pins:
    """What waits is told by the story."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def lowest(self) -> int | None:
        return self._process.pinned

    def reappend(self, below: int) -> bool:
        return False

    def counts(self) -> dict[str, int]:
        return {"timers": 0, "delayed": 0, "half_messages": 0}


class _Nothing:
    def load(self) -> None:
        """Nothing was stored."""

    def __len__(self) -> int:
        return 0


async def _registered() -> None:
    """No name server."""


def _store_config(root: Path, config: BrokerConfig) -> StoreConfig:
    return StoreConfig(
        root,
        commit_log_file_size=config.mapped_file_size_commit_log,
        flush_disk_type=config.flush_disk_type,
        queue_first_step=4096,
        queue_file_size=8000,
        index_slots=64,
        index_entries=200,
        checkpoint_bytes=8000,
    )


def queues_of(store: MessageStore) -> Sequence[tuple[str, int]]:
    return [(topic, queue) for topic, queues in store.queues().items() for queue in queues]
