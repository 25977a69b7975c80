"""Repeated heartbeats, even with ten thousand subscriptions, cost next to nothing if they change nothing."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from broker.broker_controller import BrokerController
from broker.clients import client_manager
from broker.clients.client_manager import Changes, ClientChannel, ConsumerGroup
from broker.requests import client_manage
from infra.loop.in_steps import Steps, at_once
from infra.net.remoting_server import Connection, open_connection
from neve.errors import UnknownOutcome
from neve.remoting.body import HeartbeatData, SubscriptionData, loads_as
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, running
from tests.kit.clock.calls_per_turn import CallsPerTurn

TOPICS = tuple(f"topic-{number}" for number in range(20))


def heartbeat(client: str, topics: tuple[str, ...] = TOPICS, version: int = 1, fingerprint: int = 0) -> bytes:
    subscriptions = [{"topic": topic, "subVersion": version, "codeSet": [], "tagsSet": []} for topic in topics]
    consumer = {"groupName": "g", "subscriptionDataSet": subscriptions}
    data = {"clientID": client, "consumerDataSet": [consumer], "producerDataSet": [{"groupName": "p"}]}
    return json.dumps(data | {"heartbeatFingerprint": fingerprint}).encode()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the lengths of the parsed heartbeats."""
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


async def test_repeated_heartbeat_is_not_parsed_and_keeps_its_client_alive(tmp_path: Path, read: list[int]) -> None:
    async with running(tmp_path) as (broker, connection):
        clients, body = broker.clients, heartbeat("A", fingerprint=7)
        assert await beat(connection, body) == "true"
        before = [*clients.consumers["g"].channels.values(), *clients.producers["p"].values()]
        assert [await beat(connection, body) for _ in range(3)] == ["false"] * 3
        assert len(read) == 1
        after = [*clients.consumers["g"].channels.values(), *clients.producers["p"].values()]
        assert all(new.last_update > old.last_update for new, old in zip(after, before, strict=True))
        assert await beat(connection, heartbeat("A", fingerprint=8)) == "true"
        assert len(read) == 2


async def test_heartbeat_without_a_fingerprint_is_always_answered_as_a_change(tmp_path: Path, read: list[int]) -> None:
    async with running(tmp_path) as (_, connection):
        assert [await beat(connection, heartbeat("A")) for _ in range(3)] == ["true"] * 3
        assert len(read) == 1


async def test_repeated_heartbeat_is_parsed_once_its_state_was_replaced(tmp_path: Path, read: list[int]) -> None:
    async with running(tmp_path) as (broker, connection):
        context, body = broker, heartbeat("A")
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


def test_wide_subscriptions_are_not_tracked_by_the_garbage_collector() -> None:
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


WIDE = tuple(f"a-topic-of-many-{number}" for number in range(2_000))


def test_wide_heartbeat_is_compared_in_slices_and_applied_atomically(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, others = client_manager._size, tuple(f"other-{topic}" for topic in WIDE)
    size = CallsPerTurn(whole)

    async def main() -> None:
        async with running(tmp_path) as (broker, connection):
            clients = broker.clients
            seen: set[frozenset[str]] = set()

            async def look() -> None:
                while True:
                    group = clients.consumers.get("g")
                    seen.add(frozenset(group.subscriptions) if group is not None else frozenset())
                    await asyncio.sleep(0)

            looking = asyncio.create_task(look())
            for topics in (WIDE, others, WIDE[:1_500]):
                await beat(connection, heartbeat("A", topics))
            looking.cancel()
            assert seen == {frozenset(), frozenset(WIDE), frozenset(others), frozenset(WIDE[:1_500])}
            assert clients.consumers["g"].size == sum(map(whole, subscriptions(broker)))

    monkeypatch.setattr(client_manager, "_size", size)
    asyncio.run(main())
    assert size.all == 2_000 + 4_000 + 3_500
    assert size.most <= 1_000


def subscriptions(broker: BrokerController) -> list[SubscriptionData]:
    return list(broker.clients.consumers["g"].subscriptions.values())


async def test_heartbeat_whose_group_changes_between_slices_is_compared_again(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        clients, kinds = broker.clients, ("", "", "")
        channel = ClientChannel(connection, "A", "JAVA", 1, 0.0, 0)

        def register(changes: Changes) -> ConsumerGroup:
            return clients.register_consumer("g", channel, kinds, changes)

        wide = [SubscriptionData(topic, sub_version=2) for topic in WIDE]
        steps = clients.compare("g", wide)
        for number in range(2):
            next(steps)
            next(steps)
            narrow = [SubscriptionData(topic, sub_version=3) for topic in (*WIDE[:9], f"other-{number}")]
            register(at_once(clients.compare("g", narrow)))
        group = register(at_once(steps))
        assert group.subscriptions.keys() == set(WIDE)
        assert [group.subscriptions[topic].sub_version for topic in WIDE[:10]] == [3] * 9 + [2]
        assert group.size == sum(map(client_manager._size, group.subscriptions.values()))

        steps, left = clients.compare("g", wide), 0
        for _ in steps:  # another change each time: the comparison terminates nevertheless
            left += 1
            register(at_once(clients.compare("g", [SubscriptionData(f"other-{left}")])))
        assert left == 3


async def test_requests_behind_a_wide_heartbeat_are_handled_after_it(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, connection):
        consumers = broker.clients.consumers
        await asyncio.gather(
            beat(connection, heartbeat("A", WIDE)),
            beat(connection, heartbeat("A", ("one",))),
            beat(connection, heartbeat("A", WIDE[1:])),
            beat(connection, heartbeat("A", ("two",))),
        )
        assert consumers["g"].subscriptions.keys() == {"two"}
        await asyncio.gather(
            beat(connection, heartbeat("A", WIDE)),
            ask(connection, Code.UNREGISTER_CLIENT, clientID="A", consumerGroup="g", producerGroup="p"),
        )
        assert "g" not in consumers
        assert "p" not in broker.clients.producers


async def test_connection_closed_during_a_wide_heartbeat_leaves_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (broker, _):
        clients = broker.clients
        begun, gone, over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        whole, closed = client_manager._compare, clients.connection_closed

        def held(changes: Changes, wanted: Sequence[SubscriptionData] | None) -> Steps[None]:
            begun.set()
            try:
                while not gone.is_set():
                    yield
                yield from whole(changes, wanted)
            finally:
                over.set()

        def see_it_go(connection: Connection) -> None:
            closed(connection)
            gone.set()

        monkeypatch.setattr(client_manager, "_compare", held)
        monkeypatch.setattr(clients, "connection_closed", see_it_go)
        other = await open_connection(*broker.address)
        asking = asyncio.create_task(beat(other, heartbeat("A", WIDE)))
        await begun.wait()
        other.abort()
        await over.wait()
        with pytest.raises(UnknownOutcome):
            await asking
        assert "g" not in clients.consumers
        assert clients.producers == {}
        assert clients.bytes == 0
