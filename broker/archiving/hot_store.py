"""The hot store as job threads see it: what `lifecycle.hot_store` asks, each call on the broker's loop."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from broker.archiving.ask_loop import Ask
from broker.archiving.pins import Pins
from broker.archiving.reach import Reach
from broker.intake.flusher import Flusher
from broker.store.errors import StoreError, StoreFull, StoreNotWritable
from broker.store.message_store import EntryRun, MessageStore, Segment
from broker.store.reading import EntrySlice, joined
from tiered.write.offload_plan import TopicUnreadable

log = logging.getLogger(__name__)

T = TypeVar("T")
# What the loop looks at in one step, of all that a job asks about: entries that are copied, and queues, whether they
# have any or not. A millisecond or two.
_ENTRIES_AT_ONCE = 50_000
_QUEUES_AT_ONCE = 64


class LoopHotStore:
    """`disk_ratio`: the used share of the disk that holds the log. A job's syncs are the flusher's, running or not."""

    def __init__(  # noqa: PLR0917
        self,
        store: MessageStore,
        pins: Pins,
        ask: Ask,
        flusher: Flusher,
        disk_ratio: Callable[[], float],
        reach: Reach | None = None,
        on_growth: Callable[[], None] | None = None,
    ) -> None:
        """`on_growth`: told, on the loop, when a job has made the log longer."""
        self._store, self._pins, self._ask, self._flusher = store, pins, ask, flusher
        self._on_growth = on_growth
        self._reach = reach or Reach(store)
        self.disk_ratio = disk_ratio

    def _call(self, work: Callable[[], T]) -> T:
        return self._ask.call(work)

    def _call_of(self, topic: str, work: Callable[[], T]) -> T:
        """What concerns one topic; a fault of its files is a fault of this topic alone."""
        try:
            return self._call(work)
        except TimeoutError:  # an OSError, too: but the loop's
            raise
        except (StoreError, OSError) as error:
            raise TopicUnreadable(f"topic {topic}: {error}") from error

    def segments(self) -> Sequence[Segment]:
        return self._call(self._store.segments)

    def flush(self) -> int:
        return self._ask.wait(self._flushed())

    async def _flushed(self) -> int:
        await self._flusher.flush_now()
        return self._reach.within(self._flusher.flushed_offset)

    def is_settled(self) -> bool:
        """Whether rounds may tell what the log has, and what it lacks."""
        return self._ask.wait(self._settled())

    async def _settled(self) -> bool:
        await self._flusher.flush_now()
        return self._reach.is_settled(self._flusher.flushed_offset)

    def roll(self) -> bool:
        try:
            self._call(self._roll)
        except (StoreFull, StoreNotWritable) as error:
            log.warning("the active segment goes on: %s", error)
            return False
        return True

    def _roll(self) -> None:
        self._store.roll()
        if self._on_growth is not None:
            self._on_growth()  # if only by the end of a segment

    def evict(self, base: int) -> None:
        store = self._store
        end = next((segment.end for segment in self.segments() if segment.base == base), 0)
        if self._call(lambda: store.want_checkpoint(end)):
            self._ask.wait(self._flusher.upkeep_now())  # what is still missing then, `evict` does on the loop
        self._call(lambda: store.evict(base))

    def topics(self) -> Sequence[str]:
        return sorted(self._call(self._store.topics))

    def queues_of(self, topic: str) -> Sequence[int]:
        return self._call(lambda: self._store.queues_of(topic))

    def deleted_below(self) -> Mapping[str, Mapping[int, int]]:
        return self._call(self._store.deleted_below)

    def min_offset(self, topic: str, queue: int) -> int:
        return self._call(lambda: self._store.min_offset(topic, queue))

    def expire_below(self, rising: Mapping[str, Mapping[int, int]], before: Mapping[str, int]) -> None:
        store = self._store
        hidden = False
        for topic, offsets in rising.items():
            try:
                left = iter(offsets.items())
                while some := dict(islice(left, _QUEUES_AT_ONCE)):
                    hidden |= self._call_of(topic, functools.partial(store.expire_below, topic, some, before[topic]))
            except TopicUnreadable as error:
                log.warning("the TTL of %s takes no more now: %s", topic, error)
        if hidden:
            store.write_queue_state(self._call(store.queue_state_image))

    def show_from(self, topic: str, queue: int, offset: int) -> int:
        return self._call_of(topic, lambda: self._store.show_from(topic, queue, offset))

    def offset_by_time(self, topic: str, queue: int, time_ms: int, upper: bool) -> int:
        return self._call_of(topic, lambda: self._store.offset_by_time(topic, queue, time_ms, upper))

    def store_time(self, topic: str, queue: int, offset: int) -> int:
        return self._call_of(topic, lambda: self._store.store_time(topic, queue, offset))

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]:
        """Asked for in slices: a segment of small records has millions of them."""
        slices = self._store.entry_slices(topic, start, end, _ENTRIES_AT_ONCE)
        taken: list[EntrySlice] = []
        while (more := self._call_of(topic, lambda: _some(slices))) is not None:
            taken += more
        return joined(taken)

    def confirmed_range(self) -> tuple[int, int]:
        store = self._store
        return self._call(lambda: (store.min_physical_offset, store.confirmed_offset))

    def first_offsets(self, topic: str, start: int) -> Mapping[int, int]:
        return self._call_of(topic, lambda: self._store.first_offsets(topic, start))

    def gone_below(self, topic: str) -> int:
        return self._call(lambda: self._store.gone_below(topic))

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]:
        return self._call(lambda: self._store.files(start, end))

    def pinned_from(self) -> int | None:
        return self._call(self._pins.lowest)

    def reappend_waiting(self, below: int) -> None:
        self._ask.wait(self._pins.save())
        if self._call(lambda: self._store.is_following):
            return  # its master carries it, and the copies come with the log
        try:
            while self._call(lambda: self._pins.reappend(below)):
                pass
        except (StoreFull, StoreNotWritable) as error:
            log.warning("waiting messages keep their segments: %s", error)


def _some(slices: Iterator[EntrySlice | None]) -> list[EntrySlice] | None:
    """On the loop: the next slices; None: that were all."""
    taken: list[EntrySlice] = []
    entries = queues = 0
    for piece in slices:
        if piece is None:
            queues += 1
        else:
            taken.append(piece)
            entries += len(piece.run.sizes)
        if entries >= _ENTRIES_AT_ONCE or queues >= _QUEUES_AT_ONCE:
            return taken
    return taken or None
