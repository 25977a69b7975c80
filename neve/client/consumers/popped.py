"""What is popped: the broker hands each message to one member for a while, and keeps the books itself.

While a message is held here it is renewed, so the invisible time is no limit for handlers, only for the dead.

%RETRY%group is pulled beside that: what the group's members could not handle while they pulled is in it (what was
popped and failed comes back with the next pop). Brokers give out its queues to be pulled, whatever the mode of the
topics: popped, they would get receipts that lead nowhere. So Java's consumers pull them while they pop, and this does
the same into the same buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from neve.client.consumers.life import Jobs
from neve.client.consumers.pulled import Pulled
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.delivery import DeliveryBuffer, DeliveryQueue
from neve.client.group.group_requests import RunningState
from neve.client.group.in_work import Asker
from neve.client.group.pop_requests import POP_BATCH_MAX, Popped, Popper
from neve.client.group.pop_settle import Acker, Held, Renewer
from neve.client.group.pull import Subscription
from neve.client.group.rebalance import Rounds
from neve.client.group.received import Received, Settles, received
from neve.client.group.refusals import Refusals
from neve.client.group.send_back import SendBack
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.client.trace.format import Ended
from neve.client.trace.recorder import ConsumeTraces
from neve.errors import ClientError, NeveError
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 1.0
_GIVEN_BACK_S = 1.0  # what nobody looked at is visible again so soon after the consumer closed
_RETRY_DELAYS_S = (10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)


@dataclass(frozen=True, slots=True)
class PopSettings:
    """See `AsyncClient.pop_consumer`. Times in seconds."""

    start: str = "last"
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
        if self.start not in ("first", "last"):
            raise ClientError(f"a pop consumer starts 'first' or 'last', not {self.start!r}")
        if self.hold_limit <= 0:
            raise ClientError(f"a hold limit of {self.hold_limit} s")
        if self.close_timeout < 0:
            raise ClientError(f"a close timeout of {self.close_timeout} s")

    @property
    def of_retries(self) -> ConsumerSettings:
        """Of what is pulled from %RETRY%group: nothing of it is passed over, and what is held too long goes back."""
        return ConsumerSettings(
            start="first",
            max_buffered=self.max_buffered,
            max_redeliveries=self.max_redeliveries,
            consume_timeout=self.hold_limit,
        )


class Popping:
    """The queues that one member pops, the ways back of their messages, and beside them its share of %RETRY%group."""

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
        self.retries = Pulled(
            session,
            group,
            settings.of_retries,
            consumer,
            traces,
            rounds=rounds,
            subscription=lambda _: Subscription(),
            buffer=self.buffer,
        )
        self._stats = self.retries.fetcher.stats
        self._lanes: dict[MessageQueue, DeliveryQueue] = {}
        self._loops: dict[MessageQueue, asyncio.Task[None]] = {}
        self._left: set[asyncio.Task[None]] = set()  # loops whose last pop is under way
        self._refusals = Refusals(log)

    # ---- life

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
        unseen = [message for delivery in self._lanes.values() for message in self.buffer.discard(delivery)]
        for message in unseen:
            self._renewer.release(message.receipt)
        await asyncio.gather(*(self._give_back(message.receipt, _GIVEN_BACK_S) for message in unseen))

    def in_work(self) -> Iterable[Asker]:
        return [*self._renewer.askers, *self.retries.in_work()]

    async def finish(self, closer: Asker) -> None:
        await self.retries.finish(closer)
        await self._acker.flush()
        self._loops.clear()

    # ---- the way of a message (its receipt is what is held)

    def hand_over(self, message: Received, now: float, asker: Asker) -> bool:
        held: Held = message.receipt
        if now >= held.expires_at:  # it could not be renewed: others may have it
            self._renewer.release(held)
            self.buffer.settled(held.delivery)
            return False
        held.handed_over_at, held.asker = now, asker
        self._traces.begun(message)
        return True

    def ack(self, message: Received) -> asyncio.Future[None] | None:
        """The outcome is the broker's answer."""
        held: Held = message.receipt
        self._traces.ended(message, Ended.SUCCESS)
        if not self._renewer.release(held):
            return None
        now = asyncio.get_running_loop().time()
        self._stats.consumed(held.queue.topic, now - held.handed_over_at, now)
        self.buffer.settled(held.delivery)
        return self._acker.add(held)

    def nack(self, message: Received, delay_level: int) -> Coroutine[Any, Any, None] | None:
        held: Held = message.receipt
        self._traces.ended(message, Ended.FAILED)
        if not self._renewer.release(held):
            return None
        self._stats.failed(held.queue.topic, asyncio.get_running_loop().time())
        return self._again_later(message, held, delay_level)

    def let_go(self, message: Received, seconds: float) -> Coroutine[Any, Any, None] | None:
        held: Held = message.receipt
        self._traces.ended(message, Ended.FAILED)
        return self._let_go(held, seconds) if self._renewer.release(held) else None

    def raised(self, message: Received, error: BaseException) -> None:
        self._traces.ended(message, Ended.EXCEPTION)

    async def _again_later(self, message: Received, held: Held, delay_level: int) -> None:
        if delay_level < 0 or message.reconsume_times >= self._settings.max_redeliveries:
            try:
                await self._send_back.ask_broker(message, -1)
            except NeveError as error:
                log.warning("%s did not get to the dead letter queue, it comes again: %s", message.msg_id, error)
            else:
                self.buffer.settled(held.delivery)
                self._acker.add(held)
                return
        level = delay_level if delay_level > 0 else message.reconsume_times + 1
        await self._let_go(held, _RETRY_DELAYS_S[min(max(level, 1), len(_RETRY_DELAYS_S)) - 1])

    async def _let_go(self, held: Held, seconds: float) -> None:
        """In order, those that were popped after it come again after it."""
        later = self.buffer.discard(held.delivery) if held.delivery.in_order else []
        try:
            for one in (held, *(message.receipt for message in later)):
                self._renewer.release(one)
                await self._give_back(one, seconds)
        finally:
            self.buffer.settled(held.delivery)

    async def _give_back(self, held: Held, seconds: float) -> None:
        held.is_settled = True
        try:
            await self._popper.change_invisible(held.queue, await held.settled_receipt(), seconds)
        except NeveError as error:
            log.warning("%s of %s comes again in its time: %s", held.receipt.text, held.queue, error)

    # ---- pop loops

    @property
    def problem(self) -> NeveError | None:
        """The latest error of a pop that is tried again, and has not succeeded since."""
        return self._refusals.latest

    @property
    def popped_queues(self) -> Iterable[MessageQueue]:
        return self._loops

    async def _forever(self, queue: MessageQueue) -> None:
        what = f"pop of {queue}"
        while self._loops.get(queue) is asyncio.current_task():
            while not self._has_room():
                self._room.clear()
                await self._room.wait()
            try:
                await self._once(queue)
                self._refusals.over(what)
            except NeveError as error:
                self._refusals.note(what, error)
                self._session.forget_route(queue.topic)
                await asyncio.sleep(_PAUSE_AFTER_ERROR)

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
            from_first=settings.start == "first",
            in_order=settings.in_order,
        )
        if popped:
            self._stats.pulled(queue.topic, len(popped), now() - began, now())
        for one in popped:
            if subscription.matches(one.message):
                self._deliver(queue, one, now())
            else:  # another tag with the same hash: not ours, and done with, or it came again for ever
                self._acker.add(Held(queue, one.receipt, DeliveryQueue(), now(), now(), is_settled=True))

    def _deliver(self, queue: MessageQueue, popped: Popped, now: float) -> None:
        source = popped.message.queue
        assert source is not None
        delivery = self._lanes.setdefault(source, DeliveryQueue(in_order=self._settings.in_order))
        held = Held(queue, popped.receipt, delivery, now, now + popped.receipt.invisible_time / 1000)
        self._renewer.hold(held)
        self.buffer.put(delivery, [received(popped.message, self._consumer, held)])

    # ---- queues come and go (Assignee of the rebalancer)

    async def share(self, topic: str) -> set[MessageQueue] | None:
        """The broker divides the queues. Whatever mode it says, %RETRY%group is pulled, all else popped."""
        assignments = await self._popper.assignments(topic)
        return None if assignments is None else {one.queue for one in assignments}

    def held(self) -> Iterable[MessageQueue]:
        return [*self._loops, *self.retries.held()]

    async def take(self, queues: list[MessageQueue]) -> bool:
        await self.retries.take([queue for queue in queues if queue.topic == self._retry_topic])
        for queue in (queue for queue in queues if queue.topic != self._retry_topic):
            self._loops[queue] = self._session.spawn(self._forever(queue), f"pop {self._group} {queue}")
        return True

    def keep(self, queue: MessageQueue) -> None:
        """Nothing was done towards leaving it."""

    async def leave(self, queue: MessageQueue) -> bool:
        """The pop under way may still bring messages; they are ours."""
        if queue.topic == self._retry_topic:
            return await self.retries.leave(queue)
        loop = self._loops.pop(queue)
        self._left.add(loop)
        loop.add_done_callback(self._left.discard)
        return True

    # ---- what brokers ask

    def wake(self) -> None:
        self._rounds.wake()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Of what is popped the broker keeps the offsets."""
        await self.retries.reset(offsets)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return self.retries.positions(topic)

    def running_state(self) -> RunningState:
        now_ms = self._session.options.now_ms()
        info: dict[str, Any] = {"waitAckCount": len(self._renewer), "droped": False, "lastPopTimestamp": now_ms}
        status = self._stats.status_table(asyncio.get_running_loop().time())
        pulled, popped = self.retries.fetcher.assigned, dict.fromkeys(self._loops, info)
        return RunningState(self._settings.in_order, pulled, popped, status)
