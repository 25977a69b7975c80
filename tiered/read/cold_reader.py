"""Cold reads for the broker: catalog -> row group -> one range GET in the worker -> slices of its memfd.

    at_hand ── catalog.find ──▶ cache ──hit──▶ slice by count, bytes, tags
    locate  ─┘                   └─miss─▶ one fetch for all readers, in turns between groups ──▶ cache ──▶ take
                                          read-ahead for a sequential reader

Thread-safe. `at_hand`, `locate` and `take` don't block, so the broker's event loop calls them. `at_hand` answers most
pulls of a replay. A pull before its row group is fetched calls `locate`, awaits the future, and calls `take`. A failed
read raises ColdUnavailable, and no returned offset skips a range that was not read.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from infra.clock import Clock, SystemClock
from neve.archive.catalog.catalog import Catalog, GapHit, Location
from neve.archive.format.journal import CommittedObject
from neve.remoting.codes import GetMessageStatus
from tiered.read.cold_query import ColdQuery, ColdUnavailable, FoundRecords, QueryKey
from tiered.read.group_fetches import FETCH_BUDGET, ColdCounts, GroupFetches, GroupSource
from tiered.read.read_ahead import WINDOW_MAX, ReadAhead, Reader
from tiered.read.read_request import ReadRequest
from tiered.worker.client import DecodedGroup

__all__ = ["ColdCounts", "ColdReader", "ColdResult", "ColdUnavailable", "GroupSource", "Located"]


_QUESTION_SECONDS = 20.0  # time limit of a thread's wait for one row group
_QUERIES = ""  # the fetch queue of callers without a consumer group


@dataclass(slots=True)
class ColdResult:
    """Result of a read. OFFSET_FOUND_NULL: a gap. OFFSET_OVERFLOW_ONE: above the archive."""

    status: GetMessageStatus
    next_offset: int
    buffers: list[memoryview] = field(default_factory=list)
    count: int = 0


@dataclass(slots=True)
class Located:
    """A read in progress. `decoded` ends with the row group or ColdUnavailable; cancel it if it is not needed."""

    reader: Reader
    location: Location
    offset: int
    decoded: "Future[DecodedGroup]"


class ColdReader:
    """The archive as the broker reads it: locates offsets, shares fetches between readers, and caches row groups.

    Thread-safe. ColdUnavailable means that a read fails now. Records that are lost for good are gaps of the catalog.
    """

    def __init__(
        self,
        catalog: Catalog,
        worker: GroupSource,
        store_url: str,
        cache_bytes: int = 256 << 20,
        *,
        mapped_max: int = 1024,
        fetch_budget: int = FETCH_BUDGET,
        is_current: Callable[[], bool] = lambda: True,
        clock: Clock | None = None,
    ) -> None:
        """`is_current`: whether the catalog is complete up to the journal's end. Only then does it show what is lost.

        `mapped_max`: limit of descriptors for row groups in memory, which have two each.
        """
        self._is_current = is_current
        self._catalog = catalog
        self._groups = GroupFetches(worker, store_url, cache_bytes, mapped_max, fetch_budget)
        self._query = ColdQuery(catalog, self._group_of, clock or SystemClock(), self._may_hold)
        self._lock = threading.Lock()  # guards the readers' positions
        self._ahead = ReadAhead(min(WINDOW_MAX, self._groups.ahead_max))

    @property
    def counts(self) -> ColdCounts:
        return self._groups.counts

    @property
    def cached_bytes(self) -> int:
        return self._groups.cached_bytes

    @property
    def waiting(self) -> int:
        """The number of queued fetches."""
        return self._groups.waiting

    # ---- a read from memory

    def at_hand(self, read: ReadRequest) -> ColdResult | None:
        """Read without waiting; None if the row group is not in memory, and `locate` has to be called."""
        topic, queue_id, offset = read.topic, read.queue_id, read.offset
        found = self._catalog.find(topic, queue_id, offset)
        if not isinstance(found, Location) or (decoded := self._groups.in_memory(found, offset)) is None:
            return None
        result = _slice(decoded, found, offset, read)
        reader = (read.group, topic, queue_id, read.client)
        with self._lock:
            self._note(reader, found, offset)
            self._ahead.answered(reader, offset, result.next_offset)
        return result

    # ---- a read in three steps: locate, await `decoded`, take

    def locate(self, read: ReadRequest) -> Located | ColdResult:
        """Locate an offset for a client of a consumer group, and start its fetch. Raises ColdUnavailable."""
        topic, queue_id, offset = read.topic, read.queue_id, read.offset
        found = self._catalog.find(topic, queue_id, offset)
        if found is None:
            return self._outside(topic, queue_id, offset)
        if isinstance(found, GapHit):
            return ColdResult(GetMessageStatus.OFFSET_FOUND_NULL, found.next_offset)
        reader = (read.group, topic, queue_id, read.client)
        decoded = self._groups.want(found, read.group, offset)
        with self._lock:
            self._note(reader, found, offset)
        return Located(reader, found, offset, decoded)

    def _note(self, reader: Reader, location: Location, offset: int) -> None:
        """Note a reader's position and fetch ahead of it. Under the lock."""
        position = self._ahead.note(reader, location, offset)
        position.fetch_ahead(
            location, self._catalog.next_location, lambda following: self._groups.fetch_ahead(following, reader[0])
        )

    def take(self, located: Located, decoded: DecodedGroup, read: ReadRequest) -> ColdResult:
        result = _slice(decoded, located.location, located.offset, read)
        with self._lock:
            self._ahead.answered(located.reader, located.offset, result.next_offset)
        return result

    def has_moved(self, located: Located) -> bool:
        """Whether the offset is in another place now: a failed read of an object that expired meanwhile is retried."""
        found = self._catalog.find(located.location.name.topic, located.location.queue, located.offset)
        return found != located.location

    def forget(self, names: Iterable[CommittedObject]) -> None:
        """Drop cached row groups of these objects."""
        self._groups.forget(names)

    def close(self) -> None:
        """Fail all waiting reads, because the broker stops."""
        self._groups.close()

    # ---- queries, which may block the caller's thread

    def min_offset(self, topic: str, queue_id: int) -> int | None:
        return self._catalog.min_offset(topic, queue_id)

    def count_existing(self, topic: str, queue_id: int, first: int, end: int) -> int:
        """Return how many offsets in [first, end) are not in a gap."""
        return self._catalog.queue(topic, queue_id).count_existing(first, end)

    def has(self, topic: str, queue_id: int, offset: int) -> bool:
        """Whether the archive has an offset; without a fetch."""
        return isinstance(self._catalog.find(topic, queue_id, offset), Location)

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        """Return a message's store time; -1 if it is not archived or has no known time. Raises ColdUnavailable."""
        found = self._catalog.find(topic, queue_id, offset)
        if not isinstance(found, Location):
            return -1
        row = _first_row(found) + offset - found.first
        return int(self._awaited(found, offset).times[row])

    def time_bounds(self, topic: str, queue_id: int, offset: int) -> tuple[int, int] | None:
        """Oldest and newest store time of the row group that has an offset, or the next one that exists; no fetch.

        None if the archive has no such message or no record of its row group has a time.
        """
        found = self._catalog.find(topic, queue_id, offset)
        while isinstance(found, GapHit):
            found = self._catalog.find(topic, queue_id, found.next_offset)
        if found is None or found.group.newest_ms < 0:
            return None
        return max(found.group.oldest_ms, 0), found.group.newest_ms

    def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool = False) -> int | None:
        """Return the first offset stored at or after a time, or with `upper` the last at or before; None if none.

        Raises ColdUnavailable.
        """
        low, high = self._catalog.min_offset(topic, queue_id), self._catalog.max_offset(topic, queue_id)
        if low is None or high is None:
            return None
        first = self._first_at(topic, queue_id, timestamp + 1 if upper else timestamp)
        if not upper:
            return None if first is None else max(first, low)
        return max((high if first is None else first) - 1, low)

    def has_time_below(self, topic: str, queue_id: int, timestamp: int, offset: int) -> bool:
        """Whether a row group that ends below an offset may have a message stored at or after a time; no fetch."""
        found = self._catalog.queue(topic, queue_id).by_time(timestamp)
        return found is not None and found.last < offset

    def query(self, topic: str, key: str, max_num: int, begin: int, end: int) -> FoundRecords:
        """Return records with a key stored in [begin, end], newest first, and what was not searched."""
        return self._query.by_key(topic, key, max_num, begin, end)

    def record_at(self, physical_offset: int) -> FoundRecords:
        """Return the record at a CommitLog offset, and what was not searched."""
        return self._query.at(physical_offset)

    def _first_at(self, topic: str, queue_id: int, timestamp: int) -> int | None:
        location = self._catalog.queue(topic, queue_id).by_time(timestamp)
        while location is not None:
            begin = _first_row(location)
            end = begin + location.last - location.first + 1
            # A damaged record has no time and counts as stored with the one before it.
            times = np.maximum.accumulate(self._awaited(location, location.first).times[begin:end])
            index = int(np.searchsorted(times, timestamp))
            if index < len(times):
                return location.first + index
            location = self._after(location)
        return None

    def _awaited(self, location: Location, offset: int) -> DecodedGroup:
        """Return a row group; blocks. Raises ColdUnavailable, also if the store does not answer in time."""
        waiter = self._groups.want(location, _QUERIES, offset)
        try:
            return waiter.result(_QUESTION_SECONDS)
        except TimeoutError as error:
            waiter.cancel()
            raise ColdUnavailable(f"{location.name.key}: no answer in {_QUESTION_SECONDS:.0f} s") from error

    def _after(self, location: Location) -> Location | None:
        """Return the next run of the queue, across gaps."""
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
            raise ColdUnavailable(f"{topic}/{queue_id}: it is unknown at present whether offset {offset} is archived")
        if high is None:
            return ColdResult(GetMessageStatus.OFFSET_TOO_SMALL, offset)
        if offset >= high:
            return ColdResult(GetMessageStatus.OFFSET_OVERFLOW_ONE, offset)
        raise ColdUnavailable(f"{topic}/{queue_id}: offset {offset} is in a round that is not committed yet")

    def _group_of(self, name: CommittedObject, index: int) -> "Future[DecodedGroup]":
        queue, first, last = name.row_groups[index].runs[0]
        return self._groups.want(Location(name, index, queue, first, last), _QUERIES, first, keep=False)

    def _may_hold(self, name: CommittedObject, indices: list[int], wanted: QueryKey) -> "Future[frozenset[int]]":
        return self._groups.may_hold(name, indices, wanted, _QUERIES)


def _first_row(location: Location) -> int:
    """Return the row, within its group, of the location's first offset."""
    row = 0
    for queue, first, last in location.group.runs:
        if (queue, first) == (location.queue, location.first):
            return row
        row += last - first + 1
    raise ColdUnavailable(f"{location.name.key} does not list the run of the catalog")


def _slice(group: DecodedGroup, location: Location, offset: int, read: ReadRequest) -> ColdResult:
    """Select messages from a group, at least one even above `max_bytes`. Adjacent messages share a buffer."""
    max_count, max_bytes, tag_codes = read.max_count, read.max_bytes, read.codes
    first = _first_row(location)
    row, end = first + offset - location.first, first + location.last - location.first + 1
    if tag_codes is None and row < end:  # the common case: one buffer, without creating arrays
        begins = group.begins
        begin = begins[row]
        following = min(row + max(max_count, 1), end)
        if begins[following] - begin > max_bytes:
            following = max(bisect_right(begins, begin + max_bytes, row + 1, following) - 1, row + 1)
        buffer = group.wire[begin : begins[following]]
        return ColdResult(GetMessageStatus.FOUND, offset + following - row, [buffer], following - row)
    rows = np.arange(row, end)
    if tag_codes is not None:
        rows = rows[np.isin(group.tags[row:end], list(tag_codes))]
    if not len(rows):
        return ColdResult(GetMessageStatus.NO_MATCHED_MESSAGE, location.last + 1)
    sizes = np.cumsum(group.positions[rows + 1] - group.positions[rows])
    count = min(max(max_count, 1), max(1, int(np.searchsorted(sizes, max_bytes, "right"))))
    chosen = rows[:count]
    breaks = np.flatnonzero(np.diff(chosen) != 1) + 1
    starts, ends = chosen[np.r_[0, breaks]], chosen[np.r_[breaks - 1, len(chosen) - 1]] + 1
    buffers = [
        group.wire[start:stop]
        for start, stop in zip(group.positions[starts].tolist(), group.positions[ends].tolist(), strict=True)
    ]
    next_offset = int(group.offsets[chosen[-1]]) + 1 if count < len(rows) else location.last + 1
    return ColdResult(GetMessageStatus.FOUND, next_offset, buffers, len(chosen))
