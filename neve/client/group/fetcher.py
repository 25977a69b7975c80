"""Pull loops: one for each assigned queue, which fills its delivery queue as far as there is room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from neve.client.group.consume_stats import ConsumeStatsTable
from neve.client.group.delivery import DeliveryBuffer
from neve.client.group.failures import Failures
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.received import Settles, received
from neve.client.model import MessageQueue, PullStatus
from neve.client.net.session import Session
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR_S = 1.0
_PAUSE_AFTER_FLOW_CONTROL_S = 0.02
_LOCK_CHECK_S = 1.0  # the interval at which a loop checks whether its queue is locked again


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """How much may wait for the application, in all and for each queue. The last pull may exceed it by one batch."""

    batch: int = 32
    wait: float = 15.0
    messages: int = 1000
    bytes: int = 64 << 20
    queue_messages: int = 1000
    queue_bytes: int = 100 << 20


class Fetcher:
    """Pulls the assigned queues of one consumer.

    `moved` is called when a broker reports that an offset is out of range. If a `buffer` is given, others fill it too,
    and its owner calls `wake` when there is room in it.
    """

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
        self._session = session
        self._puller = Puller(session)
        self._group = group
        self._consumer = consumer
        self._limits = limits
        self._subscription = subscription
        self._moved = moved
        self._code = code
        self._room = asyncio.Event()
        self._loops: dict[MessageQueue, asyncio.Task[None]] = {}
        self.assigned: dict[MessageQueue, ProcessQueue] = {}
        self.buffer = DeliveryBuffer(self._room.set) if buffer is None else buffer
        self.failures = Failures(self.buffer.wake)
        self.stats = ConsumeStatsTable()

    def take_over(self, process_queue: ProcessQueue) -> None:
        """Begin to pull a queue from the `next_offset` of its process queue."""
        queue = process_queue.queue
        assert queue not in self.assigned
        self.assigned[queue] = process_queue
        loop = self._session.spawn(self._forever(process_queue), f"pull {self._group} {queue}")
        self._loops[queue] = self.failures.watch(loop)

    def drop(self, queue: MessageQueue) -> ProcessQueue:
        """Stop pulling a queue, discard its buffered messages, and ignore acks of delivered ones."""
        process_queue, loop = self.assigned.pop(queue), self._loops.pop(queue)
        process_queue.is_dropped = True
        if loop is not asyncio.current_task():
            loop.cancel()
        self.buffer.close(process_queue.delivery)
        self.buffer.discard(process_queue.delivery)
        return process_queue

    def wake(self) -> None:
        """Have all loops check again whether there is room."""
        self._room.set()

    async def close(self) -> None:
        """End all loops; the queues stay assigned."""
        loops = list(self._loops.values())
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    # ---- one queue

    async def _forever(self, process_queue: ProcessQueue) -> None:
        operation = f"pull of {process_queue.queue}"
        try:
            while not process_queue.is_dropped:
                await self._until_room(process_queue)
                await self._attempt(process_queue, operation)
        finally:
            self.failures.resolve(operation)

    async def _attempt(self, process_queue: ProcessQueue, operation: str) -> None:
        try:
            await self._once(process_queue)
            self.failures.resolve(operation)
        except BrokerError as error:
            self.failures.record(operation, error)
            is_throttled = error.code == ResponseCode.FLOW_CONTROL
            await asyncio.sleep(_PAUSE_AFTER_FLOW_CONTROL_S if is_throttled else _PAUSE_AFTER_ERROR_S)
        except NeveError as error:
            self.failures.record(operation, error)
            self._session.routes.forget(process_queue.queue.topic)
            await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _until_room(self, process_queue: ProcessQueue) -> None:
        while not self._has_room(process_queue):
            self._room.clear()
            try:
                async with asyncio.timeout(None if process_queue.locked_until is None else _LOCK_CHECK_S):
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
            log.warning(
                "offset out of range, moved: queue=%s from=%d to=%d",
                process_queue.queue, process_queue.next_offset, result.next_offset,
            )  # fmt: skip
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
