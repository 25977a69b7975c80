"""A member of a group that pops: the broker hands each message to one member for a while, and keeps the books itself.

    query assignment ──▶ one pop loop per assigned queue ──▶ lanes ──▶ application ──▶ ack, or visible again later
                     └─▶ %RETRY%group, pulled ─────────────┘

What is neither acknowledged nor renewed in time comes again, to any member. While this consumer holds a message it
renews it, so the invisible time is no limit for handlers, only for the dead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from neve.client.group.consume_loop import Handler, consume
from neve.client.group.delivery import DeliveryBuffer, Lane
from neve.client.group.group_requests import DirectRun, GroupRequests, RunningState
from neve.client.group.in_work import Asker, AutoAcks, Endings, current_asker
from neve.client.group.member import GroupMember, GroupProfile
from neve.client.group.pop_requests import POP_BATCH_MAX, Popped, Popper
from neve.client.group.pop_settle import Acker, Held, Renewer
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Subscription
from neve.client.group.pulled_retries import PulledRetries
from neve.client.group.rebalance import Rebalancer
from neve.client.group.received import Received, received
from neve.client.group.refusals import Refusals
from neve.client.group.send_back import SendBack
from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.client.trace.format import Ended
from neve.client.trace.recorder import ConsumeTraces, Traces
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
        if self.close_timeout < 0:
            raise ClientError(f"a close timeout of {self.close_timeout} s")


class PopConsumer:
    """`async with client.pop_consumer(...) as consumer: async for message in consumer: ...`"""

    def __init__(
        self,
        session: Session,
        group: str,
        topics: Mapping[str, Subscription],
        settings: PopSettings,
        traces: Traces | None,
    ) -> None:
        if not topics:
            raise ClientError("a consumer needs at least one topic")
        self._session = session
        self._settings = settings
        self.group = group
        retry = {f"{RETRY_PREFIX}{group}": Subscription()}
        self._member = GroupMember(session, GroupProfile(group, start=settings.start), {**topics, **retry})
        self._popper = Popper(session, group)
        self._rebalancer = Rebalancer(session, lambda: self._member.topics, self._share, self)
        self._acker = Acker(session, self._popper)
        self._renewer = Renewer(self._popper, settings.invisible, settings.hold_limit)
        self._send_back = SendBack(session, group, settings.max_redeliveries)
        self._room = asyncio.Event()
        self._buffer = DeliveryBuffer(self._made_room)
        self._retries = PulledRetries(
            session,
            group,
            self,
            self._buffer,
            self._send_back,
            max_buffered=settings.max_buffered,
            consume_timeout=settings.hold_limit,
        )
        self._stats = self._retries.stats
        self._traces = ConsumeTraces(traces, group)
        self._lanes: dict[MessageQueue, Lane] = {}
        self._loops: dict[MessageQueue, asyncio.Task[None]] = {}
        self._refusals = Refusals(log)
        self._left: set[asyncio.Task[None]] = set()  # loops whose last pop is under way
        self._direct = Lane()
        self._auto = AutoAcks()
        self._endings = Endings(session.spawn, group)
        self._rounds: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._started_ms = 0
        self._is_closed = False

    # ---- life

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # nobody will leave the block, so the group has to be left here
            await self.close()
            raise
        return self

    def __aexit__(self, kind: type[BaseException] | None, *_: object) -> Coroutine[Any, Any, None]:
        return self._leave_block(current_asker(), is_unharmed=kind is None)

    async def _leave_block(self, asker: Asker, *, is_unharmed: bool) -> None:
        if is_unharmed:
            self._ack_done(asker)
        await self.close_for(asker)

    async def start(self) -> None:
        """Joins the group and asks for the first queues.

        Raises:
            ClientError: this client is already in the group.
            BrokerError: a broker refuses a filter expression.
        """
        if self._tasks:
            return
        await self._member.join(GroupRequests(self._session, self._member, self))
        self._started_ms = self._session.options.now_ms()
        await self._rebalancer.once()
        self._retries.start()
        self._rounds = self._session.spawn(self._rebalancer.forever(), f"rebalance {self.group}")
        self._tasks = [self._session.spawn(self._renewer.forever(), f"renewals of {self.group}")]

    def close(self) -> Coroutine[Any, Any, None]:
        """Pops no more, gives back what nobody saw, waits at most `close_timeout` for what is in work, and leaves.

        A handler of `run` that calls this goes on at once: `run` returns when all of it is done.
        """
        return self.close_for(current_asker())

    async def close_for(self, closer: Asker) -> None:
        """As `close`, on behalf of `closer`: what that one has in hand is not waited for."""
        self._is_closed = True
        self._buffer.wake()
        await self._endings.close(self, lambda: self._end(closer))

    async def _end(self, closer: Asker) -> None:
        patience = self._settings.close_timeout
        if self._rounds is not None:
            await self._rebalancer.stop(self._rounds, patience)
        loops = (*self._loops.values(), *self._left)
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        await self._popper.close()
        await self._retries.stop()
        unseen = [message for lane in self._lanes.values() for message in self._buffer.discard(lane)]
        for message in unseen:
            self._renewer.release(message.receipt)
        await asyncio.gather(*(self._give_back(message.receipt, _GIVEN_BACK_S) for message in unseen))
        left = await self._endings.until_settled(self._in_work, closer, patience)
        if left:
            log.warning("%s: %d messages are still in work after %g s, they come again", self.group, left, patience)
        await self._endings.until_finished()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self._retries.close(), return_exceptions=True)
        await self._acker.flush()
        self._loops.clear()
        await self._member.leave()

    def _in_work(self) -> Iterable[Asker]:
        return [*self._renewer.askers, *self._retries.askers]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def problem(self) -> NeveError | None:
        """As of `Consumer.problem`, of pops."""
        return self._refusals.latest

    @property
    def assigned(self) -> list[MessageQueue]:
        """What this member pops, sorted; queue id -1 is any queue of that broker."""
        return sorted(self._loops)

    # ---- delivery

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Received]:
        return self._iterate(current_asker())

    async def _iterate(self, asker: Asker) -> Received:
        message = await self.following(asker)
        if message is None:
            raise StopAsyncIteration
        return message

    async def following(self, asker: Asker) -> Received | None:
        """The next message of an iteration by `asker`; None at its end, with the consumer or with the client."""
        if self._is_closed:
            self._ack_done(asker)
            return None
        return await self._receive(asker, None)

    def receive(self, timeout: float | None = None) -> Coroutine[Any, Any, Received | None]:
        """The next message; None when the consumer is closed, or nothing came within `timeout` seconds.

        With `auto_ack`, asking for the next message acks those that the same task (or thread) got before; so does
        leaving the `with` block unharmed.
        """
        return self._receive(current_asker(), timeout)

    async def _receive(self, asker: Asker, timeout: float | None) -> Received | None:
        self._ack_done(asker)
        self._session.pool.check_usable()
        try:
            async with asyncio.timeout(timeout):
                message = await self._next(asker)
        except TimeoutError:
            return None
        if self._settings.auto_ack and message is not None:
            self._auto.give(asker, message)
        return message

    def next(self) -> Coroutine[Any, Any, Received | None]:
        """The next message, whatever became of the one before; None when the consumer is closed."""
        return self._next(current_asker())

    async def _next(self, asker: Asker) -> Received | None:
        while not self._is_closed:
            self._session.pool.check_usable()
            if (message := self._take(asker)) is not None:
                return message
            await self._buffer.wait()
        return None

    async def run(self, handler: Handler, *, workers: int = 1, delay_level: int = 0) -> None:
        """As of `Consumer`."""
        await consume(self, handler, workers, delay_level)
        await self.close()  # it was closed; what that has still to do is done when this returns

    def _take(self, asker: Asker) -> Received | None:
        now = asyncio.get_running_loop().time()
        while (message := self._buffer.take()) is not None:
            held = message.receipt
            if isinstance(held, Held):
                if now >= held.expires_at:  # it could not be renewed: others may have it
                    self._renewer.release(held)
                    self._buffer.settled(held.lane)
                    continue
                held.handed_over_at, held.asker = now, asker
            elif isinstance(held, ProcessQueue):
                self._retries.handed_over(held, message, now, asker)
            if not isinstance(held, DirectRun):
                self._traces.begun(message)
            return message
        return None

    # ---- settling

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """See `Received.ack` and `Received.nack`. An ack returns when the broker has it.

        Raises:
            NeveError: the broker could not be told; the message comes again.
        """
        if delay_level is None:
            outcome = self._ack(message)
            if outcome is not None:
                await asyncio.shield(outcome)
        else:
            await self._nack(message, delay_level)

    async def failed(self, message: Received, error: BaseException, delay_level: int) -> None:
        """The application's handler raised: as a nack."""
        if isinstance(message.receipt, DirectRun):
            message.receipt.settle("CR_THROW_EXCEPTION", repr(error))
        self._traces.ended(message, Ended.EXCEPTION)
        await self._nack(message, delay_level)

    async def change_invisible(self, message: Received, seconds: float) -> None:
        """Lets go of the message: it comes again `seconds` from now, to any member."""
        self._auto.settled(message)
        self._traces.ended(message, Ended.FAILED)
        held = message.receipt
        if isinstance(held, ProcessQueue):
            self._retries.again_in(held, message, seconds)
            self._endings.settled()
        if isinstance(held, Held) and self._release(held):
            await self._endings.finish(self._let_go(held, seconds))

    def _ack_done(self, asker: Asker) -> None:
        """Without waiting: an ack that fails means one more delivery."""
        for message in self._auto.done_with(asker):
            self._ack(message)

    def _ack(self, message: Received) -> asyncio.Future[None] | None:
        self._auto.settled(message)
        held = message.receipt
        if isinstance(held, DirectRun):
            held.settle("CR_SUCCESS")
        self._traces.ended(message, Ended.SUCCESS)
        if isinstance(held, ProcessQueue):
            self._retries.ack(held, message)
            self._endings.settled()
        if not isinstance(held, Held) or not self._release(held):
            return None
        now = asyncio.get_running_loop().time()
        self._stats.consumed(held.queue.topic, now - held.handed_over_at, now)
        self._buffer.settled(held.lane)
        return self._acker.add(held)

    async def _nack(self, message: Received, delay_level: int) -> None:
        """It is finished even where the caller is cancelled: half done, it would leave the message nowhere."""
        self._auto.settled(message)
        held = message.receipt
        if isinstance(held, DirectRun):
            held.settle("CR_LATER")
        self._traces.ended(message, Ended.FAILED)
        if isinstance(held, ProcessQueue):
            again = self._retries.nack(held, message, delay_level)
            if again is not None:
                await self._endings.finish(again)
        elif isinstance(held, Held) and self._release(held):
            self._stats.failed(held.queue.topic, asyncio.get_running_loop().time())
            await self._endings.finish(self._again_later(message, held, delay_level))

    async def _again_later(self, message: Received, held: Held, delay_level: int) -> None:
        if delay_level < 0 or message.reconsume_times >= self._settings.max_redeliveries:
            try:
                await self._send_back.ask_broker(message, -1)
            except NeveError as error:
                log.warning("%s did not get to the dead letter queue, it comes again: %s", message.msg_id, error)
            else:
                self._buffer.settled(held.lane)
                self._acker.add(held)
                return
        level = delay_level if delay_level > 0 else message.reconsume_times + 1
        await self._let_go(held, _RETRY_DELAYS_S[min(max(level, 1), len(_RETRY_DELAYS_S)) - 1])

    async def _let_go(self, held: Held, seconds: float) -> None:
        """In order, those that were popped after it come again after it."""
        later = self._buffer.discard(held.lane) if held.lane.in_order else []
        try:
            for one in (held, *(message.receipt for message in later)):
                self._renewer.release(one)
                await self._give_back(one, seconds)
        finally:
            self._buffer.settled(held.lane)

    def _release(self, held: Held) -> bool:
        self._endings.settled()
        return self._renewer.release(held)

    async def _give_back(self, held: Held, seconds: float) -> None:
        held.is_settled = True
        try:
            await self._popper.change_invisible(held.queue, await held.settled_receipt(), seconds)
        except NeveError as error:
            log.warning("%s of %s comes again in its time: %s", held.receipt.text, held.queue, error)

    # ---- pop loops

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
        self._retries.wake()

    def _has_room(self) -> bool:
        return self._buffer.count < self._settings.max_buffered

    async def _once(self, queue: MessageQueue) -> None:
        settings, now = self._settings, asyncio.get_running_loop().time
        began = now()
        subscription = self._member.topics[queue.topic]
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
                self._acker.add(Held(queue, one.receipt, Lane(), now(), now(), is_settled=True))

    def _deliver(self, queue: MessageQueue, popped: Popped, now: float) -> None:
        source = popped.message.queue
        assert source is not None
        lane = self._lanes.setdefault(source, Lane(in_order=self._settings.in_order))
        held = Held(queue, popped.receipt, lane, now, now + popped.receipt.invisible_time / 1000)
        self._renewer.hold(held)
        self._buffer.put(lane, [received(popped.message, self, held)])

    # ---- queues come and go (Assignee of the rebalancer)

    async def _share(self, topic: str) -> set[MessageQueue] | None:
        """The broker divides the queues. Whatever mode it says, %RETRY%group is pulled, all else popped."""
        assignments = await self._popper.assignments(topic)
        return None if assignments is None else {one.queue for one in assignments}

    def held(self) -> Iterable[MessageQueue]:
        return [*self._loops, *self._retries.assigned]

    async def take(self, queues: list[MessageQueue]) -> bool:
        await self._retries.take(queue for queue in queues if queue.topic == self._retries.topic)
        for queue in (queue for queue in queues if queue.topic != self._retries.topic):
            self._loops[queue] = self._session.spawn(self._forever(queue), f"pop {self.group} {queue}")
        return True

    def keep(self, queue: MessageQueue) -> None:
        """Nothing was done towards leaving it."""

    async def leave(self, queue: MessageQueue) -> bool:
        """The pop under way may still bring messages; they are ours."""
        if queue.topic == self._retries.topic:
            await self._retries.leave(queue)
            return True
        loop = self._loops.pop(queue)
        self._left.add(loop)
        loop.add_done_callback(self._left.discard)
        return True

    # ---- what brokers ask (Asked of the group's requests)

    def wake(self) -> None:
        self._rebalancer.wake()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Of what is popped the broker keeps the offsets."""
        self._retries.move(offsets)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return {queue: books.committable for queue, books in self._retries.assigned.items() if queue.topic == topic}

    def running_state(self) -> RunningState:
        now_ms = self._session.options.now_ms()
        info: dict[str, Any] = {"waitAckCount": len(self._renewer), "droped": False, "lastPopTimestamp": now_ms}
        status = self._stats.status_table(asyncio.get_running_loop().time())
        pulled, popped = self._retries.assigned, dict.fromkeys(self._loops, info)
        return RunningState(self._started_ms, self._settings.in_order, pulled, popped, status)

    async def consume_directly(self, message: Message) -> tuple[str, str | None] | None:
        run = DirectRun()
        self._buffer.put(self._direct, [received(message, self, run)], first=True)
        try:
            return await run.verdict()
        finally:
            self._buffer.discard(self._direct)
