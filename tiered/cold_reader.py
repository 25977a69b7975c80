"""Reads out of the archive for the broker: catalog -> row group -> one range GET in the worker -> slices of its memfd.

    get ── catalog.find ──▶ cache ──hit──▶ slice by count, bytes, tags
                              └─miss─▶ one fetch for all who ask ──▶ cache, and read-ahead behind a sequential reader

Synchronous and thread-safe; the caller's thread waits, the loop never does. What can't be read raises ColdUnavailable,
and no offset passes a range that was not read.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from neve.archive.catalog import Catalog, GapHit, Location
from neve.archive.journal import CommittedName
from tiered.cold_query import ColdQuery
from tiered.worker_client import DecodedGroup, WorkerFailed

READ_AHEAD_MAX = 32 << 20
_STREAMS = 4096
_AHEAD_THREADS = 2

Key = tuple[str, int]


class ColdUnavailable(Exception):
    """The archive can't answer now: the client is told to come back, its offset stays."""


@dataclass(slots=True)
class ColdResult:
    """Statuses: FOUND, NO_MATCHED_MESSAGE, GAP, OFFSET_TOO_SMALL, OFFSET_OVERFLOW_ONE (above the archive)."""

    status: str
    next_offset: int
    buffers: list[memoryview] = field(default_factory=list)
    count: int = 0


class GroupSource(Protocol):
    """The worker's reading half."""

    def read_group(self, store_url: str, name: CommittedName, index: int) -> DecodedGroup: ...


@dataclass(slots=True)
class _Cached:
    group: DecodedGroup
    highest: int = -1  # the highest row read: reading below it again is reuse, reading on is a scan


class GroupCache:
    """Decoded groups, bounded in bytes. What is read once, front to back, never drives out what is read again."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.nbytes = 0
        self._once: OrderedDict[Key, _Cached] = OrderedDict()
        self._reused: OrderedDict[Key, _Cached] = OrderedDict()

    def get(self, key: Key, row: int) -> DecodedGroup | None:
        cached = self._reused.get(key)
        if cached is not None:
            self._reused.move_to_end(key)
            return cached.group
        cached = self._once.get(key)
        if cached is None:
            return None
        if row < cached.highest:
            self._reused[key] = self._once.pop(key)
        else:
            self._once.move_to_end(key)
            cached.highest = row
        return cached.group

    def put(self, key: Key, group: DecodedGroup) -> None:
        if key in self or group.nbytes > self.capacity:
            return
        self._once[key] = _Cached(group)
        self.nbytes += group.nbytes
        while self.nbytes > self.capacity:
            _, evicted = (self._once if len(self._once) > 1 or not self._reused else self._reused).popitem(last=False)
            self.nbytes -= evicted.group.nbytes

    def __contains__(self, key: Key) -> bool:
        return key in self._once or key in self._reused


class ColdReader:
    def __init__(self, catalog: Catalog, worker: GroupSource, store_url: str, cache_bytes: int = 256 << 20) -> None:
        self._catalog, self._worker, self._store_url = catalog, worker, store_url
        self._cache = GroupCache(cache_bytes)
        self._lock = threading.Lock()
        self._query = ColdQuery(catalog, self._group_of)
        self._flights: dict[Key, Future[DecodedGroup]] = {}
        # (topic, queue, offset at which a reader is expected next) -> its read-ahead window in bytes
        self._streams: OrderedDict[tuple[str, int, int], int] = OrderedDict()
        self._window_max = min(READ_AHEAD_MAX, cache_bytes // 4)
        self._ahead = ThreadPoolExecutor(_AHEAD_THREADS, "read-ahead")
        self.fetches = 0
        self.failures = 0

    @property
    def cached_bytes(self) -> int:
        return self._cache.nbytes

    def get(  # noqa: PLR0917 - the hot store takes the same arguments in the same order
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        tag_codes: frozenset[int] | None = None,
    ) -> ColdResult:
        """Raises ColdUnavailable."""
        found = self._catalog.find(topic, queue_id, offset)
        if found is None:
            return self._outside(topic, queue_id, offset)
        if isinstance(found, GapHit):
            return ColdResult("GAP", found.next_offset)
        row = _first_row(found) + offset - found.first
        group = self._group(found, row)
        self._note_reader(found, offset)
        return _slice(group, found, row, max_count=max_count, max_bytes=max_bytes, tag_codes=tag_codes)

    def min_offset(self, topic: str, queue_id: int) -> int | None:
        return self._catalog.min_offset(topic, queue_id)

    def has(self, topic: str, queue_id: int, offset: int) -> bool:
        """Out of memory: no fetch."""
        return isinstance(self._catalog.find(topic, queue_id, offset), Location)

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """-1 where the archive has no such message or its time is unknown. Raises ColdUnavailable."""
        found = self._catalog.find(topic, queue_id, offset)
        if not isinstance(found, Location):
            return -1
        row = _first_row(found) + offset - found.first
        return int(self._group(found, row).times[row])

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool = False) -> int | None:
        """The first offset stored at or after a time, or (upper) the last at or before it; None: not in the archive.

        Raises ColdUnavailable.
        """
        low, high = self._catalog.min_offset(topic, queue_id), self._catalog.max_offset(topic, queue_id)
        if low is None or high is None:
            return None
        first = self._first_at(topic, queue_id, timestamp + 1 if upper else timestamp)
        if not upper:
            return None if first is None else max(first, low)
        return max((high if first is None else first) - 1, low)

    def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> list[bytes]:
        """Records with a key, stored in [begin, end], newest first, out of a bounded part. Raises ColdUnavailable."""
        return self._query.by_key(topic, key, max_num, begin, end)

    def record_at(self, physical_offset: int) -> bytes | None:
        """The record from a place in the log. Raises ColdUnavailable."""
        return self._query.at(physical_offset)

    def close(self) -> None:
        self._ahead.shutdown(wait=False, cancel_futures=True)

    def _first_at(self, topic: str, queue_id: int, timestamp: int) -> int | None:
        location = self._catalog.by_time(topic, queue_id, timestamp)
        while location is not None:
            begin = _first_row(location)
            end = begin + location.last - location.first + 1
            # A damaged record has no time; it counts as stored with the one before it.
            times = np.maximum.accumulate(self._group(location, begin).times[begin:end])
            index = int(np.searchsorted(times, timestamp))
            if index < len(times):
                return location.first + index
            location = self._after(location)
        return None

    def _after(self, location: Location) -> Location | None:
        """The next run, over gaps."""
        offset = location.last + 1
        while isinstance(found := self._catalog.find(location.name.topic, location.queue, offset), GapHit):
            offset = found.next_offset
        return found

    def _outside(self, topic: str, queue_id: int, offset: int) -> ColdResult:
        low, high = self._catalog.min_offset(topic, queue_id), self._catalog.max_offset(topic, queue_id)
        if low is None or high is None:
            return ColdResult("OFFSET_TOO_SMALL", max(offset, self._catalog.recorded_minimum(topic, queue_id)))
        if offset < low:
            return ColdResult("OFFSET_TOO_SMALL", low)
        if offset >= high:
            return ColdResult("OFFSET_OVERFLOW_ONE", offset)
        raise ColdUnavailable(f"{topic}/{queue_id}: offset {offset} lies in a round that is not committed yet")

    # ---- groups

    def _group_of(self, name: CommittedName, index: int) -> DecodedGroup:
        queue, first, last = name.row_groups[index].runs[0]
        return self._group(Location(name, index, queue, first, last), 0)

    def _group(self, location: Location, row: int) -> DecodedGroup:
        key = (location.name.key, location.row_group)
        with self._lock:
            cached = self._cache.get(key, row)
            if cached is not None:
                return cached
            flight = self._flights.get(key)
            mine = flight is None
            if flight is None:
                flight = self._flights[key] = Future()
        if mine:
            self._fetch(key, location, flight)
        try:
            return flight.result()
        except WorkerFailed as error:
            raise ColdUnavailable(f"{location.name.key}, row group {location.row_group}: {error}") from error

    def _fetch(self, key: Key, location: Location, flight: "Future[DecodedGroup]") -> None:
        try:
            try:
                group = self._worker.read_group(self._store_url, location.name, location.row_group)
            except WorkerFailed:
                with self._lock:
                    self.failures += 1
                group = self._worker.read_group(self._store_url, location.name, location.row_group)
        except BaseException as error:
            with self._lock:
                self.failures += 1
                del self._flights[key]
            flight.set_exception(error)
            if not isinstance(error, WorkerFailed):
                raise
            return
        with self._lock:
            self.fetches += 1
            self._cache.put(key, group)
            del self._flights[key]
        flight.set_result(group)

    # ---- read-ahead

    def _note_reader(self, location: Location, offset: int) -> None:
        """A reader that comes to a group's first offset from the group before it is sequential: its window doubles."""
        topic, queue = location.name.topic, location.queue
        expected = (topic, queue, location.last + 1)
        with self._lock:
            window = self._streams.pop((topic, queue, offset), None) if offset == location.first else None
            if window is None:
                self._streams.setdefault(expected, 0)
            else:
                window = min(max(2 * window, location.group.wire_bytes), self._window_max)
                self._streams[expected] = window
            if len(self._streams) > _STREAMS:
                self._streams.popitem(last=False)
        if window:
            for ahead in self._coming(location, window):
                self._ahead.submit(self._prefetch, ahead)

    def _coming(self, location: Location, window: int) -> Iterator[Location]:
        following = self._catalog.next_location(location)
        while following is not None and window > 0:
            yield following
            window -= following.group.wire_bytes
            following = self._catalog.next_location(following)

    def _prefetch(self, location: Location) -> None:
        key = (location.name.key, location.row_group)
        with self._lock:
            if key in self._cache or key in self._flights:
                return
            flight = self._flights[key] = Future()
        self._fetch(key, location, flight)


def _first_row(location: Location) -> int:
    """The row, inside its group, of the location's first offset."""
    row = 0
    for queue, first, last in location.group.runs:
        if (queue, first) == (location.queue, location.first):
            return row
        row += last - first + 1
    raise ColdUnavailable(f"{location.name.key} does not list the run that the catalog named")


def _slice(
    group: DecodedGroup,
    location: Location,
    row: int,
    *,
    max_count: int,
    max_bytes: int,
    tag_codes: frozenset[int] | None,
) -> ColdResult:
    """At least one message, however small `max_bytes` is; neighbours come as one buffer."""
    end = _first_row(location) + location.last - location.first + 1
    rows = np.arange(row, end)
    if tag_codes is not None:
        rows = rows[np.isin(group.tags[row:end], list(tag_codes))]
    if not len(rows):
        return ColdResult("NO_MATCHED_MESSAGE", location.last + 1)
    sizes = np.cumsum(group.positions[rows + 1] - group.positions[rows])
    count = min(max(max_count, 1), max(1, int(np.searchsorted(sizes, max_bytes, "right"))))
    chosen = rows[:count]
    breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
    begins, ends = chosen[np.r_[0, breaks]], chosen[np.r_[breaks - 1, len(chosen) - 1]] + 1
    buffers = [
        group.wire[start:stop]
        for start, stop in zip(group.positions[begins].tolist(), group.positions[ends].tolist(), strict=True)
    ]
    next_offset = int(group.offsets[chosen[-1]]) + 1 if count < len(rows) else location.last + 1
    return ColdResult("FOUND", next_offset, buffers, len(chosen))
