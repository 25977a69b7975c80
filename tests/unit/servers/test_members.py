"""Tests of test helpers that query controllers: each decision uses a single answer."""

from __future__ import annotations

from typing import Any

import msgspec
from typing_extensions import override

from tests.kit.server.members import Members


class NamedMember(msgspec.Struct, frozen=True):
    broker: str


A, B = NamedMember("a:1"), NamedMember("b:1")


class Changing(Members[NamedMember]):
    """Members with a sequence of different answers."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        super().__init__(5.0)
        self.members = [A, B]
        self._answers = iter(answers)

    @override
    def told(self) -> dict[str, Any]:
        return next(self._answers, {})


def led_by(address: str) -> dict[str, Any]:
    alive = [{"brokerAddress": address, "brokerId": 7, "alive": True}]
    return {"masterAddress": address, "masterEpoch": 3, "inSyncReplicas": alive}


def test_master_is_the_first_reported_member() -> None:
    assert Changing({}, led_by(""), led_by("b:1"), {}).master is B
    assert Changing(led_by("who is no member yet:1"), led_by("a:1")).master is A


def test_master_after_returns_the_first_different_master() -> None:
    assert Changing(led_by("a:1"), {}, led_by("b:1"), led_by("a:1")).master_after(A) is B


def test_broker_id_is_waited_for_and_taken_from_one_answer() -> None:
    assert Changing({}, led_by("a:1"), led_by("b:1"), {}).id_of(B) == 7
