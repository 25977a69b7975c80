"""Pops (200050) with what belongs to them: peeks, notifications, the number of waiting pops (200052, 54, 55).

A pop takes from the topic's queues, beginning anywhere, and from the group's pop-retry topics; what it finds is
out until it is acknowledged or its time is up. With messages in hand it does not wait for a read: a queue that needs
that has its turn when it is the first, and one that can't be read now keeps back no other.

What a pop does when it finds nothing: it stands in line, looks again (something may have come between), and only then
sleeps. Whoever makes something visible wakes one in line.
"""

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from broker.broker_context import BrokerContext
from broker.pop.extra_info import ORDER_QUEUE, REVIVE_QUEUE, ExtraInfo
from broker.pop.polling import ANY_QUEUE, Waiter
from broker.pop.pop_book import PopQueue
from broker.pop.pop_log import Popped
from broker.reading.message_filter import MessageFilter, parse_expression
from broker.reading.pull_request_hold import MAX_HELD_SIZE
from broker.reading.tiered_store import PendingRead
from broker.store.message_store import GetResult
from infra.remoting_server import Connection
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, iter_records, reencode_record
from neve.record.properties import PROPERTY_POP_CK
from neve.remoting.codes import GetMessageStatus, ResponseCode
from neve.remoting.command import RemotingCommand
from neve.remoting.headers import Int32, Int64, optional_int, parse_header, require_str
from neve.remoting.names import NORMAL, PERM_READ, RETRY_V1, RETRY_V2, real_topic, retry_version, topic_fault

_MAX_COUNT = 32
_MAX_BYTES = 4 << 20
_MAX_POLL_MS = 60_000
_ATTEMPT_ID_MAX = 255
# What can't be read now is left alone for so long.
_UNREADABLE_SECONDS = 5.0
# One pop in so many looks at the retry topic first, so that a busy topic doesn't keep retries away.
_RETRY_FIRST_EVERY = 5
_FIRST_POP_TIME = "1ST_POP_TIME"
# Nothing there, but behind it there may be something.
_GOES_ON = frozenset({
    GetMessageStatus.NO_MATCHED_MESSAGE, GetMessageStatus.OFFSET_FOUND_NULL, GetMessageStatus.OFFSET_TOO_SMALL,
})  # fmt: skip


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
    attempt_id: str = ""


@dataclass(slots=True)
class Taking:
    """One pop on its way through the queues."""

    header: PopHeader
    message_filter: MessageFilter
    queues: list[int]
    pop_time: int
    room: int
    rest: int = 0
    buffers: list[Any] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    found: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    # Why a queue could not be read.
    failure: str | None = None


class PopMessageProcessor:
    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._turn = itertools.count()

    # ---- requests ----------------------------------------------------------------------------------------------

    def pop(self, connection: Connection, request: RemotingCommand) -> None:
        header = parse_header(request.ext, PopHeader)
        taking = self._checked(header, header.max_msg_nums)
        deadline = self._deadline(header, request)
        self._spawn(connection, request, self._pop(connection, request, taking, deadline))

    def notification(self, connection: Connection, request: RemotingCommand) -> None:
        header = parse_header(request.ext, PopHeader)
        taking = self._checked(header, 1)
        deadline = self._deadline(header, request)
        self._spawn(connection, request, self._notify(connection, request, taking, deadline))

    async def peek(self, connection: Connection, request: RemotingCommand) -> RemotingCommand:
        """What a pop would find, without taking it."""
        header = parse_header(request.ext, PopHeader)
        taking = self._checked(header, header.max_msg_nums)
        for topic, queue_id in self._places(taking):
            if taking.room <= 0:
                break
            result = await self._read(taking, topic, queue_id, self._next_offset(taking, topic, queue_id), waits=True)
            assert result is not None, "it waits"
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
        if len(header.attempt_id) > _ATTEMPT_ID_MAX:
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"attemptId has more than {_ATTEMPT_ID_MAX} characters")
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
        fault = topic_fault(context.retry_names.of_pair(header.consumer_group, header.topic))
        if fault is not None:  # what comes back would find no topic
            raise BrokerError(ResponseCode.INVALID_PARAMETER, f"the group's retry topic of {header.topic}: {fault}")
        message_filter = parse_expression(header.exp, header.exp_type, sql=context.config.enable_property_filter)
        if header.queue_id == ANY_QUEUE:
            first = _spread(next(self._turn), topic.read_queue_nums)
            queues = [(first + step) % topic.read_queue_nums for step in range(topic.read_queue_nums)]
        else:
            queues = [header.queue_id]
        return Taking(header, message_filter, queues, context.clock.now_ms(), count)

    def _deadline(self, header: PopHeader, request: RemotingCommand) -> float:
        """When to answer at the latest, by this broker's clock alone: `bornTime` is a client's idea of the time."""
        may_wait = self._context.config.long_polling_enable and request.size <= MAX_HELD_SIZE
        poll = min(header.poll_time, _MAX_POLL_MS) if may_wait else 0
        return self._context.clock.monotonic() + max(poll, 0) / 1000

    # ---- pop ---------------------------------------------------------------------------------------------------

    async def _pop(
        self, connection: Connection, request: RemotingCommand, taking: Taking, deadline: float
    ) -> RemotingCommand | None:
        while True:
            await self._take(taking)
            code = None if taking.buffers else await self._wait(taking, deadline)
            if connection.is_closed:
                return None
            if taking.buffers:
                return self._answer(request, taking, ResponseCode.SUCCESS)
            if code == ResponseCode.POLLING_TIMEOUT and taking.failure is not None:
                raise BrokerError(ResponseCode.SYSTEM_BUSY, taking.failure)
            if code is not None:
                return self._answer(request, taking, code)
            self._context.require(connection, request)  # what it may do may have changed while it waited
            taking = self._checked(taking.header, taking.room)

    async def _take(self, taking: Taking) -> None:
        for topic, queue_id in self._places(taking):
            try:
                await self._take_from(taking, topic, queue_id)
            except (BrokerError, OSError):
                if not taking.buffers:
                    raise
                break  # what is in hand is out already: it has to go
        if taking.buffers and taking.rest:
            self._context.polling.wake(taking.header.consumer_group, taking.header.topic, taking.header.queue_id)

    def _places(self, taking: Taking) -> list[tuple[str, int]]:
        header = taking.header
        places = [(header.topic, queue) for queue in taking.queues]
        retries = self._context.retry_names.to_read(header.consumer_group, header.topic)
        if header.order or not retries:
            return places
        more = [(retry, 0) for retry in retries]
        return [*more, *places] if _spread(next(self._turn), _RETRY_FIRST_EVERY) == 0 else [*places, *more]

    def _initial(self, taking: Taking, topic: str, queue_id: int) -> int:
        """Where a group that has no offset begins."""
        tiered = self._context.tiered
        low = tiered.min_offset(topic, queue_id)
        if topic != taking.header.topic or taking.header.init_mode == 0:
            return low
        return 0 if tiered.is_young(topic, queue_id) else max(tiered.max_offset(topic, queue_id) - 1, low)

    def _next_offset(self, taking: Taking, topic: str, queue_id: int) -> int:
        """Where a pop would begin; asking changes nothing."""
        group, header = taking.header.consumer_group, taking.header
        queue = self._context.pops.find(group, topic, queue_id)
        if queue is not None:
            return queue.start(in_order=header.order)
        committed = self._context.offsets.query(group, topic, queue_id)
        return committed if committed >= 0 else self._initial(taking, topic, queue_id)

    async def _take_from(self, taking: Taking, topic: str, queue_id: int) -> None:
        """One pop at a time in each queue: who comes second goes on to the next queue."""
        context, header = self._context, taking.header
        group = header.consumer_group
        context.offsets.take_reset(group, topic, queue_id)  # the book knows it already
        queue = context.pops.find(group, topic, queue_id)
        if queue is None:
            queue = context.pops.open(group, topic, queue_id, self._initial(taking, topic, queue_id))
        if queue.busy:
            queue.passed_by = True
            return
        if self._is_closed(taking, queue):
            return
        if taking.room <= 0:
            taking.rest += self._left(taking, queue)
            return
        queue.busy = True
        try:
            await self._read_and_hand_out(taking, queue)
        finally:
            queue.busy = False
            if queue.passed_by:
                queue.passed_by = False
                context.polling.wake(group, topic, queue_id)

    def _is_closed(self, taking: Taking, queue: PopQueue) -> bool:
        header, clock = taking.header, self._context.clock
        if queue.unreadable_until > clock.monotonic() and queue.unreadable_at == queue.start(in_order=header.order):
            taking.failure = queue.unreadable
            return True
        return queue.is_blocked(clock.now_ms(), in_order=header.order, attempt=header.attempt_id)

    def _left(self, taking: Taking, queue: PopQueue) -> int:
        """What a later pop finds there."""
        _, topic, queue_id = queue.key
        return max(self._context.tiered.max_offset(topic, queue_id) - queue.start(in_order=taking.header.order), 0)

    async def _read_and_hand_out(self, taking: Taking, queue: PopQueue) -> None:
        group, topic, queue_id = queue.key
        in_order = taking.header.order
        while self._context.pops.find(group, topic, queue_id) is queue:
            start, turn = queue.start(in_order=in_order), queue.turn
            try:
                result = await self._read(taking, topic, queue_id, start, waits=not taking.buffers)
            except BrokerError as error:
                queue.unreadable_until = self._context.clock.monotonic() + _UNREADABLE_SECONDS
                queue.unreadable_at, queue.unreadable = start, error.remark or ""
                taking.failure = queue.unreadable
                return
            if queue.turn != turn or queue.start(in_order=in_order) != start:
                continue  # it was set elsewhere meanwhile
            if result is None:
                taking.rest += self._left(taking, queue)
            elif self._context.pops.find(group, topic, queue_id) is queue:
                self._hand_out(taking, queue, start, result)
            return

    def _hand_out(self, taking: Taking, queue: PopQueue, start: int, result: GetResult) -> None:
        header = taking.header
        records = [record for buffer in result.buffers for record in iter_records(buffer)]
        if result.next_offset == start and not records:
            return
        least = queue.least_pop_time(start)
        if taking.pop_time < least:
            if taking.buffers:  # the pop time of an answer is one for all: this queue comes with the next pop
                taking.rest += max(result.max_offset - start, 0)
                return
            taking.pop_time = least
        taking.rest += max(result.max_offset - result.next_offset, 0)
        group, topic, queue_id = queue.key
        offsets = [record.queue_offset for record in records]
        visible, following = self._context.clock.now_ms() + header.invisible_time, result.next_offset
        self._context.pops.record(
            Popped(
                group, topic, queue_id, following, taking.pop_time, visible, header.order, offsets, header.attempt_id
            )
        )
        if not records:
            return
        retry = retry_version(topic, group, header.topic)
        first = offsets[0]
        taking.buffers += result.buffers if retry == NORMAL else [self._as_original(taking, r, first) for r in records]
        taking.room -= len(records)
        self._context.stats.got(topic, group, len(records), sum(map(len, result.buffers)))
        taking.starts.append(f"{retry} {queue_id} {first}")
        taking.found.append(f"{retry} {queue_id} {','.join(map(str, offsets))}")
        if header.order:
            counts = [queue.batch.counts.get(offset, 0) for offset in offsets]
            taking.orders.append(f"{retry} {queue_id} {min(counts)}")
            taking.orders += [
                f"{retry} qo{queue_id}%{offset} {count}" for offset, count in zip(offsets, counts, strict=True)
            ]

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
            retry_version(record.topic, header.consumer_group, header.topic),
            self._context.config.broker_name,
            record.queue_id,
            record.queue_offset,
        )
        properties[PROPERTY_POP_CK] = checkpoint.to_text()
        return reencode_record(record, topic=header.topic, properties=properties)

    async def _read(self, taking: Taking, topic: str, queue_id: int, offset: int, *, waits: bool) -> GetResult | None:
        """From there on, over what isn't wanted; as far as it can be read without waiting, or not at all: None."""
        group, result = taking.header.consumer_group, None
        while True:
            answer = self._context.tiered.get_message(
                group, topic, queue_id, offset, taking.room, _MAX_BYTES, taking.message_filter
            )
            if isinstance(answer, PendingRead):
                if not waits:
                    return result
                answer = await answer
            result = answer
            if result.status not in _GOES_ON or result.next_offset <= offset:
                break
            offset = result.next_offset
            await asyncio.sleep(0)
        if result.status not in _GOES_ON and result.status != GetMessageStatus.FOUND:
            # The end of the queue, or a group that stands above it.
            result = GetResult(result.status, offset, result.min_offset, result.max_offset)
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

    async def _wait(self, taking: Taking, deadline: float) -> ResponseCode | None:
        """None when something was found, or may be there; otherwise what to answer."""
        context, clock = self._context, self._context.clock
        if clock.monotonic() >= deadline or not context.accepting:
            return ResponseCode.POLLING_TIMEOUT
        if context.polling.count >= context.config.max_pop_polling_size:
            return ResponseCode.POLLING_FULL
        waiter = self._waiter(taking, takes=True)
        context.polling.add(waiter)
        try:
            if self._has_message(taking):  # it came while the queues were looked at
                await self._take(taking)
            if not taking.buffers:
                left = deadline - clock.monotonic()
                async with asyncio.timeout(left if taking.failure is None else min(left, _UNREADABLE_SECONDS)):
                    await waiter.future
        except TimeoutError:
            return ResponseCode.POLLING_TIMEOUT if clock.monotonic() >= deadline else None
        except asyncio.CancelledError:
            context.polling.pass_on(waiter)
            raise
        finally:
            context.polling.remove(waiter)
        if taking.buffers:
            context.polling.pass_on(waiter)
        return None

    def _waiter(self, taking: Taking, *, takes: bool) -> Waiter:
        topic, group = taking.header.topic, taking.header.consumer_group
        # One of these may be made while it waits.
        retries = (real_topic(topic, group, RETRY_V1), real_topic(topic, group, RETRY_V2))
        return Waiter(group, topic, retries, taking.header.queue_id, takes)

    async def _notify(
        self, connection: Connection, request: RemotingCommand, taking: Taking, deadline: float
    ) -> RemotingCommand | None:
        context, ext = self._context, {"hasMsg": "false", "pollingFull": "false"}
        while not self._has_message(taking):
            left = deadline - context.clock.monotonic()
            if left <= 0 or not context.accepting:
                break
            if context.polling.count >= context.config.max_pop_polling_size:
                ext["pollingFull"] = "true"
                break
            waiter = self._waiter(taking, takes=False)
            context.polling.add(waiter)
            try:
                async with asyncio.timeout(left):
                    await waiter.future
            except TimeoutError:
                break
            finally:
                context.polling.remove(waiter)
            if connection.is_closed:
                context.polling.pass_on(waiter)
                return None
            context.require(connection, request)
            taking = self._checked(taking.header, 1)
        else:
            ext["hasMsg"] = "true"
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=ext)

    def _has_message(self, taking: Taking) -> bool:
        return any(self._has_message_in(taking, topic, queue_id) for topic, queue_id in self._places(taking))

    def _has_message_in(self, taking: Taking, topic: str, queue_id: int) -> bool:
        """Something that a pop would get now; while another one reads there, that one tells when it is done."""
        if self._next_offset(taking, topic, queue_id) >= self._context.tiered.max_offset(topic, queue_id):
            return False
        queue = self._context.pops.find(taking.header.consumer_group, topic, queue_id)
        if queue is None:
            return True
        queue.passed_by |= queue.busy
        return not queue.busy and not self._is_closed(taking, queue)

    def _spawn(
        self, connection: Connection, request: RemotingCommand, work: Coroutine[Any, Any, RemotingCommand | None]
    ) -> None:
        """Waiting pops don't count among a connection's requests in work: there may be thousands."""
        connection.resume(request, lambda: work)


def _spread(turn: int, number: int) -> int:
    """One of so many, each as often as any other, also for who has only every second or third turn."""
    return (turn * 0x9E3779B1 >> 8 & 0xFFFFFF) * number >> 24
