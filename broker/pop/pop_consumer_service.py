"""Pop reads: messages of the topic's queues, from a rotating first queue, and of the group's pop-retry topics.

A record of the pop book marks a message as in flight before it is handed out. The message stays in flight until it is
acknowledged or its invisible time expires. A pop that already has messages does not wait for a read: a queue that
needs one is read by a later pop that has no messages yet. An unreadable queue does not block other queues.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from broker.long_polling.pop_long_polling import PopLongPolling
from broker.pop.extra_info import REVIVE_QUEUE, ExtraInfo
from broker.pop.pop_book import PopBook
from broker.pop.pop_log import PopCheckPoint
from broker.pop.pop_queue import PopQueue, UnreadableOffset
from broker.reading.message_filter import MessageFilter
from broker.reading.tiered_store import PendingRead, ReadRequest, TieredStore
from broker.store.reading import GetResult
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
# Every fifth pop reads the retry topics first, so that a busy topic does not starve retries.
_RETRY_FIRST_EVERY = 5
# No message at this offset, but later offsets may have some.
_GOES_ON = frozenset({
    GetMessageStatus.NO_MATCHED_MESSAGE, GetMessageStatus.OFFSET_FOUND_NULL, GetMessageStatus.OFFSET_TOO_SMALL,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class PopRequest:
    """One pop of a group member, whose permissions are already checked."""

    group: str
    topic: str
    # The requested queue, or ANY_QUEUE; `queues` are those to read, in this order.
    queue_id: int
    queues: Sequence[int]
    max_count: int
    invisible_time: int
    message_filter: MessageFilter
    in_order: bool = False
    attempt: str = ""
    # A group without an offset starts at the newest message instead of the oldest.
    from_newest: bool = False


@dataclass(slots=True)
class PopResult:
    """Messages that one pop has collected so far; they share one pop time."""

    pop_time: int
    count: int = 0
    # Messages that remain in the same queues for a later pop.
    rest: int = 0
    buffers: list[memoryview | bytes] = field(default_factory=list)
    # Per queue, encoded as in the answer: the first offset, all offsets, and (in order) the redelivery counts.
    start_offsets: list[str] = field(default_factory=list)
    message_offsets: list[str] = field(default_factory=list)
    order_counts: list[str] = field(default_factory=list)
    # Why a queue could not be read.
    failure: str | None = None


class PopConsumerService:
    """Hands out messages that are not in flight, and redeliveries (RocketMQ's PopConsumerService).

    At most one pop at a time reads a queue. Messages are recorded in the book before they are handed out.
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
        """Create the service; `on_handed_out` is called with topic, group, number of messages and bytes."""
        self._clock, self._broker_name, self._on_handed_out = clock, broker_name, on_handed_out
        self._tiered, self._pops, self._offsets = tiered, pops, offsets
        self._retry_names, self._polling = retry_names, polling
        self._turn = itertools.count()
        # An unreadable queue is skipped for this time.
        self.unreadable_seconds = 5.0

    def in_turn(self, queue_nums: int) -> list[int]:
        """Return all queues of a topic, rotated so that each queue is first equally often."""
        first = spread(next(self._turn), queue_nums)
        return [(first + step) % queue_nums for step in range(queue_nums)]

    async def pop(self, request: PopRequest) -> PopResult:
        """Pop messages. Raises BrokerError only if no message was collected."""
        result, slices = PopResult(self._clock.now_ms()), LoopSlices()
        for topic, queue_id in self._message_queues(request):
            await slices.step()
            try:
                await self._pop_queue(request, result, topic, queue_id)
            except (BrokerError, OSError):
                if not result.buffers:
                    raise
                break  # the collected messages are already in flight, so they have to be sent
        if result.buffers and result.rest:
            self._polling.wake(request.group, request.topic, request.queue_id)
        return result

    async def peek(self, request: PopRequest) -> PopResult:
        """Return what a pop would find, without marking it as in flight; waits for reads."""
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
        """Return whether a pop would get a message now.

        Yields to the event loop, so a caller that waits for a message registers with `PopLongPolling` first.
        """
        slices = LoopSlices()
        for topic, queue_id in self._message_queues(request):
            await slices.step()
            if self._has_message_in(request, topic, queue_id):
                return True
        return False

    async def unreadable(self, request: PopRequest) -> str | None:
        """Return why one of the queues is unreadable now. No event is emitted when it becomes readable."""
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
        """Return the first offset of a group that has no committed offset."""
        tiered = self._tiered
        low = tiered.min_offset(topic, queue_id)
        if topic != request.topic or not request.from_newest:
            return low
        return 0 if tiered.is_young(topic, queue_id) else max(tiered.max_offset(topic, queue_id) - 1, low)

    def _next_offset(self, request: PopRequest, topic: str, queue_id: int) -> int:
        """Return the offset at which a pop would start, without changing anything."""
        queue = self._pops.find(request.group, topic, queue_id)
        if queue is not None:
            return queue.start(in_order=request.in_order)
        committed = self._offsets.query(request.group, topic, queue_id)
        return committed if committed >= 0 else self._initial_offset(request, topic, queue_id)

    def _has_message_in(self, request: PopRequest, topic: str, queue_id: int) -> bool:
        """Return whether a pop would get a message from this queue.

        False while another pop reads the queue: its release wakes waiting pops.
        """
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
        """Pop from one queue, unless another pop reads it: then skip it."""
        group = request.group
        self._offsets.take_reset(group, topic, queue_id)  # the book was reset already
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
        """Open the queue in the book if it has a message to hand out; else return None and allocate nothing.

        One offset is stored even then: for a group that starts at the newest message, a later pop would otherwise
        start at a later message and skip those that arrived in between.
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
        """Return why the queue's next messages are skipped now, None if they are not."""
        found = queue.unreadable
        if found is None or found.until <= self._clock.monotonic():
            return None
        return found.why if found.offset == queue.start(in_order=request.in_order) else None

    def _is_blocked(self, request: PopRequest, queue: PopQueue) -> bool:
        return queue.is_blocked(self._clock.now_ms(), in_order=request.in_order, attempt=request.attempt)

    def _rest(self, request: PopRequest, queue: PopQueue) -> int:
        """Return the number of messages that remain for a later pop."""
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
                queue.unreadable = UnreadableOffset(start, until, error.remark or "")
                result.failure = queue.unreadable.why
                return
            if queue.turn != turn or queue.start(in_order=in_order) != start:
                continue  # the offset was reset during the read
            if got is None:
                result.rest += self._rest(request, queue)
            elif self._pops.find(group, topic, queue_id) is queue:
                self._hand_out(request, result, queue, start, got)
            return

    async def _get(
        self, request: PopRequest, topic: str, queue_id: int, offset: int, room: int, *, waits: bool
    ) -> GetResult | None:
        """Read from `offset`, skipping messages that the filter rejects.

        With `waits` false, return what can be read without waiting, or None.
        """
        got, wanted = None, request.message_filter
        read = ReadRequest(request.group, topic, queue_id, offset, room, _MAX_BYTES, wanted.codes)
        while True:
            answer = self._tiered.get_message(read, wanted.predicate)
            if isinstance(answer, PendingRead):
                if not waits:
                    return got
                answer = await answer
            got = answer
            if got.status not in _GOES_ON or got.next_offset <= read.offset:
                break
            read.offset = got.next_offset
            await asyncio.sleep(0)
        if got.status not in _GOES_ON and got.status != GetMessageStatus.FOUND:
            # The end of the queue, or a committed offset beyond it.
            got = GetResult(got.status, read.offset, got.min_offset, got.max_offset)
        return got

    def _hand_out(self, request: PopRequest, result: PopResult, queue: PopQueue, start: int, got: GetResult) -> None:
        records = [record for buffer in got.buffers for record in iter_records(buffer)]
        if got.next_offset == start and not records:
            return
        least = queue.least_pop_time(start)
        if result.pop_time < least:
            if result.buffers:  # an answer has one pop time, so this queue is left to a later pop
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
        """Encode a message of a retry topic under its original topic; its POP_CK names the retry topic's offset."""
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
    """Return a number below `number`, equally often for each, even if a caller sees only every second or third turn."""
    return (turn * 0x9E3779B1 >> 8 & 0xFFFFFF) * number >> 24
