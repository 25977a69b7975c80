"""Tests of batch planning: selection of objects, row groups and rows, and their distribution to tasks."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neve.spark.planning.options import BadOption, options_of_batch, options_of_stream
from neve.spark.planning.planner import DataLoss, plan_batch
from neve.spark.planning.rows import count, minus, rows_of, share, taken, union
from neve.spark.planning.slices import Cut, Slice, tasks_of
from neve.spark.planning.wanted import RequestedRows
from neve.spark.pushed import wanted_by
from tests.kit.store.memory_store import MemoryStore
from tests.unit.spark.journal_on_paper import JournalOnPaper, Row

RUNS = st.lists(
    st.tuples(st.sampled_from("st"), st.integers(0, 2), st.integers(0, 40), st.integers(0, 40)), max_size=12
)


def offsets(rows: Any) -> set[Row]:
    return {
        (topic, queue, offset)
        for topic, of in rows.items()
        for queue, spans in of.items()
        for a, b in spans
        for offset in range(a, b + 1)
    }


@given(RUNS, RUNS, st.integers(0, 60))
def test_row_sets_behave_like_sets(one: Any, other: Any, most: int) -> None:
    a, b = rows_of(one), rows_of(other)
    assert offsets(union(a, b)) == offsets(a) | offsets(b)
    assert offsets(minus(a, b)) == offsets(a) - offsets(b)
    assert count(a) == len(offsets(a))
    some = taken(a, most)
    assert offsets(some) <= offsets(a)
    assert count(some) == min(most, count(a))


@given(st.integers(0, 100), st.lists(st.integers(0, 50), max_size=8))
def test_shares_are_proportional_and_add_up(most: int, wanted: list[int]) -> None:
    shares = share(most, wanted)
    assert sum(shares) == min(most, sum(wanted))
    for some, one in zip(shares, wanted, strict=True):
        assert 0 <= some <= one
        assert sum(wanted) <= most or abs(some - most * one / sum(wanted)) <= 1


@given(st.lists(st.lists(st.integers(1, 5 << 20), min_size=1, max_size=5), max_size=12), st.integers(1, 9))
def test_tasks_are_balanced_and_have_each_row_group_once(objects: list[list[int]], least: int) -> None:
    most = 8 << 20
    slices = [
        Slice(f"k{n}", "t", "d", "b", tuple(Cut(at, size, ((0, 9),)) for at, size in enumerate(groups)))
        for n, groups in enumerate(objects)
    ]
    tasks = tasks_of(slices, most, least)
    pieces = [(one.key, cut.group) for task in tasks for one in task for cut in one.cuts]
    assert pieces == [(one.key, cut.group) for one in slices for cut in one.cuts]
    assert all(tasks)
    assert len(tasks) >= min(least, len(pieces))
    sizes = [sum(one.wire_bytes for one in task) for task in tasks]
    assert all(
        size <= most + (5 << 20) or len(task) == 1 == len(task[0].cuts) for size, task in zip(sizes, tasks, strict=True)
    )


ALL = RequestedRows()


def archive() -> tuple[MemoryStore, JournalOnPaper]:
    store = MemoryStore()
    journal = JournalOnPaper(store)
    names = [journal.commit("s", [(0, 10 * n, 10 * n + 9), (1, 10 * n, 10 * n + 9)], at=1000 * n) for n in range(4)]
    journal.expire(names[:1], {"s": {0: 15, 1: 10}})
    journal.erase(names[3], 0, 35)
    journal.replace(names[1:3])
    return store, journal


def read(
    store: MemoryStore, journal: JournalOnPaper, wanted: RequestedRows = ALL, **told: str
) -> list[tuple[int, int]]:
    asked = options_of_batch({"store": "dir:/x", "subscribe": "s", **told})
    return [row[1:] for row in journal.rows(plan_batch(store, asked, wanted).archived)]


def test_batch_has_each_visible_row_once() -> None:
    store, journal = archive()
    rows = read(store, journal)
    assert sorted(rows) == [(0, n) for n in range(15, 40) if n != 35] + [(1, n) for n in range(10, 40)]


@pytest.mark.parametrize(
    ("told", "queue_0", "queue_1"),
    [
        ({"startingOffsets": '{"s": {"0": 20}}', "endingOffsets": '{"s": {"0": 22, "1": 12}}'}, (20, 22), (10, 12)),
        ({"startingOffsets": '{"s": {"0": -2, "1": -1}}'}, (15, 40), (40, 40)),
        ({"endingOffsets": '{"s": {"a": {"0": 18}, "b": {"1": 3}}}'}, (15, 18), (10, 40)),
        ({"assign": '{"s": [1]}', "subscribe": ""}, (0, 0), (10, 40)),
        ({"endingTimestamp": "2500", "startingOffsets": '{"s": {"0": 35, "1": 25}}'}, (0, 0), (25, 30)),
    ],
)
def test_offsets_bound_each_queue(told: dict[str, str], queue_0: tuple[int, int], queue_1: tuple[int, int]) -> None:
    store, journal = archive()
    given = {"store": "dir:/x", "subscribe": "s", **told}
    asked = options_of_batch({name: value for name, value in given.items() if value})
    wanted = RequestedRows().within(asked.since, asked.until)
    rows = [row[1:] for row in journal.rows(plan_batch(store, asked, wanted).archived)]
    expected = [(0, n) for n in range(*queue_0) if n != 35] + [(1, n) for n in range(*queue_1)]
    assert sorted(rows) == expected


def test_expired_and_nonexistent_offsets_are_reported() -> None:
    store, journal = archive()
    gone = {"startingOffsets": '{"s": {"0": 3}}'}
    with pytest.raises(DataLoss, match="topic s, broker a, queue 0: offsets 3 to 14 have expired"):
        read(store, journal, ALL, **gone)
    assert min(read(store, journal, ALL, failOnDataLoss="false", **gone)) == (0, 15)
    with pytest.raises(BadOption, match="queue 0 ends at 40, got 41"):
        read(store, journal, startingOffsets='{"s": {"0": 41}}')
    with pytest.raises(FileNotFoundError, match="topic nope"):
        read(store, journal, subscribe="nope")


def test_filters_select_row_groups() -> None:
    store, journal = archive()
    assert {offset for _, offset in read(store, journal, RequestedRows(since=3000))} >= set(range(30, 35))
    assert min(offset for _, offset in read(store, journal, RequestedRows(since=3000))) == 30
    assert read(store, journal, RequestedRows(queues=frozenset({1}), first=11, last=12)) == [(1, 11), (1, 12)]
    assert read(store, journal, RequestedRows(brokers=frozenset({"b"}))) == []
    assert read(store, journal, RequestedRows(days=frozenset({"2026-01-02"}))) == []
    assert read(store, journal, RequestedRows(topics=frozenset({"t"}))) == []


class EqualTo(SimpleNamespace):
    pass


class In(SimpleNamespace):
    pass


class LessThan(SimpleNamespace):
    pass


class GreaterThanOrEqual(SimpleNamespace):
    pass


class Not(SimpleNamespace):
    pass


def test_supported_spark_filters_are_pushed_down() -> None:
    moment = datetime(1970, 1, 1, 0, 0, 5, 999, tzinfo=UTC)
    wanted = wanted_by(
        [
            In(attribute=("queue_id",), value=[1, 2, None]),
            EqualTo(attribute=("queue_id",), value=2),
            EqualTo(attribute=("tags",), value="x"),
            GreaterThanOrEqual(attribute=("queue_offset",), value=5),
            LessThan(attribute=("queue_offset",), value=9),
            GreaterThanOrEqual(attribute=("store_timestamp",), value=moment),
            LessThan(attribute=("store_timestamp",), value=moment + timedelta(seconds=1)),
            Not(child=EqualTo(attribute=("tags",), value="y")),
            EqualTo(attribute=("body",), value=b""),
            EqualTo(attribute=("properties", "key"), value="tags"),
        ]
    )
    assert wanted == RequestedRows(
        since=5001, until=6001, first=5, last=8, queues=frozenset({2}), tags=frozenset({"x"})
    )


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({}, "exactly one of the options topic, subscribe, subscribePattern, assign"),
        ({"topic": "a", "subscribe": "b"}, "exactly one of"),
        (
            {"topic": "a", "fetchOffset.numRetries": "3"},
            "option fetchoffset.numretries: unknown; options are accessKey, assign, broker",
        ),
        ({"topic": "a", "kafka.bootstrap.servers": "h"}, "use the option store for the archive"),
        ({"topic": "a", "maxOffsetsPerTrigger": "3"}, "only streams have it"),
        ({"topic": "a", "startingOffsets": "latest"}, "a batch cannot begin at the latest"),
        ({"topic": "a", "startingOffsets": "LATEST"}, "a batch cannot begin at the latest"),
        ({"topic": "a", "endingOffsets": "Earliest"}, "a batch cannot end at the earliest"),
        ({"topic": "a", "startingOffsets": "soon"}, "option startingOffsets must be earliest, latest, or JSON"),
        ({"topic": "a", "startingOffsets": '{"a": 3}'}, "topic a has no object of offsets"),
        ({"topic": "a", "startingOffsets": '{"a": {"0": -3}}'}, "must be a number of at least -2, got -3"),
        ({"topic": "a", "startingTimestamp": "yesterday"}, "milliseconds since 1970 or ISO 8601"),
        ({"topic": "a", "failOnDataLoss": "maybe"}, "failOnDataLoss must be true or false"),
        ({"topic": "a", "minPartitions": "0"}, "option minPartitions"),
        ({"subscribePattern": "("}, "option subscribePattern"),
        ({"assign": '{"a": [0], "b": 1}'}, "option assign must be JSON like"),
        ({"assign": "{}"}, "option assign must be JSON like"),
        ({"subscribe": "a,,b"}, "option subscribe has an empty name"),
    ],
)
def test_option_without_effect_is_refused(told: dict[str, str], text: str) -> None:
    with pytest.raises(BadOption, match=text):
        options_of_batch({"store": "dir:/x", **told})


def test_stream_refuses_ending_offsets_and_duplicate_store_options() -> None:
    with pytest.raises(BadOption, match="option endingoffsets: a stream has no end"):
        options_of_stream({"store": "dir:/x", "topic": "a", "endingOffsets": "latest"})
    with pytest.raises(BadOption, match="store and path"):
        options_of_batch({"topic": "a"})
    asked = options_of_stream({"path": "dir:/x", "TOPIC": "a,b", "maxOffsetsPerTrigger": "7"})
    assert (asked.store, asked.subscription.names, asked.most_rows) == ("dir:/x", frozenset({"a,b"}), 7)
    assert options_of_batch({"store": "x", "topic": "a", "startingTimestamp": "1970-01-01T00:00:01"}).since == 1000
