"""The selection of messages to copy, and the message that is sent for each. Pure.

A sent message has the body, tag, keys, flag and application properties of the original, and the property NEVE_REPLAY
with the name of the task and the place of the original. Repeated messages have the same value.
"""

from __future__ import annotations

from neve.client.model import Message, MessageQueue
from neve.client.send.batch_sender import BatchItem
from neve.client.validators import RESERVED_PROPERTIES
from neve.copy.task import ORIGIN, RETRY, CopyTarget, Filters
from neve.errors import ClientError
from neve.record.properties import PROPERTY_RETRY_TOPIC
from neve.remoting.names import RETRY_PREFIX

IDENTITY = "NEVE_REPLAY"
_DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"  # RocketMQ 5 sets it in addition to RETRY_TOPIC


class NoOrigin(ClientError):
    """A dead letter without the topic of its origin."""


def is_selected(message: Message, filters: Filters) -> bool:
    """Return whether a message passes the filters."""
    if filters.tags and message.tags not in filters.tags:
        return False
    if filters.key is not None and filters.key not in message.keys:
        return False
    if filters.since is not None and message.store_timestamp < filters.since:
        return False
    if filters.until is not None and message.store_timestamp >= filters.until:
        return False
    return filters.origin is None or filters.origin == origin_of(message)


def origin_of(message: Message) -> str | None:
    """Return the topic that a dead letter was first sent to, or None if its properties lack it."""
    return message.properties.get(PROPERTY_RETRY_TOPIC) or message.properties.get(_DLQ_ORIGIN_TOPIC)


def copy_of(message: Message, name: str, target: CopyTarget, into: MessageQueue | None = None) -> BatchItem:
    """Return the message to send for an original, to any queue if `into` is None. Raises NoOrigin."""
    assert message.queue is not None
    own = {name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES}
    queue = message.queue
    own[IDENTITY] = f"{name}/{queue.broker_name}/{queue.topic}/{queue.queue_id}/{message.queue_offset}"
    topic = target.topic
    if target.back is not None:
        origin = origin_of(message)
        if origin is None:
            raise NoOrigin(f"the dead letter at offset {message.queue_offset} of {queue.topic} has no topic of origin")
        assert target.back in {ORIGIN, RETRY}
        topic = origin
        if target.back == RETRY:
            topic = RETRY_PREFIX + target.group
            own[PROPERTY_RETRY_TOPIC] = origin  # consumers of the group receive it under this topic
    assert topic is not None
    sent = Message(topic, message.body, message.tags, message.keys, own, message.flag)
    return BatchItem(sent, into)
