"""What a caller gives to the client and gets from it."""

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
    """A message to send, or one that came back. `body` is what the producer gave, not compressed."""

    topic: str
    body: bytes
    tags: str | None = None
    keys: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    flag: int = 0
    # What only a received message has:
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
    """SEND_OK, or stored but with a reservation about flush or replica."""

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"


@dataclass(frozen=True, slots=True)
class SendResult:
    """Where a message was stored. For a batch both ids are joined by commas and `queue_offset` is the first's."""

    status: SendStatus
    msg_id: str
    offset_msg_id: str
    queue: MessageQueue
    queue_offset: int
    transaction_id: str | None = None
    recall_handle: str | None = None


class PullStatus(StrEnum):
    """What a pull met."""

    FOUND = "FOUND"
    NO_NEW_MESSAGE = "NO_NEW_MESSAGE"
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


@dataclass(frozen=True, slots=True)
class PullResult:
    """`next_offset` is where to pull next, whatever the status."""

    status: PullStatus
    messages: tuple[Message, ...]
    next_offset: int
    min_offset: int
    max_offset: int


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """A topic as a broker has it. Bits of `perm`: 4 read, 2 write, 1 others may inherit from it."""

    name: str
    read_queues: int
    write_queues: int
    perm: int = 6
    order: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The offsets that a queue holds: from `min_offset`, below `max_offset`. `last_update_ms` is 0 for an empty one.

    `messages` may be fewer than that: offsets that were lost, or that a restore left out, exist nowhere. Messages below
    `local_min_offset` the archive alone has, `cold_messages` of them; None and 0 if there are none.
    """

    min_offset: int
    max_offset: int
    last_update_ms: int
    messages: int
    local_min_offset: int | None = None
    cold_messages: int = 0


@dataclass(frozen=True, slots=True)
class ConsumeStats:
    """How far a group is in one queue."""

    broker_offset: int
    consumer_offset: int
    last_update_ms: int
    left: int | None = None  # messages that are left to read, where that is not the lag
    left_cold: int | None = None  # those of them that the archive alone has; None where the broker tells of none such

    @property
    def lag(self) -> int:
        return self.broker_offset - self.consumer_offset


MASTER_ID = 0


@dataclass(frozen=True, slots=True)
class BrokerInfo:
    """A broker as the name server has it; id 0 in `addresses` is the master."""

    cluster: str
    name: str
    addresses: Mapping[int, str]

    @property
    def master(self) -> str | None:
        """Its address; None while only replicas are known."""
        return self.addresses.get(MASTER_ID)


def message_from_record(record: MessageRecord, broker_name: str) -> Message:
    """The caller's view of a record; a retried message appears under the topic that it was first sent to."""
    return inflated(stored_message(record, broker_name))


def stored_message(record: MessageRecord, broker_name: str) -> Message:
    """As `message_from_record`, with the body as it is stored.

    64 KiB may inflate to 64 MiB: what waits for the application waits like this, so that its size is what is counted.
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
    """The message with the body that its producer gave.

    A body that cannot be inflated must not block its queue: it is handed over as stored, and `sys_flag` says so.
    """
    if not message.sys_flag & COMPRESSED:
        return message
    try:
        body = inflate(message.body, message.sys_flag)
    except (ValueError, ModuleNotFoundError) as error:
        log.warning("%s of %s: %s", message.offset_msg_id, message.queue, error)
        return message
    return replace(message, body=body, sys_flag=message.sys_flag & ~(COMPRESSED | COMPRESSION_MASK))
