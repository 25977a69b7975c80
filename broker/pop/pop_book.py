"""Pop book: the next offset to hand out and the messages in flight, for each group and queue.

Each change is first written as a record of the revive log, then applied to its queue (`pop_queue`). A restart reads
the last image of the book and applies the records after it, so acknowledgements survive. Messages that were in flight
become visible again. For a queue in the book, the book is authoritative and the offset table follows it. Code that
resets a group's offset must therefore change the book first.

An idle queue without messages in flight leaves the book. From then on, the offset table is authoritative. A record of
the metadata log stores the queue's offset before that, so slaves have it as well.

Image: {"logOffset": first revive log offset after the image, "queues": [[…], …], "floor": pop time, "isPart": true}
floor   latest pop time of the queues that left the book; a queue that returns gets later pop times
isPart  the log was truncated below records that the book had applied, so the book covers only the log after that
        point. On promotion, such a broker redelivers all messages from the group's committed offset.
queue [group, topic, queue, next, flights, times, batch]
flights [[offset, pop time, visible at, in order], …], times [newest, floor], batch [attempt, [offset, …], [count, …]]
"""

import heapq
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from broker.intake.intake import refusal
from broker.intake.internal_records import WRITTEN_BY_NEVE
from broker.intake.log_writer import LogWriter
from broker.intake.message import NewMessage
from broker.pop.pop_log import (
    Ack,
    ChangeInvisibleTime,
    Event,
    Freed,
    PopCheckPoint,
    QueueRemoved,
    Reset,
    decode_event,
    encode_event,
)
from broker.pop.pop_queue import Batch, Flight, Key, PopQueue
from broker.store.errors import StoreError, StoreFull, StoreNotWritable
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.state_file import StateFile, SyncLog
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.loop.in_steps import Steps, at_once, in_turns
from infra.loop.parts import Parts, nothing, run_here
from infra.loop.threads import SYSTEM_THREADS, Threads
from neve.errors import BrokerError
from neve.record.codec import iter_records
from neve.remoting.codes import ResponseCode
from neve.remoting.names import REVIVE_LOG_PREFIX

log = logging.getLogger(__name__)

_LOG_QUEUE = 0
_BATCH_BYTES = 4 << 20
_ALL_QUEUES = -1
# Idle time after which a queue without messages in flight leaves the book.
_IDLE_MS = 600_000
# Per turn of the event loop: queues checked for idleness, and queues dropped (each by one record of the log).
_IDLE_SLICE, _DROP_SLICE = 2_000, 32
# Per turn of a promotion: records applied from the log, and queues plus messages in flight committed.
_FOLLOWED_SLICE, _LED_SLICE = 200, 500


class PopBook:
    """Pop state of all groups: the table, its image on disk, and the revive log after the image.

    Invariant: an event is in the log before it is in the table. Replaces RocketMQ's PopBufferMergeService and its
    checkpoint messages. Changes raise BrokerError if the log refuses the record.
    """

    def __init__(  # noqa: PLR0917
        self,
        store: MessageStore,
        writer: LogWriter,
        offsets: ConsumerOffsetManager,
        clock: Clock,
        disk: Disk,
        path: Path,
        topic: str,
        sync_log: SyncLog,
        threads: Threads = SYSTEM_THREADS,
    ) -> None:
        self._store, self._writer, self._offsets, self._clock = store, writer, offsets, clock
        self._topic = topic
        self.queues: dict[Key, PopQueue] = {}
        self._due: list[tuple[int, Key, int]] = []
        self._floor = 0  # see the image format above
        self._image: Mapping[str, Any] = {}
        self._log_start = 0
        self._followed = 0  # on a slave: offset of the first revive log record that is not applied yet
        self._is_part = False  # see the image format above
        self._changed = False
        # The log refused a record, so the next image must be saved to make that change durable.
        self._unlogged = False
        self.file = StateFile(disk, path, lambda: self._image, sync_log=sync_log, threads=threads)

    # ---- restart

    def load(self) -> None:
        """Load the last image and apply the log after it, limited to the end of the recovered log.

        Runs at a start. The previous content of the book is discarded.
        """
        run_here(self.load_parts())
        self.file.resume()

    def load_parts(self) -> Parts[None]:
        """Run `load` in parts, at a start and when a master becomes a slave; the file stays suspended.

        `follow` must not run before all parts have ended.
        """
        value = yield from self.file.load_parts()
        self.queues.clear()
        self._due.clear()
        self._changed = self._unlogged = False
        self._floor = int(value.get("floor", 0))
        end, behind = self._store.queues.max_offset(self._topic, _LOG_QUEUE), int(value.get("logOffset", 0))
        self._log_start = self._followed = min(behind, end)
        self._is_part = bool(value.get("isPart"))
        if self._store.end.is_following and behind > self._store.queues.next_offset(self._topic, _LOG_QUEUE):
            self._is_part = True  # an `async` set lost log records that are part of the image
            self._capture()
            yield from self.file.save_parts()
            return
        for number, row in enumerate(value.get("queues", ()), 1):
            self._load_queue(*row)
            if number % _LED_SLICE == 0:
                yield nothing
        if self._store.end.is_following:
            return  # `follow` applies the log
        at_once(self.lead_steps())
        self._is_part = False
        if self.queues or value:
            log_start = self._capture()
            self.file.save_now()
            self._log_start = log_start

    def begin_with(self, queues: Sequence[tuple[Key, int, Sequence[tuple[int, Flight]]]]) -> None:
        """Initialize the book with the state of another broker: each queue's next offset and messages in flight.

        Runs at a start, when the whole revive log is on disk. Skips all its records, because the state includes them.
        """
        self.queues.clear()
        self._due.clear()
        for key, following, flights in queues:
            queue = self._make(key, following)
            for offset, flight in flights:
                self._fly(queue, offset, flight)
        self._followed = self._store.queues.next_offset(self._topic, _LOG_QUEUE)
        self._log_start = self._capture()
        self.file.save_now()

    def follow(self, at_most: int) -> bool:
        """Apply up to `at_most` further events of the log on a slave; return False if none is left."""
        for event, following in self._events(self._followed):
            if event is not None:
                self._apply(event)
            self._followed = following
            at_most -= 1
            if at_most <= 0:
                return True
        return False

    def lead_steps(self) -> Steps[None]:
        """Run the slow part of a promotion, while the log does not grow and no offset changes.

        Apply all events of the log, clip each queue to its end, and store its offset in the offset table. `load` undoes
        this if the promotion fails.
        """
        while self.follow(_FOLLOWED_SLICE):
            yield
        weight = 0
        for queue in list(self.queues.values()):
            self._clip(queue)
            acknowledged = self._offsets.query(*queue.key) if self._is_part else -1
            if 0 <= acknowledged < queue.low():
                queue.go_to(acknowledged)
            self._commit(queue)
            weight += 1 + len(queue.flights)
            if weight >= _LED_SLICE:
                weight = 0
                yield

    def lead(self) -> None:
        """Finish a promotion after `lead_steps`: this broker is now the only writer of the log."""
        assert next(self._events(self._followed), None) is None, "the book has all events of the log"
        self._is_part, self._changed = False, True

    def _load_queue(  # noqa: PLR0917
        self,
        group: str,
        topic: str,
        queue_id: int,
        following: int,
        flights: Iterable[tuple[int, int, int, bool]],
        times: Iterable[int] = (0, 0),
        batch: tuple[str, Sequence[int], Sequence[int]] = ("", (), ()),
    ) -> None:
        queue = self._make((group, topic, int(queue_id)), int(following))
        for offset, pop_time, visible_at, in_order in flights:
            self._fly(queue, int(offset), Flight(int(pop_time), int(visible_at), bool(in_order)))
        newest, queue.floor = map(int, times)
        queue.newest = max(queue.newest, newest)
        attempt, offsets, counts = batch
        queue.batch = Batch(attempt, offsets, {o: count for o, count in zip(offsets, counts, strict=True) if count})

    def _events(self, start: int) -> Iterator[tuple[Event | None, int]]:
        """Yield each record's event with the following offset.

        The event is None for records that are malformed or not written by neve.
        """
        first = max(start, self._store.queues.min_offset(self._topic, _LOG_QUEUE))
        end, records = self._store.queues.max_offset(self._topic, _LOG_QUEUE), self._writer.internal
        for record in records.scan(self._topic, _LOG_QUEUE, first, end):
            event = None
            if records.is_own(record):
                try:
                    event = decode_event(record.body)
                except msgspec.DecodeError as error:
                    log.error("revive log at %d: %s", record.queue_offset, error)
            yield event, record.queue_offset + 1

    def _clip(self, queue: PopQueue) -> None:
        _, topic, queue_id = queue.key
        end = self._store.queues.max_offset(topic, queue_id)
        queue.next_offset = min(queue.next_offset, end)
        for offset in [offset for offset in queue.flights if offset >= end]:
            del queue.flights[offset]

    @property
    def dirty(self) -> bool:
        """Whether the book or its file has changes that are not on disk."""
        return self._changed or self.file.dirty

    async def save(self) -> None:
        """Save a new image. Only afterwards may the log before it be deleted."""
        log_start = self._capture()
        await self.file.save()
        self._log_start = max(self._log_start, log_start)

    def _capture(self) -> int:
        """Capture the image that the file writes next; return the revive log offset at which the log continues it."""
        # The image includes applied events that are not fsynced yet. Applying them once more would undo later events,
        # so the image's log offset is the end of the log and not the end of its durable part.
        store = self._store
        log_start = self._followed if store.end.is_following else store.queues.next_offset(self._topic, _LOG_QUEUE)
        image: dict[str, Any] = {
            "logOffset": log_start,
            "floor": self._floor,
            "queues": [_row(queue) for queue in self.queues.values()],
        }
        if self._is_part:
            image["isPart"] = True
        self._image = image
        self._changed = self._unlogged = False
        self.file.touch()
        return log_start

    def oldest_needed_physical(self) -> int | None:
        """Return the physical offset of the first revive log record that a restart reads, None if it reads none.

        Messages in flight do not count: they may be read from the archive.
        """
        if self._log_start >= self._store.queues.max_offset(self._topic, _LOG_QUEUE):
            return None
        got = self._store.reader.get(self._topic, _LOG_QUEUE, self._log_start, 1, _BATCH_BYTES)
        return next((record.physical_offset for buffer in got.buffers for record in iter_records(buffer)), None)

    # ---- changes

    def find(self, group: str, topic: str, queue_id: int) -> PopQueue | None:
        return self.queues.get((group, topic, queue_id))

    def open(self, group: str, topic: str, queue_id: int, initial: int) -> PopQueue:
        """Return the queue for a pop; a group that has no offset starts at `initial`.

        Raises BrokerError if the group has no offset and there is no room for one more.
        """
        found = self.find(group, topic, queue_id)
        if found is not None:
            return found
        committed = self._offsets.query(group, topic, queue_id)
        if committed < 0:
            self._offsets.require_room()
        queue = self._make((group, topic, queue_id), committed if committed >= 0 else initial)
        self._commit(queue)
        return queue

    def set_elsewhere(self, group: str, topic: str, queue_id: int, offset: int) -> bool:
        """Move a group that pops to another offset and forget its messages in flight.

        Return False if the book does not have the queue, or if this broker is a slave.
        """
        if (group, topic, queue_id) not in self.queues or self._store.end.is_following:
            return False
        self._reset(Reset(group, topic, queue_id, offset))
        return True

    def drop(self, *, topic: str = "", group: str = "") -> None:
        """Drop all queues of a deleted topic or group.

        A single record describes all of them, because one record each would block the event loop.
        """
        if self._keys(group, topic):
            self._reset(QueueRemoved(group, topic, _ALL_QUEUES))

    def forget(self, *, topic: str = "", group: str = "") -> bool:
        """Drop all queues of a topic or group whose deletion another record of the log already describes.

        Return False if the book had none.
        """
        had = bool(self._keys(group, topic))
        if had:
            self._apply(QueueRemoved(group, topic, _ALL_QUEUES))
        return had

    def _keys(self, group: str, topic: str) -> list[Key]:
        """Return keys of queues in the book; an empty name matches every name."""
        return [key for key in self.queues if topic in ("", key[1]) and group in ("", key[0])]

    def publish_offsets(self) -> None:
        """Copy the offsets of all queues in the book to the offset table."""
        for queue in self.queues.values():
            self._commit(queue)

    def _reset(self, event: Reset | QueueRemoved) -> None:
        """Log and apply an event that must not fail: if the log refuses the record, the next image makes it durable."""
        try:
            self.record(event)
        except BrokerError as error:
            log.warning("%s is not in the log yet: %s", event, error)
            self._unlogged = True
            self._apply(event)

    async def drop_idle(self) -> int:
        """Drop the idle queues without messages in flight; return their number.

        Their offsets are logged first, so that the next pop, the next start and slaves find them in the offset table. A
        slave that only polled the table would lose the acknowledgements since its last poll.
        """
        if self._store.end.is_following:
            return 0
        return await in_turns(self._drop(await in_turns(self._idle())))

    def _idle(self) -> Steps[dict[tuple[str, str], list[PopQueue]]]:
        """Return the idle queues by group and topic."""
        before = self._clock.now_ms() - _IDLE_MS
        found: dict[tuple[str, str], list[PopQueue]] = {}
        for number, queue in enumerate(list(self.queues.values()), 1):
            if queue.is_empty and queue.newest < before and self._offsets.query(*queue.key) == queue.next_offset:
                found.setdefault(queue.key[:2], []).append(queue)
            if number % _IDLE_SLICE == 0:
                yield
        return found

    def _drop(self, idle: Mapping[tuple[str, str], Sequence[PopQueue]]) -> Steps[int]:
        """Drop the queues that have not changed since their offset was logged."""
        dropped = work = 0
        for pair, queues in idle.items():
            if self._store.end.is_following:
                break
            try:
                logged = self._offsets.log_committed(*pair)
                work += len(logged) // _DROP_SLICE
                for queue in queues:
                    is_same = queue.is_empty and queue.next_offset == logged.get(queue.key[2])
                    if is_same and self.queues.get(queue.key) is queue and not self._store.end.is_following:
                        self.record(QueueRemoved(*queue.key))
                        dropped += 1
                    work += 1
                    if work >= _DROP_SLICE:
                        work = 0
                        yield
            except BrokerError as error:
                log.warning("idle queues not removed from the pop book: %s", error)
                break
        return dropped

    async def settle(self) -> None:
        """Save the image if the log refused a reset. Then all resets survive a crash once the log is fsynced."""
        if self._unlogged:
            await self.save()

    def release(self, queue: PopQueue) -> bool:
        """Return whether an ordered queue may be popped again.

        If so, the messages of its last batch are no longer in flight.
        """
        now, batch = self._clock.now_ms(), [flight for flight in queue.flights.values() if flight.in_order]
        if any(flight.visible_at > now for flight in batch):
            return False
        if batch:
            self.record(Freed(*queue.key, queue.low()))
        return True

    def record(self, event: Event) -> None:
        """Log an event and apply it. Raises BrokerError if the log refuses the record."""
        host, now = self._store.config.store_host, self._clock.now_ms()
        stored = NewMessage(
            topic=self._topic,
            queue_id=_LOG_QUEUE,
            body=encode_event(event),
            born_timestamp=now,
            born_host=host,
            prepared_transaction_offset=WRITTEN_BY_NEVE,
        )
        try:
            self._writer.put(stored, internal=True)
        except (StoreFull, StoreNotWritable) as error:
            raise refusal(error) from error
        except StoreError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"the pop's record can't be kept: {error}") from error
        queue = self._apply(event)
        if queue is not None:
            self._commit(queue)

    def take_due(self) -> list[tuple[PopQueue, int, Flight]]:
        """Return the messages in flight whose invisible time has expired; none on a slave.

        They stay in the book until an event about them is recorded.
        """
        if self._store.end.is_following:
            return []
        now, found = self._clock.now_ms(), []
        while self._due and self._due[0][0] <= now:
            visible_at, key, offset = heapq.heappop(self._due)
            queue = self.queues.get(key)
            flight = queue.flights.get(offset) if queue is not None else None
            if queue is not None and flight is not None and flight.visible_at == visible_at:
                found.append((queue, offset, flight))
        return found

    def put_off(self, queue: PopQueue, offset: int, flight: Flight, until: int) -> None:
        """Defer a message that can't be revived now until `until` (ms)."""
        if queue.flights.get(offset) is flight:
            flight.visible_at = until
            heapq.heappush(self._due, (until, queue.key, offset))

    # ---- inside

    def _make(self, key: Key, following: int) -> PopQueue:
        queue = self.queues[key] = PopQueue(key, following, newest=self._floor, floor=self._floor)
        return queue

    def _fly(self, queue: PopQueue, offset: int, flight: Flight) -> None:
        queue.add(offset, flight)
        heapq.heappush(self._due, (flight.visible_at, queue.key, offset))

    def _apply(self, event: Event) -> PopQueue | None:
        """Apply an event and return the queue that it changed; None if the queue is no longer in the book."""
        key = (event.group, event.topic, event.queue_id)
        self._changed = True
        if isinstance(event, QueueRemoved):
            self._remove([key] if event.queue_id >= 0 else self._keys(event.group, event.topic))
            return None
        queue = self.queues.get(key)
        if queue is None:
            if not isinstance(event, PopCheckPoint | Reset):
                return None
            queue = self._make(key, event.next_offset)
        match event:
            case PopCheckPoint():
                if event.in_order:
                    queue.begin_batch(event)
                queue.next_offset = max(queue.next_offset, event.next_offset)
                for offset in event.offsets:
                    self._fly(queue, offset, Flight(event.pop_time, event.visible_at, event.in_order))
            case Ack():
                for offset in event.offsets:
                    self._land(queue, offset, event.pop_time)
            case ChangeInvisibleTime():
                flight = queue.flights.get(event.offset)
                if flight is not None and flight.pop_time == event.old_pop_time:
                    self._fly(queue, event.offset, Flight(event.pop_time, event.visible_at, flight.in_order))
            case Freed():
                queue.go_to(event.next_offset)
            case Reset():
                queue.batch = Batch()
                queue.go_to(event.next_offset)
        return queue

    def _remove(self, keys: Iterable[Key]) -> None:
        for key in keys:
            removed = self.queues.pop(key, None)
            self._floor = max(self._floor, 0 if removed is None else removed.newest)

    @staticmethod
    def _land(queue: PopQueue, offset: int, pop_time: int) -> None:
        flight = queue.flights.get(offset)
        if flight is not None and flight.pop_time == pop_time:
            del queue.flights[offset]

    def _commit(self, queue: PopQueue) -> None:
        low = queue.low()
        if low != queue.committed or self._offsets.query(*queue.key) != low:
            self._offsets.follow(*queue.key, low)
            queue.committed = low


def revive_log(cluster: str) -> str:
    return REVIVE_LOG_PREFIX + cluster


def _row(queue: PopQueue) -> list[Any]:
    flights = [[offset, out.pop_time, out.visible_at, out.in_order] for offset, out in queue.flights.items()]
    batch = queue.batch
    counts = [batch.counts.get(offset, 0) for offset in batch.offsets]
    times = [queue.newest, queue.floor]
    return [*queue.key, queue.next_offset, flights, times, [batch.attempt, batch.offsets, counts]]
