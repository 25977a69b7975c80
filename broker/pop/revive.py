"""Redelivery of popped messages that were not acknowledged in time, by the group's pop-retry topic.

A message is appended to the retry topic first and removed from the pop book afterwards. A crash in between causes a
duplicate, never a loss.

    due ─▶ its message is in memory, or the queue is ordered: revived immediately
        └▶ its message must be read first: queued by pop queue, read one after the other, few pop queues in parallel

An unresponsive archive therefore delays only messages that are nowhere else. Queued messages are still in the book. If
one is acknowledged, hidden for longer or reset meanwhile, it is skipped.
"""

import asyncio
import functools
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from typing import Any

from broker.life import BrokerLife
from broker.long_polling.pop_long_polling import PopLongPolling
from broker.pop.pop_book import PopBook
from broker.pop.pop_log import Ack
from broker.pop.pop_queue import Flight, Key, PopQueue
from broker.pop.pop_retry_topics import PopRetryTopics
from broker.reading.tiered_store import PendingRead, ReadRequest, TieredStore
from broker.store.errors import StoreError
from broker.store.reading import GetResult
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.loop.in_steps import LoopSlices
from infra.loop.supervisor import Faults
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, iter_records
from neve.remoting.codes import ResponseCode

log = logging.getLogger(__name__)

_RETRY_LATER_MS = 10_000
_MAX_BYTES = 1 << 20
# Pop queues whose messages are read in parallel. A pop queue has at most MAX_OUT messages waiting here.
_LINES_MAX = 32

Due = tuple[PopQueue, int, Flight]


class _Tried(Enum):
    """Outcome of the attempt to revive one message."""

    DONE = auto()  # redelivered, or no longer in flight
    NOT_NOW = auto()
    PENDING = auto()  # its message must be read first


class PopRevive:
    """Redelivers popped messages that were not acknowledged in time (RocketMQ's PopReviveService).

    A message that can't be read now is deferred and delays only its own queue.
    """

    def __init__(
        self,
        clock: Clock,
        life: BrokerLife,
        faults: Faults,
        spawn: Callable[[str, Callable[[], Coroutine[Any, Any, object]]], asyncio.Task[None]],
        *,
        tiered: TieredStore,
        pops: PopBook,
        polling: PopLongPolling,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        retries: PopRetryTopics,
    ) -> None:
        """Create the service; `spawn` starts a background task that ends by itself or when its owner stops."""
        self._clock, self._life, self._faults, self._spawn = clock, life, faults, spawn
        self._tiered, self._pops, self._polling = tiered, pops, polling
        self._topics, self._groups, self._retries = topics, groups, retries
        self._lines: OrderedDict[Key, deque[Due]] = OrderedDict()
        self._running: set[Key] = set()
        self.revived = 0

    @property
    def waiting(self) -> int:
        """Messages that wait for a read."""
        return sum(map(len, self._lines.values()))

    async def run_due(self) -> int:
        """Revive all due messages and return the number redelivered; those that need a read are redelivered later."""
        if not self._life.accepting:
            return 0
        before, due = self.revived, deque(self._pops.take_due())
        slices = LoopSlices()
        try:
            while due:
                tried = await self._try(*due[0], waits=False)
                if tried is _Tried.PENDING:
                    self._lines.setdefault(due[0][0].key, deque()).append(due[0])
                elif tried is _Tried.NOT_NOW:
                    self._put_off(*due[0])
                due.popleft()
                await slices.step()
        finally:
            for item in due:  # after an error, the remaining messages become due again later
                self._put_off(*item)
        self._start_lines()
        return self.revived - before

    # ---- lines

    def _start_lines(self) -> None:
        for key in [key for key in self._lines if key not in self._running][: _LINES_MAX - len(self._running)]:
            self._spawn("pop-revive-cold", functools.partial(self._run_line, key))
            self._running.add(key)

    async def _run_line(self, key: Key) -> None:
        """Revive a pop queue's waiting messages in turn; defer the rest after the first that can't be read now."""
        line = self._lines[key]
        try:
            while line and self._life.accepting and await self._try(*line[0], waits=True) is _Tried.DONE:
                line.popleft()
                await asyncio.sleep(0)
        finally:
            for item in line:
                self._put_off(*item)
            del self._lines[key]
            self._running.discard(key)
        self._start_lines()

    # ---- one message

    async def _try(self, queue: PopQueue, offset: int, flight: Flight, *, waits: bool) -> _Tried:
        try:
            revived = await self._revive(queue, offset, flight, waits=waits)
        except (BrokerError, StoreError) as error:
            log.warning("revive of %s offset %d: %s", queue.key, offset, error)
            return _Tried.NOT_NOW
        except Exception as error:  # noqa: BLE001 - one message; those behind it have their turn
            self._faults.add("a popped message", error, f"of {queue.key}, offset {offset}")
            self._put_off(queue, offset, flight)
            return _Tried.DONE
        if revived is None:
            return _Tried.PENDING
        self.revived += revived
        return _Tried.DONE

    def _put_off(self, queue: PopQueue, offset: int, flight: Flight) -> None:
        self._pops.put_off(queue, offset, flight, self._clock.now_ms() + _RETRY_LATER_MS)

    def _is_out(self, queue: PopQueue, offset: int, flight: Flight) -> bool:
        """Return whether the message is still in flight by the pop book, which follows resets of the group's offset.

        Raises BrokerError if the topic or group is unknown. Its record may have been lost by a crash and come back by
        replication, so this is no proof of a deletion. Deletions drop the queue from the book.
        """
        group, topic, _ = queue.key
        if self._topics.select(topic) is None or group not in self._groups.groups:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"topic {topic} or group {group} is not known now")
        return self._pops.find(*queue.key) is queue and queue.flights.get(offset) is flight

    async def _revive(self, queue: PopQueue, offset: int, flight: Flight, *, waits: bool) -> int | None:
        """Redeliver a message and return the number redelivered; None if the message must be read first."""
        group, topic, _ = queue.key
        if not self._is_out(queue, offset, flight):
            return 0
        if flight.in_order:  # revived with the last message of its batch that becomes visible
            number = len(queue.flights)
            return number if self._revive_in_place(queue) else 0
        answer = self._tiered.get_message(ReadRequest(*queue.key, offset, 1, _MAX_BYTES))
        if isinstance(answer, PendingRead):
            if not waits:
                return None
            answer = await answer
        record, retry = _record_at(answer, offset), self._retries.of_pair(group, topic)
        if not self._is_out(queue, offset, flight):
            return 0
        if record is not None:
            await self._retries.make(retry)
            if not self._is_out(queue, offset, flight):
                return 0
        if record is not None:
            self._retries.put(retry, record, flight.pop_time)
        self._pops.record(Ack(*queue.key, flight.pop_time, [offset]))
        return int(record is not None)

    def _revive_in_place(self, queue: PopQueue) -> bool:
        """Make an ordered queue resume at its first unacknowledged message; return whether it could."""
        released = self._pops.release(queue)
        if released:
            self._polling.wake(*queue.key)
        return released


def _record_at(result: GetResult, offset: int) -> MessageRecord | None:
    records = (record for buffer in result.buffers for record in iter_records(buffer))
    return next((record for record in records if record.queue_offset == offset), None)
