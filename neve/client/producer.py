"""Sending: choose a queue, ask its master, on failure another broker."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from neve.client.connection import ConnectionFailed
from neve.client.latency import FaultTable
from neve.client.model import Message, MessageQueue, SendResult, SendStatus
from neve.client.route import DEFAULT_TOPIC, DEFAULT_TOPIC_QUEUES, TopicRoute
from neve.client.session import Session, ext_int
from neve.errors import BrokerError, ClientError, NeveError, UnknownOutcome
from neve.message import (
    COMPRESSED,
    COMPRESSION_ZLIB,
    PROPERTIES_LENGTH_MAX,
    PROPERTY_DELAY,
    PROPERTY_KEYS,
    PROPERTY_TAGS,
    PROPERTY_UNIQUE_KEY,
    PROPERTY_WAIT,
    encode_batch,
    properties_to_bytes,
)
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

PROPERTY_DELIVER_AT = "TIMER_DELIVER_MS"
RETRYABLE = frozenset({1, 2, 14, 16, 17, 204, 205, 1500})
_STATUS = {
    0: SendStatus.SEND_OK,
    10: SendStatus.FLUSH_DISK_TIMEOUT,
    11: SendStatus.SLAVE_NOT_AVAILABLE,
    12: SendStatus.FLUSH_SLAVE_TIMEOUT,
}


@dataclass(frozen=True, slots=True)
class _Draft:
    """A message, or batch, as it goes on the wire."""

    topic: str
    body: bytes
    properties: str
    sys_flag: int
    flag: int
    msg_id: str
    is_batch: bool


class Producer:
    """The sending half of a client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._faults = FaultTable(lambda: int(asyncio.get_running_loop().time() * 1000))
        self._turn: dict[str, int] = {}

    async def send(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: int | MessageQueue | None = None,
        delay_level: int = 0,
        deliver_at_ms: int | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> SendResult:
        draft = self._draft(
            message_to_send(topic, body, tags=tags, keys=keys, properties=properties, flag=flag),
            delay_level,
            deliver_at_ms,
        )
        return await self._deliver(draft, queue, timeout)

    async def send_batch(
        self,
        topic: str,
        messages: Iterable[bytes | str | Message],
        *,
        queue: int | MessageQueue | None = None,
        timeout: float | None = None,
    ) -> SendResult:
        return await self._deliver(self._batch_draft(topic, messages), queue, timeout)

    async def send_oneway(
        self,
        topic: str,
        body: bytes | str,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: int | MessageQueue | None = None,
        flag: int = 0,
        timeout: float | None = None,
    ) -> None:
        self._session.produces(self._session.options.producer_group)
        draft = self._draft(
            message_to_send(topic, body, tags=tags, keys=keys, properties=properties, flag=flag), 0, None
        )
        route = await self._session.publish_route(topic)
        target = self._choose(topic, route, queue, ())
        address = _master(route, target)
        await self._session.pool.send_oneway(
            address,
            RequestCode.SEND_MESSAGE_V2,
            self._header(draft, target),
            body=draft.body,
            timeout=timeout or self._session.options.timeout,
        )

    # ---- drafts

    def _draft(self, message: Message, delay_level: int, deliver_at_ms: int | None) -> _Draft:
        options = self._session.options
        self._check_size(len(message.body))
        properties, key = self._properties(message)
        if delay_level:
            properties[PROPERTY_DELAY] = str(delay_level)
        if deliver_at_ms is not None:
            properties[PROPERTY_DELIVER_AT] = str(deliver_at_ms)
        body, sys_flag = message.body, 0
        if len(body) >= options.compress_over:
            body, sys_flag = zlib.compress(body, options.compress_level), COMPRESSED | COMPRESSION_ZLIB
        return _Draft(message.topic, body, _packed(properties).decode(), sys_flag, message.flag, key, is_batch=False)

    def _batch_draft(self, topic: str, messages: Iterable[bytes | str | Message]) -> _Draft:
        ids: list[str] = []
        parts: list[tuple[bytes, int, bytes]] = []
        for item in messages:
            message = item if isinstance(item, Message) else message_to_send(topic, item)
            if message.topic != topic:
                raise ClientError(f"a batch is for one topic: {message.topic} among {topic}")
            if {PROPERTY_DELAY, PROPERTY_DELIVER_AT} & message.properties.keys():
                raise ClientError("a delayed message cannot be part of a batch")
            properties, key = self._properties(message)
            ids.append(key)
            parts.append((message.body, message.flag, _packed(properties)))
        if not parts:
            raise ClientError("an empty batch")
        blob = encode_batch(parts)
        self._check_size(len(blob))
        header = properties_to_bytes({PROPERTY_WAIT: "true"}).decode()
        return _Draft(topic, blob, header, 0, 0, ",".join(ids), is_batch=True)

    def _properties(self, message: Message) -> tuple[dict[str, str], str]:
        properties = dict(message.properties)
        if message.tags:
            properties[PROPERTY_TAGS] = message.tags
        if message.keys:
            properties[PROPERTY_KEYS] = " ".join(message.keys)
        key = properties.setdefault(PROPERTY_UNIQUE_KEY, self._session.next_unique_key())
        properties.setdefault(PROPERTY_WAIT, "true")
        return properties, key

    def _check_size(self, size: int) -> None:
        if size > self._session.options.max_message_size:
            limit = self._session.options.max_message_size
            raise ClientError(f"{size} bytes are more than {limit}", ResponseCode.MESSAGE_ILLEGAL)

    # ---- delivery

    async def _deliver(self, draft: _Draft, queue: int | MessageQueue | None, timeout: float | None) -> SendResult:
        """Up to 1 + `send_retries` attempts within `timeout`.

        Raises:
            BrokerError: refused, and no other broker took it.
            UnknownOutcome: no attempt succeeded and at least one may have been carried out.
        """
        options = self._session.options
        self._session.produces(self._session.options.producer_group)
        now = asyncio.get_running_loop().time
        deadline = now() + (timeout or options.timeout)
        tried: list[str] = []
        unknown: UnknownOutcome | None = None
        problem: NeveError | None = None
        for attempt in range(1 + options.send_retries):
            remaining = deadline - now()
            if remaining <= 0:
                break
            try:
                async with asyncio.timeout(remaining):
                    route = await self._session.publish_route(draft.topic)
                target = self._choose(draft.topic, route, queue, tried)
            except TimeoutError:
                break
            tried.append(target.broker_name)
            began = now()
            try:
                limit = min(options.attempt_timeout, deadline - began)
                result = await self._attempt(draft, target, route, max(limit, 0.001))
            except BrokerError as error:
                if error.code not in RETRYABLE:
                    raise
                problem = error
            except UnknownOutcome as error:
                problem = unknown = error
            except ConnectionFailed as error:
                problem = error
            else:
                self._faults.answered(target.broker_name, (now() - began) * 1000)
                return result
            self._faults.failed(target.broker_name)
            self._session.forget_route(draft.topic)
            if attempt < options.send_retries and len(set(tried)) < len(tried):  # the same broker again: not at once
                await asyncio.sleep(min(0.05 * 2**attempt, max(deadline - now(), 0)))
        raise unknown or problem or UnknownOutcome(f"no route to {draft.topic} in time")

    async def _attempt(self, draft: _Draft, target: MessageQueue, route: TopicRoute, timeout: float) -> SendResult:
        code = RequestCode.SEND_BATCH_MESSAGE if draft.is_batch else RequestCode.SEND_MESSAGE_V2
        header = self._header(draft, target)
        address = _master(route, target)
        answer = await self._session.pool.invoke(address, code, header, body=draft.body, timeout=timeout)
        return _result(answer, draft, target)

    def _header(self, draft: _Draft, target: MessageQueue) -> dict[str, str]:
        """SEND_MESSAGE_V2's short keys."""
        options = self._session.options
        return {
            "a": options.producer_group,
            "b": draft.topic,
            "c": DEFAULT_TOPIC,
            "d": str(DEFAULT_TOPIC_QUEUES),
            "e": str(target.queue_id),
            "f": str(draft.sys_flag),
            "g": str(options.now_ms()),
            "h": str(draft.flag),
            "i": draft.properties,
            "j": "0",
            "k": "false",
            "m": "true" if draft.is_batch else "false",
            "n": target.broker_name,
        }

    def _choose(
        self, topic: str, route: TopicRoute, queue: int | MessageQueue | None, tried: Sequence[str]
    ) -> MessageQueue:
        """The asked-for queue, else the next in turn whose broker is well and was not tried, else any other."""
        if isinstance(queue, MessageQueue):
            return queue
        candidates = [q for q in route.write_queues if queue is None or q.queue_id == queue]
        if not candidates:
            which = "queue" if queue is None else f"queue {queue}"
            raise ClientError(f"{topic} has no {which} to write to", ResponseCode.TOPIC_NOT_EXIST)
        turn = self._turn.get(topic, -1) + 1
        self._turn[topic] = turn
        count = len(candidates)
        in_turn = candidates if count == 1 else [candidates[(turn + i) % count] for i in range(count)]
        for candidate in in_turn:
            if candidate.broker_name not in tried and self._faults.is_available(candidate.broker_name):
                return candidate
        return next((c for c in in_turn if c.broker_name not in tried), in_turn[0])


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
        ClientError: there is no topic, or a property cannot be written.
    """
    if not topic:
        raise ClientError("no topic")
    for name, value in (properties or {}).items():
        if not name or not value or {"\x01", "\x02"} & {*name, *value}:
            raise ClientError(f"property {name!r} is empty or holds a separator")
    raw = body.encode() if isinstance(body, str) else bytes(body)
    return Message(topic, raw, tags, tuple(keys.split() if isinstance(keys, str) else keys), properties or {}, flag)


def _packed(properties: Mapping[str, str]) -> bytes:
    packed = properties_to_bytes(properties)
    if len(packed) > PROPERTIES_LENGTH_MAX:
        raise ClientError(f"properties of {len(packed)} bytes are too long", ResponseCode.MESSAGE_ILLEGAL)
    return packed


def _master(route: TopicRoute, target: MessageQueue) -> str:
    address = route.master(target.broker_name)
    if address is None:
        raise ConnectionFailed(f"no master of {target.broker_name} is known")
    return address


def _result(answer: RemotingCommand, draft: _Draft, target: MessageQueue) -> SendResult:
    status = _STATUS.get(answer.code)
    if status is None:
        raise BrokerError(answer.code, answer.remark or "")
    ext = answer.ext or {}
    return SendResult(
        status,
        draft.msg_id,
        ext.get("msgId", ""),
        target._replace(queue_id=ext_int(answer, "queueId")),
        ext_int(answer, "queueOffset"),
        ext.get("transactionId"),
        ext.get("recallHandle"),
    )
