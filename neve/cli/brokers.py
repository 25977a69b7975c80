"""What is asked of brokers and name servers by name, by codes that Apache RocketMQ's answer, too.

broker        12 messages by id · 15, 43 positions · 17, 21 topics · 200, 201 groups · 401, 402 who pops
              25, 26 its configuration · 28 how it is · 351 a topic's settings
name server   205 nobody sends to a broker any more · 327 they may again
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from neve.cli.broker_sets import new_pool
from neve.cli.cluster import connect, security_of_the_command
from neve.cli.failures import NOT_FOUND, UNREACHABLE, Failure
from neve.cli.topic_names import of_users
from neve.client.admin import topic_fields
from neve.client.model import BrokerInfo, Message, MessageQueue, message_from_record
from neve.client.net.answers import parse_body, require_success
from neve.client.net.connection import ConnectionPool
from neve.client.net.route import parse_brokers
from neve.record.codec import iter_records
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

_ASK_S = 10.0
#: A time after everything that is stored.
_NOT_YET_MS = 1 << 53
_NOTHING_SAMPLED = "java.util.NoSuchElementException"
_TRIES, _TRY_AGAIN_S = 10, 0.5


class TopicAt(NamedTuple):
    """A topic as one broker has it."""

    broker: str
    settings: Mapping[str, Any]

    def number(self, name: str) -> int:
        return int(self.settings.get(name) or 0)


def queues_of(settings: Mapping[str, Any]) -> int:
    """Return how many queues a topic has at a broker, to read or to write."""
    return max(int(settings.get("writeQueueNums") or 0), int(settings.get("readQueueNums") or 0))


class Brokers:
    """Those that the name servers know. An address is asked as it stands there."""

    def __init__(self, pool: ConnectionPool, namesrvs: list[str], known: Mapping[str, BrokerInfo]) -> None:
        self._pool, self._namesrvs, self.known = pool, namesrvs, known

    def named(self, name: str | None) -> list[str]:
        """That one, or all. Raises Failure where it is unknown."""
        if name is None:
            return sorted(self.known)
        if name not in self.known:
            raise Failure(NOT_FOUND, f"the name server knows no broker {name}, only {', '.join(sorted(self.known))}")
        return [name]

    @property
    def name_servers(self) -> list[str]:
        return list(self._namesrvs)

    async def known_to(self, address: str) -> dict[str, BrokerInfo]:
        """What one name server says itself."""
        answer = await self._pool.invoke(address, RequestCode.GET_BROKER_CLUSTER_INFO, {}, timeout=_ASK_S)
        return parse_brokers((parse_body(require_success(answer)).get("brokerAddrTable") or {}).values())

    async def topics(self, *, everything: bool) -> list[str]:
        """That the first name server has; without `everything` but the servers' own and those of groups."""
        code = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        answer = await self._pool.invoke(self._namesrvs[0], code, {}, timeout=_ASK_S)
        names = sorted(map(str, parse_body(require_success(answer)).get("topicList") or ()))
        return names if everything else of_users(names, self.known.values())

    async def topics_of_cluster(self, cluster: str) -> list[str]:
        """But the servers' own and those of groups."""
        ext, address = {"cluster": cluster}, self._namesrvs[0]
        answer = await self._pool.invoke(address, RequestCode.GET_TOPICS_BY_CLUSTER, ext, timeout=_ASK_S)
        names = map(str, parse_body(require_success(answer)).get("topicList") or ())
        return of_users(sorted(names), self.known.values())

    # ---- a broker

    async def groups(self, name: str) -> list[str]:
        """All that its master has."""
        return sorted(await self.all_groups(name))

    async def all_groups(self, name: str) -> dict[str, dict[str, Any]]:
        """With their settings."""
        return await self._table(name, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable")

    async def set_group(self, name: str, settings: Mapping[str, Any]) -> None:
        """It is made where it is missing."""
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        require_success(await self._ask(name, code, {}, dumps(settings)))

    async def request_modes(self, name: str) -> dict[str, dict[str, dict[str, Any]]]:
        """By topic and group: who pops, or shares queues in another way than by default."""
        return await self._table(name, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, "messageRequestModeMap")

    async def set_request_mode(self, name: str, topic: str, group: str, mode: Mapping[str, Any]) -> None:
        body = {
            "topic": topic,
            "consumerGroup": group,
            "mode": mode.get("mode", "PULL"),
            "popShareQueueNum": mode.get("popShareQueueNum", -1),
        }
        require_success(await self._ask(name, RequestCode.SET_MESSAGE_REQUEST_MODE, {}, dumps(body)))

    async def positions(self, name: str) -> dict[str, dict[int, int]]:
        """By `topic@group`, of each queue that has one."""
        table = await self._table(name, RequestCode.GET_ALL_CONSUMER_OFFSET, "offsetTable")
        return {pair: {int(queue): int(at) for queue, at in queues.items()} for pair, queues in table.items()}

    async def set_position(self, queue: MessageQueue, group: str, offset: int) -> None:
        ext = {
            "consumerGroup": group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "commitOffset": str(offset),
        }
        require_success(await self._ask(queue.broker_name, RequestCode.UPDATE_CONSUMER_OFFSET, ext))

    async def runtime(self, name: str) -> dict[str, str]:
        """What its master says of itself. Apache's fails to in its first second, when it has sampled nothing yet."""
        tries = 1
        answer = await self._ask(name, RequestCode.GET_BROKER_RUNTIME_INFO, {})
        while tries < _TRIES and _NOTHING_SAMPLED in (answer.remark or ""):
            await asyncio.sleep(_TRY_AGAIN_S)
            tries += 1
            answer = await self._ask(name, RequestCode.GET_BROKER_RUNTIME_INFO, {})
        require_success(answer)
        return {str(key): str(value) for key, value in (parse_body(answer).get("table") or {}).items()}

    async def per_second(self, name: str, stats: str, key: str) -> float:
        """Of what its master counted over the last minute; 0 where it counted nothing."""
        ext = {"statsName": stats, "statsKey": key}
        answer = await self._ask(name, RequestCode.VIEW_BROKER_STATS_DATA, ext)
        if answer.code == ResponseCode.SYSTEM_ERROR and "not exist" in (answer.remark or ""):
            return 0.0
        return float((parse_body(require_success(answer)).get("statsMinute") or {}).get("tps") or 0.0)

    async def config(self, name: str) -> dict[str, str]:
        """Its master's configuration in force."""
        return (await self.config_and_kept(name))[0]

    async def config_and_kept(self, name: str) -> tuple[dict[str, str], dict[str, str] | None]:
        """And which keys were set while it ran, with what they would be otherwise; None: Apache's does not tell."""
        answer = require_success(await self._ask(name, RequestCode.GET_BROKER_CONFIG, {}))
        pairs = (line.partition("=") for line in answer.body.decode().splitlines() if line and line[0] not in "#!")
        found = dict(sorted((key.strip(), value.strip()) for key, _, value in pairs))
        told = (answer.ext or {}).get("kept")
        return found, None if told is None else {str(key): str(value) for key, value in json.loads(told).items()}

    async def set_config(self, name: str, changes: Mapping[str, str], unset: Sequence[str] = ()) -> None:
        """Raises BrokerError with what the broker has against a value."""
        body = "".join(f"{key}={value}\n" for key, value in changes.items()).encode()
        ext = {"unset": ",".join(unset)} if unset else {}
        require_success(await self._ask(name, RequestCode.UPDATE_BROKER_CONFIG, ext, body))

    # ---- who may send to it

    async def wipe_write_permission(self, name: str) -> dict[str, int]:
        """How many topics each name server took out of senders' routes."""
        return await self._permission(name, RequestCode.WIPE_WRITE_PERM_OF_BROKER, "wipeTopicCount")

    async def add_write_permission(self, name: str) -> dict[str, int]:
        return await self._permission(name, RequestCode.ADD_WRITE_PERM_OF_BROKER, "addTopicCount")

    async def _permission(self, name: str, code: RequestCode, counted: str) -> dict[str, int]:
        """Each name server answers for itself, and clients ask any of them."""
        counts = {}
        for address in self._namesrvs:
            answer = await self._pool.invoke(address, code, {"brokerName": name}, timeout=_ASK_S)
            counts[address] = int((require_success(answer).ext or {}).get(counted) or 0)
        return counts

    # ---- topics

    async def topic(self, topic: str, broker: str | None) -> list[TopicAt]:
        """At each broker that has it. Raises Failure where none does."""
        names = self.named(broker)
        ext = {"topic": topic, "lo": "true"}
        answers = await asyncio.gather(*(self._ask(name, RequestCode.GET_TOPIC_CONFIG, ext) for name in names))
        found = [
            TopicAt(name, parse_body(require_success(answer)))
            for name, answer in zip(names, answers, strict=True)
            if answer.code != ResponseCode.TOPIC_NOT_EXIST
        ]
        if not found:
            raise Failure(NOT_FOUND, f"there is no topic {topic}" + ("" if broker is None else f" at {broker}"))
        return found

    async def all_topics(self, name: str) -> dict[str, dict[str, Any]]:
        """Of one broker, with their settings."""
        return await self._table(name, RequestCode.GET_ALL_TOPIC_CONFIG, "topicConfigTable")

    async def topic_stats(self, topic: str) -> dict[str, dict[str, Any]]:
        """Each broker's answer about the topic's queues, those of neve with what is where."""
        names = self.named(None)
        ext = {"topic": topic, "tiers": "true"}
        answers = await asyncio.gather(*(self._ask(name, RequestCode.GET_TOPIC_STATS_INFO, ext) for name in names))
        return {
            name: parse_body(require_success(answer))
            for name, answer in zip(names, answers, strict=True)
            if answer.code != ResponseCode.TOPIC_NOT_EXIST
        }

    async def by_id(self, name: str, topic: str, msg_id: str) -> list[Message]:
        """With the id that their producer gave, at one broker; the earliest first."""
        ext = {"topic": topic, "key": msg_id, "maxNum": "32", "beginTimestamp": "0", "endTimestamp": str(_NOT_YET_MS)}
        answer = await self._ask(name, RequestCode.QUERY_MESSAGE, {**ext, "_UNIQUE_KEY_QUERY": "true"})
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        found = [message_from_record(record, name) for record in iter_records(require_success(answer).body)]
        return sorted((one for one in found if one.msg_id == msg_id), key=lambda one: one.store_timestamp)

    async def set_topic(self, topic: str, at: TopicAt, changes: Mapping[str, str]) -> None:
        """What is not among the changes stays as it is."""
        ext = topic_fields(topic, at.settings, changes)
        require_success(await self._ask(at.broker, RequestCode.UPDATE_AND_CREATE_TOPIC, ext))

    # ---- asking

    async def _table(self, name: str, code: RequestCode, table: str) -> dict[str, Any]:
        answer = parse_body(require_success(await self._ask(name, code, {})))
        return {str(key): value for key, value in (answer.get(table) or {}).items()}

    async def _ask(self, name: str, code: RequestCode, ext: Mapping[str, str], body: bytes = b"") -> RemotingCommand:
        address = self.known[name].master
        if address is None:
            raise Failure(UNREACHABLE, f"{name} has no master now")
        return await self._pool.invoke(address, code, ext, body=body, timeout=_ASK_S)


@asynccontextmanager
async def brokers(namesrv: str) -> AsyncGenerator[Brokers]:
    """Of these name servers. Raises Failure where they know none."""
    async with connect(namesrv) as client:
        known = await client.cluster_info()
    if not known:
        raise Failure(UNREACHABLE, "the name server knows no broker: none is up, or none was told its address")
    pool = new_pool(*security_of_the_command())
    try:
        yield Brokers(pool, [one.strip() for one in namesrv.split(";") if one.strip()], known)
    finally:
        await pool.close()
