"""Pull loops: one for each queue, filling its delivery queue as far as there is room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from neve.client.group.consume_stats import ConsumeStatsTable
from neve.client.group.delivery import DeliveryBuffer
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.received import Settles, received
from neve.client.group.refusals import Refusals
from neve.client.model import MessageQueue, PullStatus
from neve.client.net.session import Session
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 1.0
_PAUSE_AFTER_FLOW_CONTROL = 0.02
_LOCK_CHECK = 1.0  # how often a loop looks whether its queue is locked again


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """What may wait for the application, in all and of one queue; the last pull may pass each by one batch."""

    batch: int = 32
    wait: float = 15.0
    messages: int = 1000
    bytes: int = 64 << 20
    queue_messages: int = 1000
    queue_bytes: int = 100 << 20


class Fetcher:
    """The queues of one consumer."""

    def __init__(
        self,
        session: Session,
        group: str,
        consumer: Settles,
        limits: FlowLimits,
        *,
        subscription: Callable[[str], Subscription],
        moved: Callable[[MessageQueue, int], Awaitable[None]],
        code: RequestCode = RequestCode.PULL_MESSAGE,
        buffer: DeliveryBuffer | None = None,
    ) -> None:
        """`buffer` is one that others fill too; its owner calls `wake` when there is room in it."""
        self._session = session
        self._puller = Puller(session)
        self._group = group
        self._consumer = consumer
        self._limits = limits
        self._subscription = subscription
        self._moved = moved  # called when a broker says that an offset is out of its range
        self._code = code
        self._refusals = Refusals(log)
        self._room = asyncio.Event()
        self._loops: dict[MessageQueue, asyncio.Task[None]] = {}
        self.assigned: dict[MessageQueue, ProcessQueue] = {}
        self.buffer = DeliveryBuffer(self._room.set) if buffer is None else buffer
        self.stats = ConsumeStatsTable()

    def take_over(self, process_queue: ProcessQueue) -> None:
        """Begins to fetch the queue from the process queue's `next_offset`."""
        assert process_queue.queue not in self.assigned
        self.assigned[process_queue.queue] = process_queue
        self._loops[process_queue.queue] = self._session.spawn(
            self._forever(process_queue), f"pull {self._group} {process_queue.queue}"
        )

    def drop(self, queue: MessageQueue) -> ProcessQueue:
        """Ends with the queue: what is waiting is thrown away, acks of what was delivered count no more."""
        process_queue, loop = self.assigned.pop(queue), self._loops.pop(queue)
        process_queue.is_dropped = True
        if loop is not asyncio.current_task():
            loop.cancel()
        self.buffer.close(process_queue.delivery)
        self.buffer.discard(process_queue.delivery)
        return process_queue

    def wake(self) -> None:
        """Something about a queue or the buffer changed: the loops look again."""
        self._room.set()

    @property
    def problem(self) -> NeveError | None:
        """The latest error of a queue that is tried again, and has not succeeded since."""
        return self._refusals.latest

    async def close(self) -> None:
        """Ends all loops; the process queues stay."""
        loops = list(self._loops.values())
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    # ---- one queue

    async def _forever(self, process_queue: ProcessQueue) -> None:
        what = f"pull of {process_queue.queue}"
        try:
            while not process_queue.is_dropped:
                await self._until_room(process_queue)
                await self._tried(process_queue, what)
        finally:
            self._refusals.over(what)

    async def _tried(self, process_queue: ProcessQueue, what: str) -> None:
        try:
            await self._once(process_queue)
            self._refusals.over(what)
        except BrokerError as error:
            self._refusals.note(what, error)
            is_throttled = error.code == ResponseCode.FLOW_CONTROL
            await asyncio.sleep(_PAUSE_AFTER_FLOW_CONTROL if is_throttled else _PAUSE_AFTER_ERROR)
        except NeveError as error:
            self._refusals.note(what, error)
            self._session.forget_route(process_queue.queue.topic)
            await asyncio.sleep(_PAUSE_AFTER_ERROR)

    async def _until_room(self, process_queue: ProcessQueue) -> None:
        while not self._has_room(process_queue):
            self._room.clear()
            try:
                async with asyncio.timeout(None if process_queue.locked_until is None else _LOCK_CHECK):
                    await self._room.wait()
            except TimeoutError:
                continue

    def _has_room(self, process_queue: ProcessQueue) -> bool:
        limits, delivery = self._limits, process_queue.delivery
        return (
            not process_queue.is_paused
            and process_queue.is_usable(asyncio.get_running_loop().time())
            and self.buffer.count < limits.messages
            and self.buffer.bytes < limits.bytes
            and len(delivery.waiting) < limits.queue_messages
            and delivery.waiting_bytes < limits.queue_bytes
        )

    async def _once(self, process_queue: ProcessQueue) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        process_queue.last_pull_ms = self._session.options.now_ms()
        result = await self._puller.pull(
            process_queue.queue,
            process_queue.next_offset,
            self._limits.batch,
            group=self._group,
            subscription=self._subscription(process_queue.queue.topic),
            wait=self._limits.wait,
            code=self._code,
        )
        if process_queue.is_dropped:
            return
        if result.status is PullStatus.OFFSET_ILLEGAL:
            log.warning("%s: offset %d moved to %d", process_queue.queue, process_queue.next_offset, result.next_offset)
            await self._moved(process_queue.queue, result.next_offset)
            return
        if result.messages or result.next_offset != process_queue.next_offset:
            process_queue.fetched(result.messages, result.next_offset)
        if result.messages:
            self.stats.pulled(process_queue.queue.topic, len(result.messages), now() - began, now())
            self.buffer.put(
                process_queue.delivery,
                (received(message, self._consumer, process_queue) for message in result.messages),
            )
