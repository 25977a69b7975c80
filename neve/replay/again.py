"""Which messages of a range are meant, and what is sent for each. Pure.

What is sent has the body, tag, keys, flag and the application's properties of the message, and NEVE_REPLAY: the name of
the replay and where the message lies. A message that is sent twice says the same twice.
"""

from __future__ import annotations

from neve.client.model import Message, MessageQueue
from neve.client.send.batch_sender import BatchItem
from neve.client.validators import RESERVED_PROPERTIES
from neve.errors import ClientError
from neve.record.properties import PROPERTY_RETRY_TOPIC
from neve.remoting.names import RETRY_PREFIX
from neve.replay.task import ORIGIN, RETRY, Filters, Target

IDENTITY = "NEVE_REPLAY"
_DLQ_ORIGIN_TOPIC = "DLQ_ORIGIN_TOPIC"  # RocketMQ 5 writes it beside RETRY_TOPIC


class NoOrigin(ClientError):
    """A dead letter that does not say which topic it comes from."""


def is_meant(message: Message, filters: Filters) -> bool:
    """Whether it is one of the messages that were asked for."""
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
    """The topic that a dead letter was first sent to; None where it does not say."""
    return message.properties.get(PROPERTY_RETRY_TOPIC) or message.properties.get(_DLQ_ORIGIN_TOPIC)


def again(message: Message, name: str, target: Target, into: MessageQueue | None = None) -> BatchItem:
    """What is sent for a message, to any queue if `into` names none. Raises NoOrigin."""
    assert message.queue is not None
    own = {name: value for name, value in message.properties.items() if name not in RESERVED_PROPERTIES}
    queue = message.queue
    own[IDENTITY] = f"{name}/{queue.broker_name}/{queue.topic}/{queue.queue_id}/{message.queue_offset}"
    topic = target.topic
    if target.back is not None:
        origin = origin_of(message)
        if origin is None:
            raise NoOrigin(f"offset {message.queue_offset} of {queue.topic} does not say which topic it comes from")
        assert target.back in {ORIGIN, RETRY}
        topic = origin
        if target.back == RETRY:
            topic = RETRY_PREFIX + target.group
            own[PROPERTY_RETRY_TOPIC] = origin  # under which the group's members get it
    assert topic is not None
    sent = Message(topic, message.body, message.tags, message.keys, own, message.flag)
    return BatchItem(sent, into)
