"""Reads over both tiers: `get_message`, and queries by key, time and physical offset.

    offset:  cold min ............ hot min ................ max
             └── ColdReader ──────┘└── MessageStore ───────┘

    get_message ─▶ local, in memory            ─▶ the result, at once
                ├▶ local, possibly only on disk ─▶ a pending read, in a thread (`old_reads`)
                └▶ in the archive ┬▶ row group in memory ─▶ the result, at once
                                  └▶ a pending read by the cold reader, while the request is parked

Callers do not know which tier answers: they get a result, or await a pending read.

The setting `tieredStorageLevel` selects the tier for messages that both have, as in RocketMQ:

    DISABLE      only the local log; messages that are only in the archive are not served
    NOT_IN_DISK  the archive serves messages that the local log no longer has
    NOT_IN_MEM   and also those outside the newest segment, the one that is being written
    FORCE        the archive serves all it has; the local log serves unarchived messages, and all that it has while
                 the archive is unreachable

A topic that was deleted and created again begins at its former end offset. Archived messages below belong to the
deleted topic and are never served, even if the deletion could not be recorded in the archive yet.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from broker.config import BrokerConfig
from broker.reading.message_filter import limits_of
from broker.reading.old_reads import OldReads, Piece, pieces_of
from broker.reading.record_filter import select
from broker.reading.sql92 import SqlFilter
from broker.store.message_store import MessageStore
from broker.store.reading import GetResult
from infra.loop.in_steps import in_turns
from infra.observe.metrics import Histogram, Metrics
from neve.errors import BrokerError
from neve.record.codec import MessageRecord, decode_record
from neve.remoting.codes import GetMessageStatus, ResponseCode
from neve.remoting.names import is_hidden
from tiered.read.cold_query import FoundRecords, as_text, has_key
from tiered.read.cold_reader import ColdResult, ColdUnavailable, Located
from tiered.read.read_request import ReadRequest

__all__ = ["PendingRead", "ReadRequest", "TieredStore"]

log = logging.getLogger(__name__)
T = TypeVar("T")

_LATER = "the archive can't be read now, try again later"
# Queries that need several row groups run in a thread pool. If this many are pending, the next one is refused.
_QUERY_THREADS = 4
_QUERIES_MAX = 64
_NOT_ASKED = FoundRecords([], "the archive, which can't be read now")
_LATENCY_BOUNDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)

DISABLE, NOT_IN_DISK, NOT_IN_MEM, FORCE = "DISABLE", "NOT_IN_DISK", "NOT_IN_MEM", "FORCE"


class PendingRead:
    """A read that waits for the disk or the archive; it begins when it is awaited.

    It may be dropped without awaiting. Awaiting it raises BrokerError SYSTEM_BUSY if the data cannot be read now.
    """

    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], Coroutine[Any, Any, GetResult]]) -> None:
        self._read = read

    def __await__(self) -> Generator[Any, Any, GetResult]:
        return self._read().__await__()


Answer = GetResult | PendingRead


class ColdTier(Protocol):
    """Interface of `tiered.read.cold_reader.ColdReader`.

    Methods that return records or exact times block and have to run in a thread.
    """

    def at_hand(self, read: ReadRequest) -> ColdResult | None: ...

    def locate(self, read: ReadRequest) -> Located | ColdResult: ...

    def take(self, located: Located, decoded: Any, read: ReadRequest) -> ColdResult: ...

    def has_moved(self, located: Located) -> bool: ...

    def min_offset(self, topic: str, queue_id: int) -> int | None: ...

    def count_existing(self, topic: str, queue_id: int, first: int, end: int) -> int: ...

    def has(self, topic: str, queue_id: int, offset: int) -> bool: ...

    def store_time(self, topic: str, queue_id: int, offset: int) -> int: ...

    def time_bounds(self, topic: str, queue_id: int, offset: int) -> tuple[int, int] | None: ...

    def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> FoundRecords: ...

    def record_at(self, physical_offset: int) -> FoundRecords: ...

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool) -> int | None: ...

    def has_time_below(self, topic: str, queue_id: int, timestamp: int, offset: int) -> bool: ...


class TieredStore:
    """One log over two tiers (RocketMQ's TieredMessageStore), read by offset, time, key or physical offset.

    An answer is a value, or an awaitable if it needs a disk or the archive. BrokerError SYSTEM_BUSY means that existing
    data cannot be read now. A failed read is never reported as a missing message.
    """

    def __init__(self, store: MessageStore, config: BrokerConfig) -> None:
        self._hot = store
        self._queues, self._reader = store.queues, store.reader
        self.old_reads = OldReads(store.disk)
        self._config = config
        self._cold: ColdTier | None = None
        self._pool = ThreadPoolExecutor(_QUERY_THREADS, "cold-query")
        self._queries = 0
        self._local_queries = asyncio.Lock()
        self.cold_reads = 0
        self.cold_failures = 0
        self.cold_parked = 0
        self.cold_latency = Histogram(_LATENCY_BOUNDS)

    def attach(self, cold: ColdTier) -> None:
        """Add the archive as the second tier."""
        self._cold = cold

    def register_metrics(self, metrics: Metrics) -> None:
        metrics.counter("cold_reads_total", "pulls answered from the archive", lambda: self.cold_reads)
        metrics.counter(
            "cold_read_failures_total", "pulls that the archive could not answer", lambda: self.cold_failures
        )
        metrics.counter("old_reads_total", "local reads below hotBytes", lambda: self.old_reads.count)
        metrics.counter("old_reads_waited_total", "local reads that waited for the disk", lambda: self.old_reads.waited)
        metrics.gauge("cold_parked", "pulls waiting for the archive", lambda: self.cold_parked)
        metrics.histogram("cold_read_seconds", "time from a cold pull to its answer", self.cold_latency)

    def close(self) -> None:
        self.old_reads.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    # ---- get_message

    def get_message(self, read: ReadRequest, predicate: SqlFilter | None = None) -> Answer:
        """Return messages of a queue from `read.offset` on with a wanted tag, or that fulfil the predicate.

        If any matches, at least one is returned, whatever its size. `read` must not change before the answer is there.
        """
        if self._is_local(read.topic, read.queue_id, read.offset):
            return self._get_local(read, predicate)
        if predicate is None and read.offset >= self._queues.ended_at(read.topic, read.queue_id):
            got = self._cold_at_hand(read)
            if got is not None:
                return got
        return PendingRead(functools.partial(self._read_archive, read, predicate))

    def _is_local(self, topic: str, queue_id: int, offset: int) -> bool:
        cold, level = self._archive(), self._config.tiered_storage_level
        if cold is None:
            return True
        if offset < self._queues.min_offset(topic, queue_id):
            return False
        if level == NOT_IN_DISK or (level == NOT_IN_MEM and self._in_newest_segment(topic, queue_id, offset)):
            return True
        return not cold.has(topic, queue_id, offset)

    def _archive(self) -> ColdTier | None:
        return None if self._config.tiered_storage_level == DISABLE else self._cold

    def _in_newest_segment(self, topic: str, queue_id: int, offset: int) -> bool:
        """Return whether the message is in the segment that is being written, which is in memory.

        RocketMQ asks the kernel which pages are loaded instead.
        """
        entry = self._reader.entry(topic, queue_id, offset)
        return entry is None or entry[0] >= self._hot.newest_segment_base

    # ---- local reads

    def _get_local(self, read: ReadRequest, predicate: SqlFilter | None) -> Answer:
        hot, topic, queue_id = self._hot, read.topic, read.queue_id
        count, size = (read.max_count, read.max_bytes) if predicate is None else limits_of(predicate)
        old_below = hot.max_physical_offset - self._config.hot_bytes
        got = self._reader.get(topic, queue_id, read.offset, count, size, read.codes, old_below=old_below)
        if self._cold is not None:
            got = self._over_both(got, topic, queue_id)
        if got.runs:
            pieces = pieces_of(hot.log.at, got.runs)
            if not self.old_reads.in_memory(pieces):
                return PendingRead(functools.partial(self._read_old, got, pieces, read, predicate))
        return got if predicate is None else select(got, predicate, read.max_count, read.max_bytes)

    def _over_both(self, got: GetResult, topic: str, queue_id: int) -> GetResult:
        """Return a result of the local log with the minimum offset of both tiers."""
        low = self._min(got.min_offset, topic, queue_id)
        if low == got.min_offset:
            return got
        return GetResult(got.status, got.next_offset, low, got.max_offset, got.buffers, got.count, got.runs)

    async def _read_old(
        self, got: GetResult, pieces: list[Piece], read: ReadRequest, predicate: SqlFilter | None
    ) -> GetResult:
        """Return the result with records read from the file; with the mapped ones if the file was evicted meanwhile."""
        loaded = await self.old_reads.load(pieces)
        if loaded is not None:
            got = GetResult(got.status, got.next_offset, got.min_offset, got.max_offset, loaded, got.count)
        return got if predicate is None else select(got, predicate, read.max_count, read.max_bytes)

    # ---- archive reads

    def _cold_at_hand(self, read: ReadRequest) -> GetResult | None:
        """Return the archive's answer if its row group is in memory.

        This holds for nearly every pull of a replay, because row groups are prefetched. It saves a task and a turn of
        the event loop.
        """
        cold = self._cold
        assert cold is not None
        got = cold.at_hand(read)
        if got is None:
            return None
        self.cold_reads += 1
        self.cold_latency.observe(0.0)
        return self._as_of_both(got, read)

    async def _read_archive(self, read: ReadRequest, predicate: SqlFilter | None) -> GetResult:
        """Read from the archive while the request is parked.

        Raises BrokerError SYSTEM_BUSY if the archive does not answer.
        """
        wanted = read
        if predicate is not None:
            count, size = limits_of(predicate)
            wanted = replace(read, max_count=count, max_bytes=size)
        self.cold_reads += 1
        self.cold_parked += 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self._config.cold_read_timeout / 1000):
                got = await self._read_cold(wanted)
        except (ColdUnavailable, TimeoutError) as error:
            self.cold_failures += 1
            why = str(error) or "timed out"
            log.warning("cold read %s/%s at %s: %s", read.topic, read.queue_id, read.offset, why)
            if read.offset < self._queues.min_offset(read.topic, read.queue_id):
                raise BrokerError(ResponseCode.SYSTEM_BUSY, _LATER) from error
            local = self._get_local(read, predicate)
            return local if isinstance(local, GetResult) else await local
        finally:
            self.cold_parked -= 1
            self.cold_latency.observe(loop.time() - began)
        result = self._as_of_both(got, read)
        return result if predicate is None else select(result, predicate, read.max_count, read.max_bytes)

    def _as_of_both(self, got: ColdResult, read: ReadRequest) -> GetResult:
        """Return the archive's answer with the offset range of both tiers.

        If the archive has no message at the requested offset, the answer names the next offset to read.
        """
        topic, queue_id, offset = read.topic, read.queue_id, read.offset
        low, high = self.min_offset(topic, queue_id), self._queues.max_offset(topic, queue_id)
        status, following = got.status, got.next_offset
        if status is GetMessageStatus.OFFSET_FOUND_NULL and following > offset:
            # A gap that holds no messages: all readers skip it at once, also those of a slave. If it were reported as
            # an invalid offset, stock consumers would release the queue and lock it again, which takes up to 30 s.
            status = GetMessageStatus.NO_MATCHED_MESSAGE
        elif status not in (GetMessageStatus.FOUND, GetMessageStatus.NO_MATCHED_MESSAGE):
            # Below the first retained message: the consumer resumes at the next existing one.
            following = following if following > offset else max(self._queues.min_offset(topic, queue_id), low)
            status = GetMessageStatus.OFFSET_TOO_SMALL if following > offset else GetMessageStatus.OFFSET_OVERFLOW_ONE
        return GetResult(status, following, low, high, got.buffers, got.count, is_archived=True)

    async def _read_cold(self, read: ReadRequest) -> ColdResult:
        """Read from the archive without blocking a thread.

        Cancellation, by timeout or disconnect, withdraws the read.
        """
        cold = self._cold
        assert cold is not None
        if read.offset < self._queues.ended_at(read.topic, read.queue_id):
            return ColdResult(GetMessageStatus.OFFSET_TOO_SMALL, self.min_offset(read.topic, read.queue_id))
        while isinstance(located := cold.locate(read), Located):
            decoding = located.decoded
            try:
                decoded = decoding.result() if decoding.done() else await asyncio.wrap_future(decoding)
            except ColdUnavailable:
                if not cold.has_moved(located):
                    raise
            else:
                return cold.take(located, decoded, read)
        return located

    # ---- offsets and times

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self._min(self._queues.min_offset(topic, queue_id), topic, queue_id)

    def local_min_offset(self, topic: str, queue_id: int) -> int:
        """Return the offset below which messages have left the local log."""
        return self._queues.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        return self._queues.max_offset(topic, queue_id)

    def is_young(self, topic: str, queue_id: int) -> bool:
        """Return whether the local log still has all messages of the queue.

        A new group reads a young queue from its beginning, but not an old queue with years of messages.
        """
        return self._queues.min_offset(topic, queue_id) <= 0

    def count_messages(self, topic: str, queue_id: int, first: int, end: int) -> int:
        """Return the number of messages in [first, end), without those below the minimum or in a gap of the archive."""
        first = max(first, self.min_offset(topic, queue_id))
        if self._cold is None:
            return max(0, end - first)
        return self._cold.count_existing(topic, queue_id, first, end)

    async def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool) -> int:
        """Return the offset for a store time, searching both tiers as far as necessary.

        The archive is searched if it may have a message of that time that the local log lacks. After a backward step of
        the clock, an archived message may be younger than the oldest local one. Lower-bound searches find it.
        """
        while True:
            hot_min = self._queues.min_offset(topic, queue_id)
            found = await self._offset_by_time(topic, queue_id, timestamp, upper, hot_min)
            if self._queues.min_offset(topic, queue_id) == hot_min:
                return found
            # messages evicted meanwhile are only in the archive, which was possibly not searched

    async def _offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool, hot_min: int) -> int:
        high = self._queues.max_offset(topic, queue_id)
        cold = self._archive()
        if cold is not None and self.min_offset(topic, queue_id) < hot_min:
            oldest_hot = self._reader.store_time(topic, queue_id, hot_min) if hot_min < high else -1
            is_older = oldest_hot < 0 or timestamp < oldest_hot or (timestamp == oldest_hot and not upper)
            if is_older or (
                not upper and await self._in_thread(cold.has_time_below, topic, queue_id, timestamp, hot_min)
            ):
                try:
                    found = await self._in_thread(cold.offset_by_time, topic, queue_id, timestamp, upper)
                except ColdUnavailable as error:
                    self.cold_failures += 1
                    raise BrokerError(ResponseCode.SYSTEM_BUSY, _LATER) from error
                if found is not None and 0 <= found < hot_min:
                    return max(found, self.min_offset(topic, queue_id))
                if hot_min == high:
                    return high - 1 if upper else high
        found = await in_turns(self._reader.offset_by_time(topic, queue_id, timestamp, upper))
        return min(self._shown_near(topic, queue_id, found, below=upper, low=hot_min), high)

    def _shown_near(self, topic: str, queue_id: int, offset: int, *, below: bool, low: int) -> int:
        """Return the nearest visible offset: erased messages have no store time, and no offset below `low` is local."""
        near = self._reader.shown_near(topic, queue_id, offset, below=below)
        return near if near >= low else self._reader.shown_near(topic, queue_id, low, below=False)

    def store_times_at_hand(self, topic: str, queue_id: int, offset: int) -> tuple[int, int] | None:
        """Return bounds of a message's store time without waiting; they are equal if the local log has the message.

        The bounds of an archived message are those of its row group. Returns None if no tier has the message.
        """
        local = self._reader.shown_time(topic, queue_id, offset)
        if local >= 0:
            return local, local
        cold = self._archive()
        if cold is None or offset < self.min_offset(topic, queue_id):
            return None
        return cold.time_bounds(topic, queue_id, offset)

    async def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Return a message's store time; -1 if there is no message.

        If the archive cannot be read now, the result is the upper bound.
        """
        cold = self._archive()
        if cold is None or self._is_local(topic, queue_id, offset):
            return self._reader.shown_time(topic, queue_id, offset)
        found = await self._ask_cold("time", cold.store_time, topic, queue_id, offset)
        if found is not None:
            return found
        bounds = self.store_times_at_hand(topic, queue_id, offset)
        return -1 if bounds is None else bounds[1]

    # ---- messages by key or place

    async def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> FoundRecords:
        """Return records with a key from both tiers, newest first, and a description of the unsearched range.

        All concurrent queries together run one step of the local search per turn of the event loop.
        """

        def is_hit(raw: bytes) -> bool:
            return has_key(decode_record(raw), topic, key)

        steps = self._reader.query(topic, key, max_num, begin, end, is_hit=is_hit)
        found, unsearched_from = await in_turns(steps, shared=self._local_queries)
        found = self._still_shown(found)
        unsearched = [] if unsearched_from is None else [f"the local log before {as_text(unsearched_from)}"]
        cold = self._archive()
        if cold is None or len(found) >= max_num:
            return FoundRecords(found, " and ".join(unsearched))
        older = await self._ask_cold("query", cold.query, topic, key, max_num, begin, end) or _NOT_ASKED
        known = set(found)
        more = [raw for raw in older.records if raw not in known and self._archive_shows(decode_record(raw))]
        unsearched += [older.unsearched] if older.unsearched else []
        return FoundRecords((self._still_shown(found) + more)[:max_num], " and ".join(unsearched))

    def _still_shown(self, records: list[bytes]) -> list[bytes]:
        """Return the records of the local log that are still visible to readers."""
        shows, decoded = self._queues.shows, ((raw, decode_record(raw)) for raw in records)
        return [raw for raw, one in decoded if shows(one.topic, one.queue_id, one.queue_offset, one.physical_offset)]

    def _archive_shows(self, record: MessageRecord) -> bool:
        """Return whether readers may get an archived message, by the current state of the catalog and the local log.

        The local counterpart is `QueueTable.shows`. A record fetched from an object is checked again before it is
        returned: its topic may have been deleted, or its row erased, during the fetch.
        """
        topic, queue, offset = record.topic, record.queue_id, record.queue_offset
        cold = self._archive()
        return (
            cold is not None
            and record.physical_offset >= self._queues.deleted_up_to(topic)
            and offset >= self.min_offset(topic, queue)
            and cold.has(topic, queue, offset)
        )

    async def record_at(self, physical_offset: int) -> bytes | None:
        """Return the record at a physical offset; None if there is none, or if its topic is hidden from clients.

        Raises BrokerError SYSTEM_BUSY if no record was found but not everything could be searched.
        """
        found = self._reader.shown_record_at(physical_offset)
        if found is not None:
            return None if is_hidden(decode_record(found).topic) else found  # hidden topics contain secrets of users
        cold = self._archive()
        if cold is None or not self._may_be_archived(physical_offset):
            return None
        archived = await self._ask_cold("record", cold.record_at, physical_offset) or _NOT_ASKED
        shown = [raw for raw in archived.records if self._archive_shows(decode_record(raw))]
        if not shown and archived.unsearched:
            raise BrokerError(
                ResponseCode.SYSTEM_BUSY,
                f"no message found at {physical_offset}, but not all was searched: {archived.unsearched}",
            )
        return shown[0] if shown else None

    def _may_be_archived(self, physical_offset: int) -> bool:
        """Return whether readers may get the record at a physical offset from the archive, if the local log has none.

        If a queue's minimum was raised above its archive, the local records below are hidden, but the archived copies
        are not.
        """
        if physical_offset < self._hot.min_physical_offset:
            return physical_offset >= 0
        hidden = self._reader.record_at(physical_offset)
        return hidden is not None and self._archive_shows(decode_record(hidden))

    async def _ask_cold(self, what: str, ask: Callable[..., T], *arguments: Any) -> T | None:
        self.cold_reads += 1
        try:
            return await self._in_thread(ask, *arguments)
        except ColdUnavailable as error:
            self.cold_failures += 1
            log.warning("cold %s %s: %s", what, " ".join(map(str, arguments)), error)
            return None

    async def _in_thread(self, ask: Callable[..., T], *arguments: Any) -> T:
        if self._queries >= _QUERIES_MAX:
            raise ColdUnavailable(f"{self._queries} queries to the archive are queued already")
        self._queries += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, ask, *arguments)
        finally:
            self._queries -= 1

    # ---- inside

    def _min(self, hot_min: int, topic: str, queue_id: int) -> int:
        cold = self._archive()
        if cold is None:
            return hot_min
        cold_min = cold.min_offset(topic, queue_id)
        if cold_min is None or not 0 <= cold_min < hot_min:
            return hot_min
        return min(max(cold_min, self._queues.ended_at(topic, queue_id)), hot_min)
