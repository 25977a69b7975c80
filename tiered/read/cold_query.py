"""Queries of the archive by key, and by CommitLog offset.

The archive has no index, but each row group has bloom filters of its keys and bounds of its CommitLog offsets. Row
groups that pass them are fetched, newest first and a few ahead, and searched for the bytes, within limits of number and
time. Records with the bytes are decoded and compared, because the bytes may be in the body. The result states which
times were not searched.
"""

import contextlib
import heapq
import re
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from datetime import UTC, datetime
from operator import itemgetter
from struct import Struct
from typing import NamedTuple

from infra.clock import Clock
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.name_blocks import NEVER, NO_TIME
from neve.archive.format.journal import CommittedObject, RowGroup
from neve.record.codec import MalformedRecord, MessageRecord, decode_record
from tiered.worker.client import DecodedGroup
from tiered.write.key_rows import rows_with

# Limits of one query; a stock client waits 15 s for its answer.
GROUPS_MAX = 64
OBJECTS_MAX = 1024  # objects whose filters are requested
SECONDS_MAX = 10.0
_AHEAD = 4
_OBJECTS_AHEAD = 6
_LONG = Struct(">q")


class ColdUnavailable(Exception):
    """The archive can't answer now. The client has to retry, at the same offset."""


class FoundRecords(NamedTuple):
    """Whole records, newest first, and what was not searched."""

    records: list[bytes]
    unsearched: str = ""  # what may have more, in words; empty: nothing


class _Place(NamedTuple):
    name: CommittedObject
    number: int

    @property
    def group(self) -> RowGroup:
        return self.name.row_groups[self.number]


class _Left(NamedTuple):
    """The row groups that were not searched: their number and time range."""

    groups: int = 0
    oldest_ms: int = NEVER
    newest_ms: int = NO_TIME

    def with_more(self, places: Iterable[_Place]) -> "_Left":
        groups, oldest, newest = self
        for place in places:
            groups, oldest, newest = groups + 1, min(oldest, place.group.oldest_ms), max(newest, place.group.newest_ms)
        return _Left(groups, oldest, newest)


_NOTHING = _Left()

# Returns the future of a row group; raises ColdUnavailable if too many fetches are queued.
Ask = Callable[[CommittedObject, int], "Future[DecodedGroup]"]
# A word, or a CommitLog offset.
QueryKey = bytes | int
# Returns the future of the row groups of an object that may have the wanted key; cancelled if it is no longer needed.
MayHold = Callable[[CommittedObject, list[int], QueryKey], "Future[frozenset[int]]"]


class ColdQuery:
    """Queries by key and by CommitLog offset, limited in row groups and time. Raises ColdUnavailable."""

    def __init__(self, catalog: Catalog, ask: Ask, clock: Clock, may_hold: MayHold | None = None) -> None:
        """Without `may_hold`, every row group of the time range is read."""
        self._catalog, self._ask, self._clock, self._may_hold = catalog, ask, clock, may_hold

    def by_key(self, topic: str, key: str, max_num: int, begin: int, end: int) -> FoundRecords:
        """Return the newest records with this word in KEYS or this unique key, stored in [begin, end], newest first."""
        if not key:
            return FoundRecords([])  # RocketMQ's index has no empty word
        places, beyond = _newest(self._catalog.topic(topic).names_since(begin), begin, end)
        word = key.encode("utf-8", "surrogatepass")
        pattern = re.compile(re.escape(word))
        found: list[tuple[int, int, bytes]] = []
        search = self._search(places, word, beyond)
        with contextlib.closing(search.groups()) as groups:
            for group in groups:
                found += [
                    (record.store_timestamp, record.physical_offset, raw)
                    for raw, record in self._matches(group, pattern)
                    if has_key(record, topic, key) and begin <= record.store_timestamp <= end
                ]
                found.sort(reverse=True)
                # Groups overlap in time, so older groups are skipped only if all results are newer than them.
                if len(found) >= max_num and found[max_num - 1][0] >= search.newest_left:
                    return FoundRecords([raw for _, _, raw in found[:max_num]])
        return FoundRecords([raw for _, _, raw in found[:max_num]], search.unsearched)

    def at(self, physical_offset: int) -> FoundRecords:
        """Return the record at a CommitLog offset."""
        places = [
            _Place(name, index)
            for name in self._catalog.objects_at(physical_offset)
            for index in range(len(name.row_groups))
        ]
        pattern = re.compile(re.escape(_LONG.pack(physical_offset)))
        search = self._search(places, physical_offset)
        with contextlib.closing(search.groups()) as groups:
            for group in groups:
                for raw, record in self._matches(group, pattern):
                    if record.physical_offset == physical_offset:
                        return FoundRecords([raw])
        return FoundRecords([], search.unsearched)

    def _search(self, places: list[_Place], wanted: QueryKey, beyond: _Left = _NOTHING) -> "_Search":
        looks = _Looks(places, wanted, self._may_hold) if self._may_hold is not None else None
        return _Search(places, self._ask, self._clock, looks, beyond)

    def _matches(self, group: DecodedGroup, pattern: "re.Pattern[bytes]") -> list[tuple[bytes, MessageRecord]]:
        found = []
        for _, raw in rows_with(group, pattern):
            try:
                record = decode_record(raw)
            except MalformedRecord:
                continue
            if self._is_visible(record):
                found.append((raw, record))
        return found

    def _is_visible(self, record: MessageRecord) -> bool:
        low = self._catalog.min_offset(record.topic, record.queue_id)
        return low is not None and record.queue_offset >= low


def _newest(names: Iterable[CommittedObject], begin: int, end: int) -> tuple[list[_Place], _Left]:
    """Return row groups that may have records stored in [begin, end], newest first, and those beyond the limit.

    Keeps the newest OBJECTS_MAX objects: all objects of a topic may be too many to hold in memory.
    """
    kept: list[tuple[int, int, CommittedObject, list[int]]] = []
    beyond = _NOTHING
    for number, name in enumerate(names):
        groups = name.row_groups
        fitting = [index for index, group in enumerate(groups) if group.newest_ms >= begin and group.oldest_ms <= end]
        if not fitting:
            continue
        one = (max(groups[index].newest_ms for index in fitting), number, name, fitting)
        if len(kept) < OBJECTS_MAX:
            heapq.heappush(kept, one)
        else:
            _, _, out, numbers = heapq.heappushpop(kept, one)
            beyond = beyond.with_more(_Place(out, index) for index in numbers)
    kept.sort(key=itemgetter(1))
    places = [_Place(name, index) for _, _, name, numbers in kept for index in numbers]
    places.sort(key=lambda place: place.group.newest_ms, reverse=True)
    return places, beyond


class _Looks:
    """Requests for the objects' filters, in the order of their first row groups, a few ahead."""

    def __init__(self, places: Sequence[_Place], wanted: QueryKey, may_hold: MayHold) -> None:
        objects: dict[str, tuple[CommittedObject, list[int]]] = {}
        for place in places:
            objects.setdefault(place.name.key, (place.name, []))[1].append(place.number)
        self._next = deque(list(objects.values())[:OBJECTS_MAX])
        self._searches: dict[str, Future[frozenset[int]]] = {}
        self._wanted, self._may_hold = wanted, may_hold

    def of(self, place: _Place) -> "Future[frozenset[int]] | None":
        """Return the future for a place's object; None if it is beyond OBJECTS_MAX."""
        coming = sum(not look.done() for look in self._searches.values())
        while self._next and (place.name.key not in self._searches or coming < _OBJECTS_AHEAD):
            name, numbers = self._next.popleft()
            self._searches[name.key] = self._may_hold(name, numbers, self._wanted)
            coming += 1
        return self._searches.get(place.name.key)

    def rules_out(self, place: _Place) -> bool:
        """Whether a completed request excludes the place."""
        look = self._searches.get(place.name.key)
        return look is not None and look.done() and not look.cancelled() and place.number not in look.result()

    def close(self) -> None:
        for look in self._searches.values():
            look.cancel()


class _Search:
    """A search through row groups in order, with fetches a few ahead. Tracks which groups were not searched."""

    def __init__(
        self, places: Sequence[_Place], ask: Ask, clock: Clock, looks: _Looks | None, beyond: _Left = _NOTHING
    ) -> None:
        """`beyond`: row groups that are not in `places`, beyond the limit."""
        self._beyond = beyond
        self._rest = deque(places)
        self._looks = looks
        self._asked = 0
        self._failed: list[_Place] = []
        self._coming: deque[tuple[_Place, Future[DecodedGroup]]] = deque()
        self._ask, self._clock = ask, clock
        self._deadline = clock.monotonic() + SECONDS_MAX

    @property
    def newest_left(self) -> int:
        """The newest store time that an unsearched group may have."""
        return self._left().newest_ms

    @property
    def unsearched(self) -> str:
        left = self._left()
        if not left.groups:
            return ""
        return f"{left.groups} row groups stored from {as_text(left.oldest_ms)} to {as_text(left.newest_ms)}"

    def groups(self) -> Generator[DecodedGroup, None, None]:
        try:
            while self._begin_more():
                place, future = self._coming[0]
                try:
                    group = future.result(self._seconds_left())
                except ColdUnavailable:
                    self._failed.append(place)
                    self._coming.popleft()
                    continue
                self._coming.popleft()
                yield group
        except TimeoutError:
            return
        finally:
            for _, future in self._coming:
                future.cancel()
            if self._looks is not None:
                self._looks.close()

    def _seconds_left(self) -> float:
        return max(self._deadline - self._clock.monotonic(), 0)

    def _begin_more(self) -> bool:
        """Request more groups. Returns False if no group remains to wait for. Raises TimeoutError."""
        while self._rest and len(self._coming) < _AHEAD and self._asked < GROUPS_MAX:
            if self._looks is not None:
                look = self._looks.of(self._rest[0])
                if look is None or (self._coming and not look.done()):
                    break
                with contextlib.suppress(CancelledError):  # without an answer, the group may have the key
                    if self._rest[0].number not in look.result(self._seconds_left()):
                        self._rest.popleft()
                        continue
            place = self._rest.popleft()
            self._asked += 1
            try:
                self._coming.append((place, self._ask(place.name, place.number)))
            except ColdUnavailable:
                self._failed.append(place)
        return bool(self._coming)

    def _left(self) -> _Left:
        rest = (place for place in self._rest if self._looks is None or not self._looks.rules_out(place))
        return self._beyond.with_more([*self._failed, *(place for place, _ in self._coming), *rest])


def as_text(time_ms: int) -> str:
    """Format a store time in UTC. Damaged records have no time, so a group of such begins at the epoch."""
    return datetime.fromtimestamp(max(time_ms, 0) / 1000, UTC).isoformat(timespec="seconds")


def has_key(record: MessageRecord, topic: str, key: str) -> bool:
    """Whether a record matches as in RocketMQ's index: by a word of KEYS or by the unique key."""
    properties = record.properties
    return record.topic == topic and (properties.get("UNIQ_KEY") == key or key in properties.get("KEYS", "").split(" "))
