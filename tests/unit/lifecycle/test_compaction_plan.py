"""Tests of the compaction plan: it merges adjacent objects of one day if the merge pays off."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lifecycle.compaction import (
    GAINED,
    OPEN_DAY_INPUTS,
    Sizes,
    When,
    droppable,
    plan_merges,
    plan_topic,
    settled_below,
)
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Commit, CommittedObject, Expire, Intent, PlannedObject, RowGroup, Topic
from tiered.write.merge import Merge, mismatch

HOUR = 3_600_000
DAY_MS = 24 * HOUR
D1 = 20_000 * DAY_MS  # 2024-10-04
DAYS = {D1: "2024-10-04", D1 + DAY_MS: "2024-10-05"}
SIZES = Sizes(target=1000, ceiling=2000, wire=100_000, inputs=50)
LATER = When(D1 + 10 * DAY_MS, DAY_MS)


def name_of(
    start: int,
    end: int,
    runs: dict[int, tuple[int, int]],
    *,
    size: int = 100,
    day: str = "2024-10-04",
    newest: int = D1,
    topic: str = "t",
) -> CommittedObject:
    """Return an object of one row group."""
    rows, queues, row = 0, {}, 0
    for queue, (first, last) in sorted(runs.items()):
        queues[queue] = (first, last, row)
        row += last - first + 1
    rows = row
    group = RowGroup(
        0, rows, 4, 50, newest, newest - HOUR, rows * 10, [(q, a, b) for q, (a, b) in sorted(runs.items())]
    )
    return CommittedObject(
        key=f"{start}-{end}", topic=topic, day=day, start=start, end=end, size=size, footer=8, etag="",
        checksum=("", ""), sha256="", rows=rows, wire_bytes=rows * 10, min_time=newest - HOUR, max_time=newest,
        queues=queues, row_groups=[group],
    )  # fmt: skip


def row_of(count: int, size: int = 100, **more: object) -> list[CommittedObject]:
    return [name_of(n * 10, n * 10 + 10, {0: (n * 5, n * 5 + 4)}, size=size, **more) for n in range(count)]  # type: ignore[arg-type]


def keys(merges: object) -> list[list[str]]:
    return [[name.key for name in inputs] for inputs in merges]  # type: ignore[attr-defined]


def test_objects_of_an_ended_day_are_merged() -> None:
    names = row_of(5)
    assert list(plan_merges(names, 1 << 40, LATER, SIZES)) == [names]


def test_objects_of_the_current_day_are_merged_from_a_minimum_count() -> None:
    names = row_of(7, 120)
    today = When(D1 + 23 * HOUR, DAY_MS)
    assert list(plan_merges(names, 1 << 40, today, SIZES)) == []
    names = row_of(OPEN_DAY_INPUTS, 120)
    assert list(plan_merges(names, 1 << 40, today, SIZES)) == [names]
    assert list(plan_merges(row_of(OPEN_DAY_INPUTS, 20), 1 << 40, today, SIZES)) == []


def test_day_has_ended_one_grace_after_midnight() -> None:
    names = row_of(5)
    assert list(plan_merges(names, 1 << 40, When(D1 + 2 * DAY_MS - 1, DAY_MS), SIZES)) == []
    assert list(plan_merges(names, 1 << 40, When(D1 + 2 * DAY_MS, DAY_MS), SIZES)) == [names]
    assert list(plan_merges(names, 1 << 40, When(D1, DAY_MS, at_once=True), SIZES)) == [names]


def test_large_object_is_not_merged() -> None:
    large = int(GAINED * SIZES.target)
    names = row_of(6)
    names[2] = name_of(20, 30, {0: (10, 14)}, size=large)
    assert keys(plan_merges(names, 1 << 40, LATER, SIZES)) == [["0-10", "10-20"], ["30-40", "40-50", "50-60"]]


def test_small_addition_does_not_rewrite_a_large_object() -> None:
    names = [name_of(0, 10, {0: (0, 4)}, size=700), name_of(10, 20, {0: (5, 9)}, size=50)]
    assert list(plan_merges(names, 1 << 40, LATER, SIZES)) == []
    names[1] = name_of(10, 20, {0: (5, 9)}, size=200)
    assert list(plan_merges(names, 1 << 40, LATER, SIZES)) == [names]


@pytest.mark.parametrize(
    "second",
    [
        name_of(10, 20, {0: (5, 9)}, day="2024-10-05"),
        name_of(10, 20, {0: (6, 9)}),
        name_of(10, 20, {0: (5, 9), 1: (3, 4)}),
        name_of(9, 20, {0: (5, 9)}),
    ],
    ids=["another day", "a hole", "a queue that has begun before", "overlapping ranges"],
)
def test_noncontiguous_object_is_not_merged(second: CommittedObject) -> None:
    first = [name_of(0, 5, {0: (0, 2), 1: (0, 1)}), name_of(5, 10, {0: (3, 4)})]
    assert keys(plan_merges([*first, second], 1 << 40, LATER, SIZES)) == [["0-5", "5-10"]]


def test_objects_above_an_open_intent_are_not_merged() -> None:
    names = row_of(6)
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=names, through={"t": 60}))
    assert settled_below(catalog, "t") == 60
    open_name = PlannedObject("x", "t", "2024-10-04", 30, 40, {1: (0, 3)})
    catalog.apply(1, Intent(round=2, names=[open_name]))
    assert settled_below(catalog, "t") == 30
    assert [merge.inputs for merge in plan_topic(catalog, "t", LATER, SIZES)] == [tuple(names[:3])]
    assert settled_below(catalog, "other") == 0


@pytest.mark.parametrize("grace", [HOUR, DAY_MS])
def test_objects_that_expire_within_twice_the_grace_are_not_merged(grace: int) -> None:
    names = row_of(4)
    ttl = 30 * DAY_MS
    soon = D1 + ttl - 2 * grace
    assert list(plan_merges(names, 1 << 40, When(soon - 1, grace, ttl), SIZES)) == [names]
    assert list(plan_merges(names, 1 << 40, When(soon, grace, ttl), SIZES)) == []


def test_only_permanently_hidden_rows_are_dropped() -> None:
    """An expiry that can still be undone hides rows, but does not drop them."""
    names = row_of(3)
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=names, through={"t": 30}))
    catalog.apply(1, Expire(keys=[], delete_after_ms=0, minimums={"t": {0: 12}}))
    assert droppable(catalog, "t", names, LATER) == {}
    catalog.apply(2, Topic(topic="t", deleted=True, minimums={0: 7}))
    catalog.apply(3, Topic(topic="t", minimums={0: 7}))
    assert droppable(catalog, "t", names, LATER) == {0: 7}
    (merge,) = plan_topic(catalog, "t", LATER, SIZES)
    assert merge.queues == {0: (7, 14)}
    ttl = LATER.now_ms - D1 - HOUR  # the newest of each expired an hour ago
    assert droppable(catalog, "t", names, When(LATER.now_ms, HOUR, ttl)) == {0: 12}
    assert droppable(catalog, "t", names, When(LATER.now_ms, HOUR + 1, ttl)) == {0: 7}


def test_fully_hidden_objects_are_not_merged() -> None:
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=row_of(3), through={"t": 30}))
    catalog.apply(1, Topic(topic="t", deleted=True, minimums={0: 15}))
    assert plan_topic(catalog, "t", LATER, SIZES) == []


OBJECTS = st.lists(
    st.tuples(st.integers(1, 1500), st.integers(0, 3), st.sampled_from([0, 0, 0, 1]), st.integers(1, 30)), max_size=40
)


@settings(max_examples=150, deadline=None)
@given(OBJECTS, st.booleans(), st.integers(0, 500))
def test_plan_merges_bounded_neighbours_and_uses_each_object_once(
    described: list[tuple[int, int, int, int]], at_once: bool, settled: int
) -> None:
    names, ends, start, day = [], dict[int, int](), 0, D1
    for size, queue, later, rows in described:
        day = min(day + later * DAY_MS, D1 + DAY_MS)
        first = ends.get(queue, 0)
        ends[queue] = first + rows
        names.append(name_of(start, start + 10, {queue: (first, first + rows - 1)}, size=size, day=DAYS[day]))
        start += 10
    merges = list(plan_merges(names, settled, When(D1 + DAY_MS + 13 * HOUR, HOUR, at_once=at_once), SIZES))
    seen: set[str] = set()
    for inputs in merges:
        assert len(inputs) >= 2
        assert not seen & {name.key for name in inputs}
        seen |= {name.key for name in inputs}
        assert len({name.day for name in inputs}) == 1
        assert all(name.end <= settled and name.size < GAINED * SIZES.target for name in inputs)
        assert all(before.end == after.start for before, after in pairwise(inputs)), "no object lies between"
        assert sum(name.size for name in inputs) <= SIZES.ceiling
        made = merged(Merge(tuple(inputs), {}))
        assert mismatch(Merge(tuple(inputs), {}), made, {}) == ""
    after = [name for name in names if name.key not in seen]
    after += [merged(Merge(tuple(inputs), {}), sum(name.size for name in inputs)) for inputs in merges]
    after.sort(key=lambda name: name.start)
    again = list(plan_merges(after, settled, When(D1 + DAY_MS + 13 * HOUR, HOUR, at_once=at_once), SIZES))
    written = sum(name.size for inputs in (*merges, *again) for name in inputs)
    assert written <= 3 * sum(name.size for name in names), "a byte is written a few times"


def merged(merge: Merge, size: int = 100) -> CommittedObject:
    """Return the output object of a merge, in one row group."""
    newest = max(name.max_time for name in merge.inputs)
    return name_of(merge.start, merge.end, merge.queues, size=size, day=merge.day, newest=newest)


MERGE = Merge((name_of(0, 10, {0: (0, 4), 1: (3, 3)}), name_of(10, 20, {0: (5, 9)})), {})


@pytest.mark.parametrize(
    "made",
    [
        name_of(0, 20, {0: (0, 8), 1: (3, 3)}),
        name_of(0, 20, {0: (0, 9)}),
        name_of(0, 20, {0: (1, 9), 1: (3, 3)}),
        name_of(0, 20, {0: (0, 9), 1: (3, 3), 2: (0, 0)}),
        name_of(0, 20, {0: (0, 9), 1: (3, 3)}, day="2024-10-05"),
        name_of(0, 20, {0: (0, 9), 1: (3, 3)}, topic="u"),
        name_of(0, 30, {0: (0, 9), 1: (3, 3)}),
        name_of(0, 20, {0: (0, 9), 1: (3, 3)}, newest=D1 + 1),
    ],
    ids=["a row less", "a queue less", "the first less", "a queue more", "the day", "the topic", "the range", "a time"],
)
def test_output_that_differs_from_its_inputs_is_a_mismatch(made: CommittedObject) -> None:
    assert mismatch(MERGE, made, {}) != ""
    assert mismatch(MERGE, merged(MERGE), {}) == ""


def test_output_with_a_duplicate_row_is_a_mismatch() -> None:
    one = merged(MERGE)
    group = one.row_groups[0]
    assert mismatch(MERGE, msgspec.structs.replace(one, row_groups=[group, group]), {}) != ""


def test_rows_visible_again_must_be_in_the_output() -> None:
    merge = Merge(MERGE.inputs, {0: 5})
    made = merged(merge)
    assert made.queues == {0: (5, 9, 0), 1: (3, 3, 5)}
    assert mismatch(merge, made, {0: 5}) == ""
    assert "may be visible again" in mismatch(merge, made, {0: 4})
