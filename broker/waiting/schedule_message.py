"""Delay levels: messages wait in SCHEDULE_TOPIC_XXXX, one queue per level, and are appended again when due.

A level's queue is in order of delivery, so only its head is checked. A level's offset is saved only after the copies
below it are on disk, so a crash causes duplicates but no loss. After each round of deliveries, a record of the metadata
log contains the offsets of all levels. A start or a slave finds it after those copies.

A failed delivery is retried with the next round, and its level waits for it. A message that can never be delivered is
dropped. One that fails with an unexpected error is quarantined (`broker.waiting.delivery`).

A message that waits for long in a log file to be evicted becomes a timer message of the same time (`reappend`).
"""

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from broker.intake.log_writer import REAPPEND_AGAIN_MS, LogWriter
from broker.intake.message import NewMessage
from broker.intake.property_text import ended_bytes, target_pairs
from broker.store.errors import StoreFull, StoreNotWritable
from broker.store.message_store import MessageStore, PutResult
from broker.tables.changes import DELAYS, DelayPositions, decode_change
from broker.tables.journal import NO_JOURNAL, Journal
from broker.tables.state_file import StateFile, SyncLog
from broker.waiting.delivery import TRANSIENT, UNDELIVERABLE, Quarantine, ReadQueues, TopicMissing, delivery_target
from broker.waiting.timer_message import TimerMessages
from infra.clock import Clock
from infra.config.properties import ConfigError
from infra.disk.filesystem import Disk
from infra.loop.parts import Parts, run_here
from infra.loop.supervisor import Faults
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, iter_records
from neve.record.properties import PROPERTY_DELAY
from neve.remoting.names import METADATA_LOG, SCHEDULE_TOPIC
from neve.units import DURATION_MS

log = logging.getLogger(__name__)

_BATCH = 32
_BATCH_BYTES = 1 << 20
# Python rejects numbers of thousands of digits; no configuration has that many levels.
_LEVEL_DIGITS = 9


def parse_levels(text: str) -> list[int]:
    """Parse `1s 5s … 2h` to the delays in ms of level 1, 2, and so on. Raises ConfigError."""
    levels = []
    for part in text.split():
        match = re.fullmatch(r"(\d+)([smhd])", part)
        if match is None:
            raise ConfigError(f"messageDelayLevel: {part!r} is not a number with s, m, h or d")
        levels.append(int(match[1]) * DURATION_MS[match[2]])
    if not levels:
        raise ConfigError("messageDelayLevel: at least one level is needed")
    return levels


class ScheduleMessage:
    """Messages of the delay levels (RocketMQ's ScheduleMessageService).

    Invariant: a saved offset never exceeds that of the last message whose copy is on disk.
    """

    requested_by = frozenset((PROPERTY_DELAY,))
    kind = "delay"

    def __init__(  # noqa: PLR0917
        self,
        store: MessageStore,
        writer: LogWriter,
        clock: Clock,
        levels: list[int],
        disk: Disk,
        path: Path,
        sync_log: SyncLog,
        faults: Faults,
        threads: Threads = SYSTEM_THREADS,
        journal: Journal = NO_JOURNAL,
        *,
        read_queues: ReadQueues,
    ) -> None:
        self._store, self._writer, self._clock, self._journal = store, writer, clock, journal
        self._queues = store.queues
        self._levels, self._faults, self._read_queues = levels, faults, read_queues
        self._quarantine = Quarantine(store, SCHEDULE_TOPIC, faults)
        # The current offsets are not in the log yet.
        self._unsaid = False
        self._offsets: dict[int, int] = {}
        self._log_takes_nothing = False
        # Level → messages below this queue offset with a store time in the future are due at this monotonic time.
        self._ahead: dict[int, tuple[int, float]] = {}
        self.file = StateFile(disk, path, self._snapshot, sync_log=sync_log, threads=threads)
        self.on_delivered: Callable[[], None] = lambda: None

    def load(self) -> None:
        """Load the offsets from the log, or from the file if the log has none, at a start."""
        run_here(self.load_parts())
        self.file.resume()

    def load_parts(self) -> Parts[None]:
        """Run `load` in parts when a master becomes a slave; the file stays suspended."""
        value = yield from self.file.load_parts(offsetTable=dict[int, int], saidBelow=int)
        self._offsets.clear()
        self._unsaid = False
        self._take(value.get("offsetTable", {}))
        recorded_below, end = value.get("saidBelow", 0), self._queues.max_offset(METADATA_LOG, DELAYS)
        if recorded_below != end:  # the log has newer records than the file, or was truncated below the file's state
            self.follow()

    def follow(self) -> None:
        """Load the offsets of the newest log record: at a start, and on a slave, whose master delivers.

        Raises UnreadableChange.
        """
        newest = self._writer.internal.last(METADATA_LOG, DELAYS, _delay_positions)
        if newest is not None:
            self.install(newest.offsets)

    def positions(self) -> dict[int, int]:
        """Return the queue offset of the next message to deliver, by level."""
        return dict(self._offsets)

    def install(self, positions: Mapping[int, int]) -> None:
        """Replace the offsets by those of a master."""
        self._offsets.clear()
        self._take(positions)
        self.file.touch()

    def _take(self, positions: Mapping[int, int]) -> None:
        for level, offset in positions.items():
            # After a power failure, the log may end before an offset that was saved.
            self._offsets[level] = min(offset, self._queues.max_offset(SCHEDULE_TOPIC, level - 1))

    def _record(self) -> None:
        """Log all offsets after the delivered copies; if the log refuses the record, the next round retries."""
        try:
            self._journal.record(DelayPositions(offsets=dict(self._offsets)))
        except BrokerError as error:
            log.debug("delay positions are not in the log yet: %s", error.remark)
            self._unsaid = True
        else:
            self._unsaid = False

    def _snapshot(self) -> Mapping[str, Any]:
        recorded_below = self._queues.next_offset(METADATA_LOG, DELAYS)
        return {
            "saidBelow": recorded_below,
            "offsetTable": {str(level): offset for level, offset in self._offsets.items()},
        }

    @property
    def max_level(self) -> int:
        return len(self._levels)

    def take(self, message: NewMessage, properties: Mapping[str, str]) -> tuple[PutResult, None] | None:
        """Store a message until its level's delay has passed; None if the message has no delay level."""
        level = _level(properties.get(PROPERTY_DELAY), self.max_level)
        if not level:
            return None
        parked = msgspec.structs.replace(
            message,
            topic=SCHEDULE_TOPIC,
            queue_id=level - 1,
            properties=ended_bytes(message.properties) + target_pairs(message.topic, message.queue_id),
            tags_code=self.deliver_time(level, self._clock.now_ms()),
        )
        return self._writer.put(parked, internal=True), None

    def deliver_time(self, level: int, store_ms: int) -> int:
        """Return the delivery time (ms) of a message by its level and store time."""
        return store_ms + self._levels[level - 1]

    def position(self, level: int) -> tuple[int, int]:
        """Return the next offset to deliver of a level, and the end of its queue."""
        return self._offsets.get(level, 0), self._queues.max_offset(SCHEDULE_TOPIC, level - 1)

    def pending(self) -> int:
        """Return the number of waiting messages."""
        floors = ((self._queues.min_offset(SCHEDULE_TOPIC, level - 1), level) for level in range(1, self.max_level + 1))
        return sum(
            max(end - max(offset, floor), 0) for floor, level in floors for offset, end in [self.position(level)]
        )

    def deliver_due(self) -> int:
        """Append due messages, at most one batch per level; return the number delivered. A slave delivers none."""
        if self._store.end.is_following:
            return 0
        before = sum(self._offsets.values())
        try:
            for level in range(1, len(self._levels) + 1):
                self._try_level(level)
        except (StoreFull, StoreNotWritable) as error:
            if not self._log_takes_nothing:
                log.warning("delayed messages can't be delivered now: %s", error)
            self._log_takes_nothing = True
        else:
            self._log_takes_nothing = False
        delivered = sum(self._offsets.values()) - before
        if delivered or self._unsaid:
            self._record()
        if delivered:
            self.file.touch()
            self.on_delivered()
        return delivered

    def _try_level(self, level: int) -> None:
        try:
            self._deliver_level(level)
        except (StoreFull, StoreNotWritable):
            raise
        except TRANSIENT as error:
            self._faults.add("a delay level", error, level)
        except Exception as error:  # noqa: BLE001 - the message is retried, then quarantined
            offset = self._next(level)
            if self._quarantine.failed("a delay level", level - 1, offset, error):
                self._offsets[level] = offset + 1

    def _next(self, level: int) -> int:
        """Return the offset of the level's first undelivered message that is still in the log."""
        return max(self._offsets.get(level, 0), self._queues.min_offset(SCHEDULE_TOPIC, level - 1))

    def _deliver_level(self, level: int) -> None:
        queue = level - 1
        end = self._queues.max_offset(SCHEDULE_TOPIC, queue)
        offset = self._next(level)
        if offset >= end:
            return
        got = self._store.reader.get(SCHEDULE_TOPIC, queue, offset, _BATCH, _BATCH_BYTES)
        now = self._clock.now_ms()
        for record in (record for buffer in got.buffers for record in iter_records(buffer)):
            if not self._is_due(level, record, now):
                break
            try:
                self._deliver(record)
            except TopicMissing as error:
                log.warning("delayed message dropped: %s; position=%d", error, record.physical_offset)
            except UNDELIVERABLE as error:
                self._faults.add("a delayed message", error, f"at {record.physical_offset}")
            self._offsets[level] = record.queue_offset + 1
            self._quarantine.delivered(queue, record.queue_offset)

    def _is_due(self, level: int, record: MessageRecord, now: int) -> bool:
        when, delay = self.deliver_time(level, record.store_timestamp), self._levels[level - 1]
        if when <= now + delay:
            return when <= now
        # The message was stored while the clock was ahead, so its true store time is unknown. It waits for its delay
        # from now on, together with all others stored by now, and not until the clock reaches its store time.
        below, until = self._ahead.get(level, (0, 0.0))
        if record.queue_offset >= below:
            below, until = self._queues.max_offset(SCHEDULE_TOPIC, level - 1), self._clock.monotonic() + delay / 1000
            self._ahead[level] = below, until
        return self._clock.monotonic() >= until

    def _deliver(self, record: MessageRecord) -> None:
        properties = record.properties
        topic, queue = delivery_target(properties, self._read_queues)
        self._writer.put_copy(record, topic, queue, properties=properties)

    def reappend(self, below: int, timers: TimerMessages) -> bool:
        """Move a batch of the messages below a physical offset to the timers; return False if none can be moved now.

        Messages that are due soon stay. Raises StoreFull or StoreNotWritable.
        """
        reappended = 0
        try:
            for level in range(1, len(self._levels) + 1):
                for record in self._waiting_first(level):
                    when = self.deliver_time(level, record.store_timestamp)
                    soon = when - self._clock.now_ms() <= REAPPEND_AGAIN_MS
                    if record.physical_offset >= below or soon or not timers.take_over(record, when):
                        break
                    self._offsets[level] = record.queue_offset + 1
                    reappended += 1
        finally:
            if reappended:
                self._record()
                self.file.touch()
        return reappended > 0

    def _waiting_first(self, level: int) -> list[MessageRecord]:
        """Return a batch of a level's first waiting messages."""
        offset, end = self.position(level)
        offset = max(offset, self._queues.min_offset(SCHEDULE_TOPIC, level - 1))
        if offset >= end:
            return []
        got = self._store.reader.get(SCHEDULE_TOPIC, level - 1, offset, _BATCH, _BATCH_BYTES)
        return [record for buffer in got.buffers for record in iter_records(buffer)]

    def oldest_pending_physical(self) -> int | None:
        """Return the lowest physical offset that a waiting message needs; its segment must not be evicted."""
        lowest: int | None = None
        for level in range(1, len(self._levels) + 1):
            offset, end = self.position(level)
            # After a restart, the offset may be an old one, of messages that were delivered and evicted.
            offset = max(offset, self._queues.min_offset(SCHEDULE_TOPIC, level - 1))
            if offset < end:
                got = self._store.reader.get(SCHEDULE_TOPIC, level - 1, offset, 1, _BATCH_BYTES)
                for record in (record for buffer in got.buffers for record in iter_records(buffer)):
                    position = record.physical_offset
                    lowest = position if lowest is None else min(lowest, position)
        return lowest


def _delay_positions(record: MessageRecord) -> DelayPositions | None:
    change = decode_change(record.body)
    return change if isinstance(change, DelayPositions) else None


def _level(delay: str | None, maximum: int) -> int:
    """Parse a delay level; levels above the maximum become the maximum, an invalid number means no delay."""
    if delay is None or not delay.isascii() or not delay.isdigit():
        return 0
    digits = delay.lstrip("0")
    return min(int(digits[:_LEVEL_DIGITS] or "0"), maximum)
