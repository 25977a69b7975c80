"""Neve's clients at work in one round: their actions and observations are recorded in a history.

topics   ROUND-plain (4 queues), ROUND-later (delayed), ROUND-halves (transactions), and some that are created and
deleted sends    once (one request per message, to one queue), again (with retries, to all), by threes, later, halves
groups   ROUND_push (two members), ROUND_order (in order), ROUND_pop; and a reader by offset of each plain queue;
         ROUND_late joins after the healing and reads everything, which an archive may have by then
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any

import neve
from neve import NeveError
from neve.client import Consumer, LocalTransactionState, Message, PopConsumer, PullStatus, SendResult, SendStatus
from neve.errors import BrokerError
from neve.record.ids import parse_offset_msg_id
from tests.histories.history import Decision, Event, Outcome, Seen, Sent, TopicDeleted, TopicMade
from tests.kit.clock.waiting import until

QUEUES = 4
_LARGEST = 3000
_PAUSE_S = 0.02
_WORKERS = 8  # For a consumer that is not in order: an acknowledgement may take long.
_LEVELS = {1: 1.0, 2: 2.0}
DELAY_LEVELS = "1s 2s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
_PULL_WAIT_S = 1.0
#: As often as in tests, because a round is short.
_OPTIONS: dict[str, Any] = {
    "timeout": 4.0, "attempt_timeout": 2.0, "connect_timeout": 2.0, "route_interval": 1.0, "heartbeat_interval": 1.0,
    "rebalance_interval": 0.5, "commit_interval": 0.5, "compress_over": 1 << 20,
}  # fmt: skip


def now_ms() -> int:
    """Return the time of the clock that all parts share."""
    return time.time_ns() // 1_000_000


def key_of(body: bytes) -> str:
    """Return the key with which the message's body begins."""
    return body.partition(b"|")[0].decode(errors="replace")


class RoundTopics:
    """The topics of a round."""

    def __init__(self, name: str) -> None:
        self.plain, self.later, self.halves = f"{name}-plain", f"{name}-later", f"{name}-halves"

    @property
    def all(self) -> tuple[str, ...]:
        return self.plain, self.later, self.halves


class RoundClients:
    """The work of one round, from `begin` to `close`; `stop` ends the sends."""

    def __init__(self, namesrv: str, name: str, history: list[Event], chance: random.Random) -> None:
        self._namesrv, self._name, self._history, self._chance = namesrv, name, history, chance
        self.topics = RoundTopics(name)
        self.groups: dict[str, tuple[str, ...]] = {
            f"{name}_push": self.topics.all,
            f"{name}_order": (self.topics.plain,),
            f"{name}_pop": (self.topics.plain,),
        }
        self.last_acknowledged: dict[str, int] = {}  # By producer: when it acknowledged last.
        self._decided: dict[str, Decision] = {}  # Of transactions, by key.
        self._topic_fates: dict[str, TopicMade | TopicDeleted | None] = {}
        self._stack = AsyncExitStack()
        self._senders: list[asyncio.Task[None]] = []
        self._readers: list[asyncio.Task[None]] = []
        self._stopped, self._closed = asyncio.Event(), asyncio.Event()

    # ---- life cycle

    async def begin(self) -> None:
        """Start in a healthy set: create topics, join groups, begin to send."""
        enter = self._stack.enter_async_context
        once = await enter(neve.connect(self._namesrv, send_retries=0, producer_group="once", **_OPTIONS))
        self.client = again = await enter(neve.connect(self._namesrv, producer_group="again", **_OPTIONS))
        for topic in self.topics.all:
            await self._make(topic)
            self._history.append(TopicMade(topic=topic, queues=QUEUES))
        self._halves = await enter(again.transaction_producer("neve_halves", check=self._check))
        await self._join()
        self._senders = [
            self._spawn(self._send_once(once)),
            self._spawn(self._send_again(again)),
            self._spawn(self._send_by_threes(once)),
            self._spawn(self._send_later(once)),
            self._spawn(self._send_halves()),
            self._spawn(self._change_topics(again)),
        ]

    async def _make(self, topic: str) -> None:
        """Create a topic; although the last round's faults are healed, a busy machine may delay the answer."""

        async def is_made() -> bool:
            try:
                await self.client.admin.create_topic(topic, QUEUES)
            except NeveError:
                return False
            return True

        await until(is_made, f"{topic} is made")

    async def _join(self) -> None:
        push, order, pop = self.groups
        patience: dict[str, Any] = {"start": "earliest", "long_poll": 2.0, "close_timeout": 2.0}
        for number in range(2):
            client = await self._stack.enter_async_context(neve.connect(self._namesrv, **_OPTIONS))
            await self._consume(f"neve_{number}", push, client.consumer(push, self.topics.all, **patience))
        ordered = self.client.consumer(order, self.topics.plain, in_order=True, **patience)
        await self._consume("neve_in_order", order, ordered, in_order=True)
        popping = self.client.pop_consumer(pop, self.topics.plain, invisible=10.0, **patience)
        await self._consume("neve_pop", pop, popping)
        for queue in range(QUEUES):
            self._readers.append(self._spawn(self._read(queue)))

    async def join_late(self) -> None:
        """Join a new group."""
        late = f"{self._name}_late"
        client = await self._stack.enter_async_context(neve.connect(self._namesrv, **_OPTIONS))
        consumer = client.consumer(late, self.topics.all, start="earliest", long_poll=2.0, close_timeout=2.0)
        await self._consume("neve_late", late, consumer)
        self.groups[late] = self.topics.all

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    async def stop(self) -> None:
        """Wait until every send in flight has its outcome."""
        self._stopped.set()
        await asyncio.gather(*self._senders)
        self._history += [fate for fate in self._topic_fates.values() if fate is not None]

    async def close(self) -> None:
        """Leave the groups."""
        self._stopped.set()
        self._closed.set()
        for task in (*self._readers, *self._senders):
            task.cancel()
        ended = await asyncio.gather(*self._readers, *self._senders, return_exceptions=True)
        await self._stack.aclose()
        faults = [one for one in ended if isinstance(one, Exception)]
        if faults:
            raise ExceptionGroup("workers failed", faults)

    async def _comes_within(self, event: asyncio.Event, seconds: float) -> bool:
        """Wait this long, or until the end of the work."""
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return False
        return True

    def failed(self) -> None:
        """Raise the error that ended a worker."""
        for task in (*self._readers, *self._senders):
            if task.done() and not task.cancelled():
                task.result()

    # ---- sends

    async def _while_sending(self, send: Callable[[int], Awaitable[None]]) -> None:
        for number in itertools.count():
            if self._stopped.is_set():
                return
            await send(number)
            await self._comes_within(self._stopped, _PAUSE_S)

    def _body(self, key: str) -> bytes:
        return key.encode() + b"|" + self._chance.randbytes(self._chance.randrange(_LARGEST))

    async def _attempt(
        self, call: Awaitable[SendResult], keys: list[str], number: int, **fields: Any
    ) -> SendResult | None:
        """Await a send of adjacent messages, and record its outcome."""
        result: SendResult | None = None
        outcome = Outcome.UNKNOWN
        began = now_ms()
        try:
            result = await call
            outcome = Outcome.ACKNOWLEDGED if result.status is SendStatus.SEND_OK else Outcome.REFUSED
        except BrokerError:
            outcome = Outcome.REFUSED
        except NeveError:
            pass  # The send may have succeeded or not: unknown.
        self._note(result, outcome, keys, number, began=began, **fields)
        return result

    def _note(self, result: SendResult | None, outcome: Outcome, keys: list[str], number: int, **fields: Any) -> None:
        ended = now_ms()
        ids = result.offset_msg_id.split(",") if result is not None else []
        for place, key in enumerate(keys):
            where = {}
            if result is not None and ids[0]:
                physical = parse_offset_msg_id(ids[min(place, len(ids) - 1)])[2]
                where = {"queue": result.queue.queue_id, "offset": result.queue_offset + place, "physical": physical}
            sent = Sent(number=number * len(keys) + place, key=key, ended=ended, outcome=outcome, **{**fields, **where})
            self._history.append(sent)
        if outcome is Outcome.ACKNOWLEDGED:
            self.last_acknowledged[fields["producer"]] = ended

    async def _send_once(self, client: neve.AsyncClient) -> None:
        topic = self.topics.plain

        async def send(number: int) -> None:
            key = f"{topic}-once-{number}"
            call = client.send(topic, self._body(key), keys=[key], queue=0)
            await self._attempt(call, [key], number, producer="once", topic=topic)

        await self._while_sending(send)

    async def _send_again(self, client: neve.AsyncClient) -> None:
        topic = self.topics.plain

        async def send(number: int) -> None:
            key = f"{topic}-again-{number}"
            call = client.send(topic, self._body(key), keys=[key])
            await self._attempt(call, [key], number, producer="again", topic=topic, may_repeat=True)

        await self._while_sending(send)

    async def _send_by_threes(self, client: neve.AsyncClient) -> None:
        topic = self.topics.plain

        async def send(number: int) -> None:
            keys = [f"{topic}-threes-{number}-{place}" for place in range(3)]
            messages = [Message(topic, self._body(key), keys=(key,)) for key in keys]
            call = client.send_batch(topic, messages, queue=2)
            await self._attempt(call, keys, number, producer="threes", topic=topic)

        await self._while_sending(send)

    async def _send_later(self, client: neve.AsyncClient) -> None:
        """Send delayed messages, alternating between delay levels and timers."""
        topic = self.topics.later

        async def send(number: int) -> None:
            key = f"{topic}-later-{number}"
            level, delay = self._chance.choice(list(_LEVELS.items()))
            how: dict[str, Any] = {"delay_level": level} if number % 2 else {"delay": delay}
            due = now_ms() + int(delay * 1000)
            call = client.send(topic, self._body(key), keys=[key], **how)
            await self._attempt(call, [key], number, producer="later", topic=topic, due=due, may_repeat=True)

        await self._while_sending(send)

    async def _send_halves(self) -> None:
        """Send transactions: of four, two are ended at once and two are left to the check-back."""
        topic = self.topics.halves

        async def send(number: int) -> None:
            key = f"{topic}-halves-{number}"
            began = now_ms()
            result: SendResult | None = None
            outcome = Outcome.UNKNOWN
            decision = Decision.ROLLBACK  # If the half message failed, its local transaction was never executed.
            try:
                transaction = await self._halves.begin(topic, self._body(key), keys=[key])
                result, outcome = transaction.sent, Outcome.ACKNOWLEDGED
                decision = Decision.COMMIT if number % 2 == 0 else Decision.ROLLBACK
                self._decided[key] = decision
                if number % 4 < 2:
                    await (transaction.commit() if decision is Decision.COMMIT else transaction.rollback())
            except NeveError:
                pass  # If the half message's outcome is unknown, or that of its end, the check-back decides.
            self._decided[key] = decision
            fields = {"producer": "halves", "topic": topic, "decision": decision, "may_repeat": True}
            self._note(result, outcome, [key], number, began=began, **fields)

        await self._while_sending(send)

    def _check(self, message: Message) -> LocalTransactionState:
        decided = self._decided.get(key_of(message.body))
        if decided is None:
            return LocalTransactionState.UNKNOWN  # The half message is in flight.
        return LocalTransactionState.COMMIT if decided is Decision.COMMIT else LocalTransactionState.ROLLBACK

    async def _change_topics(self, client: neve.AsyncClient) -> None:
        """Create topics and delete some of them; a change without an answer promises nothing."""
        for number in itertools.count():
            topic, queues = f"{self._name}-made-{number}", 1 + number % 3
            await self._changed(topic, client.admin.create_topic(topic, queues), TopicMade(topic=topic, queues=queues))
            if number % 3 == 2:
                await self._changed(topic, client.admin.delete_topic(topic), TopicDeleted(topic=topic))
            if await self._comes_within(self._stopped, 1.0):
                return

    async def _changed(self, topic: str, call: Awaitable[None], then: TopicMade | TopicDeleted) -> None:
        self._topic_fates[topic] = None
        try:
            await call
        except NeveError:
            return
        self._topic_fates[topic] = then

    # ---- readers

    def _saw(self, who: str, message: Message, group: str = "", *, in_order: bool = False) -> None:
        assert message.queue is not None
        seen = Seen(
            who=who,
            topic=message.topic,
            queue=message.queue.queue_id,
            offset=message.queue_offset,
            key=key_of(message.body),
            at=now_ms(),
            group=group,
            in_order=in_order,
            again=message.reconsume_times > 0 or message.queue.topic != message.topic,
        )
        self._history.append(seen)

    async def _consume(self, who: str, group: str, consumer: Consumer | PopConsumer, *, in_order: bool = False) -> None:
        """Join the group and record all deliveries from then on."""

        async def handle(message: Message) -> None:
            self._saw(who, message, group, in_order=in_order)

        await self._stack.enter_async_context(consumer)
        self._readers.append(self._spawn(consumer.run(handle, workers=1 if in_order else _WORKERS)))

    async def _read(self, queue: int) -> None:
        """Read by offset to the end; errors are those of a set without a master."""
        topic, who, offset = self.topics.plain, f"reader_{queue}", 0
        while True:
            try:
                result = await self.client.pull(topic, queue, offset, wait=_PULL_WAIT_S)
            except NeveError:
                await self._comes_within(self._closed, _PAUSE_S)
                continue
            for message in result.messages:
                self._saw(who, message)
            if result.status is PullStatus.OFFSET_ILLEGAL and result.next_offset < offset:
                await self._comes_within(self._closed, _PAUSE_S)
            offset = result.next_offset
