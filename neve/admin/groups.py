"""Consumer groups: settings, members, progress, and changes of committed offsets.

200 create or change, 201 all of a broker, 203 connections, 207 delete, 208 progress, 222 reset under its members,
307 queues of a member, 401 and 402 request modes, 43 committed offsets
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from neve.admin.errors import Conflict, NotFound
from neve.admin.lag import QueueProgress, progress_of
from neve.admin.requests import CONCURRENT, FAR_FUTURE_MS, REQUEST_S, ServerRequests
from neve.client import AsyncClient
from neve.client.admin import parse_consume_stats
from neve.client.model import ConsumeStats, MessageQueue, QueueStats
from neve.client.net.answers import parse_body, require_success
from neve.errors import BrokerError, NeveError
from neve.remoting.body import dumps
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.releases import release_of

_MODES = {"CONSUME_PASSIVELY": "push", "CONSUME_ACTIVELY": "pull", "CONSUME_POP": "pop"}
_BROADCASTING = "broadcasting"


class Member(NamedTuple):
    """A client in a group. `broker` is one of the brokers that it is connected to."""

    client_id: str
    address: str
    language: str
    version: str
    broker: str


class Connections(NamedTuple):
    """The connected members of a group. `mode` and `model` are empty while there is none."""

    members: tuple[Member, ...]
    mode: str
    model: str

    @property
    def is_broadcasting(self) -> bool:
        """Whether each member reads every message and keeps its own offsets, so that brokers' offsets mean nothing."""
        return self.model == _BROADCASTING


class Groups:
    """The consumer groups of a cluster, or of one broker."""

    def __init__(self, requests: ServerRequests, client: AsyncClient) -> None:
        self._requests, self._client = requests, client
        self._slots = asyncio.Semaphore(CONCURRENT)  # for calls of the client, which has no limit of its own
        self._bounds: dict[str, asyncio.Task[dict[MessageQueue, QueueStats]]] = {}

    # ---- settings

    async def settings(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the settings of all groups, by group and by broker."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        code = RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
        for broker, answer in (await self._requests.ask_every_broker(code)).items():
            for group, settings in (parse_body(require_success(answer)).get("subscriptionGroupTable") or {}).items():
                found.setdefault(str(group), {})[broker] = dict(settings)
        return dict(sorted(found.items()))

    async def settings_of(self, group: str) -> dict[str, dict[str, Any]]:
        """Return the settings of a group, by broker.

        Raises:
            NotFound: no broker has the group.
        """
        found = (await self.settings()).get(group)
        if found is None:
            raise NotFound(f"there is no group {group}")
        return found

    async def settings_at(self, broker: str) -> dict[str, dict[str, Any]]:
        """Return the settings of all groups of a broker, by group."""
        return await self._table(broker, RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, "subscriptionGroupTable")

    async def change(self, broker: str, settings: Mapping[str, Any]) -> None:
        """Replace the settings of a group at a broker, or create it there; `settings` names the group."""
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        require_success(await self._requests.ask_master(broker, code, {}, dumps(settings)))

    async def delete(self, group: str, brokers: Iterable[str]) -> None:
        """Delete a group and its committed offsets at these brokers."""
        ext = {"groupName": group, "cleanOffset": "true"}
        for broker in brokers:
            require_success(await self._requests.ask_master(broker, RequestCode.DELETE_SUBSCRIPTIONGROUP, ext))

    async def request_modes_at(self, broker: str) -> dict[str, dict[str, dict[str, Any]]]:
        """Return how groups request messages (pull or pop) where that was set, by topic and group."""
        return await self._table(broker, RequestCode.GET_ALL_MESSAGE_REQUEST_MODE, "messageRequestModeMap")

    async def set_request_mode(self, broker: str, topic: str, group: str, mode: Mapping[str, Any]) -> None:
        """Set how a group requests messages of a topic at a broker."""
        body = {
            "topic": topic,
            "consumerGroup": group,
            "mode": mode.get("mode", "PULL"),
            "popShareQueueNum": mode.get("popShareQueueNum", -1),
        }
        answer = await self._requests.ask_master(broker, RequestCode.SET_MESSAGE_REQUEST_MODE, {}, dumps(body))
        require_success(answer)

    # ---- members

    async def connections(self, group: str) -> Connections:
        """Return the members of a group that are connected to any broker, each once."""
        members: dict[str, Member] = {}
        mode = model = ""
        code, ext = RequestCode.GET_CONSUMER_CONNECTION_LIST, {"consumerGroup": group}
        for broker, answer in (await self._requests.ask_every_broker(code, ext)).items():
            if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
                continue
            data = parse_body(require_success(answer))
            mode = _MODES.get(str(data.get("consumeType")), mode)
            model = str(data.get("messageModel") or model).lower()
            for one in data.get("connectionSet") or ():
                client_id, address = str(one["clientId"]), str(one["clientAddr"])
                member = Member(client_id, address, str(one.get("language")), _version(one), broker)
                members.setdefault(client_id, member)
        return Connections(tuple(sorted(members.values())), mode, model)

    async def queues_of_member(self, group: str, member: Member) -> list[MessageQueue] | None:
        """Return the queues that a member reads now, as it reports them; None if it does not answer."""
        ext = {"consumerGroup": group, "clientId": member.client_id, "jstackEnable": "false"}
        try:
            answer = await self._requests.ask_member(member.broker, RequestCode.GET_CONSUMER_RUNNING_INFO, ext)
            data = parse_body(require_success(answer))
        except NeveError:
            return None
        queues = {*(data.get("mqTable") or ()), *(data.get("mqPopTable") or ())}
        return sorted(queue for queue in queues if isinstance(queue, MessageQueue))

    # ---- progress

    async def progress(self, group: str, topic: str | None = None) -> list[QueueProgress]:
        """Return the progress of a group in all queues where it has one, or in those of a topic."""
        ext = {"consumerGroup": group, **({} if topic is None else {"topic": topic})}
        stats: dict[MessageQueue, ConsumeStats] = {}
        for answer in (await self._requests.ask_every_broker(RequestCode.GET_CONSUME_STATS, ext)).values():
            if answer.code != ResponseCode.TOPIC_NOT_EXIST:
                stats |= parse_consume_stats(require_success(answer))
        bounds: dict[MessageQueue, QueueStats] = {}
        for of_topic in await asyncio.gather(*(self._bounds_of(name) for name in {queue.topic for queue in stats})):
            bounds |= of_topic
        return [progress_of(queue, stats[queue], bounds.get(queue)) for queue in sorted(stats)]

    async def oldest_unread_ms(self, progress: Iterable[QueueProgress]) -> dict[MessageQueue, int | None]:
        """Return the store time of the next message in each queue with a lag; None if it cannot be read now."""

        async def stored_ms(one: QueueProgress) -> int | None:
            try:
                async with self._slots:
                    found = await self._client.pull(one.queue.topic, one.queue, one.next_offset, 1, timeout=REQUEST_S)
            except NeveError:
                return None
            return found.messages[0].store_timestamp if found.messages else None

        behind = [one for one in progress if one.lag]
        times = await asyncio.gather(*(stored_ms(one) for one in behind))
        return {one.queue: time for one, time in zip(behind, times, strict=True)}

    async def _bounds_of(self, topic: str) -> dict[MessageQueue, QueueStats]:
        """Return the offsets of the queues of a topic, which are requested once for all groups."""
        asked = self._bounds.get(topic)
        if asked is None:
            asked = self._bounds[topic] = asyncio.create_task(self._ask_bounds(topic), name=f"bounds of {topic}")
        return await asked

    async def _ask_bounds(self, topic: str) -> dict[MessageQueue, QueueStats]:
        async with self._slots:
            try:
                return await self._client.admin.topic_stats(topic)
            except BrokerError as error:
                if error.code == ResponseCode.TOPIC_NOT_EXIST:
                    return {}  # deleted since the list was read
                raise

    # ---- committed offsets

    async def committed_at(self, broker: str) -> dict[str, dict[int, int]]:
        """Return all committed offsets of a broker, by `topic@group` and queue."""
        table = await self._table(broker, RequestCode.GET_ALL_CONSUMER_OFFSET, "offsetTable")
        return {pair: {int(queue): int(at) for queue, at in queues.items()} for pair, queues in table.items()}

    async def commit(self, queue: MessageQueue, group: str, offset: int) -> None:
        """Commit an offset for a group that has no connected members, also across a change of master."""
        async with self._slots:
            await self._client.commit(group, queue.topic, queue, offset)

    async def offset_by_time(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message of a queue that was stored at this time or later."""
        async with self._slots:
            return await self._client.offset_by_time(queue.topic, queue, time_ms)

    async def reset(self, group: str, queue: MessageQueue, offset: int) -> None:
        """Set the committed offset of a group in a queue.

        Brokers before 5.0 ignore queue and offset and use the time alone. The request therefore names a time in the
        far future without `isForce`, which makes them change nothing.

        Raises:
            Conflict: the broker did not set exactly this offset.
        """
        ext = {
            "group": group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "offset": str(offset),
            "timestamp": str(FAR_FUTURE_MS),
            "isForce": "false",
        }
        code = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET
        answer = await self._requests.ask_master(queue.broker_name, code, ext)
        if answer.code == ResponseCode.CONSUMER_NOT_ONLINE:
            await self.commit(queue, group, offset)
            return
        if (parse_body(require_success(answer)).get("offsetTable") or {}) != {queue: offset}:
            raise Conflict(
                f"broker {queue.broker_name} cannot reset group {group} while members are connected: stop them first"
            )

    async def _table(self, broker: str, code: RequestCode, field: str) -> dict[str, Any]:
        answer = parse_body(require_success(await self._requests.ask_master(broker, code)))
        return {str(key): value for key, value in (answer.get(field) or {}).items()}


def _version(connection: Mapping[str, Any]) -> str:
    number = int(connection.get("version") or 0)
    found = release_of(number)
    if found is None:
        return str(number)
    return f"{found.major}.{found.minor}.{found.patch}" + ("-SNAPSHOT" if found.is_snapshot else "")
