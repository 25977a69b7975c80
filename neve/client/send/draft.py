"""What a caller wants sent, and that as it goes on the wire: checked, its properties packed, its body deflated.

the arguments of any way of sending ──▶ Sending ──▶ Draft ──▶ one request an attempt
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from neve.client.model import Message
from neve.client.options import ClientOptions
from neve.client.send.compression import compress
from neve.client.send.queue_selector import OrderKey, Queue, select_by_hash
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


class Sending(NamedTuple):
    """What a caller wants sent; every way of sending takes it. Made by `sending`."""

    message: Message
    queue: Queue | None  # None: the next in turn
    timing: Mapping[str, str]  # the property that says when; none for at once
    timeout: float | None  # None: that of the options


def sending(
    topic: str,
    body: bytes | str,
    *,
    tags: str | None = None,
    keys: str | Iterable[str] = (),
    properties: Mapping[str, str] | None = None,
    queue: Queue | None = None,
    order_key: OrderKey | None = None,
    delay_level: int = 0,
    delay: float | None = None,
    deliver_at_ms: int | None = None,
    flag: int = 0,
    timeout: float | None = None,
) -> Sending:
    """A caller's arguments, which are those of `AsyncClient.send`, looked at.

    Raises:
        ClientError: one cannot be written, belongs to the system, or excludes another.
    """
    check_timeout(timeout)
    message = message_to_send(topic, body, tags=tags, keys=keys, properties=properties, flag=flag)
    return Sending(message, target_queue(queue, order_key), timing(delay_level, delay, deliver_at_ms), timeout)


def target_queue(queue: Queue | None, order_key: OrderKey | None) -> Queue | None:
    """The queue that a caller names, or the one that an order key always chooses. Raises ClientError for both."""
    if order_key is None:
        return queue
    if queue is not None:
        raise ClientError("queue and order_key exclude each other")
    return select_by_hash(order_key)


@dataclass(frozen=True, slots=True)
class Draft:
    """What a send request is made of. `message` is the caller's; a batch has none of its own."""

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
        """As traces tell it."""
        if self.sys_flag & TRANSACTION_PREPARED:
            return MessageType.HALF
        is_timed = TIMED & bytes_to_properties(self.properties.encode()).keys()
        return MessageType.DELAYED if is_timed else MessageType.NORMAL


class Drafts:
    """Makes drafts under a client's options; `next_unique_key` gives each message its id."""

    def __init__(self, options: ClientOptions, next_unique_key: Callable[[], str]) -> None:
        self._options = options
        self._next_unique_key = next_unique_key

    def single(self, message: Message, own: Mapping[str, str] | None = None, *, sys_flag: int = 0) -> Draft:
        """One message; `own` are properties of the client's own making, such as a delay.

        Raises:
            ClientError: no broker would take it.
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
        """Several messages of one topic. They are not deflated: the broker takes the batch apart.

        Raises:
            ClientError: no broker would take it, or they do not belong together.
        """
        check_topic(topic)
        ids: list[str] = []
        parts: list[tuple[bytes, int, bytes]] = []
        for item in messages:
            message = item if isinstance(item, Message) else message_to_send(topic, item)
            if type(message.body) is not bytes:
                message = replace(message, body=body_bytes(message.body))
            if message.topic != topic:
                raise ClientError(f"a batch is for one topic: {message.topic} among {topic}")
            if TIMED & message.properties.keys():
                raise ClientError("a delayed message cannot be part of a batch")
            check_body(len(message.body), self._options.max_message_size)
            properties, key = self._properties(message)
            ids.append(key)
            parts.append((message.body, message.flag, packed_properties(properties)))
        if not parts:
            raise ClientError("an empty batch")
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
    body: bytes | str,
    *,
    tags: str | None = None,
    keys: str | Iterable[str] = (),
    properties: Mapping[str, str] | None = None,
    flag: int = 0,
) -> Message:
    """A message from a caller's arguments.

    Raises:
        ClientError: a property cannot be written, or belongs to the system.
    """
    check_properties(properties or {})
    if tags is not None and not isinstance(tags, str):
        raise ClientError(f"tags are a str, not {type(tags).__name__}")
    words = tuple(keys.split() if isinstance(keys, str) else keys)
    for word in words:
        if not isinstance(word, str):
            raise ClientError(f"a key is a str, not {type(word).__name__}")
    return Message(topic, body_bytes(body), tags, words, properties or {}, flag)


def timing(delay_level: int = 0, delay: float | None = None, deliver_at_ms: int | None = None) -> dict[str, str]:
    """The property that says when a message is to be delivered; none for at once. `delay` is in seconds.

    Raises:
        ClientError: it is said twice, or is not a time.
    """
    if (delay_level != 0) + (delay is not None) + (deliver_at_ms is not None) > 1:
        raise ClientError("delay_level, delay and deliver_at_ms exclude each other")
    if delay_level < 0 or (delay is not None and delay < 0) or (deliver_at_ms is not None and deliver_at_ms < 0):
        raise ClientError("a delay cannot be negative")
    if delay_level:
        return {PROPERTY_DELAY: str(delay_level)}
    if delay is not None:
        return {PROPERTY_DELAY_MS: str(round(delay * 1000))}
    return {} if deliver_at_ms is None else {PROPERTY_DELIVER_AT: str(deliver_at_ms)}
