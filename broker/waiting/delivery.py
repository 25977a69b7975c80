"""Where a parked message goes when its time has come: a delayed message, a timer message, a committed half message.

The record names its topic and queue (REAL_TOPIC, REAL_QID). It may have been parked for days, or by another broker, so
the names are checked against the present table of topics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from broker.store.errors import InternalTopic, MessageIllegal
from neve.record.codec import MalformedRecord
from neve.record.properties import PROPERTY_REAL_QUEUE_ID, PROPERTY_REAL_TOPIC
from neve.remoting.names import is_internal

#: Returns how many queues consumers read of a topic, or None for a topic that does not exist.
ReadQueues = Callable[[str], int | None]
#: A message that can never be delivered. Any other error is taken for transient: the delivery is tried again.
UNDELIVERABLE = (MessageIllegal, MalformedRecord)
_QUEUE_DIGITS = 9


class TopicMissing(MessageIllegal):
    """The topic of a parked message does not exist: it was deleted meanwhile."""


def delivery_target(properties: Mapping[str, str], read_queues: ReadQueues) -> tuple[str, int]:
    """Return the topic and queue of a parked message.

    Consumers read the queues below the topic's readQueueNums. If the topic has shrunk below the message's queue, the
    message goes to one of those.

    Raises MessageIllegal where the message can't be delivered: TopicMissing, InternalTopic, or without a valid target.
    """
    topic, queue = properties.get(PROPERTY_REAL_TOPIC, ""), properties.get(PROPERTY_REAL_QUEUE_ID, "0")
    if not topic or not (queue.isascii() and queue.isdigit() and len(queue) <= _QUEUE_DIGITS):
        raise MessageIllegal(f"the message names no topic and queue: {topic!r}, {queue!r}")
    if is_internal(topic):
        raise InternalTopic(f"the message is for the internal topic {topic}")
    count = read_queues(topic)
    if count is None:
        raise TopicMissing(f"topic {topic} does not exist")
    number = int(queue)
    return topic, number if number < count else number % max(count, 1)
