"""A topic that is deleted and created again is empty, and no archived offset is assigned twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from neve.errors import BrokerError
from neve.remoting.codes import RequestCode as Code
from neve.remoting.codes import ResponseCode
from tests.kit.broker import in_process
from tests.kit.server.requests import SMALL, TOPIC, ask, offload, post, read_all, send

Up = Callable[..., AbstractContextManager[Any]]


def delete(neve: Any) -> None:
    (answer,) = ask(neve, (Code.DELETE_TOPIC_IN_BROKER, {"topic": TOPIC}, b""))
    assert answer.code == 0, answer.remark


def test_recreated_topic_without_archive_begins_at_offset_0(tmp_path: Path, neve_up: Up) -> None:
    arguments = ("--store", f"dir:{tmp_path / 'store'}", *SMALL)
    with neve_up(tmp_path, *arguments) as neve:
        assert send(neve, b"old-0", b"old-1") == [0, 1]
        delete(neve)
        assert send(neve, b"0", b"1", b"2") == [0, 1, 2]
        neve.kill()
    everything = {0: b"0", 1: b"1", 2: b"2", 3: b"3"}
    with neve_up(tmp_path, *arguments) as neve:
        assert send(neve, b"3") == [3]
        assert read_all(neve) == everything
        assert offload(neve, "?roll=1&evict=1")["objects"] == 1
        assert read_all(neve) == everything
        assert post(neve, "/archive/verify?deep=true")[0]["findings"] == []


def test_recreated_topic_with_archive_continues_above_hidden_offsets(tmp_path: Path, neve_up: Up) -> None:
    arguments = ("--store", f"dir:{tmp_path / 'store'}", *SMALL)
    with neve_up(tmp_path, *arguments) as neve:
        assert send(neve, b"old-0", b"old-1") == [0, 1]
        assert offload(neve)["objects"] == 1
        assert send(neve, b"old-2") == [2]
        delete(neve)
        assert send(neve, b"3") == [3]
        assert read_all(neve) == {3: b"3"}
        neve.kill()
    with neve_up(tmp_path, *arguments) as neve:
        assert send(neve, b"4") == [4]
        offload(neve, "?roll=1&evict=1")
        assert read_all(neve) == {3: b"3", 4: b"4"}
        delete(neve)
    with neve_up(tmp_path, *arguments) as neve:
        assert not (tmp_path / "data/broker/consumequeue" / TOPIC).exists()
        assert send(neve, b"5") == [5]


def test_messages_sent_while_the_end_is_recorded_are_below_it(tmp_path: Path) -> None:
    asyncio.run(_sent_meanwhile(tmp_path))


async def _sent_meanwhile(tmp_path: Path) -> None:
    settings = (f"storeUrl=dir:{tmp_path / 'store'}", "archivePeriod=24h")
    async with in_process.running(tmp_path / "data", *settings) as (broker, client):
        await in_process.send(client, TOPIC)
        await in_process.offload(broker)
        record = broker.archive.tombstones.record

        async def buried(topic: str, minimums: Mapping[int, int]) -> None:
            await record(topic, minimums)
            if topic == TOPIC and minimums[0] == 1:
                await in_process.send(client, TOPIC)

        broker.archive.tombstones.record = buried  # type: ignore[method-assign]
        assert (await in_process.ask(client, Code.DELETE_TOPIC_IN_BROKER, topic=TOPIC)).code == 0
        assert broker.archive.journal is not None
        assert broker.archive.journal.catalog.recorded_minimum(TOPIC, 0) == 2
        assert broker.store.queues.next_offset(TOPIC, 0) == 2


def test_messages_sent_during_a_failed_end_record_are_hidden_later(
    tmp_path: Path,
) -> None:
    asyncio.run(_buried_later(tmp_path))


async def _buried_later(tmp_path: Path) -> None:
    settings = (f"storeUrl=dir:{tmp_path / 'store'}", "archivePeriod=24h")
    async with in_process.running(tmp_path / "data", *settings) as (broker, client):
        await in_process.send(client, TOPIC)
        await in_process.offload(broker)
        record = broker.archive.tombstones.record

        async def once(topic: str, minimums: Mapping[int, int]) -> None:
            if minimums[0] > 1:
                raise BrokerError(ResponseCode.SYSTEM_BUSY, "the store is down")
            await record(topic, minimums)
            await in_process.send(client, TOPIC)
            await in_process.offload(broker)  # A round archives the messages sent in the meantime.

        broker.archive.tombstones.record = once  # type: ignore[method-assign]
        assert (await in_process.ask(client, Code.DELETE_TOPIC_IN_BROKER, topic=TOPIC)).code == ResponseCode.SYSTEM_BUSY
        assert broker.archive.journal is not None
        assert broker.archive.lifecycle is not None
        catalog = broker.archive.journal.catalog
        assert catalog.min_offset(TOPIC, 0) == 1, "the deleted message is in view"
        for _ in range(2):
            await asyncio.to_thread(broker.archive.lifecycle.expire.run)
            assert catalog.recorded_minimum(TOPIC, 0) == 2
            assert catalog.min_offset(TOPIC, 0) is None
        entries = catalog.next_seq
        await asyncio.to_thread(broker.archive.lifecycle.expire.run)
        assert catalog.next_seq == entries, "it is told once"
