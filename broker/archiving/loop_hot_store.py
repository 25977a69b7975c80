"""The hot store as the archive's job threads see it."""

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from broker.archiving.state_capture import capture_in_slices, next_slice
from broker.broker_context import BrokerContext
from broker.store.errors import StoreError, StoreFull, StoreNotWritable
from broker.store.message_store import EntryRun, Segment
from broker.store.reading import EntrySlice, joined
from neve.archive.state import BrokerState
from tiered.write.offload_plan import TopicUnreadable

log = logging.getLogger(__name__)

T = TypeVar("T")
# Entries, and queues, of which the loop copies those at once: a few milliseconds.
_ENTRIES_AT_ONCE = 50_000
_QUEUES_AT_ONCE = 256
_CALL_TIMEOUT_S = 120.0  # of a loop that is busy: longer, and the job has failed


class LoopHotStore:
    """The store as job threads see it: each call runs on the broker's loop, where the store lives."""

    def __init__(self, context: BrokerContext, loop: asyncio.AbstractEventLoop, *, starting: bool = False) -> None:
        self._context, self._loop = context, loop
        self._starting = starting  # the flusher doesn't run yet

    def _call(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        future: Future[T] = asyncio.run_coroutine_threadsafe(run(), self._loop)
        return future.result(_CALL_TIMEOUT_S)

    def _call_of(self, topic: str, work: Callable[[], T]) -> T:
        """What concerns one topic; a fault of its files is a fault of this topic alone."""
        try:
            return self._call(work)
        except TimeoutError:  # an OSError, too: but the loop's
            raise
        except (StoreError, OSError) as error:
            raise TopicUnreadable(f"topic {topic}: {error}") from error

    def segments(self) -> Sequence[Segment]:
        return self._call(self._context.store.segments)

    def flush(self) -> int:
        if self._starting:
            store = self._context.store
            offset = store.flush()
            self._call(lambda: store.after_flush(offset))
            return offset
        flusher = self._context.flusher
        asyncio.run_coroutine_threadsafe(flusher.flush_now(), self._loop).result(_CALL_TIMEOUT_S)
        return flusher.flushed_offset

    def roll(self) -> bool:
        try:
            self._call(self._context.store.roll)
        except StoreFull as error:
            log.warning("the active segment goes on: %s", error)
            return False
        return True

    def evict(self, base: int) -> None:
        store = self._context.store
        end = next((segment.end for segment in self.segments() if segment.base == base), 0)
        if self._call(lambda: store.want_checkpoint(end)):
            self._upkeep()  # in a thread; what is still missing then, `evict` does on the loop
        self._call(lambda: store.evict(base))

    def _upkeep(self) -> None:
        if self._starting:
            self._context.store.upkeep()
            return
        flusher = self._context.flusher
        asyncio.run_coroutine_threadsafe(flusher.upkeep_now(), self._loop).result(_CALL_TIMEOUT_S)

    def topics(self) -> Sequence[str]:
        return sorted(self._call(lambda: list(self._context.store.table_by_topic)))

    def queues_of(self, topic: str) -> Sequence[int]:
        return self._call(lambda: self._context.store.queues_of(topic))

    def deleted_below(self) -> Mapping[str, Mapping[int, int]]:
        return self._call(self._context.store.deleted_below)

    def min_offset(self, topic: str, queue: int) -> int:
        return self._call(lambda: self._context.store.min_offset(topic, queue))

    def expire_below(self, rising: Mapping[str, Mapping[int, int]], before: Mapping[str, int]) -> None:
        store = self._context.store
        self.flush()  # a minimum above what the disk has would hide, after a power cut, what comes next
        hidden = False
        for topic, offsets in rising.items():
            try:
                hidden |= self._call_of(topic, functools.partial(store.expire_below, topic, offsets, before[topic]))
            except TopicUnreadable as error:
                log.warning("the TTL of %s takes nothing now: %s", topic, error)
        if hidden:
            store.write_queue_state(self._call(store.queue_state_image))

    def show_from(self, topic: str, queue: int, offset: int) -> int:
        return self._call_of(topic, lambda: self._context.store.show_from(topic, queue, offset))

    def offset_by_time(self, topic: str, queue: int, time_ms: int, upper: bool) -> int:
        return self._call_of(topic, lambda: self._context.store.offset_by_time(topic, queue, time_ms, upper))

    def store_time(self, topic: str, queue: int, offset: int) -> int:
        return self._call_of(topic, lambda: self._context.store.store_time(topic, queue, offset))

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]:
        """Asked for in slices: a segment of small records has millions of them."""
        slices = self._context.store.entry_slices(topic, start, end, _ENTRIES_AT_ONCE)
        taken: list[EntrySlice] = []
        while more := self._call_of(topic, lambda: _some(slices)):
            taken += more
        return joined(taken)

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]:
        return self._call(lambda: self._context.store.files(start, end))

    def pinned_from(self) -> int | None:
        return self._call(self._context.pinned_from)

    def reappend_waiting(self, below: int) -> None:
        try:
            while self._call(lambda: self._context.schedule.reappend(below, self._context.timers)):
                pass
            while self._call(lambda: self._context.timers.reappend(below)):
                pass
            while self._call(lambda: self._context.transactions.reappend(below)):
                pass
        except (StoreFull, StoreNotWritable) as error:
            log.warning("waiting messages keep their segments: %s", error)

    def state(self) -> BrokerState:
        capture = capture_in_slices(self._context)
        while (state := self._call(lambda: next_slice(capture))) is None:
            pass
        return state

    def disk_ratio(self) -> float:
        return self._context.store.disk.room(self._context.root).used_ratio


def _some(slices: Iterator[EntrySlice]) -> list[EntrySlice]:
    """On the loop: the next slices; none: that were all."""
    taken: list[EntrySlice] = []
    count = 0
    for piece in slices:
        taken.append(piece)
        count += len(piece.run.sizes)
        if count >= _ENTRIES_AT_ONCE or len(taken) >= _QUEUES_AT_ONCE:
            break
    return taken
