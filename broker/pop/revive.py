"""Messages that were popped and not acknowledged in time: back through the group's pop-retry topic.

Put there first, then taken off the book: a crash between the two shows a message twice, never not at all.

    due ─▶ its message is at hand, or it is in order: at once
        └▶ its message has to be waited for: the line of its queue ─▶ one of a few lanes, one after the other

So an archive that hangs holds up nobody but the messages that only it has. What stands in a line is still in the book:
acknowledged, hidden for longer or reset meanwhile, it is left alone when its turn comes.
"""

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Coroutine
from enum import Enum, auto
from typing import Any

from broker.broker_context import BrokerContext
from broker.intake.log_writer import LogWriter, found_by
from broker.intake.message import NewMessage
from broker.pop.pop_book import Flight, Key, PopQueue
from broker.pop.pop_log import Acked
from broker.reading.tiered_store import PendingRead
from broker.store.errors import StoreError
from broker.store.message_store import GetResult
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, fitting_properties, iter_records
from neve.record.properties import PROPERTY_POP_CK, PROPERTY_TAGS, tags_code
from neve.remoting.codes import ResponseCode

log = logging.getLogger(__name__)

_FIRST_POP_TIME = "1ST_POP_TIME"
_RETRY_LATER_MS = 10_000
_MAX_BYTES = 1 << 20
# After so many the loop serves others.
_SLICE = 64
# Queues whose messages are waited for at a time; the others' lines are no longer than what may be out.
_LANES = 32

Due = tuple[PopQueue, int, Flight]


class _Tried(Enum):
    """What became of one message that is due."""

    DONE = auto()  # it came back, or is not out any more
    NOT_NOW = auto()
    PENDING = auto()  # it has to be waited for


class PopRevive:
    def __init__(
        self,
        context: BrokerContext,
        writer: LogWriter,
        spawn: Callable[[str, Coroutine[Any, Any, object]], asyncio.Task[None]],
    ) -> None:
        """`spawn` starts a lane: a background task that ends by itself, or when its owner stops."""
        self._context, self._writer = context, writer
        self._spawn = spawn
        self._lines: OrderedDict[Key, deque[Due]] = OrderedDict()
        self._running: set[Key] = set()
        self.revived = 0

    @property
    def waiting(self) -> int:
        """Messages in the lines."""
        return sum(map(len, self._lines.values()))

    async def run_due(self) -> int:
        """How many messages came back at once; those that have to be waited for come back by themselves."""
        if not self._context.accepting:
            return 0
        before, due = self.revived, deque(self._context.pops.take_due())
        try:
            while due:
                tried = await self._try(*due[0], waits=False)
                if tried is _Tried.PENDING:
                    self._lines.setdefault(due[0][0].key, deque()).append(due[0])
                elif tried is _Tried.NOT_NOW:
                    self._put_off(*due[0])
                due.popleft()
                if len(due) % _SLICE == 0:
                    await asyncio.sleep(0)
        finally:
            for item in due:  # none is forgotten, whatever went wrong with one of them
                self._put_off(*item)
        self._fill_lanes()
        return self.revived - before

    # ---- lines

    def _fill_lanes(self) -> None:
        for key in [key for key in self._lines if key not in self._running][: _LANES - len(self._running)]:
            self._spawn("pop-revive-cold", self._run_lane(key))
            self._running.add(key)

    async def _run_lane(self, key: Key) -> None:
        """A queue's line to its end, or to the first message that can't be read now: the others look again later."""
        line = self._lines[key]
        try:
            while line and self._context.accepting and await self._try(*line[0], waits=True) is _Tried.DONE:
                line.popleft()
                await asyncio.sleep(0)
        finally:
            for item in line:
                self._put_off(*item)
            del self._lines[key]
            self._running.discard(key)
        self._fill_lanes()

    # ---- one message

    async def _try(self, queue: PopQueue, offset: int, flight: Flight, *, waits: bool) -> _Tried:
        try:
            revived = await self._revive(queue, offset, flight, waits=waits)
        except (BrokerError, StoreError) as error:
            log.warning("revive of %s offset %d: %s", queue.key, offset, error)
            return _Tried.NOT_NOW
        except Exception as error:  # noqa: BLE001 - one message; those behind it have their turn
            self._context.faults.add("a popped message", error, f"of {queue.key}, offset {offset}")
            self._put_off(queue, offset, flight)
            return _Tried.DONE
        if revived is None:
            return _Tried.PENDING
        self.revived += revived
        return _Tried.DONE

    def _put_off(self, queue: PopQueue, offset: int, flight: Flight) -> None:
        self._context.pops.put_off(queue, offset, flight, self._context.clock.now_ms() + _RETRY_LATER_MS)

    def _is_out(self, queue: PopQueue, offset: int, flight: Flight) -> bool:
        """Asks the book, which follows the group's offset where somebody has set it.

        A topic or group that its table doesn't have may be one that a crash kept from the disk and that comes again:
        who deletes one tells the book.
        """
        group, topic, _ = queue.key
        if self._context.topics.select(topic) is None or group not in self._context.groups.groups:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"topic {topic} or group {group} is not known now")
        return self._context.pops.find(*queue.key) is queue and queue.flights.get(offset) is flight

    async def _revive(self, queue: PopQueue, offset: int, flight: Flight, *, waits: bool) -> int | None:
        """How many messages came back; None: its message has to be waited for."""
        context = self._context
        group, topic, _ = queue.key
        if not self._is_out(queue, offset, flight):
            return 0
        if flight.in_order:  # its turn is with the last of its batch that comes into view
            number = len(queue.flights)
            return number if self._again_in_place(queue) else 0
        answer = context.tiered.get_message(*queue.key, offset, 1, _MAX_BYTES)
        if isinstance(answer, PendingRead):
            if not waits:
                return None
            answer = await answer
        record, retry = _record_at(answer, offset), context.retry_names.of_pair(group, topic)
        if not self._is_out(queue, offset, flight):
            return 0
        if record is not None:
            await self._make_topic(retry)
            if not self._is_out(queue, offset, flight):
                return 0
        if record is not None:
            self._put_to_retry(retry, record, flight)
        context.pops.record(Acked(*queue.key, flight.pop_time, [offset]))
        return int(record is not None)

    def _again_in_place(self, queue: PopQueue) -> bool:
        """In order: the first message that was not acknowledged is the next again, and what follows it."""
        released = self._context.pops.release(queue)
        if released:
            self._context.polling.wake(*queue.key)
        return released

    async def _make_topic(self, retry: str) -> None:
        """A restart knows it before the message in it is gone from where it was."""
        topics = self._context.topics
        if topics.select(retry) is None or not topics.is_saved(retry):
            await topics.create_saved(retry, 1)
            self._context.register_soon()

    def _put_to_retry(self, retry: str, record: MessageRecord, flight: Flight) -> None:
        properties = record.properties
        properties.pop(PROPERTY_POP_CK, None)
        properties.setdefault(_FIRST_POP_TIME, str(flight.pop_time))
        again = NewMessage(
            topic=retry,
            queue_id=0,
            body=record.body,
            properties=fitting_properties(record, properties),
            flag=record.flag,
            sys_flag=record.sys_flag,
            born_timestamp=record.born_timestamp,
            born_host=self._context.store.config.store_host,
            reconsume_times=record.next_reconsume_times,
            tags_code=tags_code(properties.get(PROPERTY_TAGS)),
            keys=found_by(properties),
        )
        self._writer.put(again)


def _record_at(result: GetResult, offset: int) -> MessageRecord | None:
    records = (record for buffer in result.buffers for record in iter_records(buffer))
    return next((record for record in records if record.queue_offset == offset), None)
