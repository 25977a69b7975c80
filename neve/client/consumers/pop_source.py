"""The source of a pop consumer: the broker hands each message to one member for a while and tracks it.

A message is renewed as long as the application owns it. The invisible time therefore limits no handler; it is only the
delay until the messages of a dead member are redelivered.

%RETRY%group is pulled, as by Java's consumers. It has the messages that failed while the group pulled, and brokers
assign its queues for pulling in every mode. A pop would return receipts that no broker accepts. Messages that failed
after a pop return with a later pop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from neve.client.consumers.lifecycle import Jobs
from neve.client.consumers.pull_source import PullSource
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.delivery import DeliveryBuffer, DeliveryQueue
from neve.client.group.failures import Failures
from neve.client.group.group_requests import RunningState
from neve.client.group.ownership import Owner
from neve.client.group.pop_requests import POP_BATCH_MAX, Popped, Popper
from neve.client.group.pop_settle import Acker, Held, Renewer
from neve.client.group.pull import Subscription
from neve.client.group.rebalance import Rounds
from neve.client.group.received import Received, Settles, received
from neve.client.group.send_back import SendBack
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.client.trace.format import Ended
from neve.client.trace.recorder import ConsumeTraces
from neve.errors import ClientError, NeveError
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR_S = 1.0
_RETURN_DELAY_S = 1.0  # until messages that the application never received are visible again after a close
_RETRY_DELAYS_S = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)


@dataclass(frozen=True, slots=True)
class PopSettings:
    """The settings of a pop consumer; see `AsyncClient.pop_consumer`."""

    start: Literal["earliest", "latest"] = "latest"
    auto_ack: bool = True
    in_order: bool = False
    invisible: float = 60.0
    hold_limit: float = 3600.0
    close_timeout: float = 15.0
    pop_batch: int = POP_BATCH_MAX
    max_buffered: int = 96
    long_poll: float = 15.0
    max_redeliveries: int = 16

    def __post_init__(self) -> None:
        if self.start not in ("earliest", "latest"):
            raise ClientError(f"start of a pop consumer must be 'earliest' or 'latest', got {self.start!r}")
        if not self.hold_limit > 0:
            raise ClientError(f"hold_limit must be more than 0 s, got {self.hold_limit!r}")
        if self.close_timeout < 0:
            raise ClientError(f"close_timeout must be at least 0 s, got {self.close_timeout!r}")

    @property
    def of_retries(self) -> ConsumerSettings:
        """The settings by which %RETRY%group is pulled: from its first message, and with `hold_limit`."""
        return ConsumerSettings(
            start="earliest",
            max_buffered=self.max_buffered,
            max_redeliveries=self.max_redeliveries,
            consume_timeout=self.hold_limit,
        )


class PopSource:
    """Pops the queues that one member is assigned, settles their messages, and pulls its share of %RETRY%group."""

    def __init__(
        self,
        session: Session,
        group: str,
        settings: PopSettings,
        consumer: Settles,
        traces: ConsumeTraces,
        *,
        rounds: Rounds,
        subscription: Callable[[str], Subscription],
    ) -> None:
        self._session = session
        self._group = group
        self._settings = settings
        self._consumer = consumer
        self._traces = traces
        self._rounds = rounds
        self._subscription = subscription
        self._popper = Popper(session, group)
        self._acker = Acker(session, self._popper)
        self._renewer = Renewer(self._popper, settings.invisible, settings.hold_limit)
        self._send_back = SendBack(session, group, settings.max_redeliveries)
        self._room = asyncio.Event()
        self.buffer = DeliveryBuffer(self._made_room)
        self._retry_topic = f"{RETRY_PREFIX}{group}"
        self.retries = PullSource(
            session,
            group,
            settings.of_retries,
            consumer,
            traces,
            rounds=rounds,
            subscription=lambda _: Subscription(),
            buffer=self.buffer,
        )
        self.failures: Failures = self.retries.failures
        self._stats = self.retries.fetcher.stats
        self._deliveries: dict[MessageQueue, DeliveryQueue] = {}
        self._loops: dict[MessageQueue, asyncio.Task[None]] = {}
        self._left: set[asyncio.Task[None]] = set()  # loops of queues that were left, in their last pop

    # ---- MessageSource

    async def open(self) -> None:
        await self.retries.open()

    def jobs(self) -> Jobs:
        yield "renewals", self._renewer.forever()
        yield from self.retries.jobs()

    async def stop(self) -> None:
        loops = (*self._loops.values(), *self._left)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await self._popper.close()
        await self.retries.stop()
        buffered = [message for delivery in self._deliveries.values() for message in self.buffer.discard(delivery)]
        for message in buffered:
            self._renewer.release(message.receipt)
        await asyncio.gather(*(self._make_visible(message.receipt, _RETURN_DELAY_S) for message in buffered))

    def owners(self) -> Iterable[Owner]:
        return [*self._renewer.owners, *self.retries.owners()]

    async def finish(self, closer: Owner) -> None:
        await self.retries.finish(closer)
        await self._acker.flush()
        self._loops.clear()

    # ---- Settler of popped messages, whose receipt is a `Held`

    def deliver(self, message: Received, now: float, owner: Owner) -> bool:
        held: Held = message.receipt
        if now >= held.expires_at:  # it was not renewed in time, so the broker may redeliver it
            self._renewer.release(held)
            self.buffer.settled(held.delivery)
            return False
        held.delivered_at, held.owner = now, owner
        self._traces.consumption_started(message)
        return True

    def ack(self, message: Received) -> asyncio.Future[None] | None:
        """Acknowledge the message; the outcome is the broker's answer."""
        held: Held = message.receipt
        self._traces.ended(message, Ended.SUCCESS)
        if not self._renewer.release(held):
            return None
        now = asyncio.get_running_loop().time()
        self._stats.consumed(held.queue.topic, now - held.delivered_at, now)
        self.buffer.settled(held.delivery)
        return self._acker.add(held)

    def nack(self, message: Received, delay_level: int) -> Coroutine[Any, Any, None] | None:
        held: Held = message.receipt
        self._traces.ended(message, Ended.FAILED)
        if not self._renewer.release(held):
            return None
        self._stats.failed(held.queue.topic, asyncio.get_running_loop().time())
        return self._retry(message, held, delay_level)

    def redeliver(self, message: Received, seconds: float) -> Coroutine[Any, Any, None] | None:
        held: Held = message.receipt
        self._traces.ended(message, Ended.FAILED)
        return self._return(held, seconds) if self._renewer.release(held) else None

    def raised(self, message: Received, error: BaseException) -> None:
        self._traces.ended(message, Ended.EXCEPTION)

    async def _retry(self, message: Received, held: Held, delay_level: int) -> None:
        """Have the message redelivered after a delay level, or move it to the dead letter queue."""
        if delay_level < 0 or message.reconsume_times >= self._settings.max_redeliveries:
            try:
                await self._send_back.ask_broker(message, -1)
            except NeveError as error:
                log.warning("dead letter not stored, redelivered: msg_id=%s cause=%s", message.msg_id, error)
            else:
                self.buffer.settled(held.delivery)
                self._acker.add(held)
                return
        level = delay_level if delay_level > 0 else message.reconsume_times + 1
        await self._return(held, _RETRY_DELAYS_S[min(max(level, 1), len(_RETRY_DELAYS_S)) - 1])

    async def _return(self, held: Held, seconds: float) -> None:
        """Return a message to the broker; in order, also the buffered messages behind it, to keep their order."""
        behind = self.buffer.discard(held.delivery) if held.delivery.in_order else []
        try:
            for one in (held, *(message.receipt for message in behind)):
                self._renewer.release(one)
                await self._make_visible(one, seconds)
        finally:
            self.buffer.settled(held.delivery)

    async def _make_visible(self, held: Held, seconds: float) -> None:
        held.is_settled = True
        try:
            await self._popper.change_invisible(held.queue, await held.settled_receipt(), seconds)
        except NeveError as error:
            log.warning(
                "invisible time not changed, redelivered when it ends: queue=%s receipt=%s cause=%s",
                held.queue, held.receipt.text, error,
            )  # fmt: skip

    # ---- pop loops

    @property
    def popped_queues(self) -> Iterable[MessageQueue]:
        """The queues that are popped."""
        return self._loops

    async def _forever(self, queue: MessageQueue) -> None:
        operation = f"pop of {queue}"
        try:
            while self._loops.get(queue) is asyncio.current_task():
                while not self._has_room():
                    self._room.clear()
                    await self._room.wait()
                try:
                    await self._once(queue)
                    self.failures.resolve(operation)
                except NeveError as error:
                    self.failures.record(operation, error)
                    self._session.routes.forget(queue.topic)
                    await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
        finally:
            self.failures.resolve(operation)

    def _made_room(self) -> None:
        self._room.set()
        self.retries.fetcher.wake()

    def _has_room(self) -> bool:
        return self.buffer.count < self._settings.max_buffered

    async def _once(self, queue: MessageQueue) -> None:
        settings, now = self._settings, asyncio.get_running_loop().time
        began = now()
        subscription = self._subscription(queue.topic)
        popped = await self._popper.pop(
            queue,
            subscription=subscription,
            max_count=settings.pop_batch,
            invisible=settings.invisible,
            wait=settings.long_poll,
            from_first=settings.start == "earliest",
            in_order=settings.in_order,
        )
        if popped:
            self._stats.pulled(queue.topic, len(popped), now() - began, now())
        for one in popped:
            if subscription.matches(one.message):
                self._buffer(queue, one, now())
            else:  # its tag has only the hash in common; without an ack the broker would redeliver it for ever
                self._acker.add(Held(queue, one.receipt, DeliveryQueue(), now(), now(), is_settled=True))

    def _buffer(self, queue: MessageQueue, popped: Popped, now: float) -> None:
        source = popped.message.queue
        assert source is not None
        delivery = self._deliveries.setdefault(source, DeliveryQueue(in_order=self._settings.in_order))
        held = Held(queue, popped.receipt, delivery, now, now + popped.receipt.invisible_time / 1000)
        self._renewer.hold(held)
        self.buffer.put(delivery, [received(popped.message, self._consumer, held)])

    # ---- Assignee of the rebalancer

    async def share(self, topic: str) -> set[MessageQueue] | None:
        """Return the queues that the broker assigns to this member, or None if it does not know yet."""
        assignments = await self._popper.assignments(topic)
        return None if assignments is None else {one.queue for one in assignments}

    def held(self) -> Iterable[MessageQueue]:
        return [*self._loops, *self.retries.held()]

    async def take_queues(self, queues: list[MessageQueue]) -> bool:
        """Begin with the queues. Whatever the mode of a topic, %RETRY%group is pulled and all others are popped."""
        await self.retries.take_queues([queue for queue in queues if queue.topic == self._retry_topic])
        for queue in (queue for queue in queues if queue.topic != self._retry_topic):
            loop = self._session.spawn(self._forever(queue), f"pop {self._group} {queue}")
            self._loops[queue] = self.failures.watch(loop)
        return True

    def keep(self, queue: MessageQueue) -> None:
        """Do nothing: a queue is left at once."""

    async def leave(self, queue: MessageQueue) -> bool:
        """Leave the queue. Messages of a pop that is still waiting belong to this member."""
        if queue.topic == self._retry_topic:
            return await self.retries.leave(queue)
        loop = self._loops.pop(queue)
        self._left.add(loop)
        loop.add_done_callback(self._left.discard)
        return True

    # ---- ManagedConsumer

    def wake(self) -> None:
        self._rounds.wake()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Move offsets of %RETRY%group; the broker keeps those of popped topics."""
        await self.retries.reset(offsets)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return self.retries.positions(topic)

    def running_state(self) -> RunningState:
        now_ms = self._session.options.now_ms()
        info: dict[str, Any] = {"waitAckCount": len(self._renewer), "droped": False, "lastPopTimestamp": now_ms}
        status = self._stats.status_table(asyncio.get_running_loop().time())
        pulled, popped = self.retries.fetcher.assigned, dict.fromkeys(self._loops, info)
        return RunningState(self._settings.in_order, pulled, popped, status)
