"""Tests of allocation strategies against vectors generated with the classes of RocketMQ 5.3.3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neve.client import MessageQueue
from neve.client.group.allocation import (
    Allocation,
    average,
    by_config,
    chosen,
    circular,
    consistent_hash,
    machine_room,
    machine_room_nearby,
)
from neve.errors import ClientError

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parent / "java_vectors.json").read_text())["allocations"]


def _nearby(within: Allocation) -> Allocation:
    return machine_room_nearby(within, lambda q: q.broker_name.split("@")[0], lambda client: client.split("@")[0])


STRATEGIES: dict[str, Allocation] = {
    "average": average,
    "circular": circular,
    "machine_room r1 r3": machine_room({"r1", "r3"}),
    "consistent_hash": consistent_hash(),
    "consistent_hash 1": consistent_hash(1),
    "nearby average": _nearby(average),
    "nearby circular": _nearby(circular),
    "nearby consistent_hash": _nearby(consistent_hash()),
}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_shares_equal_those_of_the_java_client(name: str) -> None:
    for vector in VECTORS:
        queues = [MessageQueue("topic", broker, at) for broker in vector["brokers"] for at in range(vector["queues"])]
        members = vector["members"]
        shares = [
            [f"{queue.broker_name}/{queue.queue_id}" for queue in STRATEGIES[name](member, members[::-1], queues[::-1])]
            for member in members
        ]
        assert shares == vector["shares"][name], (vector["brokers"], vector["queues"], members)


def test_vectors_cover_every_strategy() -> None:
    assert {name for vector in VECTORS for name in vector["shares"]} == set(STRATEGIES)


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_non_member_gets_no_queue(name: str) -> None:
    assert STRATEGIES[name]("r1@stranger", ["r1@m"], [MessageQueue("t", "r1@a", 0)]) == []


def test_configured_share_is_used_unchanged() -> None:
    mine = [MessageQueue("t", "b", 3), MessageQueue("t", "a", 0), MessageQueue("other", "a", 0)]
    assert by_config(mine)("anybody", [], [MessageQueue("t", "a", 0)]) == mine[:2]


def test_unknown_machine_room_is_refused() -> None:
    allocate = machine_room_nearby(average, lambda _: "", lambda _: "r")
    with pytest.raises(ClientError):
        allocate("m", ["m"], [MessageQueue("t", "a", 0)])


def test_allocation_is_chosen_by_name_or_function() -> None:
    assert chosen("circular") is circular
    assert chosen(average) is average
    with pytest.raises(ClientError, match="average, circular, consistent_hash"):
        chosen("fair")
    with pytest.raises(ClientError):
        consistent_hash(0)
