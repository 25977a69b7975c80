"""What a pop gets: from the topic's queues, beginning anywhere, and from the group's pop-retry topics.

Before a message is given to anybody it is out, by a record of the book, until it is acknowledged or its time is up.
With messages in hand a pop does not wait for a read: a queue that needs that has its turn when it is the first, and one
that can't be read now keeps back no other.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from broker.long_polling.pop_long_polling import PopLongPolling
from broker.pop.extra_info import REVIVE_QUEUE, ExtraInfo
from broker.pop.pop_book import PopBook
from broker.pop.pop_log import PopCheckPoint
from broker.pop.pop_queue import PopQueue, Unreadable
from broker.reading.message_filter import MessageFilter
from broker.reading.tiered_store import PendingRead, TieredStore
from broker.store.message_store import GetResult
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from infra.clock import Clock
from infra.loop.in_steps import LoopSlices
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, iter_records, reencode_record
from neve.record.properties import PROPERTY_FIRST_POP_TIME, PROPERTY_POP_CK
from neve.remoting.codes import GetMessageStatus
from neve.remoting.names import NORMAL, retry_version

_MAX_BYTES = 4 << 20
# One pop in so many looks at the retry topic first, so that a busy topic doesn't keep retries away.
_RETRY_FIRST_EVERY = 5
# Nothing there, but behind it there may be something.
_GOES_ON = frozenset({
    GetMessageStatus.NO_MATCHED_MESSAGE, GetMessageStatus.OFFSET_FOUND_NULL, GetMessageStatus.OFFSET_TOO_SMALL,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class PopRequest:
    """What a member of a group asks for, and may have."""

    group: str
    topic: str
    # The one, or ANY_QUEUE; those that are looked at, in this order.
    queue_id: int
    queues: Sequence[int]
    max_count: int
    invisible_time: int
    message_filter: MessageFilter
    in_order: bool = False
    attempt: str = ""
    # Where a group begins that has no offset: at the newest message instead of the oldest.
    from_newest: bool = False


@dataclass(slots=True)
class PopResult:
    """What one pop has got so far; all of it has one pop time."""

    pop_time: int
    count: int = 0
    # What a later pop would find in the same queues.
    rest: int = 0
    buffers: list[memoryview | bytes] = field(default_factory=list)
    # Of each queue: the first offset, all of them, and (in order) how often each had come back; as an answer says it.
    start_offsets: list[str] = field(default_factory=list)
    message_offsets: list[str] = field(default_factory=list)
    order_counts: list[str] = field(default_factory=list)
    # Why a queue could not be read.
    failure: str | None = None


class PopConsumerService:
    """Hands out what is in a queue and not out, and what came back of it (RocketMQ's PopConsumerService).

    One pop at a time in each queue; what is handed out is in the book first.
    """

    def __init__(
        self,
        clock: Clock,
        broker_name: str,
        *,
        tiered: TieredStore,
        pops: PopBook,
        offsets: ConsumerOffsetManager,
        retry_names: RetryNames,
        polling: PopLongPolling,
        on_handed_out: Callable[[str, str, int, int], None],
    ) -> None:
        """`on_handed_out` hears topic, group, messages and bytes."""
        self._clock, self._broker_name, self._on_handed_out = clock, broker_name, on_handed_out
        self._tiered, self._pops, self._offsets = tiered, pops, offsets
        self._retry_names, self._polling = retry_names, polling
        self._turn = itertools.count()
        # What can't be read now is left alone for so long.
        self.unreadable_seconds = 5.0

    def in_turn(self, queue_nums: int) -> list[int]:
        """All queues of a topic, beginning with each as often as with any other."""
        first = spread(next(self._turn), queue_nums)
        return [(first + step) % queue_nums for step in range(queue_nums)]

    async def pop(self, request: PopRequest) -> PopResult:
        """Raises BrokerError only with nothing in hand."""
        result, slices = PopResult(self._clock.now_ms()), LoopSlices()
        for topic, queue_id in self._message_queues(request):
            await slices.step()
            try:
                await self._pop_queue(request, result, topic, queue_id)
            except (BrokerError, OSError):
                if not result.buffers:
                    raise
                break  # what is in hand is out already: it has to go
        if result.buffers and result.rest:
            self._polling.wake(request.group, request.topic, request.queue_id)
        return result

    async def peek(self, request: PopRequest) -> PopResult:
        """What a pop would find, without taking it; waits for what has to be read."""
        result, slices = PopResult(self._clock.now_ms()), LoopSlices()
        for topic, queue_id in self._message_queues(request):
            await slices.step()
            room = request.max_count - result.count
            if room <= 0:
                break
            start = self._next_offset(request, topic, queue_id)
            got = await self._get(request, topic, queue_id, start, room, waits=True)
            assert got is not None, "it waits"
            result.buffers += got.buffers
            result.count += got.count
            result.rest += max(got.max_offset - got.next_offset, 0)
        return result

    async def has_message(self, request: PopRequest) -> bool:
        """Whether a pop would get something now.

        Other requests are served meanwhile: a caller that waits for a message registers with `PopLongPolling` first.
        """
        slices = LoopSlices()
        for topic, queue_id in self._message_queues(request):
            await slices.step()
            if self._has_message_in(request, topic, queue_id):
                return True
        return False

    async def unreadable(self, request: PopRequest) -> str | None:
        """Why one of its queues can't be read now; nobody is told when it can."""
        slices = LoopSlices()
        for topic, queue_id in self._message_queues(request):
            await slices.step()
            queue = self._pops.find(request.group, topic, queue_id)
            if queue is not None and (why := self._unreadable(request, queue)) is not None:
                return why
        return None

    # ---- where to look

    def _message_queues(self, request: PopRequest) -> list[tuple[str, int]]:
        queues = [(request.topic, queue_id) for queue_id in request.queues]
        retries = self._retry_names.to_read(request.group, request.topic)
        if request.in_order or not retries:
            return queues
        more = [(retry, 0) for retry in retries]
        return [*more, *queues] if spread(next(self._turn), _RETRY_FIRST_EVERY) == 0 else [*queues, *more]

    def _initial_offset(self, request: PopRequest, topic: str, queue_id: int) -> int:
        """Where a group that has no offset begins."""
        tiered = self._tiered
        low = tiered.min_offset(topic, queue_id)
        if topic != request.topic or not request.from_newest:
            return low
        return 0 if tiered.is_young(topic, queue_id) else max(tiered.max_offset(topic, queue_id) - 1, low)

    def _next_offset(self, request: PopRequest, topic: str, queue_id: int) -> int:
        """Where a pop would begin; asking changes nothing."""
        queue = self._pops.find(request.group, topic, queue_id)
        if queue is not None:
            return queue.start(in_order=request.in_order)
        committed = self._offsets.query(request.group, topic, queue_id)
        return committed if committed >= 0 else self._initial_offset(request, topic, queue_id)

    def _has_message_in(self, request: PopRequest, topic: str, queue_id: int) -> bool:
        """While another pop reads there, that one tells when it is done."""
        if self._next_offset(request, topic, queue_id) >= self._tiered.max_offset(topic, queue_id):
            return False
        queue = self._pops.find(request.group, topic, queue_id)
        if queue is None:
            return True
        if queue.lock.pass_by():
            return False
        return self._unreadable(request, queue) is None and not self._is_blocked(request, queue)

    # ---- one queue

    async def _pop_queue(self, request: PopRequest, result: PopResult, topic: str, queue_id: int) -> None:
        """One pop at a time in each queue: who comes second goes on to the next queue."""
        group = request.group
        self._offsets.take_reset(group, topic, queue_id)  # the book knows it already
        queue = self._pops.find(group, topic, queue_id)
        if queue is None:
            queue = self._open(request, topic, queue_id)
        if queue is None:
            return
        if queue.lock.pass_by():
            return
        why = self._unreadable(request, queue)
        if why is not None:
            result.failure = why
            return
        if self._is_blocked(request, queue):
            return
        if result.count >= request.max_count:
            result.rest += self._rest(request, queue)
            return
        queue.lock.take()
        try:
            await self._read_and_hand_out(request, result, queue)
        finally:
            if queue.lock.release():
                self._polling.wake(group, topic, queue_id)

    def _open(self, request: PopRequest, topic: str, queue_id: int) -> PopQueue | None:
        """Open the book's queue if it has something to hand out; else None, so that a look costs no memory.

        An offset is kept all the same where a later pop would begin elsewhere: a group that begins with the newest
        message must not skip those that come between its pops.
        """
        group = request.group
        start = self._next_offset(request, topic, queue_id)
        if start < self._tiered.max_offset(topic, queue_id):
            return self._pops.open(group, topic, queue_id, start)
        begins_at_newest = request.from_newest and topic == request.topic
        if begins_at_newest and self._offsets.query(group, topic, queue_id) < 0:
            self._offsets.require_room()
            self._offsets.follow(group, topic, queue_id, start)
        return None

    def _unreadable(self, request: PopRequest, queue: PopQueue) -> str | None:
        """Why what a pop would get from here is left alone now."""
        found = queue.unreadable
        if found is None or found.until <= self._clock.monotonic():
            return None
        return found.why if found.offset == queue.start(in_order=request.in_order) else None

    def _is_blocked(self, request: PopRequest, queue: PopQueue) -> bool:
        return queue.is_blocked(self._clock.now_ms(), in_order=request.in_order, attempt=request.attempt)

    def _rest(self, request: PopRequest, queue: PopQueue) -> int:
        """What a later pop finds there."""
        _, topic, queue_id = queue.key
        return max(self._tiered.max_offset(topic, queue_id) - queue.start(in_order=request.in_order), 0)

    async def _read_and_hand_out(self, request: PopRequest, result: PopResult, queue: PopQueue) -> None:
        group, topic, queue_id = queue.key
        in_order, room = request.in_order, request.max_count - result.count
        while self._pops.find(group, topic, queue_id) is queue:
            start, turn = queue.start(in_order=in_order), queue.turn
            try:
                got = await self._get(request, topic, queue_id, start, room, waits=not result.buffers)
            except BrokerError as error:
                until = self._clock.monotonic() + self.unreadable_seconds
                queue.unreadable = Unreadable(start, until, error.remark or "")
                result.failure = queue.unreadable.why
                return
            if queue.turn != turn or queue.start(in_order=in_order) != start:
                continue  # it was set elsewhere meanwhile
            if got is None:
                result.rest += self._rest(request, queue)
            elif self._pops.find(group, topic, queue_id) is queue:
                self._hand_out(request, result, queue, start, got)
            return

    async def _get(
        self, request: PopRequest, topic: str, queue_id: int, offset: int, room: int, *, waits: bool
    ) -> GetResult | None:
        """From there on, over what isn't wanted; as far as it can be read without waiting, or not at all: None."""
        got = None
        while True:
            answer = self._tiered.get_message(
                request.group, topic, queue_id, offset, room, _MAX_BYTES, request.message_filter
            )
            if isinstance(answer, PendingRead):
                if not waits:
                    return got
                answer = await answer
            got = answer
            if got.status not in _GOES_ON or got.next_offset <= offset:
                break
            offset = got.next_offset
            await asyncio.sleep(0)
        if got.status not in _GOES_ON and got.status != GetMessageStatus.FOUND:
            # The end of the queue, or a group that stands above it.
            got = GetResult(got.status, offset, got.min_offset, got.max_offset)
        return got

    def _hand_out(self, request: PopRequest, result: PopResult, queue: PopQueue, start: int, got: GetResult) -> None:
        records = [record for buffer in got.buffers for record in iter_records(buffer)]
        if got.next_offset == start and not records:
            return
        least = queue.least_pop_time(start)
        if result.pop_time < least:
            if result.buffers:  # the pop time of an answer is one for all: this queue comes with the next pop
                result.rest += max(got.max_offset - start, 0)
                return
            result.pop_time = least
        result.rest += max(got.max_offset - got.next_offset, 0)
        group, topic, queue_id = queue.key
        offsets = [record.queue_offset for record in records]
        self._pops.record(
            PopCheckPoint(
                group,
                topic,
                queue_id,
                got.next_offset,
                result.pop_time,
                self._clock.now_ms() + request.invisible_time,
                request.in_order,
                offsets,
                request.attempt,
            )
        )
        if not records:
            return
        retry, first = retry_version(topic, group, request.topic), offsets[0]
        if retry == NORMAL:
            result.buffers += got.buffers
        else:
            result.buffers += [self._as_original(request, result.pop_time, record, first) for record in records]
        result.count += len(records)
        self._on_handed_out(topic, group, len(records), sum(map(len, got.buffers)))
        result.start_offsets.append(f"{retry} {queue_id} {first}")
        result.message_offsets.append(f"{retry} {queue_id} {','.join(map(str, offsets))}")
        if request.in_order:
            counts = [queue.batch.counts.get(offset, 0) for offset in offsets]
            result.order_counts.append(f"{retry} {queue_id} {min(counts)}")
            result.order_counts += [
                f"{retry} qo{queue_id}%{offset} {count}" for offset, count in zip(offsets, counts, strict=True)
            ]

    def _as_original(self, request: PopRequest, pop_time: int, record: MessageRecord, start: int) -> bytes:
        """A retried message goes out under its own topic; its POP_CK says where it is."""
        properties = record.properties
        properties.setdefault(PROPERTY_FIRST_POP_TIME, str(pop_time))
        receipt = ExtraInfo(
            start,
            pop_time,
            request.invisible_time,
            REVIVE_QUEUE,
            retry_version(record.topic, request.group, request.topic),
            self._broker_name,
            record.queue_id,
            record.queue_offset,
        )
        properties[PROPERTY_POP_CK] = receipt.to_text()
        return reencode_record(record, topic=request.topic, properties=properties)


def spread(turn: int, number: int) -> int:
    """One of so many, each as often as any other, also for who has only every second or third turn."""
    return (turn * 0x9E3779B1 >> 8 & 0xFFFFFF) * number >> 24
