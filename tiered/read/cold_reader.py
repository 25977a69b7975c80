"""Reads out of the archive for the broker: catalog -> row group -> one range GET in the worker -> slices of its memfd.

    locate ── catalog.find ──▶ cache ──hit──▶ take: slice by count, bytes, tags
                                 └─miss─▶ one fetch for all who ask, in turns between groups ──▶ cache
                                          read-ahead behind a sequential reader

Thread-safe; `locate` and `take` don't block, so the broker's loop calls them and awaits what lies between. What can't
be read raises ColdUnavailable, and no offset passes a range that was not read.
"""

import functools
import logging
import threading
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from infra.clock import Clock, SystemClock
from neve.archive.catalog import Catalog, GapHit, Location
from neve.archive.journal import CommittedName
from neve.remoting.codes import GetMessageStatus
from tiered.read.cold_cache import GroupCache, Key
from tiered.read.cold_query import ColdQuery, ColdUnavailable, Found, Wanted
from tiered.read.fetch_queue import Fetch, FetchQueue, QueueFull
from tiered.read.read_ahead import WINDOW_MAX, ReadAhead, Reader
from tiered.worker.client import DecodedGroup, WorkerFailed
from tiered.worker.frames import MayHold

__all__ = ["ColdCounts", "ColdReader", "ColdResult", "ColdUnavailable", "GroupSource", "Located"]

log = logging.getLogger(__name__)

_FETCH_THREADS = 8
_FETCH_BUDGET = 64 << 20
_FILTER_BYTES = 256 << 10  # of the budget, for a look at an object's filters
_QUESTION_SECONDS = 20.0  # that a thread waits for one row group
_QUERIES = ""  # the line of who asks without a consumer group


@dataclass(slots=True)
class ColdResult:
    """OFFSET_FOUND_NULL: a gap. OFFSET_OVERFLOW_ONE: above the archive."""

    status: GetMessageStatus
    next_offset: int
    buffers: list[memoryview] = field(default_factory=list)
    count: int = 0


@dataclass(slots=True)
class Located:
    """A read on its way: `decoded` ends with the row group or with ColdUnavailable; who gives up cancels it."""

    reader: Reader
    location: Location
    offset: int
    decoded: "Future[DecodedGroup]"


@dataclass(slots=True)
class ColdCounts:
    """Since the start, for metrics."""

    fetches: int = 0
    filters: int = 0  # objects whose filters or bounds were asked
    fetched_bytes: int = 0
    failures: int = 0
    memory_hits: int = 0
    disk_hits: int = 0


class GroupSource(Protocol):
    """The worker's reading half."""

    def read_group(self, store_url: str, name: CommittedName, index: int) -> DecodedGroup: ...

    def may_hold(self, store_url: str, name: CommittedName, groups: list[int], word: bytes) -> MayHold: ...

    def may_span(self, store_url: str, name: CommittedName, groups: list[int], physical_offset: int) -> MayHold: ...


@dataclass(slots=True, eq=False)
class _Flight:
    """One fetch and all who wait for it."""

    key: Key
    location: Location
    fetch: Fetch = field(init=False)
    waiters: dict["Future[DecodedGroup]", None] = field(default_factory=dict)
    ahead: bool = False
    keep: bool = False  # in memory, once it is there


class ColdReader:
    def __init__(
        self,
        catalog: Catalog,
        worker: GroupSource,
        store_url: str,
        cache_bytes: int = 256 << 20,
        *,
        mapped_max: int = 1024,
        fetch_budget: int = _FETCH_BUDGET,
        is_current: Callable[[], bool] = lambda: True,
        clock: Clock | None = None,
    ) -> None:
        """`is_current`: whether the catalog is known to reach the journal's end; what it lacks is lost only then.

        `mapped_max`: how many row groups may be mapped in memory.
        """
        self._is_current = is_current
        self._catalog, self._worker, self._store_url = catalog, worker, store_url
        self._cache = GroupCache(cache_bytes, mapped_max)
        self._query = ColdQuery(catalog, self._group_of, clock or SystemClock(), self._may_hold)
        self._queue = FetchQueue(_FETCH_THREADS, fetch_budget)
        # Together, what is fetched ahead of all readers stays within the part of the cache that scans may use.
        self._ahead_max = cache_bytes // 4
        self._ahead = ReadAhead(min(WINDOW_MAX, self._ahead_max))
        self._ahead_coming = 0
        self._lock = threading.Lock()
        self._flights: dict[Key, _Flight] = {}
        self._looks: set[Future[frozenset[int]]] = set()
        self.counts = ColdCounts()

    @property
    def cached_bytes(self) -> int:
        return self._cache.nbytes

    @property
    def waiting(self) -> int:
        """Fetches in line."""
        return self._queue.waiting

    # ---- one read in three steps: locate, await `decoded`, take

    def locate(
        self, group: str, topic: str, queue_id: int, offset: int, client: Hashable = None
    ) -> Located | ColdResult:
        """Where a read of a consumer group's client begins, its row group on the way. Raises ColdUnavailable."""
        found = self._catalog.find(topic, queue_id, offset)
        if found is None:
            return self._outside(topic, queue_id, offset)
        if isinstance(found, GapHit):
            return ColdResult(GetMessageStatus.OFFSET_FOUND_NULL, found.next_offset)
        reader = (group, topic, queue_id, client)
        decoded = self._want(found, group, offset)
        with self._lock:
            window = self._ahead.note(reader, found, offset)
        for ahead in self._coming(found, window):
            if not self._fetch_ahead(ahead, group):
                break
        return Located(reader, found, offset, decoded)

    def take(
        self, located: Located, decoded: DecodedGroup, max_count: int, max_bytes: int, tag_codes: frozenset[int] | None
    ) -> ColdResult:
        location, offset = located.location, located.offset
        row = _first_row(location) + offset - location.first
        result = _slice(decoded, location, row, max_count=max_count, max_bytes=max_bytes, tag_codes=tag_codes)
        with self._lock:
            self._ahead.answered(located.reader, offset, result.next_offset)
        return result

    def has_moved(self, located: Located) -> bool:
        """Whether the offset is elsewhere now: a failed read of an object that expired meanwhile is asked again."""
        found = self._catalog.find(located.location.name.topic, located.location.queue, located.offset)
        return found != located.location

    def get(  # noqa: PLR0917 - the hot store takes the same arguments in the same order
        self,
        topic: str,
        queue_id: int,
        offset: int,
        max_count: int,
        max_bytes: int,
        tag_codes: frozenset[int] | None = None,
        group: str = _QUERIES,
        client: Hashable = None,
    ) -> ColdResult:
        """All three steps; the caller's thread waits. Raises ColdUnavailable."""
        located = self.locate(group, topic, queue_id, offset, client)
        if isinstance(located, ColdResult):
            return located
        try:
            decoded = located.decoded.result()
        except ColdUnavailable:
            if not self.has_moved(located):
                raise
            return self.get(topic, queue_id, offset, max_count, max_bytes, tag_codes, group, client)
        return self.take(located, decoded, max_count, max_bytes, tag_codes)

    def close(self) -> None:
        self._queue.close()
        with self._lock:
            flights, looks = list(self._flights.values()), list(self._looks)
        for look in looks:
            look.cancel()
        for flight in flights:
            if not flight.fetch.started:
                self._land(flight, None, ColdUnavailable("the broker stops"))

    # ---- other questions; the caller's thread waits

    def min_offset(self, topic: str, queue_id: int) -> int | None:
        return self._catalog.min_offset(topic, queue_id)

    def count_existing(self, topic: str, queue_id: int, first: int, end: int) -> int:
        """How many offsets of [first, end) are in no gap."""
        return self._catalog.count_existing(topic, queue_id, first, end)

    def has(self, topic: str, queue_id: int, offset: int) -> bool:
        """Out of memory: no fetch."""
        return isinstance(self._catalog.find(topic, queue_id, offset), Location)

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """-1 where the archive has no such message or its time is unknown. Raises ColdUnavailable."""
        found = self._catalog.find(topic, queue_id, offset)
        if not isinstance(found, Location):
            return -1
        row = _first_row(found) + offset - found.first
        return int(self._awaited(found, offset).times[row])

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

    def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> Found:
        """Records with a key, stored in [begin, end], newest first, and what was not searched."""
        return self._query.by_key(topic, key, max_num, begin, end)

    def record_at(self, physical_offset: int) -> Found:
        """The record from a place in the log, and what was not searched."""
        return self._query.at(physical_offset)

    def _first_at(self, topic: str, queue_id: int, timestamp: int) -> int | None:
        location = self._catalog.by_time(topic, queue_id, timestamp)
        while location is not None:
            begin = _first_row(location)
            end = begin + location.last - location.first + 1
            # A damaged record has no time; it counts as stored with the one before it.
            times = np.maximum.accumulate(self._awaited(location, location.first).times[begin:end])
            index = int(np.searchsorted(times, timestamp))
            if index < len(times):
                return location.first + index
            location = self._after(location)
        return None

    def _awaited(self, location: Location, offset: int) -> DecodedGroup:
        """Raises ColdUnavailable, also where the store hangs."""
        waiter = self._want(location, _QUERIES, offset)
        try:
            return waiter.result(_QUESTION_SECONDS)
        except TimeoutError as error:
            waiter.cancel()
            raise ColdUnavailable(f"{location.name.key}: no answer in {_QUESTION_SECONDS:.0f} s") from error

    def _after(self, location: Location) -> Location | None:
        """The next run, over gaps."""
        offset = location.last + 1
        while isinstance(found := self._catalog.find(location.name.topic, location.queue, offset), GapHit):
            offset = found.next_offset
        return found

    def _outside(self, topic: str, queue_id: int, offset: int) -> ColdResult:
        low, high = self._catalog.min_offset(topic, queue_id), self._catalog.max_offset(topic, queue_id)
        minimum = low if low is not None else self._catalog.recorded_minimum(topic, queue_id)
        if offset < minimum:
            return ColdResult(GetMessageStatus.OFFSET_TOO_SMALL, minimum)
        if not self._is_current():
            raise ColdUnavailable(f"{topic}/{queue_id}: whether offset {offset} is archived is not known now")
        if high is None:
            return ColdResult(GetMessageStatus.OFFSET_TOO_SMALL, offset)
        if offset >= high:
            return ColdResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset)
        raise ColdUnavailable(f"{topic}/{queue_id}: offset {offset} lies in a round that is not committed yet")

    def _group_of(self, name: CommittedName, index: int) -> "Future[DecodedGroup]":
        queue, first, last = name.row_groups[index].runs[0]
        return self._want(Location(name, index, queue, first, last), _QUERIES, first, keep=False)

    def _may_hold(self, name: CommittedName, indices: list[int], wanted: Wanted) -> "Future[frozenset[int]]":
        """Those of an object's row groups that may hold what is wanted: all of them where that can't be told."""
        look: Future[frozenset[int]] = Future()
        fetch = Fetch(_FILTER_BYTES, functools.partial(self._look, look, name, indices, wanted))
        with self._lock:
            self._looks.add(look)
        look.add_done_callback(functools.partial(self._looked, fetch))
        try:
            self._queue.put(fetch, _QUERIES)
        except QueueFull:
            look.set_result(frozenset(indices))
        return look

    def _look(self, look: "Future[frozenset[int]]", name: CommittedName, indices: list[int], wanted: Wanted) -> None:
        if not look.set_running_or_notify_cancel():
            return
        found = frozenset(indices)
        try:
            if isinstance(wanted, bytes):
                answer = self._worker.may_hold(self._store_url, name, indices, wanted)
            else:
                answer = self._worker.may_span(self._store_url, name, indices, wanted)
            found = frozenset(answer.groups)
            with self._lock:
                self.counts.filters += 1
                self.counts.fetched_bytes += answer.fetched
        except (WorkerFailed, OSError) as error:
            log.warning("%s can't be asked what it may hold: %s", name.key, error)
        finally:
            look.set_result(found)

    def _looked(self, fetch: Fetch, look: "Future[frozenset[int]]") -> None:
        with self._lock:
            self._looks.discard(look)
        if look.cancelled():
            self._queue.withdraw(fetch)

    # ---- row groups

    def _want(self, location: Location, group: str, offset: int, *, keep: bool = True) -> "Future[DecodedGroup]":
        """The row group from the cache, or from the one fetch that is on its way. Raises ColdUnavailable.

        `keep`: in memory; what is searched once would only push out what readers need.
        """
        key = (location.name.key, location.row_group)
        waiter: Future[DecodedGroup] = Future()
        with self._lock:
            cached = self._cache.get(key, location.queue, offset)
            if cached is not None:
                self.counts.memory_hits += 1
                waiter.set_result(cached)
                return waiter
            flight = self._flight(key, location)
            flight.waiters[waiter] = None
            flight.keep |= keep
        waiter.add_done_callback(functools.partial(self._left, flight))
        try:
            self._queue.put(flight.fetch, group)
        except QueueFull as error:
            waiter.cancel()
            raise ColdUnavailable(str(error)) from error
        return waiter

    def _fetch_ahead(self, location: Location, group: str) -> bool:
        """False: there is no room for more in front of the readers."""
        key, size = (location.name.key, location.row_group), location.group.wire_bytes
        with self._lock:
            if key in self._cache or key in self._flights:
                return True
            if self._cache.ahead_bytes + self._ahead_coming + size > self._ahead_max:
                return False
            flight = self._flight(key, location)
            flight.ahead = True
            self._ahead_coming += size
        try:
            self._queue.put(flight.fetch, group, ahead=True)
        except QueueFull:
            self._land(flight, None, ColdUnavailable("no read-ahead now"))
            return False
        return True

    def _coming(self, location: Location, window: int) -> Iterator[Location]:
        while window > 0 and (following := self._catalog.next_location(location)) is not None:
            yield following
            window -= following.group.wire_bytes
            location = following

    def _flight(self, key: Key, location: Location) -> _Flight:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(key, location)
            flight.fetch = Fetch(location.group.wire_bytes, functools.partial(self._fetch, flight))
        return flight

    def _left(self, flight: _Flight, waiter: "Future[DecodedGroup]") -> None:
        """A waiter that gave up; the last one takes a fetch that has not begun out of the line."""
        with self._lock:
            flight.waiters.pop(waiter, None)
            abandoned = not flight.waiters and not flight.ahead and self._flights.get(flight.key) is flight
            if abandoned and self._queue.withdraw(flight.fetch):
                del self._flights[flight.key]

    def _fetch(self, flight: _Flight) -> None:
        group: DecodedGroup | None = None
        error: Exception = ColdUnavailable(f"{flight.key[0]}: the read broke off")
        try:
            group = self._read_twice(flight.location)
        except (WorkerFailed, OSError) as failure:
            error = ColdUnavailable(f"{flight.key[0]}, row group {flight.key[1]}: {failure}")
            error.__cause__ = failure
        finally:
            self._land(flight, group, error)

    def _read_twice(self, location: Location) -> DecodedGroup:
        try:
            return self._worker.read_group(self._store_url, location.name, location.row_group)
        except WorkerFailed:
            with self._lock:
                self.counts.failures += 1
            return self._worker.read_group(self._store_url, location.name, location.row_group)

    def _land(self, flight: _Flight, group: DecodedGroup | None, error: Exception) -> None:
        """The fetch is over: into the cache, and everybody is told."""
        with self._lock:
            if self._flights.get(flight.key) is flight:
                del self._flights[flight.key]
            waiters, flight.waiters = list(flight.waiters), {}
            if flight.ahead:
                self._ahead_coming -= flight.location.group.wire_bytes
            if group is not None:
                self.counts.fetches += 1
                self.counts.fetched_bytes += group.fetched
                self.counts.disk_hits += bool(group.cached and not group.fetched)
                if flight.keep or flight.ahead:
                    self._cache.put(flight.key, group, ahead=flight.ahead and not waiters)
            else:
                self.counts.failures += 1
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                if group is not None:
                    waiter.set_result(group)
                else:
                    waiter.set_exception(error)


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
    if tag_codes is None and row < end:  # nearly always: one buffer, and no array is made for it
        begin = int(group.positions[row])
        fitting = int(np.searchsorted(group.positions[row + 1 : end + 1], begin + max_bytes, "right"))
        count = min(max(max_count, 1), max(fitting, 1))
        following = row + count
        next_offset = int(group.offsets[following - 1]) + 1 if following < end else location.last + 1
        buffer = group.wire[begin : int(group.positions[following])]
        return ColdResult(GetMessageStatus.FOUND, next_offset, [buffer], count)
    rows = np.arange(row, end)
    if tag_codes is not None:
        rows = rows[np.isin(group.tags[row:end], list(tag_codes))]
    if not len(rows):
        return ColdResult(GetMessageStatus.NO_MATCHED_MESSAGE, location.last + 1)
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
    return ColdResult(GetMessageStatus.FOUND, next_offset, buffers, len(chosen))
