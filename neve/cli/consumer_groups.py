"""What is asked of a cluster's brokers about consumer groups, by codes that Apache RocketMQ's answer, too.

    201  the groups' settings            203  who is connected
    208  positions and lag               307  what a member does, relayed by its broker
    222  a position is set, by the broker and under its members, too; 15 where it is told that nobody is there
     29  which offset a time has         207  a group is deleted

A broker that can't be asked is an error: what lacks its part would be taken for the whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from neve.cli.broker_sets import new_pool
from neve.cli.cluster import connect, security_of_the_command
from neve.cli.failures import CONFLICT, NOT_FOUND, UNREACHABLE, Failure
from neve.cli.lag import Standing, standing
from neve.client.admin import parse_consume_stats
from neve.client.model import BrokerInfo, ConsumeStats, MessageQueue, QueueStats
from neve.client.net.answers import parse_body, require_success
from neve.client.net.connection import ConnectionPool
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.releases import release_of

if TYPE_CHECKING:
    from neve.client import AsyncClient

_ASK_S = 10.0
#: Questions at one time, of all brokers.
_AT_ONCE = 16
#: A time after everything that is stored.
_NOT_YET_MS = 1 << 53
_MODES = {"CONSUME_PASSIVELY": "push", "CONSUME_ACTIVELY": "pull", "CONSUME_POP": "pop"}


class Member(NamedTuple):
    """A client of a group, as a broker that it is connected to has it."""

    client_id: str
    address: str
    language: str
    version: str
    broker: str


class Connected(NamedTuple):
    """Who of a group is there, once each, and how they read; `mode` and `model` are empty while nobody is."""

    members: tuple[Member, ...]
    mode: str
    model: str


class ConsumerGroups:
    """Of the brokers that the name server knows."""

    def __init__(self, client: AsyncClient, pool: ConnectionPool, brokers: Mapping[str, BrokerInfo]) -> None:
        self._client, self._pool, self._brokers = client, pool, brokers
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._bounds: dict[str, asyncio.Task[dict[MessageQueue, QueueStats]]] = {}

    async def settings(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By group, and by broker that has it."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for broker, answer in (await self._ask_all(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {})).items():
            for group, settings in (parse_body(require_success(answer)).get("subscriptionGroupTable") or {}).items():
                found.setdefault(str(group), {})[broker] = dict(settings)
        return dict(sorted(found.items()))

    async def settings_of(self, group: str) -> dict[str, dict[str, Any]]:
        """By broker. Raises Failure where there is no such group."""
        found = (await self.settings()).get(group)
        if found is None:
            raise Failure(NOT_FOUND, f"there is no group {group}")
        return found

    async def standings(self, group: str, topic: str | None = None) -> list[Standing]:
        """In every queue of the topic, or else of all topics in which it has a position."""
        ext = {"consumerGroup": group, **({} if topic is None else {"topic": topic})}
        stats: dict[MessageQueue, ConsumeStats] = {}
        for answer in (await self._ask_all(RequestCode.GET_CONSUME_STATS, ext)).values():
            if answer.code != ResponseCode.TOPIC_NOT_EXIST:
                stats |= parse_consume_stats(require_success(answer))
        bounds: dict[MessageQueue, QueueStats] = {}
        for told in await asyncio.gather(*(self._bounds_of(name) for name in {queue.topic for queue in stats})):
            bounds |= told
        return [standing(queue, stats[queue], bounds.get(queue)) for queue in sorted(stats)]

    async def connected(self, group: str) -> Connected:
        members: dict[str, Member] = {}
        mode = model = ""
        ext = {"consumerGroup": group}
        for broker, answer in (await self._ask_all(RequestCode.GET_CONSUMER_CONNECTION_LIST, ext)).items():
            if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
                continue
            told = parse_body(require_success(answer))
            mode = _MODES.get(str(told.get("consumeType")), mode)
            model = str(told.get("messageModel") or model).lower()
            for one in told.get("connectionSet") or ():
                found = Member(
                    str(one["clientId"]), str(one["clientAddr"]), str(one.get("language")), _version(one), broker
                )
                members.setdefault(found.client_id, found)
        return Connected(tuple(sorted(members.values())), mode, model)

    async def held_by(self, group: str, member: Member) -> list[MessageQueue] | None:
        """The queues that it reads now, by itself; None where it does not say."""
        ext = {"consumerGroup": group, "clientId": member.client_id, "jstackEnable": "false"}
        try:
            told = parse_body(
                require_success(await self._ask(member.broker, RequestCode.GET_CONSUMER_RUNNING_INFO, ext))
            )
        except NeveError:
            return None
        queues = {*(told.get("mqTable") or ()), *(told.get("mqPopTable") or ())}
        return sorted(queue for queue in queues if isinstance(queue, MessageQueue))

    async def oldest_waiting(self, standings: Iterable[Standing]) -> dict[MessageQueue, int | None]:
        """When the first message that is not read was stored, by queue that has one; None: that can't be read now."""

        async def stored(one: Standing) -> int | None:
            try:
                async with self._turns:
                    found = await self._client.pull(one.queue.topic, one.queue, one.next_offset, 1, timeout=_ASK_S)
            except NeveError:
                return None
            return found.messages[0].store_timestamp if found.messages else None

        behind = [one for one in standings if one.lag]
        times = await asyncio.gather(*(stored(one) for one in behind))
        return {one.queue: time for one, time in zip(behind, times, strict=True)}

    # ---- changing

    async def offset_by_time(self, queue: MessageQueue, time_ms: int) -> int:
        async with self._turns:
            return await self._client.offset_by_time(queue.topic, queue, time_ms)

    async def reset(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Raises Failure where the broker has not done just that.

        Brokers before 5.0 know neither queue nor offset: they go by the time, and set nothing back to one that is to
        come without `isForce`.
        """
        ext = {
            "group": group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "offset": str(offset),
            "timestamp": str(_NOT_YET_MS),
            "isForce": "false",
        }
        answer = await self._ask(queue.broker_name, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext)
        if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
            async with self._turns:
                await self._client.commit(group, queue.topic, queue, offset)
            return
        if (parse_body(require_success(answer)).get("offsetTable") or {}) != {queue: offset}:
            raise Failure(CONFLICT, f"{queue.broker_name} can't set the position of a group that is connected")

    async def delete(self, group: str, brokers: Iterable[str]) -> None:
        """Its settings and positions at these brokers."""
        ext = {"groupName": group, "cleanOffset": "true"}
        for broker in brokers:
            require_success(await self._ask(broker, RequestCode.DELETE_SUBSCRIPTIONGROUP, ext))

    # ---- asking

    async def _bounds_of(self, topic: str) -> dict[MessageQueue, QueueStats]:
        """Once for all groups that ask."""
        asked = self._bounds.get(topic)
        if asked is None:
            asked = self._bounds[topic] = asyncio.create_task(self._ask_bounds(topic), name=f"bounds of {topic}")
        return await asked

    async def _ask_bounds(self, topic: str) -> dict[MessageQueue, QueueStats]:
        async with self._turns:
            try:
                return await self._client.topic_stats(topic)
            except BrokerError as error:
                if error.code == ResponseCode.TOPIC_NOT_EXIST:
                    return {}  # deleted meanwhile
                raise

    async def _ask_all(self, code: RequestCode, ext: Mapping[str, str]) -> dict[str, RemotingCommand]:
        """The answers by broker, whatever their codes."""
        names = sorted(self._brokers)
        answers = await asyncio.gather(*(self._ask(name, code, ext) for name in names))
        return dict(zip(names, answers, strict=True))

    async def _ask(self, broker: str, code: RequestCode, ext: Mapping[str, str]) -> RemotingCommand:
        """Of its master, or while there is none of the replica that would be asked next."""
        addresses = self._brokers[broker].addresses
        async with self._turns:
            return await self._pool.invoke(addresses[min(addresses)], code, ext, timeout=_ASK_S)


@asynccontextmanager
async def consumer_groups(namesrv: str, broker: str | None = None) -> AsyncGenerator[ConsumerGroups]:
    """Of the name server's brokers, or of one alone. Raises Failure where it knows none."""
    async with connect(namesrv) as client:
        known = await client.cluster_info()
        brokers = {name: one for name, one in known.items() if one.addresses and broker in (None, name)}
        if not brokers:
            raise Failure(UNREACHABLE, "the name server knows no broker: none is up, or none was told its address")
        pool = new_pool(*security_of_the_command())
        try:
            yield ConsumerGroups(client, pool, brokers)
        finally:
            await pool.close()


def _version(told: Mapping[str, Any]) -> str:
    number = int(told.get("version") or 0)
    found = release_of(number)
    if found is None:
        return str(number)
    return f"{found.major}.{found.minor}.{found.patch}" + ("-SNAPSHOT" if found.is_snapshot else "")
