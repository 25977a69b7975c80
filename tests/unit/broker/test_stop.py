"""A stop ends although steps fail or hang. The next start completes the missing ones, as after a crash."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from broker import broker_controller
from broker.broker_controller import BrokerController, Step
from broker.config import BrokerConfig
from broker.machine import Machine
from broker.store.data_directory import DataDirectory
from broker.store.errors import StoreNotWritable
from infra.clock import SystemClock
from infra.config.properties import load
from infra.disk.filesystem import RealDisk
from infra.loop.supervisor import Stop
from infra.process.startup import EXIT_FAILED
from tests.kit.broker.in_process import running, send


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_controller, "_STOP_S", dict.fromkeys(broker_controller._STOP_S, 0.5))


def make_broker(root: Path) -> BrokerController:
    own = [f"storePathRootDir={root}", "mappedFileSizeCommitLog=1m", "listenPort=0", "adminPort=0"]
    config = load(BrokerConfig, None, [*own, "bindAddress=127.0.0.1", "brokerIP1=127.0.0.1"])
    return BrokerController(config, Machine(clock=SystemClock(), disk=RealDisk()))


def stored(broker: BrokerController) -> int:
    return broker.store.queues.max_offset("orders", 0)


async def test_step_that_fails_or_hangs_does_not_prevent_the_others() -> None:
    stop = Stop("test", {"fails": 20, "hangs": 0.01, "works": 20})
    done: list[str] = []

    async def fail() -> None:
        raise OSError("gone")

    async def hang() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if done:
                    raise

    async def work() -> None:
        done.append("works")

    assert not await stop.step("fails", fail())
    assert not await stop.step("hangs", hang())
    assert await stop.step("works", work())
    assert (done, stop.left_behind) == (["works"], ["hangs"])


@pytest.mark.usefixtures("impatient")
async def test_hanging_fsync_does_not_block_a_stop_and_loses_no_synced_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go = threading.Event()
    async with running(tmp_path / "broker", "flushDiskType=SYNC_FLUSH") as (broker, connection):
        await send(connection, "orders")
        store = broker.store
        flush = store.visibility.flush

        def hang() -> int:
            assert may_go.wait(60)
            return flush()

        monkeypatch.setattr(store.visibility, "flush", hang)
        connection.close()
        await broker.shutdown()
        assert (broker.left_behind, broker.life.exit_code) == (["flush"], EXIT_FAILED)
        assert DataDirectory(store.config.root, store.disk).begin() is False, "marked as not cleanly stopped"
        may_go.set()
        await asyncio.to_thread(broker.flusher.close)
        store.abandon()  # as the end of the process does
    async with running(tmp_path / "broker") as (broker, _):
        assert stored(broker) == 1


@pytest.mark.usefixtures("impatient")
async def test_failed_sync_during_a_stop_fails_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path / "broker") as (broker, connection):
        await send(connection, "orders")
        await broker.flusher.flush_now()

        def fail() -> int:
            raise StoreNotWritable("a sync to the disk failed: Input/output error")

        monkeypatch.setattr(broker.store.visibility, "flush", fail)
        await broker.shutdown()
        monkeypatch.undo()
        assert (broker.left_behind, broker.life.exit_code) == ([], EXIT_FAILED)
    async with running(tmp_path / "broker") as (broker, _):
        assert stored(broker) == 1


async def test_failed_start_undoes_its_steps_in_reverse_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = make_broker(tmp_path / "broker")
    undone: list[str] = []

    def noting(step: Step) -> Step:
        undo = step.undo
        if undo is None:
            return step

        async def note() -> None:
            undone.append(step.name)
            await undo()

        return step._replace(undo=note)

    async def fail() -> None:
        raise OSError("the jobs have no thread")

    steps = [noting(step) for step in broker.starting]
    assert [step.name for step in steps][-1] == "jobs"
    monkeypatch.setattr(BrokerController, "starting", [*steps[:-1], Step("jobs", fail)])
    with pytest.raises(OSError, match="no thread"):
        await broker.start()
    monkeypatch.undo()
    assert undone == ["tasks", "ports", "archive", "log"]
    async with running(tmp_path / "broker") as (again, _):
        assert again.life.accepting, "the directory is locked by nobody"
