"""Row groups of the archive, from memory or by one fetch shared by all readers, in turns between consumer groups.

Thread-safe and never blocking: a reader gets a future. A failed read ends it with ColdUnavailable.
"""

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from neve.archive.catalog.catalog import Location
from neve.archive.format.journal import CommittedObject
from tiered.read.cold_cache import GroupCache, Key
from tiered.read.cold_query import ColdUnavailable
from tiered.read.fetch_queue import Fetch, FetchQueue, QueueFull
from tiered.worker.client import DecodedGroup
from tiered.worker.failed import WorkerFailed
from tiered.worker.frames import MayHold

log = logging.getLogger(__name__)

FETCH_BUDGET = 64 << 20
_FETCH_THREADS = 8
_REMEMBERED = 16_384  # row groups, 64 GiB of records
_FILTER_BYTES = 256 << 10  # budget of a request for an object's filters

assert _FILTER_BYTES < FETCH_BUDGET, "a look must fit into the budget"


@dataclass(slots=True)
class ColdCounts:
    """Counters since the start, for metrics."""

    fetches: int = 0
    filters: int = 0  # objects whose filters or bounds were requested
    fetched_bytes: int = 0
    failures: int = 0
    memory_hits: int = 0
    disk_hits: int = 0


class GroupSource(Protocol):
    """The reading methods of a worker."""

    def read_group(self, store_url: str, name: CommittedObject, index: int, *, keep: bool) -> DecodedGroup: ...

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> MayHold: ...

    def may_span(self, store_url: str, name: CommittedObject, groups: list[int], physical_offset: int) -> MayHold: ...


@dataclass(slots=True, eq=False)
class _Flight:
    """One fetch and its waiters."""

    key: Key
    location: Location
    fetch: Fetch = field(init=False)
    waiters: dict["Future[DecodedGroup]", None] = field(default_factory=dict)
    ahead: bool = False
    keep: bool = False  # whether to cache the group in memory
    forgotten: bool = False  # whether the object was forgotten meanwhile, so that nothing is cached


class GroupFetches:
    """The fetches. `mapped_max`: limit of descriptors for row groups in memory, which have two each."""

    def __init__(
        self, worker: GroupSource, store_url: str, cache_bytes: int, mapped_max: int, fetch_budget: int
    ) -> None:
        self._worker, self._store_url = worker, store_url
        self._cache = GroupCache(cache_bytes, max(mapped_max // 2, 1))
        self._queue = FetchQueue(_FETCH_THREADS, fetch_budget)
        # Read-ahead for all readers together is limited to the part of the cache that scans may use.
        self.ahead_max = cache_bytes // 4
        self._ahead_coming = 0
        self._lock = threading.Lock()
        self._flights: dict[Key, _Flight] = {}
        self._fetched: OrderedDict[Key, None] = OrderedDict()  # the last fetched groups, cached or not
        self._looks: set[Future[frozenset[int]]] = set()
        self.counts = ColdCounts()

    @property
    def cached_bytes(self) -> int:
        return self._cache.nbytes

    @property
    def waiting(self) -> int:
        """The number of queued fetches."""
        return self._queue.waiting

    def close(self) -> None:
        """Discard queued fetches; their waiters get ColdUnavailable."""
        self._queue.close()
        with self._lock:
            flights, looks = list(self._flights.values()), list(self._looks)
        for look in looks:
            look.cancel()
        for flight in flights:
            if not flight.fetch.started:
                self._land(flight, None, ColdUnavailable("the broker stops"))

    # ---- row groups

    def in_memory(self, location: Location, offset: int) -> DecodedGroup | None:
        """Return a cached group for a read that begins at the offset; None if it is not fetched yet."""
        with self._lock:
            cached = self._cache.get((location.name.key, location.row_group), location.queue, offset)
            self.counts.memory_hits += cached is not None
        return cached

    def want(self, location: Location, group: str, offset: int, *, keep: bool = True) -> "Future[DecodedGroup]":
        """Return the row group from the cache or by a shared fetch. Raises ColdUnavailable.

        `keep`: whether to cache it. A group that is searched once would only evict groups that readers need.
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

    def forget(self, names: Iterable[CommittedObject]) -> None:
        """Drop cached groups of these objects, and don't cache those that are being fetched."""
        with self._lock:
            for name in names:
                for index in range(len(name.row_groups)):
                    key = (name.key, index)
                    self._cache.forget(key)
                    if key in self._flights:
                        self._flights[key].forgotten = True

    def fetch_ahead(self, location: Location, group: str) -> bool:
        """Fetch a group ahead of a reader. Returns False if the limit of read-ahead is reached."""
        key, size = (location.name.key, location.row_group), location.group.wire_bytes
        with self._lock:
            if key in self._cache or key in self._flights:
                return True
            if self._cache.ahead_bytes + self._ahead_coming + size > self.ahead_max:
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

    def _flight(self, key: Key, location: Location) -> _Flight:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(key, location)
            flight.fetch = Fetch(location.group.wire_bytes, functools.partial(self._fetch, flight))
        return flight

    def _left(self, flight: _Flight, waiter: "Future[DecodedGroup]") -> None:
        """Remove a waiter that ended. The last one withdraws a fetch that has not begun."""
        with self._lock:
            flight.waiters.pop(waiter, None)
            abandoned = not flight.waiters and not flight.ahead and self._flights.get(flight.key) is flight
            if abandoned and self._queue.withdraw(flight.fetch):
                del self._flights[flight.key]

    def _fetch(self, flight: _Flight) -> None:
        group: DecodedGroup | None = None
        error: Exception = ColdUnavailable(f"{flight.key[0]}: the read was interrupted")
        try:
            group = self._read_twice(flight.location)
        except (WorkerFailed, OSError) as failure:
            error = ColdUnavailable(f"{flight.key[0]}, row group {flight.key[1]}: {failure}")
            error.__cause__ = failure
        finally:
            self._land(flight, group, error)

    def _read_twice(self, location: Location) -> DecodedGroup:
        name, index = location.name, location.row_group
        with self._lock:
            keep = self._is_fetched_again((name.key, index))
        try:
            return self._worker.read_group(self._store_url, name, index, keep=keep)
        except WorkerFailed:
            with self._lock:
                self.counts.failures += 1
            return self._worker.read_group(self._store_url, name, index, keep=keep)

    def _is_fetched_again(self, key: Key) -> bool:
        """Whether the group was fetched before, so that the disk cache should keep it. Under the lock.

        Most of an archive is read once at most. Writing that to the disk would take a third of a replay's cost, and
        would evict groups that are read repeatedly.
        """
        again = key in self._fetched
        self._fetched[key] = None
        self._fetched.move_to_end(key)
        if len(self._fetched) > _REMEMBERED:
            self._fetched.popitem(last=False)
        return again

    def _land(self, flight: _Flight, group: DecodedGroup | None, error: Exception) -> None:
        """End a fetch: cache the group and complete the waiters."""
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
                if (flight.keep or flight.ahead) and not flight.forgotten:
                    self._cache.put(flight.key, group, ahead=flight.ahead and not waiters)
            else:
                self.counts.failures += 1
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                if group is not None:
                    waiter.set_result(group)
                else:
                    waiter.set_exception(error)

    # ---- filters and bounds of objects

    def may_hold(
        self, name: CommittedObject, indices: list[int], wanted: bytes | int, group: str
    ) -> "Future[frozenset[int]]":
        """Return the row groups that may have the wanted word or offset; all of them if that is unknown."""
        look: Future[frozenset[int]] = Future()
        fetch = Fetch(_FILTER_BYTES, functools.partial(self._look, look, name, indices, wanted))
        with self._lock:
            self._looks.add(look)
        look.add_done_callback(functools.partial(self._looked, fetch))
        try:
            self._queue.put(fetch, group)
        except QueueFull:
            look.set_result(frozenset(indices))
        return look

    def _look(
        self, look: "Future[frozenset[int]]", name: CommittedObject, indices: list[int], wanted: bytes | int
    ) -> None:
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
            log.warning("the filter of %s can't be read: %s", name.key, error)
        finally:
            look.set_result(found)

    def _looked(self, fetch: Fetch, look: "Future[frozenset[int]]") -> None:
        with self._lock:
            self._looks.discard(look)
        if look.cancelled():
            self._queue.withdraw(fetch)
