"""Many messages on their way at once: packed into batches by lane, several batches in flight, each until it is stored.

A lane is where messages have to go together: a topic, or a queue of it. A queue that was asked for, or an order key's,
has one batch in flight at a time, so that its messages keep their order; other lanes have as many as there are. Of a
number that several brokers have a queue of, the batches take turns between these. What is delayed, and what is for a
group's retry topic, goes alone: brokers take no batches of such.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.client.send.draft import Draft
from neve.client.send.producer import Producer, Repeats
from neve.client.send.queue_selector import OrderKey, select_by_hash
from neve.errors import BrokerError, ClientError, ConnectionFailed, NeveError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from neve.remoting.names import RETRY_PREFIX

_PAUSES_S = (0.1, 0.2, 0.5, 1.0)  # between attempts to have a batch taken, the last again and again
_PASSING = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE})
_FRAMING = 64  # of a message in a batch, its own properties included


class ToSend(NamedTuple):
    """A message, and where and when: `queue` and `order_key` exclude each other; `timing` is `draft.timing`'s."""

    message: Message
    queue: int | MessageQueue | None = None
    order_key: OrderKey | None = None
    timing: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """How large a batch is, how many are in flight, and how long one is sent again.

    A batch costs a broker more than a message, and several wait there together. A premature timeout stores a second
    copy of each message, so batches wait longer for an answer than single messages.
    """

    messages: int = 200
    size: int = 256 << 10
    in_flight: int = 8
    patience: float = 30.0  # seconds for which a batch is sent again while it is not stored
    attempt_timeout: float = 10.0  # seconds that one request waits for its answer


def _size(message: Message) -> int:
    """About as many bytes as it takes of a batch."""
    size = _FRAMING + len(message.body) + len(message.tags or "") + sum(map(len, message.keys)) + len(message.keys)
    return size + sum(len(name) + len(value) for name, value in message.properties.items())


class _Lane(NamedTuple):
    topic: str
    queue: int | MessageQueue | None  # None: unordered


@dataclass(slots=True)
class _Filling:
    messages: list[Message] = field(default_factory=list)
    size: int = 0


class BatchSender:
    """`put` as often as there is something, then `flush`. After an error from either, use another one.

    `sent` counts the messages that brokers have stored. `repeated` counts messages that were sent again although an
    earlier request may have stored them: readers may find them twice, with one `msg_id`.
    """

    def __init__(self, session: Session, producer: Producer, limits: BatchLimits) -> None:
        self._session = session
        self._producer = producer
        self._limits = limits
        self._filling: dict[_Lane, _Filling] = {}
        self._in_flight: dict[asyncio.Task[None], _Lane] = {}
        self._failure: NeveError | None = None
        self._not_stored: list[Message] = []
        self.sent = 0
        self.repeated = 0

    @property
    def not_stored(self) -> list[Message]:
        """After an error: the messages without a confirmation, among them those that were never sent.

        Those of a request without an answer (UnknownOutcome) may be stored all the same.
        """
        return self._not_stored + [message for filling in self._filling.values() for message in filling.messages]

    async def put(self, messages: Iterable[ToSend]) -> None:
        """Returns when all are on their way but what fills no batch yet.

        Raises:
            BrokerError, UnknownOutcome, ConnectionFailed: as of `AsyncClient.send`, of any batch until now.
            ClientError: one of them no broker would take.
        """
        rest = iter(messages)
        try:
            await self._put(rest)
        except NeveError:
            self._not_stored += [one.message for one in rest]
            raise

    async def _put(self, messages: Iterator[ToSend]) -> None:
        selected: dict[str, Sequence[MessageQueue]] = {}
        for one in messages:
            try:
                lane = await self._lane(one, selected)
            except NeveError:
                self._not_stored.append(one.message)
                raise
            if one.timing or one.message.topic.startswith(RETRY_PREFIX):
                await self._begin(lane, [one.message], one.timing)
                continue
            size = _size(one.message)
            filling = self._filling.get(lane)
            if filling is not None and filling.size + size > self._limits.size:
                await self._begin_filled(lane)
                filling = None
            if filling is None:
                filling = self._filling[lane] = _Filling()
            filling.messages.append(one.message)
            filling.size += size
            if len(filling.messages) >= self._limits.messages:
                await self._begin_filled(lane)

    async def flush(self) -> None:
        """Returns when all are stored. Raises as `put`, when nothing is on its way any more."""
        for lane in list(self._filling):
            await self._begin_filled(lane)
        await self._settle()
        if self._failure is not None:
            raise self._failure

    async def _lane(self, one: ToSend, selected: dict[str, Sequence[MessageQueue]]) -> _Lane:
        topic = one.message.topic
        if one.order_key is None:
            return _Lane(topic, one.queue)
        if one.queue is not None:
            raise ClientError("queue and order_key exclude each other")
        queues = selected.get(topic)
        if queues is None:
            queues = selected[topic] = (await self._session.publish_route(topic)).write_queues
            if not queues:
                raise ClientError(f"{topic} has no queue to write to", ResponseCode.TOPIC_NOT_EXIST)
        return _Lane(topic, select_by_hash(one.order_key)(queues, one.message))

    async def _begin_filled(self, lane: _Lane) -> None:
        await self._begin(lane, self._filling.pop(lane).messages)

    async def _begin(self, lane: _Lane, messages: list[Message], timing: Mapping[str, str] | None = None) -> None:
        try:
            drafts = self._producer.drafts
            is_single = len(messages) == 1
            draft = drafts.single(messages[0], timing) if is_single else drafts.batch(lane.topic, messages)
            while self._failure is None and not self._has_room(lane):
                await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
            if self._failure is not None:
                await self._settle()
                raise self._failure
        except BaseException:
            self._not_stored += messages
            raise
        task = self._session.spawn(self._deliver(draft, lane, messages), f"batch to {lane.topic}")
        self._in_flight[task] = lane
        task.add_done_callback(functools.partial(self._ended, messages))

    def _ended(self, messages: list[Message], task: asyncio.Task[None]) -> None:
        """Note a cancelled batch here: a task that is cancelled before its first step runs no `except` of its own."""
        lane = self._in_flight.pop(task)
        if task.cancelled():
            self._failed(messages, UnknownOutcome(f"the client ended while messages to {lane.topic} were on their way"))

    def _has_room(self, lane: _Lane) -> bool:
        if len(self._in_flight) >= self._limits.in_flight:
            return False
        return lane.queue is None or lane not in self._in_flight.values()

    async def _deliver(self, draft: Draft, lane: _Lane, messages: list[Message]) -> None:
        """Send until the batch is stored or patience ends; what becomes of it is noted here."""
        try:
            await self._store(draft, lane, len(messages))
        except NeveError as error:
            self._failed(messages, error)
        except asyncio.CancelledError:
            raise  # `_ended` notes it
        except BaseException:
            self._failed(messages, UnknownOutcome(f"an internal error ended the sending of messages to {lane.topic}"))
            raise
        else:
            self.sent += len(messages)

    def _failed(self, messages: list[Message], error: NeveError) -> None:
        self._not_stored += messages
        self._failure = self._failure or error

    async def _store(self, draft: Draft, lane: _Lane, count: int) -> None:
        """It stays the same draft: a message sent twice has one id."""
        now = asyncio.get_running_loop().time
        deadline = now() + self._limits.patience
        pauses = iter(_PAUSES_S)
        repeats = Repeats()
        while True:
            before = repeats.count
            try:
                await self._producer.deliver(
                    draft,
                    lane.queue,
                    max(self._session.options.timeout, self._limits.attempt_timeout),
                    attempt_timeout=self._limits.attempt_timeout,
                    repeats=repeats,
                )
            except (BrokerError, ConnectionFailed, UnknownOutcome) as error:
                pause = next(pauses, _PAUSES_S[-1])
                is_final = isinstance(error, BrokerError) and error.code not in _PASSING
                if is_final or self._failure is not None or now() + pause > deadline:
                    raise
                await asyncio.sleep(pause)
            else:
                return
            finally:
                self.repeated += (repeats.count - before) * count

    async def _settle(self) -> None:
        """What became of a batch is known of each."""
        while self._in_flight:
            await asyncio.wait(self._in_flight)
