"""Who has which message until when: for each group and queue the next offset to hand out and what is out.

Every change is a record of the revive log first, then applied to its queue (`pop_queue`); a restart reads the last
image of the book and applies the records behind it: what was acknowledged stays so and what was not comes again.
Of a queue that is in the book, the book is the truth and the offset table follows it; who sets the group elsewhere
comes here first.

A queue without a message out leaves the book when it is idle. The offset table is the truth then; a record of the
metadata log states the offsets before, for slaves.

Image: {"logOffset": first record of the log behind it, "queues": [[…], …], "floor": pop time, "isPart": true}
floor   the latest pop time of the queues that left the book: a queue that comes back has later ones
isPart  records that were in the book were cut off the log: what it has is from behind the cut. Who leads by it gives
        out again what groups had not acknowledged by the offset table.
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
    Gone,
    PopCheckPoint,
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
# A queue that was not popped for so long, and has no message out, leaves the book.
_IDLE_MS = 600_000
# Queues looked at, and dropped by a record of the log each, in one turn of the event loop.
_IDLE_SLICE, _DROP_SLICE = 2_000, 32
# In one turn of a promotion: records of the log, or queues and messages in flight.
_FOLLOWED_SLICE, _LED_SLICE = 200, 500


class PopBook:
    """What every popping group holds: the table, its image on disk, and the log of events behind the image.

    Invariant: an event is in the log before it is in the table. Takes the place of RocketMQ's PopBufferMergeService
    and its checkpoint messages. Changes raise BrokerError when the log takes nothing now.
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
        self._floor = 0  # see the image
        self._image: Mapping[str, Any] = {}
        self._log_start = 0
        self._followed = 0  # of a slave: the book has all below this offset of the log
        self._is_part = False  # see the image
        self._changed = False
        # The log refused a record that the next image has to say.
        self._unlogged = False
        self.file = StateFile(disk, path, lambda: self._image, sync_log=sync_log, threads=threads)

    # ---- restart

    def load(self) -> None:
        """The last image and the log behind it, cut to what the recovered log still holds.

        At a start.
        """
        run_here(self.load_parts())
        self.file.resume()

    def load_parts(self) -> Parts[None]:
        """As `load`, also where a master becomes a slave: the file stays suspended. `follow` must wait for the end."""
        value = yield from self.file.load_parts()
        self.queues.clear()
        self._due.clear()
        self._changed = self._unlogged = False
        self._floor = int(value.get("floor", 0))
        end, behind = self._store.max_offset(self._topic, _LOG_QUEUE), int(value.get("logOffset", 0))
        self._log_start = self._followed = min(behind, end)
        self._is_part = bool(value.get("isPart"))
        if self._store.is_following and behind > self._store.next_offset(self._topic, _LOG_QUEUE):
            self._is_part = True  # of an `async` set, that lost what the image was made of
            self._capture()
            yield from self.file.save_parts()
            return
        for number, row in enumerate(value.get("queues", ()), 1):
            self._load_queue(*row)
            if number % _LED_SLICE == 0:
                yield nothing
        if self._store.is_following:
            return  # `follow` goes on
        at_once(self.lead_steps())
        self._is_part = False
        if self.queues or value:
            log_start = self._capture()
            self.file.save_now()
            self._log_start = log_start

    def begin_with(self, queues: Sequence[tuple[Key, int, Sequence[tuple[int, Flight]]]]) -> None:
        """Go on with what another broker left: each queue's next offset, and what is out. Of its log nothing is read.

        At a start, when all of the log is on the disk.
        """
        self.queues.clear()
        self._due.clear()
        for key, following, flights in queues:
            queue = self._make(key, following)
            for offset, flight in flights:
                self._fly(queue, offset, flight)
        self._followed = self._store.next_offset(self._topic, _LOG_QUEUE)
        self._log_start = self._capture()
        self.file.save_now()

    def follow(self, at_most: int) -> bool:
        """What the log has behind that, of a slave; False: that is all by now."""
        for event, following in self._events(self._followed):
            if event is not None:
                self._apply(event)
            self._followed = following
            at_most -= 1
            if at_most <= 0:
                return True
        return False

    def lead_steps(self) -> Steps[None]:
        """The part of `lead` that takes its time, while the log does not grow and no offset changes.

        Apply all events of the log, clip each queue to its end, and store its offset in the offset table. `load` undoes
        that, if this broker does not lead after all.
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
        """Behind `lead_steps`: all of the log is this broker's own from now on."""
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
        """Yield each record's event with the offset behind it; None for a record that is to be ignored."""
        first = max(start, self._store.min_offset(self._topic, _LOG_QUEUE))
        end, records = self._store.max_offset(self._topic, _LOG_QUEUE), self._writer.internal
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
        end = self._store.max_offset(topic, queue_id)
        queue.next_offset = min(queue.next_offset, end)
        for offset in [offset for offset in queue.flights if offset >= end]:
            del queue.flights[offset]

    @property
    def dirty(self) -> bool:
        """Whether the image on the disk is behind."""
        return self._changed or self.file.dirty

    async def save(self) -> None:
        """A new image on the disk; only then is the log below it not needed any more."""
        log_start = self._capture()
        await self.file.save()
        self._log_start = max(self._log_start, log_start)

    def _capture(self) -> int:
        """Take the image that the file writes next; returns the offset of the revive log from which it is continued."""
        # the image has what is applied, also what no sync has confirmed yet: told again it would undo what came after
        store = self._store
        log_start = self._followed if store.is_following else store.next_offset(self._topic, _LOG_QUEUE)
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
        """The first log position that a restart reads; what is out may be read from the archive."""
        if self._log_start >= self._store.max_offset(self._topic, _LOG_QUEUE):
            return None
        got = self._store.get(self._topic, _LOG_QUEUE, self._log_start, 1, _BATCH_BYTES)
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
        """Somebody sets the group's offset: it goes on there, and what is out is forgotten. False: it doesn't pop."""
        if (group, topic, queue_id) not in self.queues or self._store.is_following:
            return False
        self._reset(Reset(group, topic, queue_id, offset))
        return True

    def drop(self, *, topic: str = "", group: str = "") -> None:
        """All queues of a deleted topic or group, by a single record: a record for each queue would stop the loop."""
        if self._keys(group, topic):
            self._reset(Gone(group, topic, _ALL_QUEUES))

    def forget(self, *, topic: str = "", group: str = "") -> bool:
        """As `drop`, where the log says elsewhere that the topic or the group is gone. False: it had nothing of it."""
        had = bool(self._keys(group, topic))
        if had:
            self._apply(Gone(group, topic, _ALL_QUEUES))
        return had

    def _keys(self, group: str, topic: str) -> list[Key]:
        """Keys of the queues in the book; an empty name matches every name."""
        return [key for key in self.queues if topic in ("", key[1]) and group in ("", key[0])]

    def tell_offsets(self) -> None:
        """The table of offsets says of popped queues what the book says."""
        for queue in self.queues.values():
            self._commit(queue)

    def _reset(self, event: Reset | Gone) -> None:
        """A log that takes nothing now is no reason to refuse: the next image says it."""
        try:
            self.record(event)
        except BrokerError as error:
            log.warning("%s is not in the log yet: %s", event, error)
            self._unlogged = True
            self._apply(event)

    async def drop_idle(self) -> int:
        """Drop the queues that have no message out and were not popped for a while; returns how many.

        Their offsets are in the log first: the next pop, the next start and slaves find them in the offset table. A
        slave polls that table, and would lose what was acknowledged since its last poll.
        """
        if self._store.is_following:
            return 0
        return await in_turns(self._drop(await in_turns(self._idle())))

    def _idle(self) -> Steps[dict[tuple[str, str], list[PopQueue]]]:
        """Idle queues by group and topic."""
        before = self._clock.now_ms() - _IDLE_MS
        found: dict[tuple[str, str], list[PopQueue]] = {}
        for number, queue in enumerate(list(self.queues.values()), 1):
            if queue.is_empty and queue.newest < before and self._offsets.query(*queue.key) == queue.next_offset:
                found.setdefault(queue.key[:2], []).append(queue)
            if number % _IDLE_SLICE == 0:
                yield
        return found

    def _drop(self, idle: Mapping[tuple[str, str], Sequence[PopQueue]]) -> Steps[int]:
        """Drop those that have not changed since their offset was logged."""
        dropped = work = 0
        for pair, queues in idle.items():
            if self._store.is_following:
                break
            try:
                logged = self._offsets.log_standing(*pair)
                work += len(logged) // _DROP_SLICE
                for queue in queues:
                    is_same = queue.is_empty and queue.next_offset == logged.get(queue.key[2])
                    if is_same and self.queues.get(queue.key) is queue and not self._store.is_following:
                        self.record(Gone(*queue.key))
                        dropped += 1
                    work += 1
                    if work >= _DROP_SLICE:
                        work = 0
                        yield
            except BrokerError as error:
                log.warning("idle queues stay in the pop book: %s", error)
                break
        return dropped

    async def settle(self) -> None:
        """Returns when what was set elsewhere outlives a crash, as soon as the log is synced."""
        if self._unlogged:
            await self.save()

    def release(self, queue: PopQueue) -> bool:
        """True when an ordered queue may be popped again; what came into view of its batch is then no longer out."""
        now, batch = self._clock.now_ms(), [flight for flight in queue.flights.values() if flight.in_order]
        if any(flight.visible_at > now for flight in batch):
            return False
        if batch:
            self.record(Freed(*queue.key, queue.low()))
        return True

    def record(self, event: Event) -> None:
        """Log and apply. Raises BrokerError when the log takes nothing now."""
        host, now = self._store.config.store_host, self._clock.now_ms()
        said = NewMessage(
            topic=self._topic,
            queue_id=_LOG_QUEUE,
            body=encode_event(event),
            born_timestamp=now,
            born_host=host,
            prepared_transaction_offset=WRITTEN_BY_NEVE,
        )
        try:
            self._writer.put(said, internal=True)
        except (StoreFull, StoreNotWritable) as error:
            raise refusal(error) from error
        except StoreError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"the pop's record can't be kept: {error}") from error
        queue = self._apply(event)
        if queue is not None:
            self._commit(queue)

    def take_due(self) -> list[tuple[PopQueue, int, Flight]]:
        """What is out for too long; it stays in the book until its event is recorded. A slave's stays there."""
        if self._store.is_following:
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
        """It can't be revived now: look again later."""
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
        """The queue that it changed; None if the book no longer has that."""
        key = (event.group, event.topic, event.queue_id)
        self._changed = True
        if isinstance(event, Gone):
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
            gone = self.queues.pop(key, None)
            self._floor = max(self._floor, 0 if gone is None else gone.newest)

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
