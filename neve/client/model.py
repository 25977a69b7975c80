"""The arguments and results of the client."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

from neve.record.bodies import inflate
from neve.record.ids import offset_msg_id
from neve.record.layout import COMPRESSED, COMPRESSION_MASK
from neve.record.properties import PROPERTY_KEYS, PROPERTY_RETRY_TOPIC, PROPERTY_TAGS, PROPERTY_UNIQUE_KEY
from neve.remoting.address import parse_address
from neve.remoting.body import MessageQueue
from neve.remoting.names import RETRY_PREFIX

if TYPE_CHECKING:
    from neve.record.codec import MessageRecord

log = logging.getLogger(__name__)

__all__ = [
    "BrokerInfo",
    "ConsumeStats",
    "Message",
    "MessageQueue",
    "PullResult",
    "PullStatus",
    "QueueStats",
    "SendResult",
    "SendStatus",
    "TopicConfig",
    "inflated",
    "message_from_record",
    "stored_message",
]


@dataclass(frozen=True, slots=True)
class Message:
    """A message to send, or a stored message.

    Attributes:
        topic: the topic; of a redelivered message, the topic that it was first sent to.
        body: the body, not compressed.
        tags: the tag.
        keys: words by which the message can be found.
        properties: all properties; to send, those of the application.
        flag: an integer that RocketMQ stores with the message.
        queue: the queue that stores the message.
        queue_offset: its offset in the queue.
        msg_id: the id that its producer gave it.
        offset_msg_id: the id that its broker gave it, with its physical offset.
        physical_offset: its offset in the commit log, in bytes.
        born_timestamp: the time of sending, in ms since 1970.
        born_host: the address of its producer.
        store_timestamp: the time of storing, in ms since 1970.
        store_host: the address of its broker.
        reconsume_times: the number of redeliveries.
        sys_flag: RocketMQ's system flags.
    """

    topic: str
    body: bytes
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    flag: int = 0
    # Of stored messages only:
    queue: MessageQueue | None = None
    queue_offset: int = -1
    msg_id: str = ""
    offset_msg_id: str = ""
    physical_offset: int = -1
    born_timestamp: int = 0
    born_host: str = ""
    store_timestamp: int = 0
    store_host: str = ""
    reconsume_times: int = 0
    sys_flag: int = 0


M = TypeVar("M", bound=Message)


class SendStatus(StrEnum):
    """The outcome of a send. All but SEND_OK mean: stored, but not flushed or replicated in time."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


@dataclass(frozen=True, slots=True)
class SendResult:
    """The result of a send.

    Attributes:
        status: the outcome.
        msg_id: the id of the message; of a batch, the ids joined by commas.
        offset_msg_id: the id with the physical offset; of a batch, the ids joined by commas.
        queue: the queue that stores the message.
        queue_offset: the offset in the queue; of a batch, the first offset.
        transaction_id: the id of the transaction of a half message.
        recall_handle: recalls a delayed message; see `AsyncClient.recall`.
    """

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    recall_handle: str | None = None


class PullStatus(StrEnum):
    """The outcome of a pull."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of a pull.

    Attributes:
        status: the outcome.
        messages: the messages.
        next_offset: the offset of the next pull, whatever the status.
        min_offset: the first offset of the queue.
        max_offset: the offset behind the last message of the queue.
    """

    status: PullStatus
    messages: tuple[Message, ...]
    next_offset: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The configuration of a topic at one broker.

    Attributes:
        name: the name of the topic.
        read_queues: the number of readable queues.
        write_queues: the number of writable queues.
        perm: the permission bits: 4 to read, 2 to write, 1 to inherit from it.
        order: whether the topic is marked as ordered.
        attributes: further attributes.
    """

    name: str
    read_queues: int
    write_queues: int
    perm: int = 6
    order: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The messages of a queue.

    Attributes:
        min_offset: the first offset.
        max_offset: the offset behind the last message.
        last_update_ms: the store time of the last message in ms since 1970; 0 if the queue is empty.
        messages: the number of messages, which excludes offsets that were lost or that a restore left out.
        local_min_offset: the first offset on the broker's disk, if messages below it are only in the archive.
        cold_messages: the number of messages that are only in the archive.
    """

    min_offset: int
    max_offset: int
    last_update_ms: int
    messages: int
    local_min_offset: int | None = None
    cold_messages: int = 0


@dataclass(frozen=True, slots=True)
class ConsumeStats:
    """The progress of a group in one queue.

    Attributes:
        broker_offset: the offset behind the last message of the queue.
        consumer_offset: the committed offset of the group.
        last_update_ms: the store time of the last consumed message, in ms since 1970.
        left: the number of unread messages if it differs from the lag, or None.
        left_cold: the number of unread messages that are only in the archive; None if the broker does not report it.
    """

    broker_offset: int
    consumer_offset: int
    last_update_ms: int
    left: int | None = None
    left_cold: int | None = None

    @property
    def lag(self) -> int:
        """The number of offsets that the group has not read."""
        return self.broker_offset - self.consumer_offset


MASTER_ID = 0


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A broker in the name server. `addresses` are by broker id; id 0 is the master."""

    cluster: str
    name: str
    addresses: Mapping[int, str]

    @property
    def master(self) -> str | None:
        """The address of the master; None while only replicas are known."""
        return self.addresses.get(MASTER_ID)


def message_from_record(record: MessageRecord, broker_name: str) -> Message:
    """Return the message of a record, with its body decompressed and the topic that it was first sent to."""
    return inflated(stored_message(record, broker_name))


def stored_message(record: MessageRecord, broker_name: str) -> Message:
    """Return the message of a record, with its body as it is stored.

    64 KiB may decompress to 64 MiB, so buffered messages stay compressed and the limits of buffers hold.
    """
    properties = record.properties
    stored_at = offset_msg_id(_host(record.store_host), record.physical_offset)
    topic = record.topic
    if topic.startswith(RETRY_PREFIX):
        topic = properties.get(PROPERTY_RETRY_TOPIC, topic)
    return Message(
        topic=topic,
        body=record.body,
        tags=properties.get(PROPERTY_TAGS),
        keys=tuple(properties.get(PROPERTY_KEYS, "").split()),
        properties=properties,
        flag=record.flag,
        queue=MessageQueue(record.topic, broker_name, record.queue_id),
        queue_offset=record.queue_offset,
        msg_id=properties.get(PROPERTY_UNIQUE_KEY, stored_at),
        offset_msg_id=stored_at,
        physical_offset=record.physical_offset,
        born_timestamp=record.born_timestamp,
        born_host=record.born_host,
        store_timestamp=record.store_timestamp,
        store_host=record.store_host,
        reconsume_times=record.reconsume_times,
        sys_flag=record.sys_flag,
    )


_host = lru_cache(maxsize=256)(parse_address)


def inflated(message: M) -> M:
    """Return the message with its body decompressed.

    A body that cannot be decompressed must not block its queue: the message is returned as it is, and its `sys_flag`
    still has the flag of compression.
    """
    if not message.sys_flag & COMPRESSED:
        return message
    try:
        body = inflate(message.body, message.sys_flag)
    except (ValueError, ModuleNotFoundError) as error:
        log.warning("body not decompressed: id=%s queue=%s cause=%s", message.offset_msg_id, message.queue, error)
        return message
    return replace(message, body=body, sys_flag=message.sys_flag & ~(COMPRESSED | COMPRESSION_MASK))
