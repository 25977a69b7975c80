"""Sends many messages: packs them into batches by lane, and sends several batches at a time until they are stored.

A lane is the destination that messages of one batch share: a topic, or one queue of it. A lane to a queue, which a
caller or an order key chose, has one batch in flight, so that its messages keep their order. Other lanes have no such
limit. If several brokers have a queue of that number, the batches of its lane alternate between them. Delayed messages
and messages for a retry topic are sent alone, because brokers refuse batches of them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from neve.client.model import Message, MessageQueue, SendResult
from neve.client.net.session import Session
from neve.client.send.draft import Draft, send_request
from neve.client.send.producer import Producer, Repeats
from neve.client.send.queue_selector import OrderKey, select_by_hash
from neve.client.times import Time
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)

_BACKOFF_S = (0.1, 0.2, 0.5, 1.0)  # between attempts to store a batch; the last one repeats
_TEMPORARY = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE})
_FRAMING_BYTES = 64  # of a message in a batch, with the client's own properties

Delivery = asyncio.Future[SendResult]


class BatchItem(NamedTuple):
    """A message for `BatchSender.put_all`. `queue` and `order_key` exclude each other.

    `timing` is a property that delays the message; see `neve.client.send.draft.timing`.
    """

    message: Message
    queue: int | MessageQueue | None = None
    order_key: OrderKey | None = None
    timing: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The limits of a batch sender; see `AsyncClient.batch_sender`.

    Batches wait longer for an answer than single messages: they cost a broker more, several of them queue there, and a
    premature timeout stores a second copy of each message.
    """

    max_messages: int = 200
    max_bytes: int = 256 << 10
    in_flight: int = 8
    retry_timeout: float = 30.0
    attempt_timeout: float = 10.0

    def __post_init__(self) -> None:
        for name in ("max_messages", "max_bytes", "in_flight"):
            if getattr(self, name) < 1:
                raise ClientError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.retry_timeout < 0:
            raise ClientError(f"retry_timeout must be at least 0 s, got {self.retry_timeout!r}")
        if not self.attempt_timeout > 0:
            raise ClientError(f"attempt_timeout must be more than 0 s, got {self.attempt_timeout!r}")


def _size(message: Message) -> int:
    """Estimate the bytes that a message takes in a batch."""
    size = _FRAMING_BYTES + len(message.body) + len(message.tags or "") + sum(map(len, message.keys))
    return size + len(message.keys) + sum(len(name) + len(value) for name, value in message.properties.items())


class _Lane(NamedTuple):
    topic: str
    queue: int | MessageQueue | None  # None: unordered


@dataclass(slots=True)
class _Batch:
    messages: list[Message] = field(default_factory=list)
    deliveries: dict[int, Delivery] = field(default_factory=dict)  # by position, for messages of `put`
    size: int = 0


class BatchSender:
    """Sends messages in batches: `async with client.batch_sender() as sender: await sender.put("topic", b"body")`.

    The end of the block waits until all messages are stored. If the block raises, batches in flight are awaited, and
    messages that were not yet sent are discarded. After an error of a method, use another batch sender.

    Attributes:
        sent: the number of messages that brokers have stored.
        repeated: the number of messages that were sent again although an earlier request may have stored them.
            Consumers may receive them twice, with one `msg_id`.
    """

    def __init__(self, session: Session, producer: Producer, limits: BatchLimits) -> None:
        self._session = session
        self._producer = producer
        self._limits = limits
        self._filling: dict[_Lane, _Batch] = {}
        self._in_flight: dict[asyncio.Task[None], _Lane] = {}
        self._failure: NeveError | None = None
        self._not_stored: list[Message] = []
        self.sent = 0
        self.repeated = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.flush()
            return
        self._discard(self._failure)
        await self._settle()
        if self._failure is not None:
            log.warning("messages not stored: count=%d cause=%s", len(self._not_stored), self._failure)

    @property
    def not_stored(self) -> list[Message]:
        """After an error: the messages that no broker confirmed, among them those that were not sent.

        Messages of a request with an unknown outcome (UnknownOutcome) may be stored all the same.
        """
        return self._not_stored + [message for batch in self._filling.values() for message in batch.messages]

    async def put(
        self,
        topic: str | Message,
        body: bytes | str | None = None,
        *,
        tags: str | None = None,
        keys: str | Iterable[str] = (),
        properties: Mapping[str, str] | None = None,
        queue: int | MessageQueue | None = None,
        order_key: OrderKey | None = None,
        delay_level: int = 0,
        delay: float | None = None,
        deliver_at: Time | None = None,
        flag: int = 0,
    ) -> Delivery:
        """Add one message; wait while `in_flight` batches are on their way.

        Args: as of `AsyncClient.send`; `queue` is a number or a queue.

        Returns:
            A future with the `SendResult` of the message. Its exception need not be retrieved.

        Raises:
            ClientError: the message is invalid.
            NeveError: an earlier batch could not be stored.
        """
        what = send_request(
            topic,
            body,
            tags=tags,
            keys=keys,
            properties=properties,
            delay_level=delay_level,
            delay=delay,
            deliver_at=deliver_at,
            flag=flag,
        )
        delivery: Delivery = asyncio.get_running_loop().create_future()
        item = BatchItem(what.message, queue, order_key, what.timing)
        try:
            if self._failure is not None:
                raise self._failure
            await self._add(item, {}, delivery)
        except NeveError:
            self._note_unsent(item.message)
            raise
        return delivery

    async def put_all(self, items: Iterable[BatchItem | Message]) -> None:
        """Add many messages; return when all are on their way, except those that do not fill a batch yet.

        Raises:
            ClientError: a message is invalid.
            NeveError: a batch could not be stored. `not_stored` has all messages that are not.
        """
        rest = iter(items)
        selected: dict[str, Sequence[MessageQueue]] = {}
        for one in rest:
            item = BatchItem(one) if isinstance(one, Message) else one
            try:
                await self._add(item, selected, None)
            except NeveError:
                self._note_unsent(item.message)
                self._not_stored += self._messages(rest)
                raise

    async def flush(self) -> None:
        """Wait until all messages are stored.

        Raises:
            NeveError: a batch could not be stored, and all others have ended.
        """
        try:
            for lane in list(self._filling):
                await self._begin_filled(lane)
        except NeveError as error:
            self._discard(error)
            raise
        finally:
            await self._settle()
        if self._failure is not None:
            self._discard(self._failure)
            raise self._failure

    # ---- filling

    @staticmethod
    def _messages(items: Iterator[BatchItem | Message]) -> list[Message]:
        return [one if isinstance(one, Message) else one.message for one in items]

    def _note_unsent(self, message: Message) -> None:
        if not any(one is message for one in self._not_stored):  # a batch that failed has noted its messages
            self._not_stored.append(message)

    async def _add(
        self, item: BatchItem, selected: dict[str, Sequence[MessageQueue]], delivery: Delivery | None
    ) -> None:
        message = item.message
        topic = message.topic
        lane = _Lane(topic, item.queue) if item.order_key is None else await self._ordered_lane(item, selected)
        if item.timing or topic.startswith(RETRY_PREFIX):
            alone = _Batch([message])
            if delivery is not None:
                alone.deliveries[0] = delivery
            await self._begin(lane, alone, item.timing)
            return
        size = _size(message)
        batch = self._filling.get(lane)
        if batch is not None and batch.size + size > self._limits.max_bytes:
            await self._begin_filled(lane)
            batch = self._filling.get(lane)  # another task may have begun one meanwhile
        if batch is None:
            batch = self._filling[lane] = _Batch()
        if delivery is not None:
            batch.deliveries[len(batch.messages)] = delivery
        batch.messages.append(message)
        batch.size += size
        if len(batch.messages) >= self._limits.max_messages:
            await self._begin_filled(lane)

    async def _ordered_lane(self, item: BatchItem, selected: dict[str, Sequence[MessageQueue]]) -> _Lane:
        topic, order_key = item.message.topic, item.order_key
        assert order_key is not None
        if item.queue is not None:
            raise ClientError("queue and order_key exclude each other")
        queues = selected.get(topic)
        if queues is None:
            queues = selected[topic] = (await self._session.routes.to_publish(topic)).write_queues
            if not queues:
                raise ClientError(f"{topic} has no queue to write to", ResponseCode.TOPIC_NOT_EXIST)
        return _Lane(topic, select_by_hash(order_key)(queues, item.message))

    # ---- sending

    async def _begin_filled(self, lane: _Lane) -> None:
        batch = self._filling.pop(lane, None)
        if batch is not None:
            await self._begin(lane, batch, {})

    async def _begin(self, lane: _Lane, batch: _Batch, timing: Mapping[str, str]) -> None:
        try:
            drafts = self._producer.drafts
            is_single = len(batch.messages) == 1
            draft = drafts.single(batch.messages[0], timing) if is_single else drafts.batch(lane.topic, batch.messages)
            while self._failure is None and not self._has_room(lane):
                await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                await self._settle()
                raise self._failure
        except NeveError as error:
            self._give_up(batch, error)
            raise
        except BaseException:
            self._failed(batch, ClientError(f"a put to {lane.topic} was cancelled before its batch was sent"))
            raise
        task = self._session.spawn(self._deliver(draft, lane, batch), f"batch to {lane.topic}")
        self._in_flight[task] = lane
        task.add_done_callback(functools.partial(self._ended, batch))

    def _ended(self, batch: _Batch, task: asyncio.Task[None]) -> None:
        """Record a cancelled batch: a task that is cancelled before its first step runs no `except` of its own."""
        lane = self._in_flight.pop(task)
        if task.cancelled():
            self._failed(batch, UnknownOutcome(f"the client was closed during a send to {lane.topic}"))

    def _has_room(self, lane: _Lane) -> bool:
        if len(self._in_flight) >= self._limits.in_flight:
            return False
        return lane.queue is None or lane not in self._in_flight.values()

    async def _deliver(self, draft: Draft, lane: _Lane, batch: _Batch) -> None:
        """Send a batch until it is stored or the retry timeout ends, and record the outcome."""
        try:
            result = await self._store(draft, lane, len(batch.messages))
        except NeveError as error:
            self._failed(batch, error)
        except asyncio.CancelledError:
            raise  # `_ended` records it
        except BaseException:
            self._failed(batch, UnknownOutcome(f"an internal error ended a send to {lane.topic}"))
            raise
        else:
            self.sent += len(batch.messages)
            _deliver_results(batch, result)

    async def _store(self, draft: Draft, lane: _Lane, count: int) -> SendResult:
        """Send the draft until it is stored. It stays the same: a message that is sent twice has one id."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._limits.retry_timeout
        backoff = iter(_BACKOFF_S)
        repeats = Repeats()
        while True:
            before = repeats.count
            try:
                return await self._producer.deliver(
                    draft,
                    lane.queue,
                    max(self._session.options.timeout, self._limits.attempt_timeout),
                    attempt_timeout=self._limits.attempt_timeout,
                    repeats=repeats,
                )
            except (BrokerError, ConnectionFailed, UnknownOutcome) as error:
                pause = next(backoff, _BACKOFF_S[-1])
                is_final = isinstance(error, BrokerError) and error.code not in _TEMPORARY
                if is_final or self._failure is not None or now() + pause > deadline:
                    raise
                await asyncio.sleep(pause)
            finally:
                self.repeated += (repeats.count - before) * count

    async def _settle(self) -> None:
        """Wait until the outcome of every batch in flight is recorded."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)

    # ---- failing

    def _failed(self, batch: _Batch, error: NeveError) -> None:
        self._failure = self._failure or error
        self._give_up(batch, error)

    def _give_up(self, batch: _Batch, error: NeveError | None) -> None:
        self._not_stored += batch.messages
        for delivery in batch.deliveries.values():
            if delivery.done():
                continue
            if error is None:
                delivery.cancel()
            else:
                delivery.set_exception(error)
                delivery.exception()  # asyncio shall not log it: `flush` and `put` raise it

    def _discard(self, error: NeveError | None) -> None:
        """Discard the batches that are not sent: their deliveries raise the error, or are cancelled without one."""
        for lane in list(self._filling):
            self._give_up(self._filling.pop(lane), error)


def _deliver_results(batch: _Batch, result: SendResult) -> None:
    """Set the results of the deliveries. A batch has its ids joined by commas, and consecutive offsets."""
    if not batch.deliveries:
        return
    count = len(batch.messages)
    ids, offset_ids = result.msg_id.split(","), result.offset_msg_id.split(",")
    for position, delivery in batch.deliveries.items():
        if not delivery.done():  # its caller may have cancelled it
            offset_id = offset_ids[position] if len(offset_ids) == count else result.offset_msg_id
            delivery.set_result(
                SendResult(
                    result.status,
                    ids[position],
                    offset_id,
                    result.queue,
                    result.queue_offset + position,
                    result.transaction_id,
                    result.recall_handle,
                )
            )
