"""The administration of topics, groups and messages of a cluster, at `client.admin`."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from neve.client.group.pop_requests import set_request_mode
from neve.client.model import (
    BrokerInfo,
    ConsumeStats,
    Message,
    MessageQueue,
    QueueStats,
    TopicConfig,
    message_from_record,
)
from neve.client.net.answers import parse_body, require_success
from neve.client.net.connection import NOT_MASTER
from neve.client.net.route import TopicRoute
from neve.client.net.session import Session
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError, ProtocolError, UnknownOutcome
from neve.record.codec import MalformedRecord, decode_record, iter_records
from neve.record.ids import parse_offset_msg_id
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.names import DEFAULT_TOPIC

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_CLOCK_SKEW_MS = 10_000  # that a search looks ahead of our clock
_KEY_RESULTS = 32
_QUEUES, _PERM = 8, 6  # of a new topic


def _limited(
    method: Callable[Concatenate[Admin, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[Admin, P], Coroutine[Any, Any, R]]:
    """Return the method with the time limit of a call: its argument `timeout`, or the one of the options."""

    @functools.wraps(method)
    async def call(self: Admin, /, *args: P.args, **kwargs: P.kwargs) -> R:
        timeout = cast("float | None", kwargs.get("timeout"))
        return await self._session.requests.within(timeout, method(self, *args, **kwargs))

    return call


class Admin:
    """Administers one cluster.

    Every call but `view_message` and `query_messages` has a time limit: its `timeout`, or the one of the options. These
    two may last as long as the timeout of the options at each broker.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    # ---- topics

    @_limited
    async def create_topic(
        self,
        name: str,
        queues: int | None = None,
        attributes: Mapping[str, str | None] | None = None,
        *,
        perm: int | None = None,
        broker: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Create a topic on all masters, or on one broker, or change it.

        Where the topic exists, arguments that are not given keep their present values. A new topic gets 8 queues.

        Args:
            queues: for reading and for writing, at each broker.
            attributes: such as `{"reserve.time": "720"}`, in whole hours; None as a value removes the attribute.
            perm: 4 to read, 2 to write, 6 for both.

        Raises:
            ClientError: a broker has more queues to read; consumers would lose sight of their messages. Nothing is
                changed on any broker then.
        """
        changes = {}
        if queues is not None:
            changes = {"readQueueNums": str(queues), "writeQueueNums": str(queues)}
        if perm is not None:
            changes["perm"] = str(perm)
        if attributes:
            signed = (f"-{key}" if value is None else f"+{key}={value}" for key, value in attributes.items())
            changes["attributes"] = ",".join(signed)
        requests: dict[str, dict[str, str]] = {}
        for broker_name, address in (await self._masters(broker)).items():
            present = await self._present_topic(name, address, timeout)
            if queues is not None and present is not None and queues < (readable := int(present["readQueueNums"])):
                raise ClientError(
                    f"{name} has {readable} queues at {broker_name}: with {queues}, consumers would not see the others "
                    "and their messages. Use `neve topic set` to have fewer"
                )
            requests[address] = topic_fields(name, present, changes)
        for address, ext in requests.items():
            await self._session.requests.ask(address, RequestCode.UPDATE_AND_CREATE_TOPIC, ext, timeout=timeout)
        self._session.routes.forget(name)

    async def _present_topic(self, name: str, address: str, timeout: float | None) -> Mapping[str, Any] | None:
        """Return the settings of the topic at a broker; None if the broker does not have it."""
        ext = {"topic": name, "lo": "true"}
        try:
            answer = await self._session.requests.ask(address, RequestCode.GET_TOPIC_CONFIG, ext, timeout=timeout)
        except BrokerError as error:
            if error.code == ResponseCode.TOPIC_NOT_EXIST:
                return None
            raise
        present: Mapping[str, Any] = parse_body(answer)
        _topic_config(present)  # raises ProtocolError if a field is missing
        return present

    @_limited
    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Delete a topic on all masters and in the name servers."""
        for address in (await self._masters(None)).values():
            await self._session.requests.ask(
                address, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name}, timeout=timeout
            )
        require_success(await self._session.name_servers.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": name}))
        self._session.routes.drop(name)

    @_limited
    async def topic_config(self, name: str, *, broker: str | None = None) -> TopicConfig:
        """Return the configuration of a topic at one of its brokers, by default the first.

        Raises:
            ClientError: no such broker has the topic.
        """
        route = await self._session.routes.read_now(name)
        for broker_name in sorted(route.brokers):
            address = route.address(broker_name)
            if address is not None and broker in (None, broker_name):
                answer = await self._session.requests.ask(
                    address, RequestCode.GET_TOPIC_CONFIG, {"topic": name, "lo": "true"}
                )
                return _topic_config(parse_body(answer))
        raise ClientError(f"{name} has no broker {broker or 'at all'}")

    @_limited
    async def topic_route(self, name: str) -> TopicRoute:
        """Return the route of a topic, as the name servers have it now."""
        return await self._session.routes.read_now(name)

    @_limited
    async def topic_list(self) -> list[str]:
        """Return all topics of the name server, with system topics, sorted."""
        answer = require_success(
            await self._session.name_servers.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
        )
        return sorted(str(topic) for topic in parse_body(answer).get("topicList") or ())

    @_limited
    async def topic_stats(self, name: str) -> dict[MessageQueue, QueueStats]:
        """Return the offsets of each queue of a topic, sorted by queue."""
        stats: dict[MessageQueue, QueueStats] = {}
        for table in await self._offset_tables(name, RequestCode.GET_TOPIC_STATS_INFO, {"topic": name}):
            for queue, entry in table.items():
                low, high = int(entry["minOffset"]), int(entry["maxOffset"])
                changed = int(entry.get("lastUpdateTimestamp") or 0)
                messages, local = int(entry.get("messages", high - low)), entry.get("localMinOffset")
                cold = min(int(entry.get("coldMessages", max(int(local or low) - low, 0))), messages)
                hot_from = None if local is None else int(local)
                stats[queue] = QueueStats(low, high, changed, messages, hot_from, cold)
        return dict(sorted(stats.items()))

    # ---- groups

    @_limited
    async def consume_stats(self, group: str, topic: str) -> dict[MessageQueue, ConsumeStats]:
        """Return the progress of a group in each queue of a topic, sorted by queue."""
        ext = {"consumerGroup": group, "topic": topic}
        tables = await self._offset_tables(topic, RequestCode.GET_CONSUME_STATS, ext)
        return dict(sorted((queue, _consume_stats(entry)) for table in tables for queue, entry in table.items()))

    @_limited
    async def set_request_mode(self, group: str, topic: str, mode: str, *, share_queues: int = -1) -> None:
        """Set how brokers divide a topic among the popping members of a group.

        Args:
            group: the consumer group.
            topic: the topic.
            mode: "PULL" assigns each queue to one member; "POP" lets every member pop from all queues.
            share_queues: with "POP", the number of queues of other members that a member pops from; -1 for all.

        Raises:
            ClientError: the mode is unknown.
        """
        await set_request_mode(self._session, group, topic, mode, share_queues)

    # ---- cluster

    @_limited
    async def cluster_info(self) -> dict[str, BrokerInfo]:
        """Return all brokers by name."""
        return await self._session.routes.brokers()

    @_limited
    async def broker_config(self, broker: str) -> dict[str, str]:
        """Return the effective configuration of a broker's master."""
        address = (await self._masters(broker))[broker]
        text = (await self._session.requests.ask(address, RequestCode.GET_BROKER_CONFIG, {})).body.decode()
        pairs = (line.partition("=") for line in text.splitlines() if line and line[0] not in "#!")
        return {name.strip(): value.strip() for name, _, value in pairs}

    # ---- messages

    async def view_message(self, msg_id: str, topic: str | None = None) -> Message:
        """Return the message with an id.

        Args:
            msg_id: the id that its producer gave it, which needs the topic, or the id with the physical offset.
            topic: the topic of the message.

        Raises:
            BrokerError: QUERY_NOT_FOUND.
            NeveError: a broker that may have the message is unreachable, and no other has it.
        """
        if topic is not None:
            found = [m for m in await self.query_messages(topic, msg_id, is_unique_key=True) if m.msg_id == msg_id]
            if found:
                return found[-1]
        try:
            host, port, offset = parse_offset_msg_id(msg_id)
        except ValueError as error:
            raise ClientError(str(error)) from error
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        brokers = await self._session.routes.brokers()
        owner = next((one for one in brokers.values() if address in one.addresses.values()), None)
        # An id has an address of its author's choice, so only brokers of this cluster are asked. If the broker that
        # stored the message is gone, the other members of its set have it.
        asked = sorted(brokers.values(), key=lambda one: one.name) if owner is None else [owner]
        ext = {"offset": str(offset), "topic": topic or ""}
        where = "on no broker of this cluster" if owner is None else f"not on {owner.name}"
        problem: NeveError = BrokerError(ResponseCode.QUERY_NOT_FOUND, f"{msg_id} is {where}")
        for broker in asked:
            try:
                answer = await self._ask_any(broker, RequestCode.VIEW_MESSAGE_BY_ID, ext, first=address)
                message = _message(require_success(answer).body, broker)
            except BrokerError as error:
                if owner is not None:
                    problem = error
            except NeveError as error:
                log.info("broker not asked for a message: broker=%s msg_id=%s cause=%s", broker.name, msg_id, error)
                problem = error
            else:
                if message.offset_msg_id == msg_id.upper():  # another log may have another message at that offset
                    return message
        raise problem

    async def query_messages(
        self,
        topic: str,
        key: str,
        *,
        max_count: int = _KEY_RESULTS,
        begin_ms: int = 0,
        end_ms: int | None = None,
        is_unique_key: bool = False,
    ) -> list[Message]:
        """Return the messages of a topic with a key, from all its brokers, by store time.

        Args:
            topic: the topic.
            key: a word of the messages' keys.
            max_count: the largest number of messages of each broker.
            begin_ms: the first store time, in ms since 1970.
            end_ms: the last store time, in ms since 1970; by default now.
            is_unique_key: whether the key is the id that a producer gave a message.
        """
        end = self._session.options.now_ms() + _CLOCK_SKEW_MS if end_ms is None else end_ms
        ext = {
            "topic": topic,
            "key": key,
            "maxNum": str(max_count),
            "beginTimestamp": str(begin_ms),
            "endTimestamp": str(end),
            "_UNIQUE_KEY_QUERY": "true" if is_unique_key else "false",
        }
        route = await self._session.routes.get(topic)
        found: list[Message] = []
        for name, broker in sorted(route.brokers.items()):
            if not broker.addresses:
                continue
            answer = await self._ask_any(broker, RequestCode.QUERY_MESSAGE, ext)
            if answer.code == ResponseCode.QUERY_NOT_FOUND:
                continue
            try:
                records = iter_records(require_success(answer).body)
                found += (message_from_record(record, name) for record in records)
            except MalformedRecord as error:
                raise ProtocolError(f"{name}: {error}") from error
        return sorted(found, key=lambda message: message.store_timestamp)

    # ---- internal

    async def _ask_any(
        self, broker: BrokerInfo, code: RequestCode, ext: Mapping[str, str], *, first: str = ""
    ) -> RemotingCommand:
        """Return the answer of a member of a broker set: of `first`, the master, or a replica, in this order.

        Raises:
            NeveError: no member answers; the error of the last one.
        """
        members = [broker.addresses[number] for number in sorted(broker.addresses)]
        if not members:
            raise ConnectionFailed(f"no member of {broker.name} is known")
        members.sort(key=lambda address: address != first)
        for address in members[:-1]:
            try:
                answer = await self._session.pool.invoke(address, code, ext, timeout=self._session.options.timeout)
            except (ConnectionFailed, UnknownOutcome) as error:
                log.info("member does not answer: address=%s cause=%s", address, error)
            else:
                if answer.code not in NOT_MASTER:
                    return answer
        return await self._session.pool.invoke(members[-1], code, ext, timeout=self._session.options.timeout)

    async def _masters(self, broker: str | None) -> dict[str, str]:
        brokers = await self._session.routes.brokers()
        masters = {
            name: info.master
            for name, info in sorted(brokers.items())
            if info.master is not None and broker in (None, name)
        }
        if not masters:
            raise ClientError(f"the name server has no master {broker or 'at all'}")
        return masters

    async def _offset_tables(self, topic: str, code: RequestCode, ext: Mapping[str, str]) -> list[Mapping[Any, Any]]:
        """Return the `offsetTable` of each broker of the topic."""
        route = await self._session.routes.read_now(topic)
        addresses = [address for name in sorted(route.brokers) if (address := route.address(name)) is not None]
        answers = await asyncio.gather(*(self._session.requests.ask(address, code, ext) for address in addresses))
        return [parse_body(answer).get("offsetTable") or {} for answer in answers]


def topic_fields(name: str, present: Mapping[str, Any] | None, changes: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of UPDATE_AND_CREATE_TOPIC, which replaces all settings of a topic but its attributes.

    Args:
        present: the settings that the broker has, which stay unless `changes` name them; None for a new topic.
        changes: fields of the request. `attributes` lists changes: `+name=value` or `-name`, joined by commas.
    """
    row = present or {}
    return {
        "topic": name,
        "defaultTopic": DEFAULT_TOPIC,
        "readQueueNums": str(int(row.get("readQueueNums", _QUEUES))),
        "writeQueueNums": str(int(row.get("writeQueueNums", _QUEUES))),
        "perm": str(int(row.get("perm", _PERM))),
        "topicFilterType": str(row.get("topicFilterType") or "SINGLE_TAG"),
        "topicSysFlag": str(int(row.get("topicSysFlag") or 0)),
        "order": str(bool(row.get("order"))).lower(),
        "attributes": "",
        **changes,
    }


def _message(stored: bytes, broker: BrokerInfo) -> Message:
    try:
        return message_from_record(decode_record(stored), broker.name)
    except ValueError as error:
        raise ProtocolError(f"invalid record at {broker.name}: {error}") from error


def parse_consume_stats(answer: RemotingCommand) -> dict[MessageQueue, ConsumeStats]:
    """Return the statistics of an answer to GET_CONSUME_STATS."""
    return {queue: _consume_stats(entry) for queue, entry in (parse_body(answer).get("offsetTable") or {}).items()}


def _consume_stats(entry: Mapping[str, Any]) -> ConsumeStats:
    left, cold = entry.get("messages"), entry.get("coldMessages")
    return ConsumeStats(
        int(entry["brokerOffset"]),
        int(entry["consumerOffset"]),
        int(entry.get("lastTimestamp") or 0),
        None if left is None else int(left),
        None if cold is None else int(cold),
    )


def _topic_config(data: Any) -> TopicConfig:
    try:
        attributes = {str(key): str(value) for key, value in (data.get("attributes") or {}).items()}
        return TopicConfig(
            str(data["topicName"]),
            int(data["readQueueNums"]),
            int(data["writeQueueNums"]),
            int(data.get("perm", 6)),
            bool(data.get("order", False)),
            attributes,
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"invalid configuration of a topic: {error!r}") from error
