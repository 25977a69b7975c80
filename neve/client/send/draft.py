"""Messages to send: checked, with encoded properties and a compressed body.

arguments of a send ──▶ SendRequest ──▶ Draft ──▶ one request for each attempt
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from neve.client.model import Message
from neve.client.options import ClientOptions
from neve.client.send.compression import compress
from neve.client.send.queue_selector import OrderKey, Queue, select_by_hash
from neve.client.times import Time, time_ms
from neve.client.trace.format import MessageType
from neve.client.validators import (
    body_bytes,
    check_body,
    check_properties,
    check_timeout,
    check_topic,
    packed_properties,
)
from neve.errors import ClientError
from neve.record.bodies import encode_batch
from neve.record.layout import TRANSACTION_PREPARED
from neve.record.properties import (
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT,
    bytes_to_properties,
    properties_to_bytes,
)

PROPERTY_DELAY_MS = "TIMER_DELAY_MS"
PROPERTY_DELIVER_AT = "TIMER_DELIVER_MS"
TIMED = frozenset({PROPERTY_DELAY, "TIMER_DELAY_SEC", PROPERTY_DELAY_MS, PROPERTY_DELIVER_AT})


class SendRequest(NamedTuple):
    """A message to send, and where and when. Made by `send_request`."""

    message: Message
    queue: Queue | None  # None: the next in turn
    timing: Mapping[str, str]  # the property that delays the message, if it is delayed
    timeout: float | None  # None: the timeout of the options


def send_request(
    topic: str | Message,
    body: bytes | str | None = None,
    *,
    tags: str | None = None,
    keys: str | Iterable[str] = (),
    properties: Mapping[str, str] | None = None,
    queue: Queue | None = None,
    order_key: OrderKey | None = None,
    delay_level: int = 0,
    delay: float | None = None,
    deliver_at: Time | None = None,
    flag: int = 0,
    timeout: float | None = None,
) -> SendRequest:
    """Check the arguments of a send, which are those of `AsyncClient.send`.

    Raises:
        ClientError: an argument is invalid, or excludes another.
    """
    check_timeout(timeout)
    if isinstance(topic, Message):
        if body is not None or tags is not None or keys or properties or flag:
            raise ClientError("body, tags, keys, properties and flag are those of the Message")
        topic, body, tags, keys, properties, flag = _parts(topic)
    message = message_to_send(topic, body, tags=tags, keys=keys, properties=properties, flag=flag)
    return SendRequest(message, target_queue(queue, order_key), timing(delay_level, delay, deliver_at), timeout)


def _parts(message: Message) -> tuple[str, bytes, str | None, tuple[str, ...], Mapping[str, str], int]:
    return message.topic, message.body, message.tags, message.keys, message.properties, message.flag


def target_queue(queue: Queue | None, order_key: OrderKey | None) -> Queue | None:
    """Return the queue that the caller chose, or the selector of an order key.

    Raises:
        ClientError: both are given.
    """
    if order_key is None:
        return queue
    if queue is not None:
        raise ClientError("queue and order_key exclude each other")
    return select_by_hash(order_key)


@dataclass(frozen=True, slots=True)
class Draft:
    """The parts of a send request. `message` is the caller's; for a batch it has the encoded batch as its body."""

    topic: str
    body: bytes
    properties: str
    sys_flag: int
    flag: int
    msg_id: str
    message: Message
    is_batch: bool = False
    is_reply: bool = False

    @property
    def kind(self) -> MessageType:
        """The type of the message in traces."""
        if self.sys_flag & TRANSACTION_PREPARED:
            return MessageType.HALF
        is_timed = TIMED & bytes_to_properties(self.properties.encode()).keys()
        return MessageType.DELAYED if is_timed else MessageType.NORMAL


class Drafts:
    """Creates drafts by the options of a client. `next_unique_key` returns the id of a message."""

    def __init__(self, options: ClientOptions, next_unique_key: Callable[[], str]) -> None:
        self._options = options
        self._next_unique_key = next_unique_key

    def single(self, message: Message, own: Mapping[str, str] | None = None, *, sys_flag: int = 0) -> Draft:
        """Return the draft of one message. `own` are properties that the client sets, such as a delay.

        Raises:
            ClientError: brokers refuse such a message.
        """
        check_topic(message.topic)
        check_body(len(message.body), self._options.max_message_size)
        properties, key = self._properties(message)
        properties.update(own or {})
        body = message.body
        if len(body) >= self._options.compress_over:
            body, compressed = compress(body, self._options.compress_type, self._options.compress_level)
            sys_flag |= compressed
        packed = packed_properties(properties).decode()
        is_reply = properties.get("MSG_TYPE") == "reply"
        return Draft(message.topic, body, packed, sys_flag, message.flag, key, message, is_reply=is_reply)

    def batch(self, topic: str, messages: Iterable[bytes | str | Message]) -> Draft:
        """Return the draft of a batch. Its bodies are not compressed: the broker unpacks the batch.

        Raises:
            ClientError: brokers refuse such a batch, or a message has another topic.
        """
        check_topic(topic)
        ids: list[str] = []
        parts: list[tuple[bytes, int, bytes]] = []
        for item in messages:
            message = item if isinstance(item, Message) else message_to_send(topic, item)
            if type(message.body) is not bytes:
                message = replace(message, body=body_bytes(message.body))
            if message.topic != topic:
                raise ClientError(f"a batch has one topic, got {message.topic} and {topic}")
            if TIMED & message.properties.keys():
                raise ClientError("a delayed message cannot be part of a batch")
            check_body(len(message.body), self._options.max_message_size)
            properties, key = self._properties(message)
            ids.append(key)
            parts.append((message.body, message.flag, packed_properties(properties)))
        if not parts:
            raise ClientError("a batch needs at least one message")
        blob = encode_batch(parts)
        check_body(len(blob), self._options.max_message_size)
        header = properties_to_bytes({PROPERTY_WAIT: "true"}).decode()
        return Draft(topic, blob, header, 0, 0, ",".join(ids), Message(topic, blob), is_batch=True)

    def _properties(self, message: Message) -> tuple[dict[str, str], str]:
        properties = dict(message.properties)
        if message.tags:
            properties[PROPERTY_TAGS] = message.tags
        if message.keys:
            properties[PROPERTY_KEYS] = " ".join(message.keys)
        key = properties.setdefault(PROPERTY_UNIQUE_KEY, self._next_unique_key())
        properties.setdefault(PROPERTY_WAIT, "true")
        return properties, key


def message_to_send(
    topic: str,
    body: bytes | str | None,
    *,
    tags: str | None = None,
    keys: str | Iterable[str] = (),
    properties: Mapping[str, str] | None = None,
    flag: int = 0,
) -> Message:
    """Return the message that consists of these parts.

    Raises:
        ClientError: a part has the wrong type, or a property is reserved or cannot be encoded.
    """
    check_properties(properties or {})
    if tags is not None and not isinstance(tags, str):
        raise ClientError(f"tags must be a str, got {type(tags).__name__}")
    words = tuple(keys.split() if isinstance(keys, str) else keys)
    for word in words:
        if not isinstance(word, str):
            raise ClientError(f"a key must be a str, got {type(word).__name__}")
    return Message(topic, body_bytes(body), tags, words, properties or {}, flag)


def timing(delay_level: int = 0, delay: float | None = None, deliver_at: Time | None = None) -> dict[str, str]:
    """Return the property that delays a message; empty if it is not delayed.

    Args:
        delay_level: a delay level of the broker, 1 to 18; 0 for none.
        delay: a delay in seconds.
        deliver_at: the time of delivery.

    Raises:
        ClientError: more than one is given, or a delay is negative.
    """
    if (delay_level != 0) + (delay is not None) + (deliver_at is not None) > 1:
        raise ClientError("delay_level, delay and deliver_at exclude each other")
    at = None if deliver_at is None else time_ms(deliver_at)
    if delay_level < 0 or (delay is not None and delay < 0) or (at is not None and at < 0):
        raise ClientError("a delay cannot be negative")
    if delay_level:
        return {PROPERTY_DELAY: str(delay_level)}
    if delay is not None:
        return {PROPERTY_DELAY_MS: str(round(delay * 1000))}
    return {} if at is None else {PROPERTY_DELIVER_AT: str(at)}
