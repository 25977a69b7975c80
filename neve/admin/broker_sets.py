"""Broker sets: their state as a controller has it, elections, and members that join or leave.

    controller   1005 metadata, 1006 SyncStateSets, 1002 election, 1011 removal of members
    master       1002 switchover; Apache's masters do not support it
    member       26 configuration, 28 runtime, 907 HA status, 1007 epochs of the log

Apache's controllers and brokers answer the same codes.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from neve.admin.errors import AdminError, Conflict, NotFound, Unreachable
from neve.admin.requests import REQUEST_S, config_of, new_pool, split_addresses
from neve.client import connect as connect_client
from neve.client.model import BrokerInfo
from neve.client.net.answers import parse_body
from neve.client.net.connection import ConnectionPool
from neve.errors import NeveError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

_POLL_S = 0.25
_APACHE_MASTER = 0  # Apache's master of a set answers with this id, neve's members with their own
_SECONDS = {"day": 86_400, "hour": 3_600, "minute": 60, "second": 1}


class Replica(NamedTuple):
    """A member of a broker set, as the controller has it."""

    id: int
    address: str
    in_sync: bool
    alive: bool


class SetState(NamedTuple):
    """A broker set, as the controller has it. `master` is the elected member, whether or not it is alive."""

    name: str
    master: int | None
    master_address: str | None
    master_epoch: int
    sync_state_set_epoch: int
    replicas: tuple[Replica, ...]

    @property
    def living_master(self) -> Replica | None:
        """The elected member, if it is alive."""
        return next((one for one in self.replicas if one.id == self.master and one.alive), None)

    @property
    def in_sync_and_alive(self) -> int:
        """The number of members that are in sync and alive."""
        return sum(one.in_sync and one.alive for one in self.replicas)

    def replica(self, broker_id: int) -> Replica:
        """Return the member with this id.

        Raises:
            NotFound: the set has no such member.
        """
        for one in self.replicas:
            if one.id == broker_id:
                return one
        ids = ", ".join(str(one.id) for one in self.replicas)
        raise NotFound(f"broker set {self.name} has no member {broker_id}, only {ids}")


class MemberLog(NamedTuple):
    """The log of a member, as the member reports it. An entry of `epochs` is (epoch, start, end)."""

    end: int
    epochs: tuple[tuple[int, int, int], ...]

    @property
    def epoch(self) -> int:
        """The epoch at the end of the log; -1 for an empty log."""
        return self.epochs[-1][0] if self.epochs else -1


class BrokerSets:
    """The broker sets of one controller."""

    def __init__(self, pool: ConnectionPool, controller: str) -> None:
        self._pool, self.controller = pool, controller

    # ---- at the controller

    async def states(self, names: Sequence[str]) -> list[SetState]:
        """Return the state of each of these sets that the controller knows."""
        if not names:
            return []
        answer = await self._ask_controller(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, {}, dumps(list(names)))
        table: Mapping[str, Any] = parse_body(answer)["replicasInfoTable"]
        return [_state(name, table[name]) for name in names if name in table]

    async def state(self, name: str) -> SetState:
        """Return the state of a set.

        Raises:
            NotFound: the controller does not know the set.
        """
        for state in await self.states([name]):
            return state
        raise NotFound(f"the controller {self.controller} knows no broker set {name}")

    async def switch_over(self, name: str, master: Replica, target: Replica) -> bool:
        """Ask the master to give its role to a member that is in sync, without loss.

        Returns:
            Whether the master supports switchover; Apache's do not.

        Raises:
            Conflict: the master refused.
        """
        ext = {"brokerName": name, "brokerId": str(target.id), "designateElect": "true"}
        answer = await self._pool.invoke(master.address, RequestCode.CONTROLLER_ELECT_MASTER, ext, timeout=REQUEST_S)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return False
        if answer.code != ResponseCode.SUCCESS:
            raise Conflict(f"{name}: master {master.id} refused the switchover: {answer.remark or answer.code}")
        return True

    async def elect(self, name: str, broker_id: int) -> None:
        """Have the controller elect this member.

        Raises:
            Conflict: the controller refused, or elected another member.
        """
        ext = {"brokerName": name, "brokerId": str(broker_id), "designateElect": "true"}
        answer = await self._ask_controller(RequestCode.CONTROLLER_ELECT_MASTER, ext, accept_all=True)
        elected = answer.ext.get("masterBrokerId")
        has_master = answer.code in (ResponseCode.SUCCESS, ResponseCode.CONTROLLER_MASTER_STILL_EXIST)
        if not has_master or elected != str(broker_id):
            raise Conflict(f"{name}: member {broker_id} was not elected: {answer.remark or f'{elected} is master'}")

    async def remove(self, name: str, cluster: str, ids: Sequence[int], *, living: bool) -> None:
        """Remove members from the controller's register; `living` permits to remove members that are alive."""
        ext = {
            "brokerName": name,
            "clusterName": cluster,
            "brokerControllerIdsToClean": ";".join(map(str, ids)),
            "isCleanLivingBroker": str(living).lower(),
        }
        await self._ask_controller(RequestCode.CLEAN_BROKER_DATA, ext)

    async def wait_until_in_sync(self, name: str, address: str, seconds: float, *, other_than: int = 0) -> Replica:
        """Return the member at `address` when it is in sync; `other_than` is the id of its predecessor there.

        Raises:
            AdminError: the member is not in sync after `seconds`.
        """
        found: Replica | None = None
        try:
            async with asyncio.timeout(seconds):
                while True:
                    replicas = (await self.state(name)).replicas
                    there = [one for one in replicas if one.address == address and one.id != other_than]
                    found = next((one for one in there if one.alive), there[0] if there else None)
                    if found is not None and found.in_sync and found.alive:
                        return found
                    await asyncio.sleep(_POLL_S)
        except NeveError:
            raise  # a request timed out, not the wait
        except TimeoutError:
            new = "new " if other_than else ""
            what = f"no {new}member has joined" if found is None else f"member {found.id} is not in sync"
            raise AdminError(f"{name}: {what} at {address} after {seconds:.0f} s") from None

    async def wait_until_master(self, name: str, member: Replica, seconds: float, *, in_sync: int = 1) -> SetState:
        """Return the state of the set when the member is master and `in_sync` members are in sync.

        Raises:
            AdminError: that is not so after `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                while True:
                    state = await self.state(name)
                    enough = state.in_sync_and_alive >= in_sync
                    if state.master == member.id and enough and await self._serves_as_master(member.address):
                        return state
                    await asyncio.sleep(_POLL_S)
        except NeveError:
            raise  # a request timed out, not the wait
        except TimeoutError:
            raise AdminError(
                f"{name}: member {member.id} does not serve as master with {in_sync} in sync after {seconds:.0f} s"
            ) from None

    # ---- at members

    async def config(self, address: str) -> dict[str, str]:
        """Return the configuration in force of a member."""
        return config_of(await self._pool.invoke(address, RequestCode.GET_BROKER_CONFIG, {}, timeout=REQUEST_S))

    async def logs(self, state: SetState, members: Sequence[Replica]) -> list[MemberLog | None]:
        """Return the log of each of these members, None for a member that does not answer.

        A member is asked at its address. If another member has that address by now, its log is not returned.
        """
        living = {one.address: one.id for one in state.replicas if one.alive}
        asked = (self._log(one) if living.get(one.address, one.id) == one.id else _none() for one in members)
        return await asyncio.gather(*asked)

    async def _log(self, member: Replica) -> MemberLog | None:
        answer = await self._ask_member(member.address, RequestCode.GET_BROKER_EPOCH_CACHE)
        if answer is None:
            return None
        data = parse_body(answer)
        if int(data.get("brokerId") or _APACHE_MASTER) not in {member.id, _APACHE_MASTER}:
            return None
        entries = tuple((one["epoch"], one["startOffset"], one["endOffset"]) for one in data["epochList"])
        return MemberLog(int(data["maxOffset"]), entries)

    async def clock_ms(self, address: str) -> int | None:
        """Return the wall clock of a member, exact to a second; None if the member does not report it."""
        answer = await self._ask_member(address, RequestCode.GET_BROKER_RUNTIME_INFO)
        table: Mapping[str, str] = {} if answer is None else parse_body(answer)["table"]
        boot_ms = table.get("bootTimestamp", "")
        uptime = re.findall(r"(\d+) (day|hour|minute|second)", table.get("runtime", ""))
        if not boot_ms.isdigit() or not uptime:
            return None
        return int(boot_ms) + 1000 * sum(int(count) * _SECONDS[unit] for count, unit in uptime)

    async def _serves_as_master(self, address: str) -> bool:
        answer = await self._ask_member(address, RequestCode.GET_BROKER_HA_STATUS)
        return answer is not None and bool(parse_body(answer)["master"])

    # ---- requests

    async def _ask_controller(
        self, code: RequestCode, ext: Mapping[str, str], body: bytes = b"", *, accept_all: bool = False
    ) -> RemotingCommand:
        answer = await self._pool.invoke(self.controller, code, ext, body=body, timeout=REQUEST_S)
        if answer.code != ResponseCode.SUCCESS and not accept_all:
            raise Conflict(f"the controller {self.controller} refused: {answer.remark or answer.code}")
        return answer

    async def _ask_member(self, address: str, code: RequestCode) -> RemotingCommand | None:
        """Return the answer of a member; None if it was not reached, or refused."""
        try:
            answer = await self._pool.invoke(address, code, {}, timeout=REQUEST_S)
        except NeveError:
            return None
        return answer if answer.code == ResponseCode.SUCCESS else None


@asynccontextmanager
async def connect_controllers(
    namesrv: str,
    controllers: str | None = None,
    *,
    credentials: tuple[str, str] | None = None,
    tls: ssl.SSLContext | bool = False,
) -> AsyncGenerator[tuple[BrokerSets, list[str]]]:
    """Yield the broker sets of a controller, and the names of all brokers that the name servers know.

    Args:
        namesrv: name servers. If `controllers` is given, they need not answer.
        controllers: addresses separated by `;`; without them, those in the configuration of a broker.

    Raises:
        NotFound: no broker has a controller in its configuration.
        Unreachable: no controller answers.
    """
    pool = new_pool(credentials, tls)
    try:
        try:
            async with connect_client(namesrv, credentials=credentials, tls=tls) as client:
                brokers = await client.admin.cluster_info()
        except NeveError:
            if controllers is None:
                raise
            brokers = {}
        chosen = controllers or await _configured_controllers(pool, brokers, namesrv)
        yield BrokerSets(pool, await find_controller(pool, chosen)), sorted(brokers)
    finally:
        await pool.close()


async def _configured_controllers(pool: ConnectionPool, brokers: Mapping[str, BrokerInfo], namesrv: str) -> str:
    for info in brokers.values():
        for number in sorted(info.addresses):
            try:
                answer = await pool.invoke(info.addresses[number], RequestCode.GET_BROKER_CONFIG, {}, timeout=REQUEST_S)
                addresses = config_of(answer).get("controllerAddr", "")
            except NeveError:
                continue
            if addresses:
                return addresses
    raise NotFound(f"no broker of {namesrv} has controllerAddr in its configuration: name a controller")


async def find_controller(pool: ConnectionPool, controllers: str) -> str:
    """Return the address of the active controller, as the first of these that answers reports it.

    Raises:
        Unreachable: none answers.
    """
    why = "the list of controllers is empty"
    for address in split_addresses(controllers):
        try:
            answer = await pool.invoke(address, RequestCode.CONTROLLER_GET_METADATA_INFO, {}, timeout=REQUEST_S)
        except NeveError as error:
            why = str(error)
            continue
        if answer.code == ResponseCode.SUCCESS:
            return answer.ext.get("controllerLeaderAddress") or address
        why = answer.remark or f"{address} answers with code {answer.code}"
    raise Unreachable(f"no controller answers: {why}")


def _state(name: str, data: Mapping[str, Any]) -> SetState:
    replicas = [
        Replica(int(one["brokerId"]), one["brokerAddress"], in_sync, bool(one["alive"]))
        for key, in_sync in (("inSyncReplicas", True), ("notInSyncReplicas", False))
        for one in data.get(key) or ()
    ]
    master = data.get("masterBrokerId")
    return SetState(
        name,
        None if master is None else int(master),
        data.get("masterAddress") or None,
        int(data.get("masterEpoch") or 0),
        int(data.get("syncStateSetEpoch") or 0),
        tuple(sorted(replicas)),
    )


async def _none() -> None:
    return None
