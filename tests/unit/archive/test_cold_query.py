"""Tests of queries of archived messages by key and by place, over generated row groups."""

import mmap
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
import pytest

from infra.clock import ManualClock
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.name_blocks import Block
from neve.archive.format.journal import Commit, CommittedObject, RowGroup, Topic
from neve.record.codec import encode_record
from neve.record.properties import properties_to_bytes
from tiered.read import cold_query
from tiered.read.cold_query import GROUPS_MAX, SECONDS_MAX, ColdQuery, ColdUnavailable, FoundRecords, QueryKey
from tiered.worker.client import DecodedGroup

ROWS = 4
GROUPS = 3


def record(offset: int) -> bytes:
    """Return a record. Every other one has the key `odd`, and all have it in their body."""
    properties = {"UNIQ_KEY": f"ID{offset}", "KEYS": f"k{offset} {'odd' if offset % 2 else 'even'}"}
    return encode_record(
        topic=b"t", body=b"odd k1", properties=properties_to_bytes(properties), queue_id=0, flag=0,
        queue_offset=offset, physical_offset=offset * 1000, sys_flag=0, born_timestamp=1, born_host=("1.1.1.1", 1),
        store_timestamp=offset * 10, store_host=("1.1.1.1", 2),
    )  # fmt: skip


class Fetched:
    def __init__(self) -> None:
        self.groups: list[int] = []
        self.fails: set[int] = set()
        self.hangs: set[int] = set()

    def __call__(self, name: CommittedObject, index: int) -> "Future[DecodedGroup]":
        self.groups.append(index)
        future: Future[DecodedGroup] = Future()
        if index in self.hangs:
            return future
        if index in self.fails:
            future.set_exception(ColdUnavailable("down"))
            return future
        records = [record(offset) for offset in range(index * ROWS, (index + 1) * ROWS)]
        wire = b"".join(records)
        positions = np.cumsum([0, *map(len, records)], dtype=np.int64)
        numbers = np.concatenate([positions, np.zeros(3 * ROWS, np.int64)])
        mapped = mmap.mmap(-1, numbers.nbytes + len(wire))
        mapped.write(numbers.tobytes() + wire)
        future.set_result(DecodedGroup(memoryview(mapped), ROWS, len(wire)))
        return future


def catalog(count: int = GROUPS) -> Catalog:
    groups = [
        RowGroup(i * ROWS, ROWS, 0, 1, (i * ROWS + 3) * 10, i * ROWS * 10, 600, [(0, i * ROWS, i * ROWS + 3)])
        for i in range(count)
    ]
    name = CommittedObject(
        key="k", topic="t", day="", start=0, end=count * 4000, size=1, footer=1, etag="", checksum=("", ""), sha256="",
        rows=count * ROWS, wire_bytes=1, min_time=0, max_time=110, queues={0: (0, count * ROWS - 1, 0)},
        row_groups=groups,
    )  # fmt: skip
    made = Catalog()
    made.apply(0, Commit(round=1, names=[name]))
    return made


def query_of(fetched: Fetched, made: Catalog | None = None) -> ColdQuery:
    return ColdQuery(made or catalog(), fetched, ManualClock())


def test_key_query_returns_exact_matches_newest_first() -> None:
    query = query_of(Fetched())
    assert query.by_key("t", "odd", 3, 0, 1000) == FoundRecords([record(11), record(9), record(7)])
    assert query.by_key("t", "k1", 32, 0, 1000) == FoundRecords([record(1)])
    assert query.by_key("t", "ID5", 32, 0, 1000) == FoundRecords([record(5)])
    assert query.by_key("t", "dd", 32, 0, 1000) == FoundRecords([])
    assert query.by_key("other", "odd", 32, 0, 1000) == FoundRecords([])


def test_key_query_reads_only_row_groups_of_its_time() -> None:
    fetched = Fetched()
    assert query_of(fetched).by_key("t", "odd", 32, 45, 65) == FoundRecords([record(5)])
    assert fetched.groups == [1]


def test_key_query_stops_at_its_limit_and_cancels_fetches() -> None:
    fetched = Fetched()
    assert query_of(fetched, catalog(50)).by_key("t", "odd", 2, 0, 10_000) == FoundRecords([record(199), record(197)])
    assert fetched.groups == [49, 48, 47, 46]


def test_key_query_bounds_its_row_groups_and_reports_the_rest() -> None:
    fetched = Fetched()
    query = query_of(fetched, catalog(GROUPS_MAX + 2))
    found = query.by_key("t", "k1", 32, 0, 1 << 60)
    assert fetched.groups == list(range(GROUPS_MAX + 1, 1, -1))
    assert found == FoundRecords([], "2 row groups stored from 1970-01-01T00:00:00+00:00 to 1970-01-01T00:00:00+00:00")
    assert query.at(1000) == FoundRecords([record(1)])
    assert query.at((GROUPS_MAX + 1) * 4000).unsearched.startswith("2 row groups")


def test_unreadable_row_group_is_skipped_and_reported() -> None:
    fetched = Fetched()
    fetched.fails = {1}
    found = query_of(fetched).by_key("t", "odd", 32, 0, 1000)
    assert found.records == [record(offset) for offset in (11, 9, 3, 1)]
    assert found.unsearched.startswith("1 row groups")
    # The unreadable group may have newer matches. Two results suffice only if it cannot.
    assert query_of(fetched).by_key("t", "odd", 2, 0, 1000) == FoundRecords([record(11), record(9)])
    assert query_of(fetched).by_key("t", "odd", 3, 0, 1000).unsearched.startswith("1 row groups")


def test_key_query_times_out_with_partial_results() -> None:
    class Late(ManualClock):
        def monotonic(self) -> float:
            self.advance(int(SECONDS_MAX * 1000 / 3))
            return super().monotonic()

    fetched = Fetched()
    fetched.hangs = {1}
    found = ColdQuery(catalog(), fetched, Late()).by_key("t", "odd", 32, 0, 1000)
    assert found.records == [record(11), record(9)]
    assert found.unsearched.startswith("2 row groups")


def test_query_by_place_finds_only_visible_messages() -> None:
    made = catalog()
    query = query_of(Fetched(), made)
    assert query.at(6000) == FoundRecords([record(6)])
    assert query.at(6001) == FoundRecords([])
    made.apply(1, Topic(topic="t", deleted=True, minimums={0: 12}))
    assert (query.at(6000), query.by_key("t", "odd", 32, 0, 1000)) == (FoundRecords([]), FoundRecords([]))


class Filters:
    """Filters that exclude nothing. A request completes at once unless it is set to hang."""

    def __init__(self, *may: int, hangs: bool = False) -> None:
        self.may, self.hangs = frozenset(may), hangs
        self.looks: list[Future[frozenset[int]]] = []

    def __call__(self, name: CommittedObject, numbers: list[int], wanted: QueryKey) -> "Future[frozenset[int]]":
        look: Future[frozenset[int]] = Future()
        self.looks.append(look)
        if not self.hangs:
            look.set_result(self.may.intersection(numbers))
        return look


def test_row_groups_excluded_by_filters_are_not_read() -> None:
    fetched = Fetched()
    filters = Filters(0, 7)
    query = ColdQuery(catalog(GROUPS_MAX * 3), fetched, ManualClock(), filters)
    assert query.by_key("t", "k1", 32, 0, 1 << 60) == FoundRecords([record(1)])
    assert (fetched.groups, len(filters.looks)) == ([7, 0], 1)
    fetched.fails = {7}
    assert query.by_key("t", "k1", 32, 0, 1 << 60).unsearched.startswith("1 row groups")
    fetched.groups.clear()
    query = ColdQuery(catalog(GROUPS_MAX * 3), fetched, ManualClock(), Filters(1))
    assert (query.at(5000), fetched.groups) == (FoundRecords([record(5)]), [1])
    assert query.by_key("t", "", 32, 0, 1000) == FoundRecords([])


def test_unanswered_filter_request_is_cancelled_and_reported() -> None:
    class Hurried(ManualClock):
        def monotonic(self) -> float:
            self.advance(int(SECONDS_MAX * 1000) - 10)  # the rest is waited for in real time
            return super().monotonic()

    filters = Filters(hangs=True)
    found = ColdQuery(catalog(), Fetched(), Hurried(), filters).by_key("t", "k1", 32, 0, 1000)
    assert found.records == [] and found.unsearched.startswith(f"{GROUPS} row groups")
    assert all(look.cancelled() for look in filters.looks)


def test_cancelled_filter_request_excludes_nothing() -> None:
    def called_off(name: CommittedObject, numbers: list[int], wanted: QueryKey) -> "Future[frozenset[int]]":
        look: Future[frozenset[int]] = Future()
        look.cancel()
        return look

    assert ColdQuery(catalog(), Fetched(), ManualClock(), called_off).by_key("t", "k1", 1, 0, 1000) == FoundRecords(
        [record(1)]
    )


def test_key_query_reports_row_groups_beyond_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_query, "OBJECTS_MAX", 0)
    found = ColdQuery(catalog(), Fetched(), ManualClock(), Filters(0)).by_key("t", "k1", 1, 0, 1000)
    assert found.records == [] and found.unsearched.startswith(f"{GROUPS} row groups")


class ByObject(Fetched):
    """Fetches by object, each with one row group."""

    def __call__(self, name: CommittedObject, index: int) -> "Future[DecodedGroup]":
        return super().__call__(name, name.start // 1000 // ROWS)


def single(number: int, newest: int) -> CommittedObject:
    first = number * ROWS
    group = RowGroup(0, ROWS, 0, 1, newest, number * ROWS * 10, 600, [(0, first, first + 3)])
    return CommittedObject(
        key=f"k{number}", topic="t", day="", start=first * 1000, end=first * 1000 + 4000, size=1, footer=1, etag="",
        checksum=("", ""), sha256="", rows=ROWS, wire_bytes=1, min_time=0, max_time=newest,
        queues={0: (first, first + 3, 0)}, row_groups=[group],
    )  # fmt: skip


def test_key_query_keeps_the_newest_objects_and_reports_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_query, "OBJECTS_MAX", 5)
    names = [single(number, (number * ROWS + 3) * 10) for number in range(200)]
    held: list[int] = []
    search = ColdQuery._search

    def counted(self: ColdQuery, places: list[cold_query._Place], *args: Any) -> Any:
        held.append(len(places))
        return search(self, places, *args)

    monkeypatch.setattr(ColdQuery, "_search", counted)
    made = Catalog()
    made.apply(0, Commit(round=1, names=names))
    fetched = ByObject()
    query = ColdQuery(made, fetched, ManualClock(), Filters(0))
    found = query.by_key("t", "k799", 1, 0, 1 << 60)
    assert (found, held) == (FoundRecords([record(799)]), [5])
    found = query.by_key("t", "k3", 1, 0, 1 << 60)
    assert found == FoundRecords(
        [], "195 row groups stored from 1970-01-01T00:00:00+00:00 to 1970-01-01T00:00:07+00:00"
    )
    assert query.by_key("t", "k3", 1, 0, 100) == FoundRecords([record(3)]), "those of its time alone count"
    unpacked: list[Block] = []
    names_of = Block.names

    def noted(block: Block) -> tuple[CommittedObject, ...]:
        unpacked.append(block)
        return names_of(block)

    monkeypatch.setattr(Block, "names", noted)
    assert query.by_key("t", "k799", 1, 7900, 8000) == FoundRecords([record(799)])
    assert len(unpacked) == 1, "what is older is not unpacked"


@pytest.mark.parametrize("seed", range(4))
def test_newest_of_many_objects_equal_the_sorted_list(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    names = [single(number, random.randrange(-1, 60)) for number in range(100)]
    whole, nothing = cold_query._newest(iter(names), 10, 3000)
    monkeypatch.setattr(cold_query, "OBJECTS_MAX", 9)
    places, beyond = cold_query._newest(iter(names), 10, 3000)
    assert nothing.groups == 0 and len(whole) > 20
    newest = [place.group.newest_ms for place in whole]
    assert newest == sorted(newest, reverse=True)
    assert [place.group.newest_ms for place in places] == newest[:9]
    left = [place for place in whole if place not in places]
    assert beyond == (len(left), min(one.group.oldest_ms for one in left), max(one.group.newest_ms for one in left))
