"""What the command line and tests need of a cluster's administration."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

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

_SHOWN_TO_ALL = 10_000  # ms that an id search looks ahead of our clock
_KEY_RESULTS = 32
_QUEUES, _PERM = 8, 6  # of a new topic


class Admin:
    """The administering part of a client."""

    def __init__(self, session: Session) -> None:
        self._session = session

    # ---- topics

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
        """Create the topic, or change it, on all masters (or on the broker named).

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
                    "and their messages. Use `neve topic alter` to have fewer"
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

    async def delete_topic(self, name: str, *, timeout: float | None = None) -> None:
        """Deletes the topic on all masters and in the name servers."""
        for address in (await self._masters(None)).values():
            await self._session.requests.ask(
                address, RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": name}, timeout=timeout
            )
        require_success(await self._session.name_servers.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": name}))
        self._session.routes.drop(name)

    async def topic_config(self, name: str, *, broker: str | None = None) -> TopicConfig:
        """The topic as the first of its brokers (or the one named) has it."""
        route = await self._session.routes.read_now(name)
        for broker_name in sorted(route.brokers):
            address = route.address(broker_name)
            if address is not None and broker in (None, broker_name):
                answer = await self._session.requests.ask(
                    address, RequestCode.GET_TOPIC_CONFIG, {"topic": name, "lo": "true"}
                )
                return _topic_config(parse_body(answer))
        raise ClientError(f"{name} has no broker {broker or 'at all'}")

    async def topic_route(self, name: str) -> TopicRoute:
        return await self._session.routes.read_now(name)

    async def topic_list(self) -> list[str]:
        """All topics that the name server has, system topics included, sorted."""
        answer = require_success(
            await self._session.name_servers.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {})
        )
        return sorted(str(topic) for topic in parse_body(answer).get("topicList") or ())

    async def topic_stats(self, name: str) -> dict[MessageQueue, QueueStats]:
        """The offsets of each queue, sorted by queue."""
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

    async def consume_stats(self, group: str, topic: str) -> dict[MessageQueue, ConsumeStats]:
        """How far the group is in each queue of the topic."""
        ext = {"consumerGroup": group, "topic": topic}
        tables = await self._offset_tables(topic, RequestCode.GET_CONSUME_STATS, ext)
        return dict(sorted((queue, _consume_stats(entry)) for table in tables for queue, entry in table.items()))

    # ---- cluster

    async def cluster_info(self) -> dict[str, BrokerInfo]:
        """All brokers by name."""
        return await self._session.routes.brokers()

    async def broker_config(self, broker: str) -> dict[str, str]:
        """The configuration in force of a broker's master."""
        address = (await self._masters(broker))[broker]
        text = (await self._session.requests.ask(address, RequestCode.GET_BROKER_CONFIG, {})).body.decode()
        pairs = (line.partition("=") for line in text.splitlines() if line and line[0] not in "#!")
        return {name.strip(): value.strip() for name, _, value in pairs}

    # ---- messages

    async def view_message(self, msg_id: str, topic: str | None = None) -> Message:
        """The message with this id: the producer's (then its topic is needed) or the one that says where it lies.

        Raises:
            BrokerError: QUERY_NOT_FOUND.
            NeveError: nobody who was asked has it, and not everybody who may have it could be asked.
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
        # The id names an address of its writer's choice: ask none that is not ours. Who stored it may be gone; what it
        # stored is with the other members of its set.
        asked = sorted(brokers.values(), key=lambda one: one.name) if owner is None else [owner]
        ext = {"offset": str(offset), "topic": topic or ""}
        where = "on no broker of this cluster" if owner is None else f"not on {owner.name}"
        problem: NeveError = BrokerError(ResponseCode.QUERY_NOT_FOUND, f"{msg_id} lies {where}")
        for broker in asked:
            try:
                answer = await self._ask_any(broker, RequestCode.VIEW_MESSAGE_BY_ID, ext, first=address)
                message = _message(require_success(answer).body, broker)
            except BrokerError as error:
                if owner is not None:
                    problem = error
            except NeveError as error:
                log.info("%s may have %s: %s", broker.name, msg_id, error)
                problem = error
            else:
                if message.offset_msg_id == msg_id.upper():  # another log may have a message there, too
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
        """Messages of the topic with this key, of all its brokers, by store time."""
        end = self._session.options.now_ms() + _SHOWN_TO_ALL if end_ms is None else end_ms
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

    # ---- inside

    async def _ask_any(
        self, broker: BrokerInfo, code: RequestCode, ext: Mapping[str, str], *, first: str = ""
    ) -> RemotingCommand:
        """What a member of the broker answers, its master first, unless another is named: all have the same messages.

        Raises:
            NeveError: none can be asked; why the last one could not.
        """
        members = [broker.addresses[number] for number in sorted(broker.addresses)]
        if not members:
            raise ConnectionFailed(f"no member of {broker.name} is known")
        members.sort(key=lambda address: address != first)
        for address in members[:-1]:
            try:
                answer = await self._session.pool.invoke(address, code, ext, timeout=self._session.options.timeout)
            except (ConnectionFailed, UnknownOutcome) as error:
                log.info("%s: %s", address, error)
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
        """`offsetTable` of the answer of each of the topic's brokers."""
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
        raise ProtocolError(f"what {broker.name} has can't be read: {error}") from error


def parse_consume_stats(answer: RemotingCommand) -> dict[MessageQueue, ConsumeStats]:
    """Of an answer to GET_CONSUME_STATS."""
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
        raise ProtocolError(f"a topic's configuration cannot be read: {error!r}") from error
