"""Pops (200050) with what belongs to them: peeks, notifications, the number of waiting pops (200052, 54, 55).

A pop takes from the topic's queues, beginning anywhere, and from the group's pop-retry topic; what it finds is
out until it is acknowledged or its time is up.
"""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from broker.broker_context import BrokerContext
from broker.filter.record_filter import select
from broker.pop.extra_info import NORMAL, ORDER_QUEUE, RETRY_V1, REVIVE_QUEUE, ExtraInfo, pop_retry_topic
from broker.pop.polling import ANY_QUEUE, Waiter
from broker.pop.pop_book import MAX_OUT, PopQueue
from broker.pop.pop_log import Popped
from broker.processor.pull_message import Wanted, parse_expression
from broker.tiered_store import FOUND, FOUND_NULL, NO_MATCHED, TOO_SMALL, ReadResult
from broker.validators import PERM_READ, topic_fault
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.message import (
    PROPERTY_POP_CK,
    MessageRecord,
    iter_records,
    reencode_record,
)
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import Int32, Int64, optional_int, parse_header, require_str

log = logging.getLogger(__name__)

_MAX_COUNT = 32
_MAX_BYTES = 4 << 20
_FILTER_COUNT = 256
_GRACE_MS = 500
_MAX_POLL_MS = 60_000
# One pop in so many looks at the retry topic first, so that a busy topic doesn't keep retries away.
_RETRY_FIRST_EVERY = 5
_FIRST_POP_TIME = "1ST_POP_TIME"


class PopHeader(msgspec.Struct, rename="camel"):
    """Fields of POP_MESSAGE; PEEK_MESSAGE and NOTIFICATION have some of them."""

    consumer_group: str
    topic: str
    queue_id: Int32
    max_msg_nums: Int32 = 1
    invisible_time: Int64 = 60_000
    poll_time: Int64 = 0
    born_time: Int64 = 0
    init_mode: Int32 = 0
    exp_type: str | None = None
    exp: str | None = None
    order: bool = False


@dataclass(slots=True)
class Taking:
    """One pop on its way through the queues."""

    header: PopHeader
    wanted: Wanted
    queues: list[int]
    pop_time: int
    room: int
    rest: int = 0
    buffers: list[Any] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)


class PopMessageProcessor:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context

    # ---- requests ----------------------------------------------------------------------------------------------

    def pop(self, connection: Connection, request: RemotingCommand) -> None:
        header = parse_header(request.ext, PopHeader)
        taking = self._checked(header, header.max_msg_nums)
        deadline = self._deadline(header)
        self._spawn(connection, request, self._pop(connection, request, taking, deadline))

    def notification(self, connection: Connection, request: RemotingCommand) -> None:
        header = parse_header(request.ext, PopHeader)
        taking = self._checked(header, 1)
        deadline = self._deadline(header)
        self._spawn(connection, request, self._notify(connection, request, taking, deadline))

    async def peek(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """What a pop would find, without taking it."""
        header = parse_header(request.ext, PopHeader)
        taking = self._checked(header, header.max_msg_nums)
        for topic, queue_id in self._places(taking, retry_first=False):
            if taking.room <= 0:
                break
            queue = self._open(taking, topic, queue_id)
            result = await self._read(taking, topic, queue_id, queue.next_offset)
            taking.buffers += result.buffers
            taking.room -= result.count
            taking.rest += max(result.max_offset - result.next_offset, 0)
        code = ResponseCode.SUCCESS if taking.buffers else ResponseCode.PULL_NOT_FOUND
        return self._answer(request, taking, code)

    def polling_info(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        group, topic = require_str(request.ext, "consumerGroup"), require_str(request.ext, "topic")
        self._context.find_topic(topic)
        queue = optional_int(request.ext, "queueId", ANY_QUEUE)
        number = self._context.polling.waiting_for(group, topic, queue)
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext={"pollingNum": str(number)})

    # ---- checks ------------------------------------------------------------------------------------------------

    def _checked(self, header: PopHeader, count: int) -> Taking:
        context = self._context
        if not context.accepting:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, "broker unable to service, until it has started")
        if not context.config.broker_permission & PERM_READ:
            name = context.config.broker_name
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the broker[{name}] pop message is forbidden")
        if not 0 < count <= _MAX_COUNT:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"maxMsgNums {count} is not from 1 to {_MAX_COUNT}")
        if header.invisible_time <= 0:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"invisibleTime {header.invisible_time} is not above 0")
        topic = context.find_topic(header.topic)
        if not topic.perm & PERM_READ:
            raise BrokerError(ResponseCode.NO_PERMISSION, f"the topic[{header.topic}] pop message is forbidden")
        if not ANY_QUEUE <= header.queue_id < topic.read_queue_nums:
            raise BrokerError(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{header.queue_id}] is illegal, topic:[{header.topic}] "
                f"topicConfig.readQueueNums:[{topic.read_queue_nums}]",
            )
        group = context.find_group(header.consumer_group)
        if not group.consume_enable or context.groups.is_forbidden(header.consumer_group, header.topic):
            raise BrokerError(ResponseCode.NO_PERMISSION, f"subscription group no permission, {header.consumer_group}")
        fault = topic_fault(pop_retry_topic(header.topic, header.consumer_group))
        if fault is not None:  # what comes back would find no topic
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"the group's retry topic of {header.topic}: {fault}")
        wanted = parse_expression(header.exp, header.exp_type, sql=context.config.enable_property_filter)
        if header.queue_id == ANY_QUEUE:
            first = context.any_queue(topic.read_queue_nums)
            queues = [(first + step) % topic.read_queue_nums for step in range(topic.read_queue_nums)]
        else:
            queues = [header.queue_id]
        return Taking(header, wanted, queues, context.clock.now_ms(), count)

    def _deadline(self, header: PopHeader) -> int:
        """When to answer at the latest. A client's clock that is far off costs it the waiting, not the messages."""
        now = self._context.clock.now_ms()
        poll = min(header.poll_time, _MAX_POLL_MS)
        if poll <= 0 or not self._context.config.long_polling_enable:
            return now
        return min((header.born_time or now) + poll, now + poll)

    # ---- pop ---------------------------------------------------------------------------------------------------

    async def _pop(
        self, connection: Connection, request: RemotingCommand, taking: Taking, deadline: int
    ) -> RemotingCommand | None:
        header, now = taking.header, self._context.clock.now_ms()
        if header.poll_time > 0 and header.born_time and now > header.born_time + header.poll_time + _GRACE_MS:
            return self._answer(request, taking, ResponseCode.POLLING_TIMEOUT)
        while True:
            await self._take(taking)
            if taking.buffers:
                return self._answer(request, taking, ResponseCode.SUCCESS)
            code = await self._wait(connection, header, deadline)
            if connection.is_closed:
                return None
            if code is not None:
                return self._answer(request, taking, code)
            taking.pop_time, taking.rest = self._context.clock.now_ms(), 0

    async def _take(self, taking: Taking) -> None:
        retry_first = self._context.any_queue(_RETRY_FIRST_EVERY) == 0
        for topic, queue_id in self._places(taking, retry_first=retry_first):
            await self._take_from(taking, topic, queue_id)
        if taking.buffers and taking.rest:
            self._context.polling.wake(taking.header.consumer_group, taking.header.topic, taking.header.queue_id)

    def _places(self, taking: Taking, *, retry_first: bool) -> list[tuple[str, int]]:
        header = taking.header
        places = [(header.topic, queue) for queue in taking.queues]
        retry = pop_retry_topic(header.topic, header.consumer_group)
        if header.order or retry == header.topic or self._context.topics.select(retry) is None:
            return places
        return [(retry, 0), *places] if retry_first else [*places, (retry, 0)]

    def _open(self, taking: Taking, topic: str, queue_id: int) -> PopQueue:
        low, high = (
            read(topic, queue_id) for read in (self._context.tiered.min_offset, self._context.tiered.max_offset)
        )
        young = self._context.store.min_offset(topic, queue_id) <= 0
        from_start = topic != taking.header.topic or taking.header.init_mode == 0
        initial = low if from_start else 0 if young else max(high - 1, low)
        return self._context.pops.open(taking.header.consumer_group, topic, queue_id, initial)

    async def _take_from(self, taking: Taking, topic: str, queue_id: int) -> None:
        """One pop at a time in each queue: who comes second goes on to the next queue."""
        queue = self._open(taking, topic, queue_id)
        blocked = queue.busy or len(queue.flights) >= MAX_OUT or (taking.header.order and queue.flights)
        high = self._context.tiered.max_offset(topic, queue_id)
        if blocked or taking.room <= 0:
            taking.rest += 0 if queue.busy else max(high - queue.next_offset, 0) * (taking.room <= 0)
            return
        queue.busy = True
        try:
            start = queue.next_offset
            result = await self._read(taking, topic, queue_id, start)
            if self._context.pops.find(*queue.key) is queue and queue.next_offset == start:
                self._hand_out(taking, queue, result)
        finally:
            queue.busy = False

    def _hand_out(self, taking: Taking, queue: PopQueue, result: ReadResult) -> None:
        header = taking.header
        records = [record for buffer in result.buffers for record in iter_records(buffer)]
        taking.rest += max(result.max_offset - result.next_offset, 0)
        if result.next_offset == queue.next_offset and not records:
            return
        group, topic, queue_id = queue.key
        offsets = [record.queue_offset for record in records]
        start = offsets[0] if offsets else queue.next_offset
        visible = taking.pop_time + header.invisible_time
        following = result.next_offset
        self._context.pops.record(
            Popped(group, topic, queue_id, following, taking.pop_time, visible, header.order, offsets)
        )
        if not records:
            return
        retry = NORMAL if topic == header.topic else RETRY_V1
        taking.buffers += result.buffers if retry == NORMAL else [self._as_original(taking, r, start) for r in records]
        taking.room -= len(records)
        self._context.stats.got(topic, group, len(records), sum(map(len, result.buffers)))
        taking.starts.append(f"{retry} {queue_id} {start}")
        taking.found.append(f"{retry} {queue_id} {','.join(map(str, offsets))}")
        if header.order:
            taking.orders.append(f"{retry} {queue_id} {queue.counts.get(start, 0)}")
            taking.orders += [f"{retry} qo{queue_id}%{offset} {queue.counts.get(offset, 0)}" for offset in offsets]

    def _as_original(self, taking: Taking, record: MessageRecord, start: int) -> bytes:
        """A retried message goes out under its own topic; its POP_CK says where it is."""
        header = taking.header
        properties = record.properties
        properties.setdefault(_FIRST_POP_TIME, str(taking.pop_time))
        checkpoint = ExtraInfo(
            start,
            taking.pop_time,
            header.invisible_time,
            REVIVE_QUEUE,
            RETRY_V1,
            self._context.config.broker_name,
            record.queue_id,
            record.queue_offset,
        )
        properties[PROPERTY_POP_CK] = checkpoint.to_text()
        return reencode_record(record, topic=header.topic, properties=properties)

    async def _read(self, taking: Taking, topic: str, queue_id: int, offset: int) -> ReadResult:
        tiered, wanted = self._context.tiered, taking.wanted
        predicate = wanted.predicate
        count = _FILTER_COUNT if predicate is not None else taking.room
        while True:
            if tiered.is_hot(topic, queue_id, offset):
                result = await tiered.load(tiered.get_hot(topic, queue_id, offset, count, _MAX_BYTES, wanted.codes))
            else:
                result = await tiered.get_cold(
                    topic, queue_id, offset, count, _MAX_BYTES, wanted.codes, group=taking.header.consumer_group
                )
            if predicate is not None:
                result = select(result, predicate, taking.room, _MAX_BYTES)
            if result.status not in (NO_MATCHED, FOUND_NULL, TOO_SMALL) or result.next_offset <= offset:
                break
            offset = result.next_offset
            await asyncio.sleep(0)
        if result.status not in (FOUND, NO_MATCHED, FOUND_NULL, TOO_SMALL):
            # The end of the queue, or a group that stands above it.
            result = ReadResult(result.status, offset, result.min_offset, result.max_offset)
        return result

    def _answer(self, request: RemotingCommand, taking: Taking, code: int) -> RemotingCommand:
        ext = {
            "popTime": str(taking.pop_time),
            "invisibleTime": str(taking.header.invisible_time),
            "reviveQid": str(ORDER_QUEUE if taking.header.order else REVIVE_QUEUE),
            "restNum": str(taking.rest),
            "startOffsetInfo": ";".join(taking.starts),
            "msgOffsetInfo": ";".join(taking.found),
        }
        if taking.orders:
            ext["orderCountInfo"] = ";".join(taking.orders)
        remark = "FOUND" if code == ResponseCode.SUCCESS else None
        return RemotingCommand.response(request, code, remark, ext, parts=taking.buffers or None)

    # ---- waiting -----------------------------------------------------------------------------------------------

    async def _wait(self, connection: Connection, header: PopHeader, deadline: int) -> ResponseCode | None:
        """None when something may be there; otherwise what to answer."""
        context = self._context
        seconds = (deadline - context.clock.now_ms()) / 1000
        if seconds <= 0 or not context.accepting:
            return ResponseCode.POLLING_TIMEOUT
        if context.polling.count >= context.config.max_pop_polling_size:
            return ResponseCode.POLLING_FULL
        group = header.consumer_group
        waiter = Waiter(group, header.topic, pop_retry_topic(header.topic, group), header.queue_id)
        context.polling.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter.future
        except TimeoutError:
            return ResponseCode.POLLING_TIMEOUT
        finally:
            context.polling.remove(waiter)
        return None if context.topics.select(header.topic) is not None else ResponseCode.POLLING_TIMEOUT

    async def _notify(
        self, connection: Connection, request: RemotingCommand, taking: Taking, deadline: int
    ) -> RemotingCommand | None:
        ext = {"hasMsg": "false", "pollingFull": "false"}
        while True:
            if self._has_message(taking):
                ext["hasMsg"] = "true"
                break
            code = await self._wait(connection, taking.header, deadline)
            if connection.is_closed:
                return None
            if code is not None:
                ext["pollingFull"] = str(code == ResponseCode.POLLING_FULL).lower()
                break
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    def _has_message(self, taking: Taking) -> bool:
        for topic, queue_id in self._places(taking, retry_first=False):
            queue = self._open(taking, topic, queue_id)
            blocked = taking.header.order and queue.flights
            if not blocked and queue.next_offset < self._context.tiered.max_offset(topic, queue_id):
                return True
        return False

    def _spawn(
        self, connection: Connection, request: RemotingCommand, work: Coroutine[Any, Any, RemotingCommand | None]
    ) -> None:
        """Waiting pops don't count among a connection's requests in work: there may be thousands."""
        connection.resume(request, lambda: work)
