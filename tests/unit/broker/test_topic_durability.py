"""A topic created by a send is saved before the send is acknowledged. An older image never replaces a newer one."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.machine import Machine
from broker.tables.state_file import StateFile
from broker.tables.topic_config_manager import TopicConfigManager, system_topics
from infra.clock import ManualClock, SystemClock
from infra.config.properties import load
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection, open_connection
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, send
from tests.kit.clock.waiting import until
from tests.kit.store.gated_disk import GatedDisk


def manager(path: Path) -> TopicConfigManager:
    return TopicConfigManager(RealDisk(), path, ManualClock(1))


def test_new_topic_is_unsaved_until_a_restart_would_load_it(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    topics = manager(path)
    topics.ensure_system(system_topics("b", "c", auto_create=True, queues=8, trace=False))
    assert topics.create_in_send("orders", "TBW102", 4, enabled=True) is not None
    topics.create_plain("%RETRY%g", 1)
    assert [topics.is_saved(name) for name in ("orders", "%RETRY%g", "TBW102")] == [False, False, True]
    asyncio.run(topics.file.save())
    assert [topics.is_saved(name) for name in ("orders", "%RETRY%g")] == [True, True]
    assert not topics.unsaved

    after_kill = manager(path)
    after_kill.load()
    orders, retry = after_kill.select("orders"), after_kill.select("%RETRY%g")
    assert orders is not None
    assert orders.write_queue_nums == 4
    assert retry is not None


def test_slow_write_of_an_older_image_does_not_replace_a_newer_one(tmp_path: Path) -> None:
    disk, table = GatedDisk(is_open=False), {"n": 1}
    file = StateFile(disk, tmp_path / "state.json", lambda: dict(table))

    async def run() -> None:
        file.touch()
        slow = asyncio.create_task(file.save())
        assert await asyncio.to_thread(disk.began.wait, 10)
        table["n"] = 2
        file.touch()
        now = asyncio.create_task(asyncio.to_thread(file.save_now))
        disk.go.set()
        await asyncio.gather(slow, now)

    asyncio.run(run())
    assert file.load()["n"] == 2
    assert not file.dirty


@asynccontextmanager
async def broker_on(root: Path, disk: GatedDisk) -> AsyncIterator[tuple[BrokerController, Connection]]:
    settings = [f"storePathRootDir={root}", "mappedFileSizeCommitLog=1m", "listenPort=0", "adminPort=-1"]
    config = load(BrokerConfig, None, [*settings, "bindAddress=127.0.0.1", "flushConsumerOffsetInterval=10m"])
    broker = BrokerController(config, Machine(clock=SystemClock(), disk=disk))
    await broker.start()
    connection = await open_connection("127.0.0.1", broker.address[1])
    try:
        async with asyncio.timeout(60):
            disk.writes = disk.on_loop = 0
            yield broker, connection
    finally:
        disk.go.set()
        connection.close()
        await broker.shutdown()


async def test_sends_to_a_new_topic_wait_for_one_shared_save_of_the_topic(tmp_path: Path) -> None:
    disk = GatedDisk("topics.json")
    async with broker_on(tmp_path, disk) as (broker, connection):
        await send(connection, "known")
        writes, made = disk.writes, broker.store.max_physical_offset
        disk.go.clear()
        new = [asyncio.create_task(send(connection, f"new-{number % 100}")) for number in range(300)]
        await until(lambda: len(broker.topics.unsaved) == 100 and disk.pending == 1)
        await send(connection, "known")
        assert not any(task.done() for task in new)
        assert broker.store.queues.max_offset("new-7", 0) == 0, "not even stored"
        disk.go.set()
        await asyncio.gather(*new)
        assert disk.writes - writes <= 3
        assert disk.on_loop == 0
        assert broker.store.max_physical_offset > made
        assert [broker.store.queues.max_offset(f"new-{number}", 0) for number in (0, 7, 99)] == [3, 3, 3]
    after_kill = manager(tmp_path / "config" / "topics.json")
    after_kill.load()
    assert after_kill.select("new-99") is not None


async def test_failed_save_of_a_topic_fails_the_send_and_the_next_retries(tmp_path: Path) -> None:
    disk = GatedDisk("topics.json")
    async with broker_on(tmp_path, disk) as (broker, connection):
        disk.fault = OSError(errno.ENOSPC, "No space left on device")
        for _ in range(2):
            with pytest.raises(AssertionError, match="No space"):
                await send(connection, "new")
        assert broker.store.queues.max_offset("new", 0) == 0
        disk.fault = None
        await send(connection, "new")


async def test_dead_letter_is_acknowledged_only_after_its_topic_is_saved(tmp_path: Path) -> None:
    disk = GatedDisk("topics.json")
    async with broker_on(tmp_path, disk) as (broker, connection):
        await send(connection, "T")
        await ask(connection, Code.HEART_BEAT, b'{"clientID":"c","consumerDataSet":[{"groupName":"g"}]}')
        await until(lambda: broker.topics.is_saved("%RETRY%g"))
        await broker.topics.file.save()
        disk.go.clear()
        entry = broker.store.reader.entry("T", 0, 0)
        assert entry is not None
        ext = {"group": "g", "offset": entry[0], "delayLevel": -1, "originTopic": "T"}
        back = asyncio.create_task(ask(connection, Code.CONSUMER_SEND_MSG_BACK, **ext))
        await until(lambda: disk.pending == 1)
        assert not back.done()
        assert broker.store.queues.max_offset("%DLQ%g", 0) == 0
        disk.go.set()
        assert (await back).code == 0
        assert broker.store.queues.max_offset("%DLQ%g", 0) == 1


async def test_heartbeat_with_many_new_groups_saves_in_bulk_outside_the_loop(tmp_path: Path) -> None:
    disk = GatedDisk("topics.json")
    async with broker_on(tmp_path, disk) as (broker, connection):
        groups = ",".join(f'{{"groupName":"group-{number}"}}' for number in range(2000))
        answer = await ask(connection, Code.HEART_BEAT, f'{{"clientID":"c","consumerDataSet":[{groups}]}}'.encode())
        assert answer.code == 0
        assert len(broker.clients.consumers) == 2000
        await until(lambda: broker.topics.is_saved("%RETRY%group-1999"))
        assert disk.writes <= 2
        assert disk.on_loop == 0
