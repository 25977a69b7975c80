"""Timer messages: stored in rmq_sys_wheel_timer and appended again at their delivery time, never before.

queue 0   messages and recalls; the tags code of a queue entry is the delivery time, negative for a recall, so that a
          start reads entries only
queue 1   marks, one after each batch of deliveries; body: `time,offset,position`. All messages up to (time, queue
          offset) are delivered, and no waiting message is below the physical offset `position`

Deliveries are in order of (time, queue offset), and a new message is always due after the last delivery. One mark
therefore describes the whole state. A crash between a batch and its mark causes duplicates but no loss.

A message that waits longer than its log file is kept is appended again with the same delivery time, and the next mark
excludes its old copy. A crash before that mark causes duplicates but no loss. Messages that are due within half an hour
stay where they are. So do messages that were appended again in the last half hour: a full disk evicts every few
seconds, and each eviction would append all waiting messages.
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
from infra.loop.parts import Parts, emptied
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
# Limit of stale entries in heap and order, in addition to the number of waiting messages.
_STALE_ENTRIES = 1024
_A_STEP = 250  # entries read in one turn of the event loop
_NUMBER = re.compile(r"-?[0-9]{1,18}")
# Topics whose queue entries contain something else than the tags' hash code.
CODED_TOPICS = frozenset((WHEEL_TIMER_TOPIC,))


def code_of_entry(record: MessageRecord) -> int:
    """Return the code for a message's queue entry: the delivery time of a timer, otherwise the hash of the tags."""
    if record.topic == WHEEL_TIMER_TOPIC and record.queue_id == _MESSAGES:
        properties = record.properties
        if _NUMBER.fullmatch(when := properties.get(OUT_MS, "")):
            return -int(when) if RECALL_KEY in properties else int(when)
    return code_of_tags(record)


class TimersTakenOver(msgspec.Struct, frozen=True):
    """Timer state of another broker: all messages due up to `time` are delivered, none waits below offset `below`.

    `again` lists the exceptions that still wait, by physical offset and time, which is negative for a recall.
    `is_empty`: no other message waits.
    """

    time: int
    below: int
    again: list[tuple[int, int]]
    is_empty: bool


class TimerMessages:
    """Timer messages (RocketMQ's TimerMessageStore), in a heap by delivery time (ms); the log is authoritative.

    No message is delivered early. A crash may cause duplicates, but no loss. Raises BrokerError for an invalid time.
    """

    requested_by = frozenset(TIMER_PROPERTIES)
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
        # Entries are (delivery time, queue offset, physical offset).
        self._heap: list[tuple[int, int, int]] = []
        self._stored_order: deque[tuple[int, int, int]] = deque()
        self._waiting: set[int] = set()
        # Time of the last reappend since the start, for waiting messages.
        self._reappended_at: dict[int, int] = {}
        self._recalls: dict[str, int] = {}
        self._delivered = (0, -1)
        self._rewind_below: int | None = None  # physical offset of a rewind in progress, see `_rewind`

    def __len__(self) -> int:
        return len(self._waiting)

    # ---- arrivals

    def take(self, message: NewMessage, properties: Mapping[str, str]) -> tuple[PutResult, int] | None:
        """Store a message until its delivery time, or a recall that is due at the same time; None without a time.

        Raises BrokerError for an invalid time.
        """
        when = self.time_of(properties)
        if when is None:
            return None
        self._rewind(self._clock.now_ms())
        # The last delivery is in the future only while a rewind is in progress.
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
        """Return the delivery time in ms, None if it is due now. Raises BrokerError for an invalid time."""
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
                f"timer message is under flow control, max num limit is {most}: timerMaxPending is reached",
            )
        return when

    def added(self, when: int, stored: PutResult, recall_key: str | None) -> None:
        """Track a message that has been stored; `when` is its delivery time in ms."""
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
        """Drop stale entries: reappended messages leave one in the heap, deliveries leave one in the store order."""
        waiting = self._waiting
        self._heap = [entry for entry in self._heap if entry[1] in waiting]
        heapq.heapify(self._heap)
        self._stored_order = deque(entry for entry in self._stored_order if entry[1] in waiting)

    def _done(self, offset: int) -> None:
        self._waiting.discard(offset)
        self._reappended_at.pop(offset, None)

    # ---- deliveries

    def deliver_due(self) -> int:
        """Deliver due messages, a few batches at most; return the number of entries done. A slave delivers none."""
        if self._store.end.is_following:
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
        """Recover from a clock that was ahead at the last delivery and has been corrected.

        New messages would be due before the last delivery, but a mark states that all messages up to its time are
        delivered. Therefore all waiting messages are appended again above a physical offset without deliveries after
        it. Then a mark with that offset restarts at the current time.
        """
        if self._rewind_below is None:
            if self._delivered[0] - now <= STANDS_STILL_MS:
                return
            ahead = (self._delivered[0] - now) / 1000
            log.warning("the clock is %.1f s behind the last timer message: pending timers are reappended", ahead)
            self._rewind_below = self._store.visibility.confirmed
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
        now, done, heap = self._clock.now_ms(), 0, self._heap  # no entry is added to the heap in this method
        try:
            while done < _BATCH and heap and heap[0][0] <= now and self._is_shown(heap[0]):
                when, offset, position = heap[0]
                if offset not in self._waiting:  # it was appended again: its copy has the same time
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

        A message that can never be delivered is dropped. One that fails with an unexpected error is quarantined.
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
        """Return whether a message is visible; the confirmed or fsynced offset may be within its record."""
        return entry[1] < self._store.queues.max_offset(WHEEL_TIMER_TOPIC, _MESSAGES)

    def _deliver(self, position: int, offset: int) -> None:
        raw = self._store.reader.record_at(position)
        if raw is None:
            log.error("the timer message at %d is no longer in the log: skipped", position)
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
            return  # a checkpoint of an Apache master's pop; after taking over, the pop book has this state
        topic, queue = delivery_target(properties, self._read_queues)
        self._put(record, topic, queue, properties)

    def _is_recalled(self, properties: Mapping[str, str]) -> bool:
        topic, unique = properties.get("REAL_TOPIC", ""), properties.get("UNIQ_KEY", "")
        return recall_key(topic, unique) in self._recalls

    def _put(self, record: MessageRecord, topic: str, queue: int, properties: dict[str, str]) -> None:
        raw = record.properties_raw
        stamp = f"{DEQUEUE_MS}\x01{self._clock.now_ms()}\x02".encode()
        taken_over = _out_at_the_end(properties.get(OUT_MS, ""))
        if raw.endswith(taken_over):  # delivered as its delay level would have done
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

    # ---- eviction of log files

    def reappend(self, below: int) -> bool:
        """Append a batch of the messages below a physical offset again; return False if none can be moved now.

        Messages that are due soon or were appended again recently stay. Raises StoreFull or StoreNotWritable; the
        copies appended before that are valid.
        """
        return self._reappend_batch(lambda entry: self._goes(entry, below))

    def _reappend_batch(self, is_due: Callable[[tuple[int, int, int]], bool]) -> bool:
        reappended = 0
        try:
            while reappended < _BATCH and (entry := self._first_stored()) is not None:
                if not (is_due(entry) and self._is_shown(entry)):
                    break
                self._reappend(entry)
                reappended += 1
        finally:
            if reappended:
                self._mark()
        return reappended > 0

    def take_over(self, record: MessageRecord, when: int) -> bool:
        """Store a copy of a message that waits elsewhere in the log; False if it must stay. Raises StoreError."""
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
        """Take over the timers of another broker by a mark; `load` finds the waiting messages. Raises StoreError."""
        store = self._store
        covered = store.queues.max_offset(WHEEL_TIMER_TOPIC, _MESSAGES) - 1
        below = store.max_physical_offset if left.is_empty else left.below
        for position, due in left.again:
            raw_record = store.reader.record_at(position)
            assert raw_record is not None, "it was read in this turn, and nothing is evicted meanwhile"
            record = decode_record(raw_record)
            when = max(abs(due), left.time + 1)
            # The replaced time has the same number of digits, so the properties still fit. Both are times in ms of this
            # era.
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
        raw = self._store.reader.record_at(position)
        if raw is None:
            log.error("the timer message at %d is no longer in the log: skipped", position)
            self._done(offset)
            return
        record = decode_record(raw)
        recall = record.properties.get(RECALL_KEY)
        if recall is None and self._is_recalled(record.properties):
            # Its copy would follow its recall, which has the same time and applies to no other message.
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
        """Return the waiting message that was stored first."""
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
        """Return the lowest physical offset that a waiting message needs."""
        first = self._first_stored()
        return None if first is None else first[2]

    # ---- start

    def load(self) -> None:
        """Load the waiting messages at a start: the entries that the last mark does not cover."""
        at_once(self.load_steps())

    def load_steps(self) -> Steps[None]:
        """Run `load` in steps; the log must not grow meanwhile."""
        store = self._store
        for _ in self.forget_parts():
            yield
        mark = yield from self._writer.internal.last_steps(WHEEL_TIMER_TOPIC, _MARKS, _mark_of)
        if mark is not None:
            self._delivered = mark.delivered
        start = max(0 if mark is None else mark.position, store.min_physical_offset)
        for found in store.reader.entry_slices(WHEEL_TIMER_TOPIC, start, store.max_physical_offset, _A_STEP):
            if found is None or found.queue_id != _MESSAGES:
                continue
            if found.anew:
                for _ in self._forget_waiting():
                    yield
            columns = zip(found.run.physical.tolist(), found.run.tags.tolist(), strict=True)
            for offset, (position, code) in enumerate(columns, found.run.first_offset):
                if (abs(code), offset) > self._delivered:
                    self._add((abs(code), offset, position))
                    if code < 0:
                        self._load_recall(position, offset)
            yield

    def forget_parts(self) -> Parts[None]:
        """Forget all messages on a slave, because its master delivers them."""
        self._delivered, self._rewind_below = (0, -1), None
        yield from self._forget_waiting()

    def _forget_waiting(self) -> Parts[None]:
        tables = (self._heap, self._stored_order, self._waiting, self._reappended_at, self._recalls)
        self._heap, self._stored_order, self._waiting, self._reappended_at, self._recalls = [], deque(), set(), {}, {}
        yield from emptied(*tables)

    def _load_recall(self, position: int, offset: int) -> None:
        raw = self._store.reader.record_at(position)
        if raw is not None:
            self._recalls[decode_record(raw).properties.get(RECALL_KEY, "")] = offset


class _Mark(NamedTuple):
    """Last delivery by time and queue offset, and the physical offset below which no message waits."""

    delivered: tuple[int, int]
    position: int


def _mark_of(record: MessageRecord) -> _Mark | None:
    """Parse a mark; None if it is damaged."""
    found = _MARK.fullmatch(record.body)
    if found is None:
        return None
    time, offset, position = map(int, found.groups())
    return _Mark((time, offset), position)


def _out(when: int) -> bytes:
    return f"{OUT_MS}\x01{when}".encode()


def _out_at_the_end(when: str) -> bytes:
    """Return the last property of messages taken over from delay levels; others end with their target properties."""
    return f"{OUT_MS}\x01{when}\x02".encode()


def recall_key(topic: str, unique: str) -> str:
    """Return the key of a recall; it includes the topic, because ids of two topics may be equal."""
    return f"{topic}+{unique}"
