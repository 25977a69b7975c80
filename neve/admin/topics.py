"""Topics: lists, settings at each broker, offsets of queues.

17 create or change, 21 all of a broker, 351 settings, 202 offsets, 206 all of the name server, 224 of a cluster,
12 messages by the producer's id
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from neve.admin.errors import NotFound
from neve.admin.requests import FAR_FUTURE_MS, ServerRequests
from neve.client.admin import topic_fields
from neve.client.model import BrokerInfo, Message, message_from_record
from neve.client.net.answers import parse_body, require_success
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.names import is_system_topic


class TopicAt(NamedTuple):
    """The settings of a topic at one broker, by RocketMQ's names."""

    broker: str
    settings: Mapping[str, Any]

    def number(self, name: str) -> int:
        """Return a numeric setting; 0 if it is missing."""
        return int(self.settings.get(name) or 0)


def queue_count(settings: Mapping[str, Any]) -> int:
    """Return the number of queues that a topic has at a broker, for reading or for writing."""
    return max(int(settings.get("writeQueueNums") or 0), int(settings.get("readQueueNums") or 0))


def user_topics(names: Iterable[str], brokers: Iterable[BrokerInfo]) -> list[str]:
    """Return the topics without those of servers and of consumer groups (retries, dead letters)."""
    brokers = list(brokers)
    # each broker and each cluster has topics of its own name
    own = {broker.name for broker in brokers} | {broker.cluster for broker in brokers}
    own |= {f"{broker.cluster}_REPLY_TOPIC" for broker in brokers}
    return [name for name in names if name not in own and not is_system_topic(name) and not name.startswith("%")]


class Topics:
    """The topics of a cluster."""

    def __init__(self, requests: ServerRequests) -> None:
        self._requests = requests

    # ---- lists

    async def names(self, *, include_system: bool = False) -> list[str]:
        """Return the topics that a name server knows, sorted."""
        answer = await self._requests.ask_name_server(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        names = sorted(map(str, parse_body(require_success(answer)).get("topicList") or ()))
        return names if include_system else user_topics(names, self._requests.brokers.values())

    async def names_of_cluster(self, cluster: str) -> list[str]:
        """Return the users' topics of one cluster, sorted."""
        answer = await self._requests.ask_name_server(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": cluster})
        names = map(str, parse_body(require_success(answer)).get("topicList") or ())
        return user_topics(sorted(names), self._requests.brokers.values())

    # ---- settings

    async def settings_at(self, broker: str) -> dict[str, dict[str, Any]]:
        """Return the settings of all topics of a broker, by topic."""
        answer = await self._requests.ask_master(broker, RequestCode.GET_ALL_TOPIC_CONFIG)
        table = parse_body(require_success(answer)).get("topicConfigTable") or {}
        return {str(topic): settings for topic, settings in table.items()}

    async def settings_of(self, topic: str, broker: str | None = None) -> list[TopicAt]:
        """Return the settings of a topic at each broker that has it, or at one broker.

        Raises:
            NotFound: no broker has the topic.
        """
        names = self._requests.require(broker)
        ext = {"topic": topic, "lo": "true"}
        answers = await asyncio.gather(
            *(self._requests.ask_master(name, RequestCode.GET_TOPIC_CONFIG, ext) for name in names)
        )
        found = [
            TopicAt(name, parse_body(require_success(answer)))
            for name, answer in zip(names, answers, strict=True)
            if answer.code != ResponseCode.TOPIC_NOT_EXIST
        ]
        if not found:
            raise NotFound(f"there is no topic {topic}" + ("" if broker is None else f" at broker {broker}"))
        return found

    async def change(self, topic: str, at: TopicAt, changes: Mapping[str, str]) -> None:
        """Change settings of a topic at one broker, or create it there. Settings that are not named stay."""
        fields = topic_fields(topic, at.settings, changes)
        answer = await self._requests.ask_master(at.broker, RequestCode.UPDATE_AND_CREATE_TOPIC, fields)
        require_success(answer)

    # ---- messages

    async def offsets(self, topic: str) -> dict[str, dict[str, Any]]:
        """Return the answer of each broker to GET_TOPIC_STATS_INFO; neve's brokers add what each tier holds."""
        names = self._requests.require(None)
        ext = {"topic": topic, "tiers": "true"}
        answers = await asyncio.gather(
            *(self._requests.ask_master(name, RequestCode.GET_TOPIC_STATS_INFO, ext) for name in names)
        )
        return {
            name: parse_body(require_success(answer))
            for name, answer in zip(names, answers, strict=True)
            if answer.code != ResponseCode.TOPIC_NOT_EXIST
        }

    async def messages_by_id(self, broker: str, topic: str, msg_id: str) -> list[Message]:
        """Return the messages with a producer's id at one broker, by store time."""
        ext = {"topic": topic, "key": msg_id, "maxNum": "32", "beginTimestamp": "0", "endTimestamp": str(FAR_FUTURE_MS)}
        ext["_UNIQUE_KEY_QUERY"] = "true"
        answer = await self._requests.ask_master(broker, RequestCode.QUERY_MESSAGE, ext)
        if answer.code == ResponseCode.QUERY_NOT_FOUND:
            return []
        found = [message_from_record(record, broker) for record in iter_records(require_success(answer).body)]
        return sorted((one for one in found if one.msg_id == msg_id), key=lambda one: one.store_timestamp)
