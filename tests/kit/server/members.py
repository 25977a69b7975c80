"""The members of a set, as controllers report them; each question is decided by one answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from bench.wire import Client, Refused
from tests.kit.clock.waiting import wait_until

NAME = "broker-a"
_SYNC_STATE_DATA = 1006


def told_by(controller: str, timeout: float = 30.0, name: str = NAME) -> dict[str, Any]:
    """Return the controller's information about a set; empty while the set is unknown or the controller unreachable."""
    try:
        with Client(controller, timeout) as client:
            answer = client.ask(_SYNC_STATE_DATA, {}, json.dumps([name]).encode())
    except (OSError, Refused):
        return {}
    return dict(json.loads(answer.body)["replicasInfoTable"].get(name, {}))


def replicas_in(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return all members, in sync or not."""
    return [*told.get("inSyncReplicas", ()), *told.get("notInSyncReplicas", ())]


def in_sync_in(told: Mapping[str, Any]) -> set[str]:
    """Return the addresses of the living in-sync members."""
    return {one["brokerAddress"] for one in told.get("inSyncReplicas", ()) if one["alive"]}


class MemberProcess(Protocol):
    """A broker as a process."""

    @property
    def broker(self) -> str: ...


M = TypeVar("M", bound=MemberProcess)
T = TypeVar("T")


class Members(Generic[M]):
    """Members of a set under controllers. Membership may change with every answer, so no lookup combines two."""

    def __init__(self, patience: float) -> None:
        """Create the members; `patience` is the time limit for a role, in seconds."""
        self.members: list[M] = []
        self._patience = patience

    def told(self) -> dict[str, Any]:
        """Return the controllers' information about the set; empty while it is unknown."""
        raise NotImplementedError

    def in_sync(self) -> set[str]:
        """Return the addresses of the living in-sync members."""
        return in_sync_in(self.told())

    @property
    def epoch(self) -> int:
        """Return the master's epoch; −1 while it is unknown."""
        return int(self.told().get("masterEpoch", -1))

    @property
    def master(self) -> M:
        """Return the elected member."""
        return self._found(self._elected, "a master is elected")

    def master_after(self, former: M) -> M:
        """Wait for another master, and return it."""

        def another() -> M | None:
            found = self._elected()
            return None if found is former else found

        return self._found(another, "another master")

    @property
    def slaves(self) -> list[M]:
        """Return the other members."""
        master = self.master
        return [member for member in self.members if member is not master]

    def id_of(self, member: M) -> int:
        """Return the id that the controllers assigned."""

        def known() -> int | None:
            numbers = {one["brokerAddress"]: int(one["brokerId"]) for one in replicas_in(self.told())}
            return numbers.get(member.broker)

        return self._found(known, f"{member.broker} is known")

    def wait_until_in_sync(self, *members: M) -> None:
        """Wait until exactly these members are in sync."""
        wanted = {member.broker for member in members}
        wait_until(lambda: self.in_sync() == wanted, f"{wanted} are in sync", self._patience)

    def _elected(self) -> M | None:
        address = self.told().get("masterAddress")
        return next((member for member in self.members if member.broker == address), None)

    def _found(self, look: Callable[[], T | None], what: str) -> T:
        """Repeat the lookup until it finds something, and return that."""
        found: list[T] = []

        def is_found() -> bool:
            found.extend(one for one in [look()] if one is not None)
            return bool(found)

        wait_until(is_found, what, self._patience)
        return found[0]
