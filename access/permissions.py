"""The permissions that each request code needs: its resources and the actions on them. An unknown code is denied.

`P`, `S`, `G`: Pub, Sub, Get; any of several actions satisfies a need. Names come from the same fields that the handlers
read; a missing field is an empty name, which only the pattern `*` matches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from neve.remoting.body import lenient_loads, loads_as
from neve.remoting.codes import RequestCode as Code
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


Needs = Callable[[RemotingCommand, str], Iterator[Need | NeedOfAll]]
# Returns all (group, popped topic) that the name of a retry topic may mean; the topic is None for a pull-retry topic.
RetryOwners = Callable[[str], Sequence[tuple[str, str | None]]]

P, S, G = frozenset({"Pub"}), frozenset({"Sub"}), frozenset({"Get"})
SG, PSG = S | G, P | S | G
SU = frozenset({"Sub", "Update"})
CREATE, UPDATE, DELETE, LIST = (frozenset({name}) for name in ("Create", "Update", "Delete", "List"))


def topic_need(name: str, actions: frozenset[str]) -> Need:
    """Return the need for a topic. A retry or dead-letter topic needs the permission on its group."""
    if name.startswith(_OF_GROUPS):
        kind, owner = (RETRY_TOPIC, name) if name.startswith(RETRY_PREFIX) else ("Group", name.removeprefix(DLQ_PREFIX))
        return Need(kind, owner, actions - P | S if actions & P else actions)
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


def _topic(actions: frozenset[str], field: str = "topic") -> Needs:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
        yield topic_need(command.ext.get(field, ""), actions)

    return needs


def _group(actions: frozenset[str], field: str = "consumerGroup") -> Needs:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
        yield Need("Group", command.ext.get(field, ""), actions)

    return needs


def _cluster(actions: frozenset[str]) -> Needs:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
        yield Need("Cluster", cluster, actions)

    return needs


def _all(*parts: Needs) -> Needs:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need | NeedOfAll]:
        for part in parts:
            yield from part(command, cluster)

    return needs


def _both(actions: frozenset[str], group: str = "consumerGroup") -> Needs:
    return _all(_topic(actions), _group(actions, group))


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


def _heartbeat(command: RemotingCommand, cluster: str) -> Iterator[Need | NeedOfAll]:
    for consumer in loads_as(command.body, _Heartbeat).consumer_data_set:
        yield Need("Group", consumer.group_name, S)
        topics = [subscription.topic for subscription in consumer.subscription_data_set]
        of_groups = {topic for topic in topics if topic.startswith(_OF_GROUPS)}
        yield NeedOfAll("Topic", [topic for topic in topics if topic not in of_groups] if of_groups else topics, S)
        for topic in of_groups:
            yield topic_need(topic, S)


def _unregister(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    if command.ext.get("consumerGroup"):
        yield Need("Group", command.ext["consumerGroup"], S)


def _check_client(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    body = _body(command)
    yield Need("Group", _text(body.get("group")), S)
    subscription = body.get("subscriptionData")
    yield topic_need(_text(subscription.get("topic")) if isinstance(subscription, dict) else "", S)


def _locks(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    body = _body(command)
    yield Need("Group", _text(body.get("consumerGroup")), S)
    for queue in _rows(body.get("mqSet")):
        yield topic_need(_text(queue.get("topic")), S)


def _body_pair(actions: frozenset[str]) -> Needs:
    def needs(command: RemotingCommand, cluster: str) -> Iterator[Need]:
        body = _body(command)
        yield topic_need(_text(body.get("topic")), actions)
        yield Need("Group", _text(body.get("consumerGroup")), actions)

    return needs


def _batch_ack(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    for ack in _rows(_body(command).get("acks")):
        yield Need("Group", _text(ack.get("c", ack.get("consumerGroup"))), S)
        yield topic_need(_text(ack.get("t", ack.get("topic"))), S)


def _create_topics(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    for row in _rows(_body(command).get("topicConfigList")):
        yield topic_need(_text(row.get("topicName")), CREATE)


def _create_group(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    yield Need("Group", _text(_body(command).get("groupName")), CREATE)


def _create_groups(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    for row in _rows(_body(command).get("groupConfigList")):
        yield Need("Group", _text(row.get("groupName")), CREATE)


def _route(command: RemotingCommand, cluster: str) -> Iterator[Need]:
    """The template for new topics needs no permission: its route contains only the addresses of brokers."""
    name = command.ext.get("topic", "")
    if name != DEFAULT_TOPIC:
        yield topic_need(name, PSG)


_MESSAGING: dict[int, Needs] = {
    Code.SEND_MESSAGE: _topic(P),
    Code.SEND_MESSAGE_V2: _topic(P, "b"),
    Code.SEND_BATCH_MESSAGE: _topic(P, "b"),
    Code.SEND_REPLY_MESSAGE: _topic(P),
    Code.SEND_REPLY_MESSAGE_V2: _topic(P, "b"),
    Code.RECALL_MESSAGE: _topic(P),
    Code.END_TRANSACTION: _topic(P),
    Code.CONSUMER_SEND_MSG_BACK: _group(S, "group"),
    Code.PULL_MESSAGE: _both(S),
    Code.LITE_PULL_MESSAGE: _both(S),
    Code.POP_MESSAGE: _both(S),
    Code.PEEK_MESSAGE: _both(S),
    Code.ACK_MESSAGE: _both(S),
    Code.BATCH_ACK_MESSAGE: _batch_ack,
    Code.CHANGE_MESSAGE_INVISIBLETIME: _both(S),
    Code.NOTIFICATION: _both(S),
    Code.POLLING_INFO: _both(SG),
    Code.QUERY_ASSIGNMENT: _body_pair(S),
    Code.QUERY_MESSAGE: _topic(SG),
    Code.VIEW_MESSAGE_BY_ID: _cluster(G),  # the record at an offset may belong to any topic
    Code.QUERY_CONSUMER_OFFSET: _both(SG),
    Code.UPDATE_CONSUMER_OFFSET: _both(SU),
    Code.GET_MAX_OFFSET: _topic(PSG),
    Code.GET_MIN_OFFSET: _topic(PSG),
    Code.SEARCH_OFFSET_BY_TIMESTAMP: _topic(PSG),
    Code.GET_EARLIEST_MSG_STORETIME: _topic(PSG),
    Code.GET_CONSUMER_LIST_BY_GROUP: _group(SG),
    Code.LOCK_BATCH_MQ: _locks,
    Code.UNLOCK_BATCH_MQ: _locks,
    Code.HEART_BEAT: _heartbeat,
    Code.UNREGISTER_CLIENT: _unregister,
    Code.CHECK_CLIENT_CONFIG: _check_client,
}

_ADMINISTRATION: dict[int, Needs] = {
    Code.UPDATE_AND_CREATE_TOPIC: _topic(CREATE),
    Code.UPDATE_AND_CREATE_TOPIC_LIST: _create_topics,
    Code.DELETE_TOPIC_IN_BROKER: _topic(DELETE),
    Code.GET_TOPIC_CONFIG: _topic(G),
    Code.GET_TOPIC_STATS_INFO: _topic(G),
    Code.QUERY_TOPIC_CONSUME_BY_WHO: _topic(G),
    Code.QUERY_CONSUME_QUEUE: _topic(G),
    Code.RESUME_CHECK_HALF_MESSAGE: _cluster(UPDATE),
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: _create_group,
    Code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST: _create_groups,
    Code.DELETE_SUBSCRIPTIONGROUP: _group(DELETE, "groupName"),
    Code.GET_SUBSCRIPTIONGROUP_CONFIG: _group(G, "group"),
    Code.GET_CONSUME_STATS: _group(G),
    Code.GET_CONSUMER_CONNECTION_LIST: _group(G),
    Code.GET_PRODUCER_CONNECTION_LIST: _group(G, "producerGroup"),
    Code.QUERY_TOPICS_BY_CONSUMER: _group(G, "group"),
    Code.QUERY_SUBSCRIPTION_BY_CONSUMER: _both(G, "group"),
    Code.QUERY_CONSUME_TIME_SPAN: _both(G, "group"),
    Code.QUERY_CORRECTION_OFFSET: _both(G, "compareGroup"),
    Code.CLONE_GROUP_OFFSET: _all(_group(G, "srcGroup"), _group(UPDATE, "destGroup")),
    Code.UPDATE_AND_GET_GROUP_FORBIDDEN: _both(UPDATE, "group"),
    Code.INVOKE_BROKER_TO_RESET_OFFSET: _both(UPDATE, "group"),
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS: _both(G, "group"),
    Code.GET_CONSUMER_RUNNING_INFO: _group(G),
    Code.CONSUME_MESSAGE_DIRECTLY: _all(_group(UPDATE), _cluster(G)),
    Code.SET_MESSAGE_REQUEST_MODE: _body_pair(UPDATE),
}

_CLUSTER: dict[int, frozenset[str]] = {
    **dict.fromkeys((Code.GET_BROKER_CONFIG, Code.GET_BROKER_RUNTIME_INFO, Code.VIEW_BROKER_STATS_DATA), G),
    **dict.fromkeys((Code.GET_BROKER_CONSUME_STATS, Code.GET_ALL_PRODUCER_INFO, Code.GET_BROKER_HA_STATUS), G),
    Code.EXCHANGE_BROKER_HA_INFO: G,
    **dict.fromkeys((Code.GET_BROKER_EPOCH_CACHE, Code.GET_ALL_CONSUMER_OFFSET, Code.GET_ALL_DELAY_OFFSET), G),
    **dict.fromkeys((Code.GET_ALL_MESSAGE_REQUEST_MODE, Code.GET_BROKER_CLUSTER_INFO, Code.GET_KV_CONFIG), G),
    **dict.fromkeys((Code.GET_KVLIST_BY_NAMESPACE, Code.GET_NAMESRV_CONFIG, Code.GET_BROKER_MEMBER_GROUP), G),
    **dict.fromkeys((Code.GET_ALL_TOPIC_CONFIG, Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG), LIST),
    **dict.fromkeys((Code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, Code.GET_SYSTEM_TOPIC_LIST_FROM_NS), LIST),
    **dict.fromkeys((Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, Code.GET_TOPICS_BY_CLUSTER), LIST),
    **dict.fromkeys((Code.GET_UNIT_TOPIC_LIST, Code.GET_HAS_UNIT_SUB_TOPIC_LIST), LIST),
    Code.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST: LIST,
    **dict.fromkeys((Code.UPDATE_BROKER_CONFIG, Code.UPDATE_NAMESRV_CONFIG, Code.DELETE_EXPIRED_COMMITLOG), UPDATE),
    **dict.fromkeys((Code.CLEAN_EXPIRED_CONSUMEQUEUE, Code.CLEAN_UNUSED_TOPIC, Code.PUT_KV_CONFIG), UPDATE),
    **dict.fromkeys((Code.DELETE_KV_CONFIG, Code.WIPE_WRITE_PERM_OF_BROKER), UPDATE),
    **dict.fromkeys((Code.ADD_WRITE_PERM_OF_BROKER, Code.REGISTER_TOPIC_IN_NAMESRV), UPDATE),
    **dict.fromkeys((Code.REGISTER_BROKER, Code.UNREGISTER_BROKER, Code.QUERY_DATA_VERSION), UPDATE),
    Code.BROKER_HEARTBEAT: UPDATE,
    **dict.fromkeys((Code.CONTROLLER_GET_METADATA_INFO, Code.CONTROLLER_GET_REPLICA_INFO), G),
    **dict.fromkeys((Code.CONTROLLER_GET_SYNC_STATE_DATA, Code.GET_CONTROLLER_CONFIG), G),
    **dict.fromkeys((Code.CONTROLLER_GET_NEXT_BROKER_ID, Code.CONTROLLER_APPLY_BROKER_ID), UPDATE),
    **dict.fromkeys((Code.CONTROLLER_REGISTER_BROKER, Code.CONTROLLER_ELECT_MASTER, Code.CLEAN_BROKER_DATA), UPDATE),
    **dict.fromkeys((Code.CONTROLLER_ALTER_SYNC_STATE_SET, Code.UPDATE_CONTROLLER_CONFIG), UPDATE),
    Code.NOTIFY_BROKER_ROLE_CHANGED: UPDATE,
}

NEEDS: dict[int, Needs] = {
    **_MESSAGING,
    **_ADMINISTRATION,
    **{code: _cluster(actions) for code, actions in _CLUSTER.items()},
    Code.GET_ROUTEINFO_BY_TOPIC: _route,
    Code.DELETE_TOPIC_IN_NAMESRV: _topic(DELETE),
}
