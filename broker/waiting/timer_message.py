"""Messages for a moment: stored in rmq_sys_wheel_timer, appended again when that moment comes, never before.

queue 0   messages and recalls; an entry's tags code is the time of delivery, negative for a recall, so that a start
          reads entries only
queue 1   marks, one after each batch of deliveries; body: `time,offset,position` - everything due up to (time, queue
          offset) is delivered, nothing that waits lies below the log position

Deliveries are in order of (time, queue offset) and a new message is always due after the last delivery, so one mark
says all. A crash between a batch and its mark delivers that batch twice rather than not at all.

A message that waits longer than its log file may stay is reappended for the same time, and the next mark passes its old
place. A crash before that mark delivers it twice rather than not at all. What is due within half an hour stays where it
is, and so does what was reappended in the last half hour: a crowded disk evicts every few seconds, and each time would
append all that waits.
"""

import heapq
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from broker.config import BrokerConfig
from broker.intake.internal_records import WRITTEN_BY_NEVE
from broker.intake.log_writer import REAPPEND_AGAIN_MS, LogWriter
from broker.intake.message import NewMessage
from broker.intake.property_text import ended_bytes, target_pairs
from broker.store.config import code_of_tags
from broker.store.errors import StoreFull, StoreNotWritable
from broker.store.layout import STANDS_STILL_MS
from broker.store.message_store import MessageStore, PutResult
from broker.waiting.delivery import UNDELIVERABLE, Quarantine, ReadQueues, TopicMissing, delivery_target
from infra.clock import Clock
from infra.loop.in_steps import Steps, at_once
from infra.loop.supervisor import Faults
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, decode_record
from neve.record.layout import PROPERTIES_LENGTH_MAX
from neve.record.properties import PROPERTY_REAL_TOPIC
from neve.remoting.codes import ResponseCode
from neve.remoting.names import REVIVE_LOG_PREFIX, WHEEL_TIMER_TOPIC

log = logging.getLogger(__name__)

DELAY_SECONDS, DELAY_MS, DELIVER_MS = "TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS"
OUT_MS, DEQUEUE_MS, RECALL_KEY = "TIMER_OUT_MS", "TIMER_DEQUEUE_MS", "TIMER_DEL_UNIQKEY"
TIMER_PROPERTIES = (DELAY_SECONDS, DELAY_MS, DELIVER_MS)

_MESSAGES, _MARKS = 0, 1
_MARK = re.compile(rb"([0-9]{1,19}),(-1|[0-9]{1,19}),([0-9]{1,19})")
_BATCH = 64
_BATCHES_AT_ONCE = 8
# Entries of messages that no longer wait, besides as many as there are that do.
_STALE_ENTRIES = 1024
_A_STEP = 250  # entries that are read in one turn of the loop
_NUMBER = re.compile(r"-?[0-9]{1,18}")
# Those whose entries say something else than their tags.
CODED_TOPICS = frozenset((WHEEL_TIMER_TOPIC,))


def code_of_entry(record: MessageRecord) -> int:
    """What a queue's entry says of a message: of a timer its time, of any other its tags."""
    if record.topic == WHEEL_TIMER_TOPIC and record.queue_id == _MESSAGES:
        properties = record.properties
        if _NUMBER.fullmatch(when := properties.get(OUT_MS, "")):
            return -int(when) if RECALL_KEY in properties else int(when)
    return code_of_tags(record)


class TimersTakenOver(msgspec.Struct, frozen=True):
    """What another broker left: all that is due up to `time` is delivered, nothing that waits lies below `below`.

    `again`: waits on the wrong side of that, each by its place in the log and its time, which is negative for a recall.
    `is_empty`: nothing else waits.
    """

    time: int
    below: int
    again: list[tuple[int, int]]
    is_empty: bool


class TimerMessages:
    """Messages for a moment (RocketMQ's TimerMessageStore), in a heap by their time in ms; the log is the truth.

    Never delivered early; after a crash perhaps twice, never not at all. A time that can't be had raises BrokerError.
    """

    asked_by = frozenset(TIMER_PROPERTIES)
    kind = "delay"

    def __init__(  # noqa: PLR0917
        self,
        store: MessageStore,
        writer: LogWriter,
        clock: Clock,
        config: BrokerConfig,
        read_queues: ReadQueues,
        faults: Faults,
    ) -> None:
        self._store, self._writer, self._clock = store, writer, clock
        self._config, self._read_queues, self._faults = config, read_queues, faults
        self._quarantine = Quarantine(store, WHEEL_TIMER_TOPIC, faults)
        self._log_takes_nothing = False
        # Entries are (time of delivery, queue offset, log position).
        self._heap: list[tuple[int, int, int]] = []
        self._stored_order: deque[tuple[int, int, int]] = deque()
        self._waiting: set[int] = set()
        # Of those that wait, when they were reappended the last time since the start.
        self._reappended_at: dict[int, int] = {}
        self._recalls: dict[str, int] = {}
        self._delivered = (0, -1)
        self._rewind_below: int | None = None  # a log position: under way, see `_rewind`

    def __len__(self) -> int:
        return len(self._waiting)

    # ---- a message comes

    def take(self, message: NewMessage, properties: Mapping[str, str]) -> tuple[PutResult, int] | None:
        """To wait for the moment that it names; or a recall of such a message, due at the same time. None: it has none.

        Raises BrokerError for a time that can't be had.
        """
        when = self.time_of(properties)
        if when is None:
            return None
        self._rewind(self._clock.now_ms())
        # Only while what waits is reappended after the wall clock went back does this change anything.
        when = max(when, self._delivered[0] + 1)
        recall, topic = properties.get(RECALL_KEY), message.topic
        if recall is not None and not recall.startswith(recall_key(topic, "")):
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal: {RECALL_KEY} of another topic")
        parked = msgspec.structs.replace(
            message,
            topic=WHEEL_TIMER_TOPIC,
            queue_id=_MESSAGES,
            properties=ended_bytes(message.properties)
            + _out_at_the_end(str(when))
            + target_pairs(topic, message.queue_id),
            tags_code=-when if recall else when,
        )
        stored = self._writer.put(parked, internal=True)
        self.added(when, stored, recall)
        return stored, when

    def time_of(self, properties: Mapping[str, str]) -> int | None:
        """When to deliver; None: at once. Raises BrokerError for a time that can't be had."""
        name = next((name for name in TIMER_PROPERTIES if name in properties), None)
        if name is None:
            return None
        if not self._config.timer_wheel_enable or self._config.apache_members:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR, "accurate timer message is not enabled, timerWheelEnable is false"
            )
        text, now = properties[name], self._clock.now_ms()
        if _NUMBER.fullmatch(text) is None:
            raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal: {name}={text} is no number")
        value = int(text)
        when = {DELAY_SECONDS: now + value * 1000, DELAY_MS: now + value, DELIVER_MS: value}[name]
        limit = self._config.timer_max_delay_sec
        if when > now + limit * 1000:
            raise BrokerError(
                ResponseCode.MESSAGE_ILLEGAL, f"timer message illegal: {name}={text} is more than {limit} s away"
            )
        if when <= now:
            if RECALL_KEY in properties:
                raise BrokerError(ResponseCode.MESSAGE_ILLEGAL, "timer message illegal: a recall of the past")
            return None
        most = self._config.timer_max_pending
        if len(self) >= most:
            raise BrokerError(
                ResponseCode.SYSTEM_ERROR,
                f"timer message is under flow control, max num limit is {most}: timerMaxPending of them wait already",
            )
        return when

    def added(self, when: int, stored: PutResult, recall_key: str | None) -> None:
        self._add((when, stored.queue_offset, stored.physical_offset))
        if recall_key:
            self._recalls[recall_key] = stored.queue_offset

    def _add(self, entry: tuple[int, int, int]) -> None:
        heapq.heappush(self._heap, entry)
        self._stored_order.append(entry)
        self._waiting.add(entry[1])
        most = 2 * len(self._waiting) + _STALE_ENTRIES
        if len(self._heap) > most or len(self._stored_order) > most:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Reappending leaves an entry in the heap, and a delivery behind a long wait one in the order."""
        waiting = self._waiting
        self._heap = [entry for entry in self._heap if entry[1] in waiting]
        heapq.heapify(self._heap)
        self._stored_order = deque(entry for entry in self._stored_order if entry[1] in waiting)

    def _done(self, offset: int) -> None:
        self._waiting.discard(offset)
        self._reappended_at.pop(offset, None)

    # ---- its time comes

    def deliver_due(self) -> int:
        """Deliver what is due, a few batches at most; the number of entries done. A slave's wait on."""
        if self._store.is_following:
            return 0
        self._rewind(self._clock.now_ms())
        done = 0
        for _ in range(_BATCHES_AT_ONCE):
            batch = self._deliver_batch()
            done += batch
            if batch < _BATCH:
                break
        return done

    def _rewind(self, now: int) -> None:
        """The clock was ahead at the last delivery, and is right again: what comes now must not be due after that one.

        A mark says that all up to its time is delivered. So what waits moves above a log position, behind which nothing
        was delivered yet, and a mark with that position begins anew at the present time.
        """
        if self._rewind_below is None:
            if self._delivered[0] - now <= STANDS_STILL_MS:
                return
            ahead = (self._delivered[0] - now) / 1000
            log.warning("the clock is %.1f s behind the last timer message: what waits is reappended, to go on", ahead)
            self._rewind_below = self._store.confirmed_offset
        try:
            for _ in range(_BATCHES_AT_ONCE):
                if not self._reappend_batch(self._lies_below_rewind):
                    self._rewind_below, self._delivered = None, (now, -1)
                    self._mark()
                    return
        except (StoreFull, StoreNotWritable) as error:
            log.warning("timer messages can't be reappended now: %s", error)

    def _lies_below_rewind(self, entry: tuple[int, int, int]) -> bool:
        return self._rewind_below is not None and entry[2] < self._rewind_below

    def _deliver_batch(self) -> int:
        now, done, heap = self._clock.now_ms(), 0, self._heap  # nothing is added to it on the way
        try:
            while done < _BATCH and heap and heap[0][0] <= now and self._is_shown(heap[0]):
                when, offset, position = heap[0]
                if offset not in self._waiting:  # it was reappended: its copy comes at the same time
                    heapq.heappop(heap)
                    continue
                if not self._try(position, offset):
                    break
                heapq.heappop(heap)
                self._done(offset)
                self._delivered = (when, offset)
                done += 1
            if done:
                self._mark()
        except (StoreFull, StoreNotWritable) as error:
            if not self._log_takes_nothing:
                log.warning("timer messages can't be delivered now: %s", error)
            self._log_takes_nothing = True
        else:
            self._log_takes_nothing = False
        return done

    def _try(self, position: int, offset: int) -> bool:
        """Deliver one message; return False if it is to be retried.

        A message that can never be delivered is dropped, one that fails in an unexpected way is quarantined.
        Raises StoreFull and StoreNotWritable.
        """
        try:
            self._deliver(position, offset)
        except (StoreFull, StoreNotWritable):
            raise
        except TopicMissing as error:
            log.warning("timer message dropped: %s; position=%d", error, position)
        except UNDELIVERABLE as error:
            self._faults.add("a timer message", error, f"at {position}")
        except Exception as error:  # noqa: BLE001 - retried, then quarantined
            return self._quarantine.failed("a timer delivery", _MESSAGES, offset, error)
        self._quarantine.delivered(_MESSAGES, offset)
        return True

    def _is_shown(self, entry: tuple[int, int, int]) -> bool:
        """Whether it can be read: what a set has confirmed, or a sync covers, may end within its record."""
        return entry[1] < self._store.max_offset(WHEEL_TIMER_TOPIC, _MESSAGES)

    def _deliver(self, position: int, offset: int) -> None:
        raw = self._store.record_at(position)
        if raw is None:
            log.error("the timer message at %d is no longer in the log: left out", position)
            return
        record = decode_record(raw)
        properties = record.properties
        recall = properties.get(RECALL_KEY)
        if recall is not None:
            if self._recalls.get(recall) == offset:
                del self._recalls[recall]
            return
        if self._is_recalled(properties):
            return
        if properties.get(PROPERTY_REAL_TOPIC, "").startswith(REVIVE_LOG_PREFIX):
            return  # of an Apache master's pops: who became master in its place has them in its book
        topic, queue = delivery_target(properties, self._read_queues)
        self._put(record, topic, queue, properties)

    def _is_recalled(self, properties: Mapping[str, str]) -> bool:
        topic, unique = properties.get("REAL_TOPIC", ""), properties.get("UNIQ_KEY", "")
        return recall_key(topic, unique) in self._recalls

    def _put(self, record: MessageRecord, topic: str, queue: int, properties: dict[str, str]) -> None:
        raw = record.properties_raw
        stamp = f"{DEQUEUE_MS}\x01{self._clock.now_ms()}\x02".encode()
        taken_over = _out_at_the_end(properties.get(OUT_MS, ""))
        if raw.endswith(taken_over):  # it comes as its delay level would have delivered it
            raw = raw.removesuffix(taken_over)
        elif len(raw) + len(stamp) < PROPERTIES_LENGTH_MAX:
            raw = ended_bytes(raw) + stamp
        self._writer.put_copy(
            record,
            topic,
            queue,
            properties_raw=raw,
            properties=properties,
            prepared_transaction_offset=record.prepared_transaction_offset,
        )

    # ---- its place in the log is wanted

    def reappend(self, below: int) -> bool:
        """Append again, for the same time, a batch of what waits below a log position; False: nothing more goes now.

        What is due soon, or was reappended a short while ago, stays. Raises StoreFull or StoreNotWritable; what was
        reappended by then stays so.
        """
        return self._reappend_batch(lambda entry: self._goes(entry, below))

    def _reappend_batch(self, goes: Callable[[tuple[int, int, int]], bool]) -> bool:
        reappended = 0
        try:
            while reappended < _BATCH and (entry := self._first_stored()) is not None:
                if not (goes(entry) and self._is_shown(entry)):
                    break
                self._reappend(entry)
                reappended += 1
        finally:
            if reappended:
                self._mark()
        return reappended > 0

    def take_over(self, record: MessageRecord, when: int) -> bool:
        """Wait for a message that waits elsewhere in the log; False: it has to stay there. Raises StoreError."""
        when = max(when, self._delivered[0] + 1)
        raw = ended_bytes(record.properties_raw) + _out_at_the_end(str(when))
        if len(self) >= self._config.timer_max_pending or len(raw) > PROPERTIES_LENGTH_MAX:
            return False
        stored = self._writer.put_copy(
            record, WHEEL_TIMER_TOPIC, _MESSAGES, code=when, properties_raw=raw, internal=True
        )
        self._add((when, stored.queue_offset, stored.physical_offset))
        self._reappended_at[stored.queue_offset] = self._clock.now_ms()
        return True

    def begin_after(self, left: TimersTakenOver) -> None:
        """Go on with what another broker left: a mark says so, `load` finds the rest. Raises StoreError."""
        store = self._store
        covered = store.max_offset(WHEEL_TIMER_TOPIC, _MESSAGES) - 1
        below = store.max_physical_offset if left.is_empty else left.below
        for position, due in left.again:
            raw_record = store.record_at(position)
            assert raw_record is not None, "it was read a moment ago, and nothing goes meanwhile"
            record = decode_record(raw_record)
            when = max(abs(due), left.time + 1)
            # as long as it was, so that it fits: both are milliseconds of these years
            raw = record.properties_raw.replace(_out(abs(due)), _out(when))
            code = when if due >= 0 else -when
            self._writer.put_copy(record, WHEEL_TIMER_TOPIC, _MESSAGES, code=code, properties_raw=raw, internal=True)
        self._put_mark(f"{left.time},{covered},{below}".encode())

    def _goes(self, entry: tuple[int, int, int], below: int) -> bool:
        when, offset, position = entry
        now, reappended_at = self._clock.now_ms(), self._reappended_at.get(offset)
        fresh = reappended_at is not None and 0 <= now - reappended_at < REAPPEND_AGAIN_MS
        return position < below and when - now > REAPPEND_AGAIN_MS and not fresh

    def _reappend(self, entry: tuple[int, int, int]) -> None:
        when, offset, position = entry
        raw = self._store.record_at(position)
        if raw is None:
            log.error("the timer message at %d is no longer in the log: left out", position)
            self._done(offset)
            return
        record = decode_record(raw)
        recall = record.properties.get(RECALL_KEY)
        if recall is None and self._is_recalled(record.properties):
            # reappended it would come behind its recall, which is due at the same time and stands for nobody else
            self._done(offset)
            return
        stored = self._writer.put_copy(
            record,
            WHEEL_TIMER_TOPIC,
            _MESSAGES,
            code=when if recall is None else -when,
            prepared_transaction_offset=record.prepared_transaction_offset,
            internal=True,
        )
        self._done(offset)
        self._add((when, stored.queue_offset, stored.physical_offset))
        self._reappended_at[stored.queue_offset] = self._clock.now_ms()
        if recall is not None and self._recalls.get(recall) == offset:
            self._recalls[recall] = stored.queue_offset

    def _first_stored(self) -> tuple[int, int, int] | None:
        """What waits longest in the log."""
        order = self._stored_order
        while order and order[0][1] not in self._waiting:
            order.popleft()
        return order[0] if order else None

    def _mark(self) -> None:
        pinned = self.pinned_from()
        position = self._store.max_physical_offset if pinned is None else pinned
        self._put_mark(f"{self._delivered[0]},{self._delivered[1]},{position}".encode())

    def _put_mark(self, body: bytes) -> None:
        mark = NewMessage(
            topic=WHEEL_TIMER_TOPIC,
            queue_id=_MARKS,
            body=body,
            born_timestamp=self._clock.now_ms(),
            prepared_transaction_offset=WRITTEN_BY_NEVE,
        )
        self._writer.put(mark, internal=True)

    def pinned_from(self) -> int | None:
        """The lowest log position that a waiting message needs."""
        first = self._first_stored()
        return None if first is None else first[2]

    # ---- start

    def load(self) -> None:
        """At a start, find the waiting messages: the entries that the last mark doesn't cover."""
        at_once(self.load_steps())

    def load_steps(self) -> Steps[None]:
        """As `load`, of a log that does not grow meanwhile."""
        store = self._store
        self.forget()
        mark = yield from self._writer.internal.last_steps(WHEEL_TIMER_TOPIC, _MARKS, _mark_of)
        if mark is not None:
            self._delivered = mark.delivered
        start = max(0 if mark is None else mark.position, store.min_physical_offset)
        for found in store.entry_slices(WHEEL_TIMER_TOPIC, start, store.max_physical_offset, _A_STEP):
            if found is None or found.queue_id != _MESSAGES:
                continue
            if found.anew:
                self._forget_waiting()
            columns = zip(found.run.physical.tolist(), found.run.tags.tolist(), strict=True)
            for offset, (position, code) in enumerate(columns, found.run.first_offset):
                if (abs(code), offset) > self._delivered:
                    self._add((abs(code), offset, position))
                    if code < 0:
                        self._load_recall(position, offset)
            yield

    def forget(self) -> None:
        """A slave knows of none: they are its master's to deliver."""
        self._forget_waiting()
        self._delivered, self._rewind_below = (0, -1), None

    def _forget_waiting(self) -> None:
        for part in (self._heap, self._stored_order, self._waiting, self._reappended_at, self._recalls):
            part.clear()

    def _load_recall(self, position: int, offset: int) -> None:
        raw = self._store.record_at(position)
        if raw is not None:
            self._recalls[decode_record(raw).properties.get(RECALL_KEY, "")] = offset


class _Mark(NamedTuple):
    """The last delivery, by time and offset, and the position in the log below which no message waits."""

    delivered: tuple[int, int]
    position: int


def _mark_of(record: MessageRecord) -> _Mark | None:
    """None: the record is damaged."""
    found = _MARK.fullmatch(record.body)
    if found is None:
        return None
    time, offset, position = map(int, found.groups())
    return _Mark((time, offset), position)


def _out(when: int) -> bytes:
    return f"{OUT_MS}\x01{when}".encode()


def _out_at_the_end(when: str) -> bytes:
    """By its last property a message is known that was taken over: of any other the last one is its target."""
    return f"{OUT_MS}\x01{when}\x02".encode()


def recall_key(topic: str, unique: str) -> str:
    """What a recall names: an id alone might be another topic's."""
    return f"{topic}+{unique}"
