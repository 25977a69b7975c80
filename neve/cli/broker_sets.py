"""What is asked of a broker set: of its controller by RocketMQ's codes, and of its members.

    controller   1005 who answers · 1006 who is in sync · 1002 designate · 1011 forget members
    master       1002 hand over, of neve's alone
    member       26 its configuration · 28 how long it has run · 907 who follows it · 1007 who wrote its log

Apache's controllers and brokers answer the same.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from neve.cli.cluster import connect, security_of_the_command
from neve.cli.failures import CONFLICT, FAILED, NOT_FOUND, UNREACHABLE, Failure
from neve.client.net.answers import parse_body
from neve.client.net.connection import Connection, ConnectionPool
from neve.errors import NeveError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

_CONNECT_S = 3.0
_ASK_S = 10.0
_POLL_S = 0.25
_APACHE_MASTER = 0  # Apache's master of a set answers with this id, neve's members with their own
_SECONDS = {"day": 86_400, "hour": 3_600, "minute": 60, "second": 1}


class Replica(NamedTuple):
    """A member, as the controller has it."""

    id: int
    address: str
    in_sync: bool
    alive: bool


class SetState(NamedTuple):
    """What the controller says of one set."""

    name: str
    master: int | None
    master_address: str | None
    master_epoch: int
    sync_state_set_epoch: int
    replicas: tuple[Replica, ...]

    @property
    def living_master(self) -> Replica | None:
        """Who is elected, if it lives."""
        return next((one for one in self.replicas if one.id == self.master and one.alive), None)

    def replica(self, broker_id: int) -> Replica:
        """Raises Failure where there is none."""
        for one in self.replicas:
            if one.id == broker_id:
                return one
        ids = ", ".join(str(one.id) for one in self.replicas)
        raise Failure(NOT_FOUND, f"{self.name} has no member {broker_id}, only {ids}")


class LogOf(NamedTuple):
    """A member's log, as it says itself: who wrote what of it."""

    end: int
    epochs: tuple[tuple[int, int, int], ...]  # epoch, start, end

    @property
    def epoch(self) -> int:
        """Of its end."""
        return self.epochs[-1][0] if self.epochs else -1


class BrokerSets:
    """Of one controller, and whom it names."""

    def __init__(self, pool: ConnectionPool, controller: str) -> None:
        self._pool, self.controller = pool, controller

    # ---- of the controller

    async def states(self, names: Sequence[str]) -> list[SetState]:
        """Those that it knows."""
        if not names:
            return []
        body = dumps(list(names))
        answer = await self._of_controller(RequestCode.CONTROLLER_GET_SYNC_STATE_DATA, {}, body)
        table: Mapping[str, Any] = parse_body(answer)["replicasInfoTable"]
        return [_state(name, table[name]) for name in names if name in table]

    async def state(self, name: str) -> SetState:
        """Raises Failure where it is unknown."""
        for state in await self.states([name]):
            return state
        raise Failure(NOT_FOUND, f"the controller {self.controller} knows no broker set {name}")

    async def hand_over(self, name: str, master: Replica, target: Replica) -> bool:
        """By the master itself, once the target has all of its log. False: it is no broker that can. Raises Failure."""
        ext = {"brokerName": name, "brokerId": str(target.id), "designateElect": "true"}
        answer = await self._pool.invoke(master.address, RequestCode.CONTROLLER_ELECT_MASTER, ext, timeout=_ASK_S)
        if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
            return False
        if answer.code != ResponseCode.SUCCESS:
            raise Failure(CONFLICT, f"{master.id} does not hand over: {answer.remark or answer.code}")
        return True

    async def designate(self, name: str, broker_id: int) -> None:
        """Raises Failure with what the controller has against it."""
        ext = {"brokerName": name, "brokerId": str(broker_id), "designateElect": "true"}
        answer = await self._of_controller(RequestCode.CONTROLLER_ELECT_MASTER, ext, accept_all=True)
        elected = answer.ext.get("masterBrokerId")
        is_there = answer.code in (ResponseCode.SUCCESS, ResponseCode.CONTROLLER_MASTER_STILL_EXIST)
        if not is_there or elected != str(broker_id):
            raise Failure(CONFLICT, f"{broker_id} is not elected: {answer.remark or f'{elected} is'}")

    async def forget(self, name: str, cluster: str, ids: Sequence[int], *, living: bool) -> None:
        """Members that do not come back."""
        ext = {
            "brokerName": name,
            "clusterName": cluster,
            "brokerControllerIdsToClean": ";".join(map(str, ids)),
            "isCleanLivingBroker": str(living).lower(),
        }
        await self._of_controller(RequestCode.CLEAN_BROKER_DATA, ext)

    async def until_in_sync(self, name: str, address: str, seconds: float, *, other_than: int = 0) -> Replica:
        """Return the member at `address` when it is in sync; `other_than` is the id of its predecessor there.

        Raises:
            Failure: it is not in sync after `seconds`.
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
            raise
        except TimeoutError:
            new = "new " if other_than else ""
            what = f"is no {new}member" if found is None else f"is member {found.id}, and not in sync"
            raise Failure(FAILED, f"{address} {what} of {name} after {seconds:.0f} s") from None

    async def until_it_leads(self, name: str, member: Replica, seconds: float, *, in_sync: int = 1) -> SetState:
        """Elected, its log takes messages, and so many are in sync. Raises Failure."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    state = await self.state(name)
                    are = sum(one.in_sync and one.alive for one in state.replicas)
                    if state.master == member.id and are >= in_sync and await self._leads(member.address):
                        return state
                    await asyncio.sleep(_POLL_S)
        except NeveError:
            raise
        except TimeoutError:
            raise Failure(FAILED, f"{member.id} of {name} does not lead after {seconds:.0f} s") from None

    # ---- of members

    async def configuration(self, address: str) -> dict[str, str]:
        """All keys in force."""
        return await _configuration(self._pool, address)

    async def logs(self, state: SetState, members: Sequence[Replica]) -> list[LogOf | None]:
        """Return the log of each of these members, None for a member that does not answer.

        A member is asked at its address, where another member may run by now, in an empty directory.
        """
        living = {one.address: one.id for one in state.replicas if one.alive}
        asked = (self._log(one) if living.get(one.address, one.id) == one.id else _none() for one in members)
        return await asyncio.gather(*asked)

    async def _log(self, member: Replica) -> LogOf | None:
        answer = await self._of_member(member.address, RequestCode.GET_BROKER_EPOCH_CACHE)
        if answer is None:
            return None
        told = parse_body(answer)
        if int(told.get("brokerId") or _APACHE_MASTER) not in {member.id, _APACHE_MASTER}:
            return None
        entries = tuple((one["epoch"], one["startOffset"], one["endOffset"]) for one in told["epochList"])
        return LogOf(int(told["maxOffset"]), entries)

    async def clock_ms(self, address: str) -> int | None:
        """What it is by the member's clock, to the second; None of one that does not say."""
        answer = await self._of_member(address, RequestCode.GET_BROKER_RUNTIME_INFO)
        table: Mapping[str, str] = {} if answer is None else parse_body(answer)["table"]
        began, runs = (
            table.get("bootTimestamp", ""),
            re.findall(r"(\d+) (day|hour|minute|second)", table.get("runtime", "")),
        )
        if not began.isdigit() or not runs:
            return None
        return int(began) + 1000 * sum(int(count) * _SECONDS[unit] for count, unit in runs)

    async def _leads(self, address: str) -> bool:
        answer = await self._of_member(address, RequestCode.GET_BROKER_HA_STATUS)
        return answer is not None and bool(parse_body(answer)["master"])

    # ---- asking

    async def _of_controller(
        self, code: RequestCode, ext: Mapping[str, str], body: bytes = b"", *, accept_all: bool = False
    ) -> RemotingCommand:
        answer = await self._pool.invoke(self.controller, code, ext, body=body, timeout=_ASK_S)
        if answer.code != ResponseCode.SUCCESS and not accept_all:
            raise Failure(CONFLICT, f"the controller {self.controller}: {answer.remark or answer.code}")
        return answer

    async def _of_member(self, address: str, code: RequestCode) -> RemotingCommand | None:
        try:
            answer = await self._pool.invoke(address, code, {}, timeout=_ASK_S)
        except NeveError:
            return None
        return answer if answer.code == ResponseCode.SUCCESS else None


@asynccontextmanager
async def broker_sets(namesrv: str, controllers: str | None) -> AsyncGenerator[tuple[BrokerSets, list[str]]]:
    """Of the controllers that are named, or else that a broker of the name server's names; and the brokers' names."""
    pool = new_pool(*security_of_the_command())
    try:
        brokers = await _brokers(namesrv, has_controllers=controllers is not None)
        named = controllers or await _controllers_of(pool, brokers, namesrv)
        yield BrokerSets(pool, await who_answers(pool, named)), sorted(brokers)
    finally:
        await pool.close()


async def _brokers(namesrv: str, *, has_controllers: bool) -> dict[str, list[str]]:
    """Addresses by name; the lowest id first."""
    try:
        async with connect(namesrv) as client:
            known = await client.cluster_info()
    except NeveError:
        if has_controllers:
            return {}
        raise
    return {name: [info.addresses[one] for one in sorted(info.addresses)] for name, info in known.items()}


async def _controllers_of(pool: ConnectionPool, brokers: Mapping[str, Sequence[str]], namesrv: str) -> str:
    for address in (one for addresses in brokers.values() for one in addresses):
        try:
            named = (await _configuration(pool, address)).get("controllerAddr", "")
        except NeveError:
            continue
        if named:
            return named
    raise Failure(NOT_FOUND, f"no broker of {namesrv} names a controller: name one with --controller")


async def _configuration(pool: ConnectionPool, address: str) -> dict[str, str]:
    answer = await pool.invoke(address, RequestCode.GET_BROKER_CONFIG, {}, timeout=_ASK_S)
    if answer.code != ResponseCode.SUCCESS:
        raise NeveError(answer.code, f"{address}: {answer.remark}")
    lines = answer.body.decode().splitlines()
    pairs = (line.partition("=") for line in lines if line and line[0] not in "#!")
    return {name.strip(): value.strip() for name, _, value in pairs}


def new_pool(credentials: tuple[str, str] | None, tls: ssl.SSLContext | bool) -> ConnectionPool:
    """To be closed."""
    return ConnectionPool(_CONNECT_S, _refuse, lambda _: None, credentials=credentials, tls=tls)


async def who_answers(pool: ConnectionPool, controllers: str) -> str:
    """The leader that the first living one names; each of neve's names itself. Raises Failure."""
    addresses = [one.strip() for one in re.split("[;,]", controllers) if one.strip()]
    why = "--controller names none"
    for address in addresses:
        try:
            answer = await pool.invoke(address, RequestCode.CONTROLLER_GET_METADATA_INFO, {}, timeout=_ASK_S)
        except NeveError as error:
            why = str(error)
            continue
        if answer.code == ResponseCode.SUCCESS:
            return answer.ext.get("controllerLeaderAddress") or address
        why = answer.remark or f"{address} answers {answer.code}"
    raise Failure(UNREACHABLE, f"no controller answers: {why}")


def _state(name: str, told: Mapping[str, Any]) -> SetState:
    replicas = [
        Replica(int(one["brokerId"]), one["brokerAddress"], in_sync, bool(one["alive"]))
        for key, in_sync in (("inSyncReplicas", True), ("notInSyncReplicas", False))
        for one in told.get(key) or ()
    ]
    master = told.get("masterBrokerId")
    return SetState(
        name,
        None if master is None else int(master),
        told.get("masterAddress") or None,
        int(told.get("masterEpoch") or 0),
        int(told.get("syncStateSetEpoch") or 0),
        tuple(sorted(replicas)),
    )


async def _none() -> None:
    return None


def _refuse(connection: Connection, request: RemotingCommand) -> None:
    connection.answer(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
