"""A member of a consumer group: takes its share of the queues, pulls them, keeps the books, commits.

    rebalance ──▶ one pull loop per assigned queue ──▶ buffer (bounded) ──▶ `async for` ──▶ ack ──▶ committed offset

Delivery is at least once: what was not acked when a queue moves to another member is delivered again there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from neve.client.allocation import Allocation, chosen
from neve.client.connection import Connection
from neve.client.model import RETRY_PREFIX, Message, MessageQueue, PullStatus
from neve.client.process_queue import ProcessQueue
from neve.client.pull import Puller, Subscription
from neve.client.session import Session, parse_body
from neve.errors import BrokerError, ClientError, NeveError
from neve.message import PROPERTY_RETRY_TOPIC, tags_code
from neve.remoting.body import lenient_loads
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand

log = logging.getLogger(__name__)

_FROM_WHERE = {"first": "CONSUME_FROM_FIRST_OFFSET", "last": "CONSUME_FROM_LAST_OFFSET"}
_PAUSE_AFTER_ERROR = 1.0
_PAUSE_AFTER_FLOW_CONTROL = 0.02
_REBALANCE_AGAIN = 1.0


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """See `AsyncClient.consumer`."""

    start: str | int = "last"
    auto_ack: bool = True
    allocation: str | Allocation = "average"
    pull_batch: int = 32
    max_buffered: int = 1000
    max_buffered_bytes: int = 64 << 20
    long_poll: float = 15.0
    max_redeliveries: int = 16


@dataclass(frozen=True, slots=True)
class Received(Message):
    """A message with its way back to the consumer that delivered it."""

    consumer: Consumer | None = None
    books: ProcessQueue | None = None

    async def ack(self) -> None:
        """Done with it; the group's offset may pass it."""
        self._consumer().ack(self)

    async def nack(self, delay_level: int = 0) -> None:
        """Have the broker deliver it again later, to any member; after too many times it goes to %DLQ%group.

        Args:
            delay_level: 1..18 (1 s … 2 h); 0 lets the wait grow with each redelivery; -1 means %DLQ% at once.
        """
        await self._consumer().nack(self, delay_level)

    def _consumer(self) -> Consumer:
        if self.consumer is None:
            raise ClientError("this message was not delivered by a consumer")
        return self.consumer


class Consumer:
    """`async with client.consumer(...) as consumer: async for message in consumer: ...`"""

    def __init__(
        self,
        session: Session,
        group: str,
        topics: Mapping[str, Subscription],
        settings: ConsumerSettings,
    ) -> None:
        self._allocate = chosen(settings.allocation)
        if isinstance(settings.start, str) and settings.start not in _FROM_WHERE:
            raise ClientError(f"start is 'first', 'last' or ms since 1970, not {settings.start!r}")
        if not topics or not group:
            raise ClientError("a consumer needs a group and at least one topic")
        self._session = session
        self._puller = Puller(session)
        self.group = group
        self._settings = settings
        self._topics = {**topics, f"{RETRY_PREFIX}{group}": Subscription()}
        self._version = session.options.now_ms()
        self._assigned: dict[MessageQueue, ProcessQueue] = {}
        self._loops: dict[MessageQueue, asyncio.Task[None]] = {}
        self._buffer: deque[Received] = deque()
        self._changed = asyncio.Condition()
        self._rebalancing = asyncio.Lock()
        self._wanted = asyncio.Event()  # a rebalance
        self._auto: Received | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_closed = False

    # ---- life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._ack_last()
        await self.close()

    async def start(self) -> None:
        """Joins the group and takes the first share of queues."""
        if self._tasks:
            return
        if self.group in self._session.consumers:
            raise ClientError(f"this client is already in group {self.group}")
        self._session.consumers[self.group] = self._describe
        self._session.request_handlers[self.group] = self._serve
        await self._refresh_routes()
        await self._session.heartbeat()
        await self._rebalance()
        self._tasks = [
            self._session.spawn(self._rebalance_forever(), f"rebalance {self.group}"),
            self._session.spawn(self._commit_forever(), f"commit {self.group}"),
        ]

    async def close(self) -> None:
        """Commits, and leaves the group at once."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in (*self._tasks, *self._loops.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._loops.values(), return_exceptions=True)
        try:
            await self.commit()
        except NeveError as error:
            log.warning("the last commit of %s failed; some messages will come again: %s", self.group, error)
        for books in self._assigned.values():
            books.is_dropped = True
        self._assigned.clear()
        self._buffer.clear()
        if self._session.consumers.pop(self.group, None) is not None:
            self._session.request_handlers.pop(self.group, None)
            await self._session.unregister({"consumerGroup": self.group})
        async with self._changed:
            self._changed.notify_all()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # ---- delivery

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Received:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def receive(self, timeout: float | None = None) -> Received | None:
        """The next message; None when the consumer is closed, or nothing came within `timeout`.

        With `auto_ack`, asking for the next message acks the one before; so does leaving the `with` block unharmed.
        """
        self._session.pool.check_usable()
        self._ack_last()
        try:
            async with asyncio.timeout(timeout), self._changed:
                while (message := self._take()) is None:
                    if self._is_closed:
                        return None
                    await self._changed.wait()
                self._changed.notify_all()
        except TimeoutError:
            return None
        if self._settings.auto_ack:
            self._auto = message
        return message

    def _take(self) -> Received | None:
        while self._buffer:
            message = self._buffer.popleft()
            assert message.books is not None
            message.books.handed_over(message)
            if not message.books.is_dropped:
                return message
        return None

    def _ack_last(self) -> None:
        if self._auto is not None:
            self.ack(self._auto)

    def ack(self, message: Received) -> None:
        """Marks it done; the offset is committed within `commit_interval` and at close."""
        if message.books is not None:
            message.books.ack(message.queue_offset)
        if self._auto is message:
            self._auto = None

    async def nack(self, message: Received, delay_level: int = 0) -> None:
        """See `Received.nack`."""
        assert message.queue is not None
        ext = {
            "offset": str(message.physical_offset),
            "group": self.group,
            "delayLevel": str(delay_level),
            "originMsgId": message.offset_msg_id,
            "originTopic": message.properties.get(PROPERTY_RETRY_TOPIC, message.topic),
            "maxReconsumeTimes": str(self._settings.max_redeliveries),
            "bname": message.queue.broker_name,
        }
        route = await self._session.route(message.queue.topic)
        address = route.master(message.queue.broker_name) or message.store_host
        await self._session.ask(address, RequestCode.CONSUMER_SEND_MSG_BACK, ext)
        self.ack(message)

    # ---- offsets

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, sorted; those of the group's retry topic are not among them."""
        return sorted(queue for queue in self._assigned if not queue.topic.startswith(RETRY_PREFIX))

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which all of the queue is acked."""
        return self._books(queue).committable

    async def commit(self) -> None:
        """Stores the positions of all assigned queues and waits for the answers."""
        await self._commit(oneway=False)

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Goes on with `offset`: what was fetched is dropped, acks of what was delivered count no more."""
        async with self._rebalancing:
            self._books(queue)
            await self._puller.commit(self.group, queue, offset)
            await self._drop(queue, commit=False)
            self._take_over(queue, offset)

    async def seek_to_time(self, time_ms: int, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes on with the first message that was stored at `time_ms` or later, in each of the queues."""
        for queue in self.assigned if queues is None else list(queues):
            await self.seek(queue, await self._puller.offset_by_time(queue, time_ms))

    async def seek_to_begin(self) -> None:
        for queue in self.assigned:
            await self.seek(queue, await self._puller.min_offset(queue))

    async def seek_to_end(self) -> None:
        for queue in self.assigned:
            await self.seek(queue, await self._puller.max_offset(queue))

    def _books(self, queue: MessageQueue) -> ProcessQueue:
        books = self._assigned.get(queue)
        if books is None:
            raise ClientError(f"{queue} is not assigned to this consumer")
        return books

    async def _commit(self, *, oneway: bool) -> None:
        for queue, books in list(self._assigned.items()):
            offset = books.committable
            if offset != books.committed:
                await self._puller.commit(self.group, queue, offset, oneway=oneway)
                books.committed = offset

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._session.options.commit_interval)
            try:
                await self._commit(oneway=True)
            except NeveError as error:
                log.warning("commit of %s, tried again later: %s", self.group, error)

    # ---- group membership

    def _describe(self) -> dict[str, Any]:
        start = self._settings.start
        return {
            "consumeFromWhere": _FROM_WHERE.get(str(start), "CONSUME_FROM_TIMESTAMP"),
            "consumeType": "CONSUME_PASSIVELY",
            "groupName": self.group,
            "messageModel": "CLUSTERING",
            "subscriptionDataSet": [self._subscription(topic, what) for topic, what in self._topics.items()],
            "unitMode": False,
        }

    def _subscription(self, topic: str, what: Subscription) -> dict[str, Any]:
        tags = sorted(what.tags)
        return {
            "classFilterMode": False,
            "codeSet": [tags_code(tag) for tag in tags],
            "expressionType": what.kind,
            "subString": what.expression,
            "subVersion": self._version,
            "tagsSet": tags,
            "topic": topic,
        }

    def _serve(self, connection: Connection, request: RemotingCommand) -> bool:
        """Requests of brokers; whether this was one that we know."""
        if request.code == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED:
            self._wanted.set()
            connection.answer(request, ResponseCode.SUCCESS)
            return True
        if request.code == RequestCode.RESET_CONSUMER_CLIENT_OFFSET:
            table = lenient_loads(request.body).get("offsetTable") or {}
            self._session.spawn(self._reset(table), f"reset {self.group}")
            connection.answer(request, ResponseCode.SUCCESS)
            return True
        return False

    async def _reset(self, table: Mapping[Any, Any]) -> None:
        for queue, offset in table.items():
            if isinstance(queue, MessageQueue) and queue in self._assigned:
                await self.seek(queue, int(offset))

    async def _rebalance_forever(self) -> None:
        interval = self._session.options.rebalance_interval
        while True:
            try:
                async with asyncio.timeout(interval):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            interval = self._session.options.rebalance_interval if await self._rebalance() else _REBALANCE_AGAIN

    async def _refresh_routes(self) -> None:
        for topic in self._topics:
            try:
                await self._session.route(topic, fresh=True)
            except BrokerError as error:  # the retry topic is made by the first heartbeat; others may come later
                log.info("%s: %s", topic, error)

    async def _rebalance(self) -> bool:
        """Takes and leaves queues so that the share is right; False when some topic could not be settled."""
        settled = True
        async with self._rebalancing:
            for topic in self._topics:
                try:
                    await self._rebalance_topic(topic)
                except NeveError as error:
                    log.info("rebalance of %s in %s: %s", topic, self.group, error)
                    settled = False
        return settled

    async def _rebalance_topic(self, topic: str) -> None:
        route = await self._session.route(topic)
        members = await self._members(topic)
        mine = set(self._allocate(self._session.client_id, members, route.read_queues))
        for queue in [q for q in self._assigned if q.topic == topic and q not in mine]:
            await self._drop(queue, commit=True)
        for queue in sorted(mine - self._assigned.keys()):
            self._take_over(queue, await self._first_offset(queue))

    async def _members(self, topic: str) -> list[str]:
        """The group's members as any of the topic's brokers knows them."""
        route = await self._session.route(topic)
        problem: NeveError = ClientError(f"{topic} has no broker")
        for name in sorted(route.brokers):
            address = route.address(name)
            if address is None:
                continue
            try:
                ext = {"consumerGroup": self.group}
                answer = await self._session.ask(address, RequestCode.GET_CONSUMER_LIST_BY_GROUP, ext)
            except NeveError as error:
                problem = error
                continue
            members = [str(member) for member in parse_body(answer).get("consumerIdList") or ()]
            if self._session.client_id not in members:  # it forgot us, or has not heard of us yet
                await self._session.heartbeat()
                members.append(self._session.client_id)
            return members
        if isinstance(problem, BrokerError):  # no member online: so it does not know us
            await self._session.heartbeat()
        raise problem

    async def _first_offset(self, queue: MessageQueue) -> int:
        """Where to begin: the group's stored offset, else what `start` says."""
        stored = await self._puller.committed(self.group, queue)
        if stored is not None:
            return stored
        if queue.topic.startswith(RETRY_PREFIX) or self._settings.start == "first":
            return await self._puller.min_offset(queue)
        if self._settings.start == "last":
            return await self._puller.max_offset(queue)
        return await self._puller.offset_by_time(queue, int(self._settings.start))

    def _take_over(self, queue: MessageQueue, offset: int) -> None:
        books = ProcessQueue(queue, offset)
        self._assigned[queue] = books
        self._loops[queue] = self._session.spawn(self._pull_forever(books), f"pull {self.group} {queue}")

    async def _drop(self, queue: MessageQueue, *, commit: bool) -> None:
        books, loop = self._assigned.pop(queue), self._loops.pop(queue)
        books.is_dropped = True
        if loop is not asyncio.current_task():
            loop.cancel()
        kept = [message for message in self._buffer if message.books is not books]
        self._buffer.clear()
        self._buffer.extend(kept)
        async with self._changed:
            self._changed.notify_all()  # there may be room now
        if commit and books.committable != books.committed:
            await self._puller.commit(self.group, queue, books.committable)

    # ---- pull loops

    async def _pull_forever(self, books: ProcessQueue) -> None:
        while not books.is_dropped:
            async with self._changed:
                await self._changed.wait_for(self._has_room)
            try:
                await self._pull_once(books)
            except BrokerError as error:
                log.info("pull of %s: %s", books.queue, error)
                is_throttled = error.code == ResponseCode.FLOW_CONTROL
                await asyncio.sleep(_PAUSE_AFTER_FLOW_CONTROL if is_throttled else _PAUSE_AFTER_ERROR)
            except NeveError as error:
                log.info("pull of %s: %s", books.queue, error)
                self._session.forget_route(books.queue.topic)
                await asyncio.sleep(_PAUSE_AFTER_ERROR)

    def _has_room(self) -> bool:
        if len(self._buffer) >= self._settings.max_buffered:
            return False
        held = sum(books.buffered_bytes for books in self._assigned.values())
        return held < self._settings.max_buffered_bytes

    async def _pull_once(self, books: ProcessQueue) -> None:
        result = await self._puller.pull(
            books.queue,
            books.next_offset,
            self._settings.pull_batch,
            group=self.group,
            subscription=self._topics[books.queue.topic],
            wait=self._settings.long_poll,
        )
        if books.is_dropped:
            return
        if result.status is PullStatus.OFFSET_ILLEGAL:
            log.warning("%s: offset %d moved to %d", books.queue, books.next_offset, result.next_offset)
            await self.seek(books.queue, result.next_offset)
            return
        if result.messages or result.next_offset != books.next_offset:
            books.fetched(result.messages, result.next_offset)
        if result.messages:
            self._buffer.extend(_received(message, self, books) for message in result.messages)
            async with self._changed:
                self._changed.notify_all()


_MESSAGE_FIELDS = tuple(field.name for field in fields(Message))


def _received(message: Message, consumer: Consumer, books: ProcessQueue) -> Received:
    values: dict[str, Any] = {name: getattr(message, name) for name in _MESSAGE_FIELDS}
    return Received(**values, consumer=consumer, books=books)
