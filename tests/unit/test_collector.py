"""Tests of garbage collection: full collections cover only new objects, so servers must not create cycles."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import mmap
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from broker.broker_controller import BrokerController
from broker.clients.client_manager import ClientChannel
from broker.long_polling.pull_request_hold import HeldPull
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue, MappedFiles, QueueFile
from broker.store.queue_removal import QueueRemoval
from infra.net.remoting_server import Connection, open_connection
from infra.process import collector
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from tests.kit.broker.in_process import ask, running, send
from tests.kit.clock.waiting import until
from tests.kit.store.sim_disk import SimDisk

KEPT = (Connection, ClientChannel, HeldPull, ConsumeQueue, RemotingCommand, asyncio.Task)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> dict[str, int]:
    found = [type(one) for one in gc.get_objects()]
    return {kind.__name__: found.count(kind) for kind in KEPT}


async def a_client(broker: BrokerController, number: int) -> None:
    """Use a broker as a client: heartbeat, queue, long-polling pull and pop, and an error."""
    topic = f"of-client-{number}"
    connection = await open_connection(*broker.address)
    try:
        await send(connection, topic)
        subscription = {"topic": topic, "subString": "*", "expressionType": "TAG", "subVersion": 0}
        group: dict[str, object] = {"groupName": "g", "consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING"}
        group |= {"consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET", "subscriptionDataSet": [subscription]}
        beat = {"clientID": f"client-{number}", "producerDataSet": [{"groupName": "p"}], "consumerDataSet": [group]}
        assert (await ask(connection, Code.HEART_BEAT, json.dumps(beat).encode())).code == 0
        wide = {**group, "subscriptionDataSet": [{**subscription, "topic": f"of-many-{one}"} for one in range(1_000)]}
        for consumers, code in (([wide], 0), ([wide, {"groupName": ""}], ResponseCode.INVALID_PARAMETER)):
            body = json.dumps({**beat, "consumerDataSet": consumers}).encode()
            assert (await ask(connection, Code.HEART_BEAT, body)).code == code
        assert (await ask(connection, Code.DELETE_TOPIC_IN_NAMESRV)).code != 0
        pull = {"consumerGroup": "g", "topic": topic, "queueId": 0, "queueOffset": 1, "maxMsgNums": 32}
        pull |= {"sysFlag": 6, "commitOffset": 0, "suspendTimeoutMillis": 20_000, "subscription": "*", "subVersion": 0}
        pop = {"consumerGroup": "g", "topic": "nothing", "queueId": -1, "maxMsgNums": 1, "invisibleTime": 60_000}
        pop |= {"pollTime": 20_000, "bornTime": broker.clock.now_ms(), "initMode": 0}
        for code, ext in ((Code.PULL_MESSAGE, pull), (Code.POP_MESSAGE, pop)):
            texts = {name: str(value) for name, value in ext.items()}
            connection.send(RemotingCommand(code, ext=texts, opaque=7_000_000 + code))
        await until(lambda: broker.hold.count > 0)
    finally:
        connection.close()
    await until(lambda: broker.hold.count == 0)
    assert (await ask_once(broker, Code.DELETE_TOPIC_IN_BROKER, topic=topic)).code == 0


async def ask_once(broker: BrokerController, code: int, **ext: object) -> RemotingCommand:
    connection = await open_connection(*broker.address)
    try:
        return await ask(connection, code, **ext)
    finally:
        connection.close()


@pytest.mark.usefixtures("no_collector")
async def test_objects_of_clients_are_freed_without_the_garbage_collector(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, _):
        await ask_once(broker, Code.UPDATE_AND_CREATE_TOPIC, topic="nothing", readQueueNums=1, writeQueueNums=1)
        await a_client(broker, 0)
        before = alive()
        for number in range(1, 6):
            await a_client(broker, number)
        await until(lambda: alive() == before)


def test_full_collection_skips_objects_that_survived_one() -> None:
    thresholds = gc.get_threshold()
    callbacks = list(gc.callbacks)
    before = [[number] for number in range(1_000_000)]
    try:
        collector.settle()
        kept = [[number] for number in range(100_000)]
        young = len(gc.get_objects())  # frozen objects are not listed
        assert len(before) + len(kept) == 1_100_000
        assert young < 60_000
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_replaced_mappings_do_not_accumulate_in_the_youngest_generation() -> None:
    """Allocations and releases balance, so no collection starts until thousands of mappings are new."""
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    disk = SimDisk()
    disk.map = lambda path, size: mmap.mmap(-1, size)  # type: ignore[method-assign] # anonymous memory instead of files
    limit, owner = 3_000, SimpleNamespace(used=False, tail=None, map=None)
    files = [QueueFile(cast("ConsumeQueue", owner), 0, Path(f"/{number}"), 4096) for number in range(2 * limit)]
    maps = MappedFiles(limit, disk, QueueRemoval(StoreConfig(Path("/store")), disk))
    new: list[int] = []
    try:
        collector.settle()
        for number in range(6 * limit):
            maps.map(files[number % len(files)])
            owner.used = False
            if number % 250 == 249:
                new.append(sum(type(one) is mmap.mmap for one in gc.get_objects()))
        assert len(maps) == limit
        assert len(new) > 50
        assert max(new) <= 1_000
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def test_large_new_objects_are_frozen_in_a_settled_server() -> None:
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    try:
        gc.collect()
        large: list[list[int]] = [[]]
        collector.freeze_new()
        assert any(one is large for one in gc.get_objects()), "nothing is settled yet"
        collector.settle()
        table: list[list[int]] = [[]]
        collector.freeze_new()
        assert not any(one is table for one in gc.get_objects())
    finally:
        gc.callbacks[:] = callbacks
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 50, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("no_collector", "few_descriptors")
def test_simulated_disk_frees_descriptors_of_disks_in_cycles() -> None:
    for _ in range(500):
        disk = SimDisk()
        disk.write_atomic(Path("/file"), bytes(4096))
        left: list[object] = [disk, disk.map(Path("/file"), 4096)]
        left.append(left)


@pytest.mark.usefixtures("no_collector", "few_descriptors")
def test_simulated_file_without_descriptor_is_freed_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is freed at an arbitrary point, where an unraisable error would disturb other code."""
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    disks = []
    with pytest.raises(OSError) as caught:
        while True:
            disks.append(SimDisk())
            disks[-1].write_atomic(Path("/file"), b"")
    assert caught.value.errno == errno.EMFILE
    del caught, disks
    gc.collect()
    assert told == []
