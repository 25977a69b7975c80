"""Permissions, of which each row of a request code has one: the resources of a request and the actions on them.

Any of several actions satisfies a need. Names come from the same fields that the handlers read; a missing field is an
empty name, which only the pattern `*` matches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from neve.remoting.body import lenient_loads, loads_as
from neve.remoting.command import RemotingCommand
from neve.remoting.names import DEFAULT_TOPIC, DLQ_PREFIX, RETRY_PREFIX

_OF_GROUPS = (RETRY_PREFIX, DLQ_PREFIX)
# The kind of a need whose resource only the server's tables determine: see `of_owners`.
RETRY_TOPIC = "RetryTopic"


class Need(NamedTuple):
    """One of `actions` on one resource."""

    kind: str
    name: str
    actions: frozenset[str]


class NeedOfAll(NamedTuple):
    """One of `actions` on each of many resources."""

    kind: str
    names: Sequence[str]
    actions: frozenset[str]


Permission = Callable[[RemotingCommand, str], Iterator[Need | NeedOfAll]]
# Returns all (group, popped topic) that the name of a retry topic may mean; the topic is None for a pull-retry topic.
RetryOwners = Callable[[str], Sequence[tuple[str, str | None]]]

PUB, SUB, GET, CREATE, UPDATE, DELETE, LIST = (
    frozenset({name}) for name in ("Pub", "Sub", "Get", "Create", "Update", "Delete", "List")
)


def topic_need(name: str, actions: frozenset[str]) -> Need:
    """Return the need for a topic. A retry or dead-letter topic needs the permission on its group."""
    if name.startswith(_OF_GROUPS):
        kind, owner = (RETRY_TOPIC, name) if name.startswith(RETRY_PREFIX) else ("Group", name.removeprefix(DLQ_PREFIX))
        return Need(kind, owner, actions - PUB | SUB if actions & PUB else actions)
    return Need("Topic", name, actions)


def of_owners(need: Need, retry_owners: RetryOwners) -> Iterator[Need]:
    """Resolve a need for a retry topic: its group and the popped topic, for all meanings of its name."""
    if need.kind != RETRY_TOPIC:
        yield need
        return
    for group, topic in retry_owners(need.name) or ((need.name.removeprefix(RETRY_PREFIX), None),):
        yield Need("Group", group, need.actions)
        if topic is not None:
            yield Need("Topic", topic, need.actions)


def super_users(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    """Mark a request that only super users may send, even without authorization: others could grant themselves any."""
    raise AssertionError("the guard decides by the type of the user")


def of_topic(actions: frozenset[str], field: str = "topic") -> Permission:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
        yield topic_need(command.ext.get(field, ""), actions)

    return needs


def of_group(actions: frozenset[str], field: str = "consumerGroup") -> Permission:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
        yield Need("Group", command.ext.get(field, ""), actions)

    return needs


def of_cluster(actions: frozenset[str]) -> Permission:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
        yield Need("Cluster", cluster, actions)

    return needs


def all_of(*parts: Permission) -> Permission:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need | NeedOfAll]:
        for part in parts:
            yield from part(command, cluster)

    return needs


def of_topic_and_group(actions: frozenset[str], group: str = "consumerGroup") -> Permission:
    return all_of(of_topic(actions), of_group(actions, group))


# ---- requests that name their resources in the body


def _rows(value: Any) -> list[dict[str, Any]]:
    """Return the objects of a list; any other item becomes an empty object, whose needs are not satisfiable."""
    rows = value if isinstance(value, list) else []
    return [row if isinstance(row, dict) else {} for row in rows]


def _body(command: RemotingCommand) -> dict[str, Any]:
    value = lenient_loads(command.body)
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


class _Subscription(msgspec.Struct, gc=False):
    topic: str


class _Consumer(msgspec.Struct, rename="camel"):
    group_name: str
    subscription_data_set: list[_Subscription] = []


class _Heartbeat(msgspec.Struct, rename="camel"):
    """The part of `HeartbeatData` that needs permissions; the whole may be a megabyte."""

    consumer_data_set: list[_Consumer] = []


def of_heartbeat(command: RemotingCommand, cluster: str) -> Iterator[Need | NeedOfAll]:
    for consumer in loads_as(command.body, _Heartbeat).consumer_data_set:
        yield Need("Group", consumer.group_name, SUB)
        topics = [subscription.topic for subscription in consumer.subscription_data_set]
        of_groups = {topic for topic in topics if topic.startswith(_OF_GROUPS)}
        yield NeedOfAll("Topic", [topic for topic in topics if topic not in of_groups] if of_groups else topics, SUB)
        for topic in of_groups:
            yield topic_need(topic, SUB)


def of_unregistration(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    if command.ext.get("consumerGroup"):
        yield Need("Group", command.ext["consumerGroup"], SUB)


def of_client_check(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    body = _body(command)
    yield Need("Group", _text(body.get("group")), SUB)
    subscription = body.get("subscriptionData")
    yield topic_need(_text(subscription.get("topic")) if isinstance(subscription, dict) else "", SUB)


def of_queue_locks(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    body = _body(command)
    yield Need("Group", _text(body.get("consumerGroup")), SUB)
    for queue in _rows(body.get("mqSet")):
        yield topic_need(_text(queue.get("topic")), SUB)


def of_topic_and_group_in_body(actions: frozenset[str]) -> Permission:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
        body = _body(command)
        yield topic_need(_text(body.get("topic")), actions)
        yield Need("Group", _text(body.get("consumerGroup")), actions)

    return needs


def of_batch_ack(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    for ack in _rows(_body(command).get("acks")):
        yield Need("Group", _text(ack.get("c", ack.get("consumerGroup"))), SUB)
        yield topic_need(_text(ack.get("t", ack.get("topic"))), SUB)


def of_topic_list(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    for row in _rows(_body(command).get("topicConfigList")):
        yield topic_need(_text(row.get("topicName")), CREATE)


def of_group_config(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    yield Need("Group", _text(_body(command).get("groupName")), CREATE)


def of_group_list(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    for row in _rows(_body(command).get("groupConfigList")):
        yield Need("Group", _text(row.get("groupName")), CREATE)


def of_route(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    """The template for new topics needs no permission: its route contains only the addresses of brokers."""
    name = command.ext.get("topic", "")
    if name != DEFAULT_TOPIC:
        yield topic_need(name, PUB | SUB | GET)
