"""The members of a set, as controllers tell of them: each question is decided by one answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from bench.wire import Client, Refused
from tests.waiting import wait_until

NAME = "broker-a"
_SYNC_STATE_DATA = 1006


def told_by(controller: str, timeout: float = 30.0, name: str = NAME) -> dict[str, Any]:
    """What the controller at an address says of a set; nothing while that is unknown, or while it can't be asked."""
    try:
        with Client(controller, timeout) as client:
            answer = client.ask(_SYNC_STATE_DATA, {}, json.dumps([name]).encode())
    except (OSError, Refused):
        return {}
    return dict(json.loads(answer.body)["replicasInfoTable"].get(name, {}))


def replicas_in(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All members, in sync or not."""
    return [*told.get("inSyncReplicas", ()), *told.get("notInSyncReplicas", ())]


def in_sync_in(told: Mapping[str, Any]) -> set[str]:
    """The addresses of those that are, and live."""
    return {one["brokerAddress"] for one in told.get("inSyncReplicas", ()) if one["alive"]}


class Member(Protocol):
    """A broker as a process."""

    @property
    def broker(self) -> str: ...


M = TypeVar("M", bound=Member)
T = TypeVar("T")


class Members(Generic[M]):
    """Of a set under controllers. Who is a member may change with every answer, so nobody is looked up in two."""

    def __init__(self, patience: float) -> None:
        """`patience`: seconds until a role is taken."""
        self.members: list[M] = []
        self._patience = patience

    def told(self) -> dict[str, Any]:
        """Of the set; nothing while it is unknown."""
        raise NotImplementedError

    def in_sync(self) -> set[str]:
        """The addresses of those that are, and live."""
        return in_sync_in(self.told())

    @property
    def epoch(self) -> int:
        """Of the master; −1 while nobody tells it."""
        return int(self.told().get("masterEpoch", -1))

    @property
    def master(self) -> M:
        """Who is elected."""
        return self._found(self._elected, "a master is elected")

    def master_after(self, former: M) -> M:
        """Another one, once it is elected."""

        def another() -> M | None:
            found = self._elected()
            return None if found is former else found

        return self._found(another, "another master")

    @property
    def slaves(self) -> list[M]:
        """The others."""
        master = self.master
        return [member for member in self.members if member is not master]

    def id_of(self, member: M) -> int:
        """What the controllers gave it."""

        def known() -> int | None:
            numbers = {one["brokerAddress"]: int(one["brokerId"]) for one in replicas_in(self.told())}
            return numbers.get(member.broker)

        return self._found(known, f"{member.broker} is known")

    def wait_until_in_sync(self, *members: M) -> None:
        """These, and no others."""
        wanted = {member.broker for member in members}
        wait_until(lambda: self.in_sync() == wanted, f"{wanted} are in sync", self._patience)

    def _elected(self) -> M | None:
        address = self.told().get("masterAddress")
        return next((member for member in self.members if member.broker == address), None)

    def _found(self, look: Callable[[], T | None], what: str) -> T:
        """What the first look finds that finds something."""
        found: list[T] = []

        def is_found() -> bool:
            found.extend(one for one in [look()] if one is not None)
            return bool(found)

        wait_until(is_found, what, self._patience)
        return found[0]
