"""Implementation of `lifecycle.hot_store` for job threads; each call runs on the broker's event loop."""

from __future__ import annotations

import asyncio
import errno
import functools
import logging
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

from broker.archiving.archivable_limit import ArchivableLimit
from broker.archiving.environment import LoopCaller
from broker.archiving.pins import Pins
from broker.intake.flusher import Flusher
from broker.store.erased_rows import hide
from broker.store.errors import StoreError, StoreFull, StoreNotWritable, TruncationRunning
from broker.store.log_search import records_with
from broker.store.message_store import MessageStore
from broker.store.reading import EntrySlice, joined
from broker.store.store_reader import Segment
from broker.tables.changes import RowsErased
from broker.tables.journal import NO_JOURNAL, Journal
from broker.waiting.delivery import quarantined
from infra.loop.in_steps import in_turns
from lifecycle.hot_store import Aged, Hidden
from neve.errors import BrokerError
from neve.record.codec import decode_record
from tiered.write.entry_run import EntryRun
from tiered.write.offload_plan import FoundEntries, TopicRange, TopicUnreadable

log = logging.getLogger(__name__)

T = TypeVar("T")
# Work of a job in one step of the event loop (about 0.5 ms): entries copied, and queues visited. Empty queues count
# too, because a file may have to be opened for each.
_ENTRIES_AT_ONCE = 16_000
_QUEUES_AT_ONCE = 16
_ROWS_IN_RECORD = 1_000  # erased ranges in one record of the metadata log
_UNKNOWN_MS, _NEVER_MS = -1, 1 << 62


@contextmanager
def _faults_of(topic: str) -> Iterator[None]:
    """Raise an error of a topic's files as TopicUnreadable, so that it fails only this topic."""
    try:
        yield
    except TimeoutError:  # an OSError as well, but raised by the call to the loop
        raise
    except (StoreError, OSError) as error:
        raise TopicUnreadable(f"topic {topic}: {error}") from error


class LoopHotStore:
    """Hot store for job threads.

    `disk_ratio` returns the used share of the disk that holds the log. Fsyncs go through the flusher, even if it does
    not run.
    """

    def __init__(  # noqa: PLR0917
        self,
        store: MessageStore,
        pins: Pins,
        ask: LoopCaller,
        flusher: Flusher,
        disk_ratio: Callable[[], float],
        limit: ArchivableLimit | None = None,
        on_growth: Callable[[], None] | None = None,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        """Create the adapter; `on_growth` is called on the loop when a job has appended to the log."""
        self._journal = journal
        self._store, self._pins, self._ask, self._flusher = store, pins, ask, flusher
        self._on_growth = on_growth
        self._limit = limit or ArchivableLimit(store)
        self.disk_ratio = disk_ratio
        self._is_unsaved = False  # rows were hidden and saving that failed

    def _call(self, work: Callable[[], T]) -> T:
        """Run `work` on the loop in one step; wait first while a diverged tail is being truncated."""

        def if_whole() -> T:
            self._store.truncations.check_whole()
            return work()

        while True:
            try:
                return self._ask.call(if_whole)
            except TruncationRunning:
                self._ask.wait(self._whole())

    async def _whole(self) -> None:
        ended = asyncio.Event()
        self._store.truncations.when_whole(ended.set)
        await ended.wait()

    def _call_of(self, topic: str, work: Callable[[], T]) -> T:
        with _faults_of(topic):
            return self._call(work)

    def segments(self) -> Sequence[Segment]:
        return self._call(self._store.reader.segments)

    def flush(self) -> int:
        return self._ask.wait(self._after_flush(self._limit.within))

    async def _after_flush(self, limit: Callable[[int], T]) -> T:
        await self._flusher.flush_now()
        return limit(self._flusher.flushed_offset)

    def is_settled(self) -> bool:
        """Return whether rounds may record gaps: the set has all that this member had at its promotion."""
        return self._ask.wait(self._after_flush(self._limit.is_settled))

    def roll(self) -> bool:
        try:
            self._call(self._roll)
        except (StoreFull, StoreNotWritable) as error:
            log.warning("the active segment stays open: %s", error)
            return False
        return True

    def _roll(self) -> None:
        self._store.end.roll()
        if self._on_growth is not None:
            self._on_growth()  # the end marker of a segment counts as growth

    def evict(self, base: int) -> bool:
        store = self._store
        end = next((segment.end for segment in self.segments() if segment.base == base), 0)
        for _ in range(2):  # a checkpoint that is due already may lie below the end of the file
            if not self._call(lambda: store.want_checkpoint(end)):
                break
            self._ask.wait(self._flusher.upkeep_now())
        remove = self._call(lambda: store.take_out(base))
        return remove()

    def topics(self) -> Sequence[str]:
        return sorted(self._call(self._store.queues.topics))

    def queues_of(self, topic: str) -> Sequence[int]:
        return self._call(lambda: self._store.queues.names_of(topic))

    def deleted_below(self) -> Mapping[str, Mapping[int, int]]:
        return self._call(self._store.queues.records.ended)

    def deleted_topics(self) -> Sequence[str]:
        return self._call(self._store.queues.records.deleted)

    def forget_deleted(self, topics: Collection[str]) -> int:
        store = self._store
        image = self._call(lambda: store.queue_changes.image_without(topics))
        if image is None:
            return 0
        store.queues.records.write(image)
        return self._call(lambda: store.queue_changes.forget_deleted(image))

    def min_offset(self, topic: str, queue: int) -> int:
        return self._call_of(topic, lambda: self._store.queues.min_offset(topic, queue))

    def expire_below(
        self, rising: Mapping[str, Mapping[int, int]], before: Mapping[str, int]
    ) -> Mapping[str, TopicUnreadable]:
        store = self._store
        hidden, failed = False, dict[str, TopicUnreadable]()
        for topic, offsets in rising.items():
            try:
                left = iter(offsets.items())
                while some := dict(islice(left, _QUEUES_AT_ONCE)):
                    with _faults_of(topic):
                        hidden |= self._ask.wait(self._expired(topic, some, before[topic]))
            except TopicUnreadable as error:
                failed[topic] = error
        if hidden:
            store.queues.records.write(self._call(store.queue_changes.image))
        return failed

    async def _expired(self, topic: str, offsets: Mapping[int, int], timestamp: int) -> bool:
        while True:
            try:
                return await in_turns(self._store.queue_changes.expire_below(topic, offsets, timestamp))
            except TruncationRunning:
                await self._whole()

    def show_from(self, topic: str, queue: int, offset: int) -> int:
        return self._call_of(topic, lambda: self._store.queue_changes.show_from(topic, queue, offset))

    def hide_erased(self, rows: Iterable[tuple[str, int, int, int]]) -> Hidden:
        store = self._store
        hidden = hide(store, rows, self._call)
        self._is_unsaved |= hidden.is_changed
        if self._is_unsaved:
            store.queues.records.write(self._call(store.queue_changes.image))
            self._is_unsaved = False
        return Hidden(hidden.runs, hidden.failed)

    def log_erased(self, rows: Sequence[tuple[str, int, int, int]]) -> None:
        try:
            for begin in range(0, len(rows), _ROWS_IN_RECORD):
                self._call(functools.partial(self._log_erased, rows[begin : begin + _ROWS_IN_RECORD]))
        except BrokerError as error:
            raise OSError(errno.EAGAIN, f"the log accepts no record: {error.remark}") from error

    def _log_erased(self, rows: Iterable[tuple[str, int, int, int]]) -> None:
        if self._store.end.is_following:
            return  # the copy of an Apache master's log accepts no records; no other neve broker follows it
        change = RowsErased(rows={})
        for topic, queue, first, last in rows:
            change.rows.setdefault(topic, {}).setdefault(queue, []).append((first, last))
        self._journal.record(change)
        if self._on_growth is not None:
            self._on_growth()

    def erased(self, topic: str) -> Mapping[int, Sequence[tuple[int, int]]]:
        records = self._store.queues.records
        return self._call(lambda: {q: records.erased_of(t, q) for t, q in records.erased_places() if t == topic})

    def former_ends(self, topics: Collection[str]) -> Mapping[str, int]:
        return self._call(lambda: self._store.reader.former_ends(topics))

    def search_log(self, ranges: Mapping[str, tuple[int, int]], text: bytes) -> Iterator[bytes | None]:
        for segment in self.segments():
            wanted = {topic: ranges[topic] for topic in segment.topics if topic in ranges}
            if not any(start < segment.end and segment.base < end for start, end in wanted.values()):
                continue
            try:
                yield from self._search_segment(segment, wanted, text)
            except FileNotFoundError as error:
                if segment.base >= self.confirmed_range()[0]:
                    raise TopicUnreadable(f"the file of the log at {segment.base} is missing") from error
            except (StoreError, OSError) as error:
                raise TopicUnreadable(f"the file of the log at {segment.base}: {error}") from error

    def _search_segment(
        self, segment: Segment, wanted: Mapping[str, tuple[int, int]], text: bytes
    ) -> Iterator[bytes | None]:
        for path, base, _ in self.files(segment.base, segment.end):
            for raw in records_with(self._store.disk, Path(path), segment.end - base, text):
                if raw is not None:
                    record = decode_record(raw)
                    start, end = wanted.get(record.topic, (0, 0))
                    if not start <= record.physical_offset < end:
                        continue
                yield raw

    def quarantined(self, text: bytes) -> Iterator[tuple[str, bytes]]:
        store = self._store
        for path, raw in quarantined(store.disk, store.config.root):
            if text in raw:
                yield str(path), raw

    def remove_quarantined(self, name: str) -> None:
        disk, path = self._store.disk, Path(name)
        disk.remove(path)
        disk.fsync_dir(path.parent)

    def aged(self, before: Mapping[str, int]) -> Iterator[tuple[str, Aged | TopicUnreadable]]:
        # Messages appended after this are no older, in whichever queue.
        newest_ms = max((one.newest_store_time for one in self.segments()), default=_UNKNOWN_MS)
        looks = _aged(self._store, before, newest_ms)
        while some := self._call(lambda: list(islice(looks, _QUEUES_AT_ONCE))):
            yield from (one for one in some if one is not None)

    def store_time(self, topic: str, queue: int, offset: int) -> int:
        return self._call_of(topic, lambda: self._store.reader.store_time(topic, queue, offset))

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]:
        """Return the entries of a topic in a range, by queue.

        They are looked up in slices, because a segment may have millions of small records.
        """
        (found,) = self.entries_of([TopicRange(topic, start, end)])
        if isinstance(found, TopicUnreadable):
            raise found
        return found.runs

    def entries_of(
        self, ranges: Sequence[TopicRange], *, timed: bool = False
    ) -> Iterator[FoundEntries | TopicUnreadable]:
        """Yield the entries of each range; only the range in progress is held in memory."""
        ahead = _LookUp(self._store, ranges, timed=timed)
        there_is_more = True
        while there_is_more:
            there_is_more = self._call(ahead.some)
            while ahead.found:
                slices, oldest_ms = ahead.found.popleft()
                if isinstance(slices, TopicUnreadable):
                    yield slices
                else:
                    yield FoundEntries(joined(slices), oldest_ms)

    def confirmed_range(self) -> tuple[int, int]:
        store = self._store
        return self._call(lambda: (store.min_physical_offset, store.visibility.confirmed))

    def first_offsets(self, topic: str, start: int) -> Mapping[int, int]:
        return self._call_of(topic, lambda: self._store.reader.first_offsets(topic, start))

    def deleted_up_to(self, topic: str) -> int:
        return self._call(lambda: self._store.queues.deleted_up_to(topic))

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]:
        return self._call(lambda: self._store.reader.files(start, end))

    def pinned_from(self) -> int | None:
        return self._call(self._pins.lowest)

    def undelivered_from(self) -> int | None:
        return self._call(self._pins.undelivered_from)

    def reappend_waiting(self, below: int) -> None:
        self._ask.wait(self._pins.save())
        if self._call(lambda: self._store.end.is_following):
            return  # the master appends them again, and replication copies them
        try:
            while self._call(lambda: self._pins.reappend(below)):
                pass
        except (StoreFull, StoreNotWritable) as error:
            log.warning("pending messages pin their segments: %s", error)


def _aged(
    store: MessageStore, before: Mapping[str, int], newest_ms: int
) -> Iterator[tuple[str, Aged | TopicUnreadable] | None]:
    """Yield the aged ends of each topic, on the loop; None ends each queue and each part of a long search."""
    for topic, time_ms in before.items():
        ends: dict[int, int] = {}
        oldest_ms = newest_ms
        try:
            for queue in store.queues.names_of(topic):
                end, since_ms = yield from _aged_in(store, topic, queue, time_ms)
                oldest_ms = min(oldest_ms, since_ms)
                if end is not None:
                    ends[queue] = end
                yield None
        except (StoreError, OSError) as error:
            yield topic, TopicUnreadable(f"topic {topic}: {error}")
        else:
            yield topic, Aged(ends, oldest_ms)


def _aged_in(
    store: MessageStore, topic: str, queue: int, time_ms: int
) -> Generator[None, None, tuple[int | None, int]]:
    low = store.queues.min_offset(topic, queue)
    if low >= store.queues.max_offset(topic, queue):
        return None, _NEVER_MS
    first_ms = store.reader.store_time(topic, queue, low)
    if first_ms >= time_ms:
        return None, first_ms
    end = yield from store.reader.offset_by_time(topic, queue, time_ms, False)
    return end if end > low else None, _UNKNOWN_MS


class _LookUp:
    """Lookup of many ranges in the log, run on the event loop in parts."""

    def __init__(self, store: MessageStore, ranges: Sequence[TopicRange], *, timed: bool) -> None:
        self._store, self._timed = store, timed
        self._pieces = self._of_each(ranges)
        self.found: deque[tuple[list[EntrySlice] | TopicUnreadable, int]] = deque()  # completed ranges, in order

    def some(self) -> bool:
        """Look up the next part; return whether more is left."""
        entries = examined = 0
        for count in self._pieces:
            entries += count
            examined += not count
            if entries >= _ENTRIES_AT_ONCE or examined >= _QUEUES_AT_ONCE:
                return True
        return False

    def _of_each(self, ranges: Sequence[TopicRange]) -> Iterator[int]:
        """Yield the number of entries of each slice; 0 ends a queue or a range."""
        for wanted in ranges:
            slices: list[EntrySlice] = []
            try:
                for piece in self._store.reader.entry_slices(wanted.topic, wanted.start, wanted.end, _ENTRIES_AT_ONCE):
                    if piece is None:
                        yield 0
                        continue
                    slices.append(piece)
                    yield len(piece.run.sizes)
                oldest_ms = self._oldest_ms(wanted.topic, slices) if self._timed else _UNKNOWN_MS
            except (StoreError, OSError) as error:
                unreadable = TopicUnreadable(f"topic {wanted.topic}: {error}")
                unreadable.__cause__ = error
                self.found.append((unreadable, _UNKNOWN_MS))
            else:
                self.found.append((slices, oldest_ms))
            yield 0

    def _oldest_ms(self, topic: str, slices: list[EntrySlice]) -> int:
        firsts = {piece.queue_id: piece.run for piece in slices if piece.anew}
        if not firsts:
            return _UNKNOWN_MS
        queue, run = min(firsts.items(), key=lambda item: int(item[1].physical[0]))
        return self._store.reader.store_time(topic, queue, run.first_offset)
