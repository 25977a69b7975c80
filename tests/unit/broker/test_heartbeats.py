"""A client says the same every 30 s, of ten thousand topics if it likes: what changes nothing costs next to nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest

from broker.requests import client_manage
from infra.remoting_server import Connection, open_connection
from neve.remoting.body import HeartbeatData, loads_as
from neve.remoting.codes import RequestCode as Code
from tests.broker_in_process import ask, running

TOPICS = tuple(f"topic-{number}" for number in range(20))


def heartbeat(client: str, topics: tuple[str, ...] = TOPICS, version: int = 1, fingerprint: int = 0) -> bytes:
    subscriptions = [{"topic": topic, "subVersion": version, "codeSet": [], "tagsSet": []} for topic in topics]
    consumer = {"groupName": "g", "subscriptionDataSet": subscriptions}
    data = {"clientID": client, "consumerDataSet": [consumer], "producerDataSet": [{"groupName": "p"}]}
    return json.dumps(data | {"heartbeatFingerprint": fingerprint}).encode()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the heartbeats that were read."""
    lengths: list[int] = []

    def counted(body: bytes, kind: Any) -> Any:
        lengths.append(len(body))
        return loads_as(body, kind)

    monkeypatch.setattr(client_manage, "loads_as", counted)
    return lengths


async def beat(connection: Connection, body: bytes) -> str:
    answer = await ask(connection, Code.HEART_BEAT, body)
    assert answer.code == 0, answer.remark
    return answer.ext["IS_SUB_CHANGE"]


def test_a_heartbeat_that_says_the_same_again_is_not_read_again_and_its_client_lives(
    tmp_path: Path, read: list[int]
) -> None:
    async def main() -> None:
        async with running(tmp_path) as (broker, connection):
            clients, body = broker.context.clients, heartbeat("A", fingerprint=7)
            assert await beat(connection, body) == "true"
            before = [*clients.consumers["g"].channels.values(), *clients.producers["p"].values()]
            assert [await beat(connection, body) for _ in range(3)] == ["false"] * 3
            assert len(read) == 1
            after = [*clients.consumers["g"].channels.values(), *clients.producers["p"].values()]
            assert all(new.last_update > old.last_update for new, old in zip(after, before, strict=True))
            assert await beat(connection, heartbeat("A", fingerprint=8)) == "true"
            assert len(read) == 2

    asyncio.run(main())


def test_without_a_fingerprint_the_answer_stays_that_something_may_have_changed(
    tmp_path: Path, read: list[int]
) -> None:
    async def main() -> None:
        async with running(tmp_path) as (_, connection):
            assert [await beat(connection, heartbeat("A")) for _ in range(3)] == ["true"] * 3
            assert len(read) == 1

    asyncio.run(main())


def test_a_heartbeat_is_read_again_once_what_it_says_no_longer_stands(tmp_path: Path, read: list[int]) -> None:
    async def main() -> None:
        async with running(tmp_path) as (broker, connection):
            context, body = broker.context, heartbeat("A")
            await beat(connection, body)

            other = await open_connection(*context.address)
            await beat(other, heartbeat("B", ("elsewhere",)))
            assert context.clients.consumers["g"].subscriptions.keys() == {"elsewhere"}
            await beat(connection, body)
            assert context.clients.consumers["g"].subscriptions.keys() == set(TOPICS)
            await beat(other, heartbeat("B", version=2))
            await beat(connection, body)
            assert {sub.sub_version for sub in context.clients.consumers["g"].subscriptions.values()} == {2}
            other.close()

            await ask(connection, Code.UNREGISTER_CLIENT, clientID="A", consumerGroup="g", producerGroup="p")
            await beat(connection, body)
            assert context.clients.consumers["g"].client_ids() == ["A"]
            assert "p" in context.clients.producers

            assert (await ask(connection, Code.DELETE_TOPIC_IN_BROKER, topic="%RETRY%g")).code == 0
            await beat(connection, body)
            assert context.topics.select("%RETRY%g") is not None
            assert (await ask(connection, Code.DELETE_SUBSCRIPTIONGROUP, groupName="g")).code == 0
            await beat(connection, body)
            assert "g" in context.groups.groups

            known = len(read)
            await beat(connection, body)
            assert len(read) == known

    asyncio.run(main())


def test_what_a_group_subscribes_to_is_no_business_of_the_garbage_collector() -> None:
    body = heartbeat("A", tuple(f"topic-{number}" for number in range(2_000)))
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        data = loads_as(body, HeartbeatData)
        more = gc.get_count()[0] - before
    finally:
        gc.enable()
    assert len(data.consumer_data_set[0].subscription_data_set) == 2_000
    assert more < 100
