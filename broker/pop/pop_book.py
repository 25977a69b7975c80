"""Who has which message until when: for each group and queue the next offset to hand out and what is out.

Every change is a record of the revive log first, then applied; a restart reads the last image of the book and
applies the records behind it, so that what was acknowledged stays so and what was not comes again.
The group's offset is the lowest offset that is still out.
"""

import heapq
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from broker.consumer_offset_manager import ConsumerOffsetManager
from broker.pop.pop_log import Acked, Changed, Event, Popped, Reset, decode_event, encode_event
from broker.state_file import StateFile, SyncLog
from broker.store.errors import StoreError, StoreFull, StoreNotWritable
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.disk import Disk
from neve.errors import BrokerError
from neve.message import iter_records
from neve.remoting.codes import ResponseCode

log = logging.getLogger(__name__)

Key = tuple[str, str, int]
_LOG_QUEUE = 0
_BATCH, _BATCH_BYTES = 512, 4 << 20
MAX_OUT = 20_000
GONE = -1


@dataclass(slots=True)
class Flight:
    """One message that is out."""

    pop_time: int
    visible_at: int
    in_order: bool


@dataclass(slots=True, eq=False)
class PopQueue:
    """One queue of one group. `committed` is what the offset table was last told; a difference means: set by hand."""

    key: Key
    next_offset: int
    committed: int = -1
    flights: dict[int, Flight] = field(default_factory=dict)
    # How often a message of an ordered pop came back.
    counts: dict[int, int] = field(default_factory=dict)
    busy: bool = False
    _lowest: list[int] = field(default_factory=list)

    def add(self, offset: int, flight: Flight) -> None:
        if offset not in self.flights:
            heapq.heappush(self._lowest, offset)
        self.flights[offset] = flight

    def low(self) -> int:
        lowest = self._lowest
        while lowest and lowest[0] not in self.flights:
            heapq.heappop(lowest)
        return min(lowest[0], self.next_offset) if lowest else self.next_offset

    def reset(self, offset: int) -> None:
        self.next_offset = offset
        self.flights.clear()
        self._lowest.clear()


class PopBook:
    def __init__(  # noqa: PLR0917
        self,
        store: MessageStore,
        offsets: ConsumerOffsetManager,
        clock: Clock,
        disk: Disk,
        path: Path,
        topic: str,
        sync_log: SyncLog,
    ) -> None:
        self._store, self._offsets, self._clock = store, offsets, clock
        self._topic = topic
        self.queues: dict[Key, PopQueue] = {}
        self._due: list[tuple[int, Key, int]] = []
        self._image: Mapping[str, Any] = {}
        self._log_start = 0
        self._changed = False
        self.file = StateFile(disk, path, lambda: self._image, sync_log=sync_log)

    # ---- restart -----------------------------------------------------------------------------------------------

    def load(self) -> None:
        """The last image and the log behind it, cut to what the recovered log still holds."""
        value = self.file.load()
        for group, topic, queue_id, following, flights in value.get("queues", ()):
            queue = self._make((group, topic, int(queue_id)), int(following))
            for offset, pop_time, visible_at, in_order in flights:
                self._fly(queue, int(offset), Flight(int(pop_time), int(visible_at), bool(in_order)))
        end = self._store.max_offset(self._topic, _LOG_QUEUE)
        self._log_start = min(int(value.get("logOffset", 0)), end)
        for event in self._events(self._log_start):
            self._apply(event)
        for queue in self.queues.values():
            self._clip(queue)
            self._commit(queue)
        if self.queues or value:
            log_start = self._capture()
            self.file.save_now()
            self._log_start = log_start

    def _events(self, start: int) -> Iterator[Event]:
        offset = start
        while True:
            got = self._store.get(self._topic, _LOG_QUEUE, offset, _BATCH, _BATCH_BYTES)
            if got.next_offset <= offset:
                return
            for buffer in got.buffers:
                for record in iter_records(buffer):
                    try:
                        yield decode_event(record.body)
                    except msgspec.DecodeError as error:
                        log.error("revive log at %d: %s", record.queue_offset, error)
            offset = got.next_offset

    def _clip(self, queue: PopQueue) -> None:
        _, topic, queue_id = queue.key
        end = self._store.max_offset(topic, queue_id)
        queue.next_offset = min(queue.next_offset, end)
        for offset in [offset for offset in queue.flights if offset >= end]:
            del queue.flights[offset]

    @property
    def dirty(self) -> bool:
        return self._changed or self.file.dirty

    async def save(self) -> None:
        """A new image on the disk; only then is the log below it not needed any more."""
        log_start = self._capture()
        await self.file.save()
        self._log_start = max(self._log_start, log_start)

    def _capture(self) -> int:
        """Take the image that the file writes next; returns the offset of the revive log from which it is continued."""
        for queue in list(self.queues.values()):
            self.follow_offset_table(queue)
        log_start = self._store.max_offset(self._topic, _LOG_QUEUE)
        self._image = {
            "logOffset": log_start,
            "queues": [[*queue.key, queue.next_offset, _flights(queue)] for queue in self.queues.values()],
        }
        self._changed = False
        self.file.touch()
        return log_start

    def oldest_needed_physical(self) -> int | None:
        """The first log position that a restart reads; what is out may be read from the archive."""
        if self._log_start >= self._store.max_offset(self._topic, _LOG_QUEUE):
            return None
        got = self._store.get(self._topic, _LOG_QUEUE, self._log_start, 1, _BATCH_BYTES)
        return next((record.physical_offset for buffer in got.buffers for record in iter_records(buffer)), None)

    # ---- changes -----------------------------------------------------------------------------------------------

    def find(self, group: str, topic: str, queue_id: int) -> PopQueue | None:
        queue = self.queues.get((group, topic, queue_id))
        if queue is not None:
            self.follow_offset_table(queue)
        return self.queues.get((group, topic, queue_id))

    def open(self, group: str, topic: str, queue_id: int, initial: int) -> PopQueue:
        """The queue; a group that has no offset starts at `initial`."""
        found = self.find(group, topic, queue_id)
        if found is not None:
            return found
        committed = self._offsets.query(group, topic, queue_id)
        queue = self._make((group, topic, queue_id), committed if committed >= 0 else initial)
        self._commit(queue)
        return queue

    def follow_offset_table(self, queue: PopQueue) -> None:
        """Somebody set the group's offset: it goes on there, and what is out is forgotten."""
        group, topic, queue_id = queue.key
        committed = self._offsets.query(group, topic, queue_id)
        if committed == queue.committed:
            return
        self.record(Reset(group, topic, queue_id, committed))

    def record(self, event: Event) -> None:
        """Log and apply. Raises BrokerError when the log takes nothing now."""
        host = self._store.config.store_host
        try:
            self._store.put(
                self._topic, _LOG_QUEUE, encode_event(event), b"",
                flag=0, sys_flag=0, born_timestamp=self._clock.now_ms(), born_host=host,
            )  # fmt: skip
        except (StoreFull, StoreNotWritable) as error:
            raise BrokerError(ResponseCode.SERVICE_NOT_AVAILABLE, f"service not available now: {error}") from error
        except StoreError as error:
            raise BrokerError(ResponseCode.SYSTEM_ERROR, f"the pop's record can't be kept: {error}") from error
        queue = self._apply(event)
        if queue is not None:
            self._commit(queue)

    def take_due(self) -> list[tuple[PopQueue, int, Flight]]:
        """What is out for too long; it stays in the book until its event is recorded."""
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

    def drop(self, *, topic: str | None = None, group: str | None = None) -> None:
        for key in [key for key in self.queues if topic in (None, key[1]) and group in (None, key[0])]:
            self.record(Reset(*key, GONE))

    # ---- inside ------------------------------------------------------------------------------------------------

    def _make(self, key: Key, following: int) -> PopQueue:
        queue = self.queues[key] = PopQueue(key, following)
        return queue

    def _fly(self, queue: PopQueue, offset: int, flight: Flight) -> None:
        queue.add(offset, flight)
        heapq.heappush(self._due, (flight.visible_at, queue.key, offset))

    def _apply(self, event: Event) -> PopQueue | None:
        """The queue that it changed; None if the book no longer has that."""
        key = (event.group, event.topic, event.queue_id)
        self._changed = True
        if isinstance(event, Reset) and event.next_offset < 0:
            self.queues.pop(key, None)
            return None
        queue = self.queues.get(key)
        if queue is None:
            if not isinstance(event, Popped | Reset):
                return None
            queue = self._make(key, event.next_offset)
        match event:
            case Popped():
                queue.next_offset = max(queue.next_offset, event.next_offset)
                for offset in event.offsets:
                    self._fly(queue, offset, Flight(event.pop_time, event.visible_at, event.in_order))
            case Acked():
                for offset in event.offsets:
                    self._land(queue, offset, event.pop_time)
            case Changed():
                flight = queue.flights.get(event.offset)
                if flight is not None and flight.pop_time == event.old_pop_time:
                    self._fly(queue, event.offset, Flight(event.pop_time, event.visible_at, flight.in_order))
            case Reset():
                queue.reset(event.next_offset)
        return queue

    @staticmethod
    def _land(queue: PopQueue, offset: int, pop_time: int) -> None:
        flight = queue.flights.get(offset)
        if flight is not None and flight.pop_time == pop_time:
            del queue.flights[offset]
            queue.counts.pop(offset, None)

    def _commit(self, queue: PopQueue) -> None:
        low = queue.low()
        if low != queue.committed or self._offsets.query(*queue.key) != low:
            self._offsets.commit(*queue.key, low)
            queue.committed = low


def revive_log(cluster: str) -> str:
    return f"rmq_sys_REVIVE_LOG_{cluster}"


def _flights(queue: PopQueue) -> list[list[int | bool]]:
    return [[offset, out.pop_time, out.visible_at, out.in_order] for offset, out in queue.flights.items()]


def is_out(queue: PopQueue, offsets: Iterable[int], pop_time: int) -> list[int]:
    """Those of the offsets that are out since that pop; an acknowledgement of another one is too late."""
    flights = queue.flights
    return [o for o in offsets if (flight := flights.get(o)) is not None and flight.pop_time == pop_time]
