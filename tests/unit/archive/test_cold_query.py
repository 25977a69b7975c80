"""Finding archived messages by key and by place, over row groups made here."""

import mmap
from concurrent.futures import Future

import numpy as np
import pytest

from infra.clock import ManualClock
from neve.archive.catalog import Catalog
from neve.archive.journal import Commit, CommittedName, RowGroup, Topic
from neve.record.codec import encode_record
from neve.record.properties import properties_to_bytes
from tiered.read import cold_query
from tiered.read.cold_query import GROUPS_MAX, SECONDS_MAX, ColdQuery, ColdUnavailable, Found, QueryKey
from tiered.worker.client import DecodedGroup

ROWS = 4
GROUPS = 3


def record(offset: int) -> bytes:
    """Every other message has the key `odd`, and all of them have it in their body."""
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

    def __call__(self, name: CommittedName, index: int) -> "Future[DecodedGroup]":
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
        future.set_result(DecodedGroup(mapped, ROWS, len(wire)))
        return future


def catalog(count: int = GROUPS) -> Catalog:
    groups = [
        RowGroup(i * ROWS, ROWS, 0, 1, (i * ROWS + 3) * 10, i * ROWS * 10, 600, [(0, i * ROWS, i * ROWS + 3)])
        for i in range(count)
    ]
    name = CommittedName(
        key="k", topic="t", day="", start=0, end=count * 4000, size=1, footer=1, etag="", checksum=("", ""), sha256="",
        rows=count * ROWS, wire_bytes=1, min_time=0, max_time=110, queues={0: (0, count * ROWS - 1, 0)},
        row_groups=groups,
    )  # fmt: skip
    made = Catalog()
    made.apply(0, Commit(round=1, names=[name]))
    return made


def query_of(fetched: Fetched, made: Catalog | None = None) -> ColdQuery:
    return ColdQuery(made or catalog(), fetched, ManualClock())


def test_a_key_is_found_newest_first_and_exactly() -> None:
    query = query_of(Fetched())
    assert query.by_key("t", "odd", 3, 0, 1000) == Found([record(11), record(9), record(7)])
    assert query.by_key("t", "k1", 32, 0, 1000) == Found([record(1)])
    assert query.by_key("t", "ID5", 32, 0, 1000) == Found([record(5)])
    assert query.by_key("t", "dd", 32, 0, 1000) == Found([])
    assert query.by_key("other", "odd", 32, 0, 1000) == Found([])


def test_only_groups_of_the_time_are_read() -> None:
    fetched = Fetched()
    assert query_of(fetched).by_key("t", "odd", 32, 45, 65) == Found([record(5)])
    assert fetched.groups == [1]


def test_enough_is_enough_and_what_was_on_its_way_is_called_back() -> None:
    fetched = Fetched()
    assert query_of(fetched, catalog(50)).by_key("t", "odd", 2, 0, 10_000) == Found([record(199), record(197)])
    assert fetched.groups == [49, 48, 47, 46]


def test_a_question_reads_so_many_groups_and_says_what_it_left() -> None:
    fetched = Fetched()
    query = query_of(fetched, catalog(GROUPS_MAX + 2))
    found = query.by_key("t", "k1", 32, 0, 1 << 60)
    assert fetched.groups == list(range(GROUPS_MAX + 1, 1, -1))
    assert found == Found([], "2 row groups stored from 1970-01-01T00:00:00+00:00 to 1970-01-01T00:00:00+00:00")
    assert query.at(1000) == Found([record(1)])
    assert query.at((GROUPS_MAX + 1) * 4000).unsearched.startswith("2 row groups")


def test_a_group_that_cannot_be_read_is_left_out_and_said() -> None:
    fetched = Fetched()
    fetched.fails = {1}
    found = query_of(fetched).by_key("t", "odd", 32, 0, 1000)
    assert found.records == [record(offset) for offset in (11, 9, 3, 1)]
    assert found.unsearched.startswith("1 row groups")
    # What failed may hold newer ones than what was found: two are enough only where it may not.
    assert query_of(fetched).by_key("t", "odd", 2, 0, 1000) == Found([record(11), record(9)])
    assert query_of(fetched).by_key("t", "odd", 3, 0, 1000).unsearched.startswith("1 row groups")


def test_a_question_ends_in_time_with_what_it_has() -> None:
    class Late(ManualClock):
        def monotonic(self) -> float:
            self.advance(int(SECONDS_MAX * 1000 / 3))
            return super().monotonic()

    fetched = Fetched()
    fetched.hangs = {1}
    found = ColdQuery(catalog(), fetched, Late()).by_key("t", "odd", 32, 0, 1000)
    assert found.records == [record(11), record(9)]
    assert found.unsearched.startswith("2 row groups")


def test_a_place_in_the_log_is_found_and_hidden_messages_are_not() -> None:
    made = catalog()
    query = query_of(Fetched(), made)
    assert query.at(6000) == Found([record(6)])
    assert query.at(6001) == Found([])
    made.apply(1, Topic(topic="t", deleted=True, minimums={0: 12}))
    assert (query.at(6000), query.by_key("t", "odd", 32, 0, 1000)) == (Found([]), Found([]))


class Filters:
    """Row groups that may hold any word; a look ends at once unless it hangs."""

    def __init__(self, *may: int, hangs: bool = False) -> None:
        self.may, self.hangs = frozenset(may), hangs
        self.looks: list[Future[frozenset[int]]] = []

    def __call__(self, name: CommittedName, numbers: list[int], wanted: QueryKey) -> "Future[frozenset[int]]":
        look: Future[frozenset[int]] = Future()
        self.looks.append(look)
        if not self.hangs:
            look.set_result(self.may.intersection(numbers))
        return look


def test_what_filters_rule_out_is_neither_read_nor_counted() -> None:
    fetched = Fetched()
    filters = Filters(0, 7)
    query = ColdQuery(catalog(GROUPS_MAX * 3), fetched, ManualClock(), filters)
    assert query.by_key("t", "k1", 32, 0, 1 << 60) == Found([record(1)])
    assert (fetched.groups, len(filters.looks)) == ([7, 0], 1)
    fetched.fails = {7}
    assert query.by_key("t", "k1", 32, 0, 1 << 60).unsearched.startswith("1 row groups")
    fetched.groups.clear()
    query = ColdQuery(catalog(GROUPS_MAX * 3), fetched, ManualClock(), Filters(1))
    assert (query.at(5000), fetched.groups) == (Found([record(5)]), [1])
    assert query.by_key("t", "", 32, 0, 1000) == Found([])


def test_filters_that_do_not_answer_leave_all_unsearched_and_are_called_back() -> None:
    class Hurried(ManualClock):
        def monotonic(self) -> float:
            self.advance(int(SECONDS_MAX * 1000) - 10)  # what is left is waited for in true time
            return super().monotonic()

    filters = Filters(hangs=True)
    found = ColdQuery(catalog(), Fetched(), Hurried(), filters).by_key("t", "k1", 32, 0, 1000)
    assert found.records == [] and found.unsearched.startswith(f"{GROUPS} row groups")
    assert all(look.cancelled() for look in filters.looks)


def test_a_look_that_was_called_off_may_hold_everything() -> None:
    def called_off(name: CommittedName, numbers: list[int], wanted: QueryKey) -> "Future[frozenset[int]]":
        look: Future[frozenset[int]] = Future()
        look.cancel()
        return look

    assert ColdQuery(catalog(), Fetched(), ManualClock(), called_off).by_key("t", "k1", 1, 0, 1000) == Found(
        [record(1)]
    )


def test_one_object_too_many_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_query, "OBJECTS_MAX", 0)
    found = ColdQuery(catalog(), Fetched(), ManualClock(), Filters(0)).by_key("t", "k1", 1, 0, 1000)
    assert found.records == [] and found.unsearched.startswith(f"{GROUPS} row groups")
