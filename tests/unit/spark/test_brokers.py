"""Tests of the requests to brokers while a query of both tiers is planned."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from neve.spark.brokers import REQUESTS_IN_FLIGHT, ClusterBrokers
from neve.spark.planning.options import Cluster
from neve.spark.planning.queues import Bounds, BrokerRefused, Queue

TOPICS = [f"t{number:03d}" for number in range(200)]


class FakeClient:
    """A client of one broker with topics of two queues, which counts requests in flight."""

    def __init__(self, refused: str | None = None) -> None:
        self._refused, self._now, self.most, self.asked = refused, 0, 0, 0
        self.admin = self

    async def _answer(self) -> None:
        self.asked += 1
        self._now += 1
        self.most = max(self.most, self._now)
        for _ in range(5):
            await asyncio.sleep(0)
        self._now -= 1

    async def cluster_info(self) -> dict[str, Any]:
        return {"b": type("Info", (), {"master": "127.0.0.1:1"})()}

    async def topic_route(self, topic: str) -> Any:
        await self._answer()
        if topic == self._refused:
            raise BrokerError(ResponseCode.NO_PERMISSION, "you may not")
        if topic == "nowhere":
            raise BrokerError(ResponseCode.TOPIC_NOT_EXIST, "no route")
        queues = [type("At", (), {"broker_name": "b", "queue_id": number})() for number in range(2)]
        return type("Route", (), {"read_queues": queues, "write_queues": queues, "brokers": ["b"]})()

    async def max_offset(self, topic: str, _queue: object) -> int:
        await self._answer()
        return int(topic[1:]) + 1

    async def min_offset(self, _topic: str, _queue: object) -> int:
        await self._answer()
        return 1

    async def close(self) -> None:
        """Do nothing."""


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()

    async def connected(_cluster: Cluster) -> FakeClient:
        return fake

    monkeypatch.setattr("neve.spark.brokers._connected", connected)
    return fake


def test_requests_for_many_topics_are_concurrent_and_limited(client: FakeClient) -> None:
    brokers = ClusterBrokers(Cluster("namesrv"))
    try:
        seen = brokers.seen([*TOPICS, "nowhere"])
    finally:
        brokers.close()
    assert seen.bounds == {
        Queue("b", topic, queue): Bounds(1, number + 1) for number, topic in enumerate(TOPICS) for queue in range(2)
    }
    assert client.asked == len(TOPICS) * 5 + 1
    assert REQUESTS_IN_FLIGHT // 2 < client.most <= REQUESTS_IN_FLIGHT


def test_refused_topic_is_named_and_not_taken_as_empty(client: FakeClient) -> None:
    client._refused = "t007"
    brokers = ClusterBrokers(Cluster("namesrv"))
    try:
        with pytest.raises(BrokerRefused, match=r"topic t007 \(namesrv namesrv\): no rights"):
            brokers.seen(TOPICS)
    finally:
        brokers.close()
