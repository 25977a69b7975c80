"""Batches and streams of archive and brokers: each row once, from either tier; an unreachable broker is an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neve.archive.format.journal import Gap
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode
from neve.spark.brokers import ClusterBrokers
from neve.spark.planning import journal_positions
from neve.spark.planning.journal_positions import BadPosition
from neve.spark.planning.options import BadOption, Options, options_of_batch, options_of_stream
from neve.spark.planning.planner import DataLoss, Plan, plan_batch
from neve.spark.planning.queue_positions import QueuePosition, decoded, encoded
from neve.spark.planning.queue_stream import QueueStream
from neve.spark.planning.queues import (
    TASK_ROWS,
    Bounds,
    BrokerAway,
    BrokerRefused,
    HotSlice,
    Queue,
    Seen,
    hot_tasks_of,
)
from neve.spark.planning.wanted import RequestedRows
from tests.kit.store.memory_store import MemoryStore
from tests.unit.spark.journal_on_paper import JournalOnPaper

Row = tuple[str, str, int, int]
CLUSTER = {"store": "dir:/x", "namesrv": "127.0.0.1:1"}


def of_batch(**told: str) -> Options:
    return options_of_batch({**CLUSTER, "subscribePattern": "[st]", **told})


def of_stream(**told: str) -> Options:
    return options_of_stream({**CLUSTER, "subscribePattern": "[st]", "startingOffsets": "earliest", **told})


class HotTier:
    """A cluster with queues and bounds set by a test."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.bounds_of: dict[Queue, Bounds] = {}
        self.unreadable: dict[tuple[str, str], str] = {}
        self.without_master: set[str] = set()
        self.reported: list[Mapping[Queue, int]] = []
        self.takes_reports = True

    def topics(self) -> list[str]:
        return sorted({queue.topic for queue in self.bounds_of if queue.broker in self.names})

    def seen(self, topics: Iterable[str]) -> Seen:
        asked = set(topics)
        there = {one: at for one, at in self.bounds_of.items() if one.topic in asked and one.broker in self.names}
        return Seen(frozenset(self.names), frozenset(self.without_master), there, self.unreadable)

    def bounds(self, queues: Iterable[Queue]) -> Mapping[Queue, Bounds]:
        return {queue: Bounds(0, 0) for queue in queues}

    def report(self, offsets: Mapping[Queue, int]) -> bool:
        if self.takes_reports:
            self.reported.append(dict(offsets))
        return self.takes_reports

    def send(self, queue: Queue, count: int) -> None:
        has = self.bounds_of.get(queue, Bounds(0, 0))
        self.bounds_of[queue] = has._replace(maximum=has.maximum + count)


class TwoBrokers:
    """Two brokers with their archives."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.journals = [JournalOnPaper(self.store, broker) for broker in "ab"]
        self.hot = HotTier("a", "b")

    def rows(self, plan: Plan) -> list[Row]:
        archived = [(one.broker, *row) for one in self.journals for row in one.rows(plan.archived)]
        pulled = [
            (one.queue.broker, one.queue.topic, one.queue.queue_id, offset)
            for task in plan.hot
            for one in task
            for offset in range(one.first, one.last + 1)
        ]
        return sorted([*archived, *pulled])

    def sent(self) -> list[Row]:
        return sorted(row for one, at in self.hot.bounds_of.items() for row in rows(*one, range(at.maximum)))

    def batch(self, **told: str) -> list[Row]:
        return self.rows(plan_batch(self.store, of_batch(**told), RequestedRows(), self.hot))


def rows(broker: str, topic: str, queue: int, offsets: Iterable[int]) -> list[Row]:
    return [(broker, topic, queue, offset) for offset in offsets]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["send", "archive", "later", "replace", "batch", "limited", "restart", "replay", "now"]),
        st.integers(0, 3),
        st.integers(1, 9),
    ),
    max_size=40,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS)
def test_each_row_is_in_one_batch_and_repeated_batches_are_equal(
    steps: list[tuple[str, int, int]],
) -> None:
    world, asked = TwoBrokers(), of_stream()
    queues = [Queue(broker, topic, 0) for broker in "ab" for topic in "st"]
    world.hot.send(queues[0], 3)
    archived = dict.fromkeys(queues, 0)
    planner = QueueStream(world.store, world.hot, asked)
    before = position = planner.initial()
    found: list[list[Row]] = []

    def batch(most: int | None) -> None:
        nonlocal before, position
        end = decoded(json.loads(json.dumps(encoded(planner.latest(position, most)))))
        if end == position:
            return
        before, position = position, end
        found.append(world.rows(planner.tasks(before, position)))
        assert most is None or len(found[-1]) <= most
        planner.forget(position)

    for kind, which, number in steps:
        queue = queues[which]
        journal = world.journals["ab".index(queue.broker)]
        waiting = world.hot.bounds_of.get(queue, Bounds(0, 0)).maximum - archived[queue]
        if kind == "send":
            world.hot.send(queue, number)
        elif kind == "archive" and waiting:
            first, archived[queue] = archived[queue], archived[queue] + min(number, waiting)
            journal.commit(queue.topic, [(0, first, archived[queue] - 1)])
        elif kind == "later" and waiting > 1:  # the second of two objects of a round is committed first
            first, archived[queue] = archived[queue], archived[queue] + waiting
            journal.commit(queue.topic, [(0, first + 1, archived[queue] - 1)])
            batch(None)
            journal.commit(queue.topic, [(0, first, first)])
        elif kind == "replace":
            names = journal.catalog.objects(queue.topic)
            if len(names) > 1:
                journal.replace(names)
        elif kind in {"batch", "limited"}:
            batch(number if kind == "limited" else None)
        elif kind == "replay" and found:
            assert world.rows(planner.tasks(before, position)) == found[-1]
        elif kind == "now":
            planner.stop_at_now()
        elif kind == "restart":
            planner = QueueStream(world.store, world.hot, asked)
        assert world.batch() == world.sent(), "a query returns all rows"
    planner = QueueStream(world.store, world.hot, asked)
    for _ in range(3):
        batch(None)
    assert sorted(row for one in found for row in one) == world.sent()


def test_broker_is_read_from_the_end_of_the_archive() -> None:
    world = TwoBrokers()
    world.journals[0].commit("s", [(0, 0, 9), (1, 0, 4)])
    world.hot.bounds_of = {Queue("a", "s", 0): Bounds(0, 15), Queue("a", "s", 1): Bounds(0, 5)}
    plan = plan_batch(world.store, of_batch(), RequestedRows(), world.hot)
    assert plan.hot == [[HotSlice(Queue("a", "s", 0), 10, 14)]]
    assert world.rows(plan) == rows("a", "s", 0, range(15)) + rows("a", "s", 1, range(5))


def test_gaps_erased_and_expired_rows_are_not_pulled() -> None:
    world = TwoBrokers()
    journal, queue = world.journals[0], Queue("a", "s", 0)
    old = journal.commit("s", [(0, 0, 9)])
    name = journal.commit("s", [(0, 10, 19)])
    journal.append(Gap(topic="s", queue=0, first=20, last=24, reason="lost"))
    journal.erase(name, 0, 12)
    journal.expire([old], {"s": {0: 10}})
    world.hot.bounds_of = {queue: Bounds(10, 30)}
    plan = plan_batch(world.store, of_batch(), RequestedRows(), world.hot)
    assert plan.hot == [[HotSlice(queue, 25, 29)]]
    assert world.rows(plan) == rows("a", "s", 0, [10, 11, *range(13, 20), *range(25, 30)])


def test_rows_deleted_by_a_broker_during_planning_are_in_the_archive() -> None:
    """Planning queries the brokers before it reads the journals."""
    world = TwoBrokers()
    queue = Queue("a", "s", 0)
    world.hot.bounds_of = {queue: Bounds(0, 10)}
    asked = world.hot.seen

    def seen(topics: Iterable[str]) -> Seen:
        found = asked(topics)
        world.journals[0].commit("s", [(0, 0, 12)])
        world.hot.bounds_of[queue] = Bounds(13, 14)
        return found

    world.hot.seen = seen  # type: ignore[method-assign]
    plan = plan_batch(world.store, of_batch(), RequestedRows(), world.hot)
    assert plan.hot == []
    assert world.rows(plan) == rows("a", "s", 0, range(13))


def test_offsets_of_the_options_bound_both_tiers() -> None:
    world = TwoBrokers()
    world.journals[0].commit("s", [(0, 0, 9)])
    world.hot.bounds_of = {Queue("a", "s", 0): Bounds(0, 15)}
    assert world.batch(startingOffsets='{"s": {"0": 8}}', endingOffsets='{"s": {"0": 12}}') == rows(
        "a", "s", 0, range(8, 12)
    )
    assert world.batch(startingOffsets='{"s": {"0": 12}}') == rows("a", "s", 0, range(12, 15))
    with pytest.raises(BadOption, match="ends at 15, got 16"):
        world.batch(startingOffsets='{"s": {"0": 16}}')
    world.hot.bounds_of = {Queue("a", "t", 0): Bounds(5, 15)}
    with pytest.raises(DataLoss, match="offsets 2 to 4 have expired"):
        world.batch(startingOffsets='{"t": {"0": 2}}')
    assert world.batch(subscribePattern="t", startingOffsets='{"t": {"0": 2}}', failOnDataLoss="false") == rows(
        "a", "t", 0, range(5, 15)
    )


def test_filters_reduce_the_pulled_offsets() -> None:
    world = TwoBrokers()
    world.journals[0].commit("s", [(0, 0, 9)])
    world.hot.bounds_of = {Queue("a", "s", 0): Bounds(0, 20), Queue("a", "s", 1): Bounds(0, 5)}
    world.hot.bounds_of[Queue("b", "s", 0)] = Bounds(0, 5)
    wanted = RequestedRows(first=8, last=11, queues=frozenset({0}), brokers=frozenset({"a"}))
    plan = plan_batch(world.store, of_batch(), wanted, world.hot)
    assert world.rows(plan) == rows("a", "s", 0, range(8, 12))
    assert plan.hot == [[HotSlice(Queue("a", "s", 0), 10, 11)]]


def test_unknown_broker_is_an_error_unless_retired() -> None:
    world = TwoBrokers()
    world.journals[1].commit("s", [(0, 0, 4), (0, 6, 9)])
    world.hot.bounds_of = {Queue("a", "s", 0): Bounds(0, 3)}
    world.hot.names = {"a"}
    with pytest.raises(BrokerAway, match=r"broker b: the name servers do not know it.*retiredBrokers=b"):
        world.batch()
    assert world.batch(broker="a") == rows("a", "s", 0, range(3))
    assert world.batch(retiredBrokers="b") == rows("a", "s", 0, range(3)) + rows(
        "b", "s", 0, [*range(5), *range(6, 10)]
    )
    assert world.batch(subscribePattern="t") == []
    planner = QueueStream(world.store, world.hot, of_stream(retiredBrokers="b"))
    start = planner.initial()
    with pytest.raises(DataLoss, match="topic s, queue 0, offsets 5 to 5: neither at their broker nor in the archive"):
        planner.tasks(start, planner.latest(start, None))


def test_unreachable_broker_stops_a_stream() -> None:
    world = TwoBrokers()
    world.hot.bounds_of = {Queue("b", "s", 0): Bounds(0, 3)}
    planner = QueueStream(world.store, world.hot, of_stream())
    start = planner.initial()
    world.hot.names = {"a"}
    with pytest.raises(BrokerAway, match="broker b"):
        planner.latest(start, None)
    planner.stop_at_now()
    with pytest.raises(BrokerAway, match="broker b"):
        planner.latest(start, None)


def test_unreadable_topic_is_an_error() -> None:
    world = TwoBrokers()
    world.hot.unreadable = {("a", "s"): "its permissions do not allow reading"}
    with pytest.raises(BrokerRefused, match="topic s at broker a: its permissions"):
        world.batch()
    assert world.batch(broker="b") == []


def test_missing_and_internal_topics_are_refused() -> None:
    world = TwoBrokers()
    with pytest.raises(FileNotFoundError, match="topic s is at no broker, and not in this archive"):
        plan_batch(world.store, options_of_batch({**CLUSTER, "subscribe": "s"}), RequestedRows(), world.hot)
    with pytest.raises(FileNotFoundError, match="there is no broker c"):
        world.batch(broker="c")
    half = options_of_batch({**CLUSTER, "subscribe": "RMQ_SYS_TRANS_HALF_TOPIC"})
    with pytest.raises(BadOption, match="is internal to brokers"):
        plan_batch(world.store, half, RequestedRows(), world.hot)


def test_deleted_topic_has_its_archived_rows() -> None:
    world = TwoBrokers()
    world.journals[0].commit("s", [(0, 0, 9)])
    assert world.batch() == rows("a", "s", 0, range(10))
    planner = QueueStream(world.store, world.hot, of_stream())
    start = planner.initial()
    assert world.rows(planner.tasks(start, planner.latest(start, None))) == rows("a", "s", 0, range(10))


@pytest.mark.parametrize("stops_at_now", [False, True])
def test_reused_offsets_stop_a_stream_and_a_lagging_slave_does_not(*, stops_at_now: bool) -> None:
    world = TwoBrokers()
    queue = Queue("a", "s", 0)
    world.hot.bounds_of = {queue: Bounds(0, 10)}
    planner = QueueStream(world.store, world.hot, of_stream())
    position = planner.latest(planner.initial(), None)

    def latest() -> QueuePosition:
        if stops_at_now:
            planner.stop_at_now()
        return planner.latest(position, None)

    world.hot.bounds_of = {queue: Bounds(0, 4)}
    with pytest.raises(DataLoss, match="it ends at 4, and the stream has read up to 10"):
        latest()
    world.hot.without_master = {"a"}
    assert latest() == position


def test_group_gets_the_offsets_of_the_checkpoint() -> None:
    world = TwoBrokers()
    queues = [Queue("a", "s", 0), Queue("b", "s", 0)]
    world.hot.bounds_of = {queues[0]: Bounds(0, 10), queues[1]: Bounds(0, 3)}
    planner = QueueStream(world.store, world.hot, of_stream())
    begin = planner.initial()
    first = planner.latest(begin, 8)
    planner.forget(first)
    second = planner.latest(first, None)
    assert planner.latest(second, None) == second
    told: dict[Queue, int] = {}
    ends = [told := told | dict(report) for report in world.hot.reported]
    assert [sum(one.values()) for one in ends if one] == [0, 8, 13]


def test_rejected_commit_is_repeated_for_an_unchanged_queue() -> None:
    world = TwoBrokers()
    queues = [Queue("a", "s", 0), Queue("b", "s", 0)]
    world.hot.bounds_of = {queues[0]: Bounds(0, 10), queues[1]: Bounds(0, 3)}
    planner = QueueStream(world.store, world.hot, of_stream())
    end = planner.latest(planner.initial(), None)
    world.hot.takes_reports = False
    planner.forget(end)
    world.hot.takes_reports = True
    planner.forget(end)
    assert world.hot.reported[-1] == {queues[0]: 10, queues[1]: 3}


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, ResponseCode.NO_PERMISSION])
def test_busy_broker_delays_a_commit_and_a_forbidden_one_fails(
    code: ResponseCode, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        async def commit(self, *_: object) -> None:
            raise BrokerError(code, "not now")

    class Loop:
        client = Client()

        def __init__(self, _: object) -> None:
            pass

        def call(self, work: Coroutine[Any, Any, Any]) -> Any:
            return asyncio.run(work)

    monkeypatch.setattr("neve.spark.brokers.ClientLoop", Loop)
    cluster = of_stream(consumerGroup="g").cluster
    assert cluster is not None
    brokers, told = ClusterBrokers(cluster), {Queue("a", "s", 0): 3}
    if code == ResponseCode.SYSTEM_BUSY:
        assert not brokers.report(told)
    else:
        with pytest.raises(BrokerRefused, match="consumerGroup g: the offsets cannot be committed"):
            brokers.report(told)


@pytest.mark.parametrize("begins_at", ["earliest", "latest"])
def test_first_batch_is_repeated_from_its_beginning(begins_at: str) -> None:
    """Spark requests the initial position again, since it stores only the ends of batches."""
    world = TwoBrokers()
    queue, late = Queue("a", "s", 0), Queue("a", "s", 1)
    world.hot.bounds_of = {queue: Bounds(0, 5)}
    asked = of_stream(startingOffsets=begins_at)
    planner = QueueStream(world.store, world.hot, asked)
    start = planner.initial()
    world.hot.send(queue, 5)
    end = decoded(json.loads(json.dumps(encoded(planner.latest(start, 4)))))
    first = world.rows(planner.tasks(start, end))
    world.hot.send(queue, 5)
    world.hot.send(late, 3)
    planner = QueueStream(world.store, world.hot, asked)
    assert world.rows(planner.tasks(planner.initial(), end)) == first
    found = list(first)
    for _ in range(2):
        before, end = end, planner.latest(end, None)
        found += world.rows(planner.tasks(before, end))
    begin = {"earliest": 0, "latest": 5}[begins_at]
    assert sorted(found) == rows("a", "s", 0, range(begin, 15)) + rows("a", "s", 1, range(3))


def test_checkpoint_of_the_other_kind_is_refused() -> None:
    journals = journal_positions.encoded(journal_positions.Position({"a": journal_positions.Place(3, {})}))
    with pytest.raises(BadPosition, match="was begun without the option namesrv"):
        decoded(journals)
    with pytest.raises(BadPosition, match="was begun with the option namesrv"):
        journal_positions.decoded(encoded(QueuePosition({Queue("a", "s", 0): 3})))
    with pytest.raises(BadPosition, match="no position of a stream of neve"):
        decoded({"version": 2, "brokers": 3})


def test_tasks_pull_equal_numbers_of_rows() -> None:
    queue = Queue("a", "s", 0)
    assert hot_tasks_of([], 4) == []
    assert [len(task) for task in hot_tasks_of([HotSlice(queue, 0, 2 * TASK_ROWS)], 1)] == [1, 1, 1]
    assert hot_tasks_of([HotSlice(queue, 0, 9)], 2) == [[HotSlice(queue, 0, 4)], [HotSlice(queue, 5, 9)]]
    few = [HotSlice(Queue("a", "s", number), 0, 9) for number in range(8)]
    assert hot_tasks_of(few, 1) == [few]


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"consumerGroup": "g"}, "requires the option namesrv"),
        ({"namesrv": " "}, "option namesrv is empty"),
        ({"namesrv": "x", "accessKey": "a"}, "accessKey and secretKey require each other"),
        ({"namesrv": "x", "accessKey": "a", "secretKey": "b", "credentials": "f"}, "exclude each other"),
        ({"namesrv": "x", "tlsCert": "a"}, "tlsCert and tlsKey require each other"),
    ],
)
def test_options_about_brokers_are_checked(told: dict[str, str], why: str) -> None:
    with pytest.raises(BadOption, match=why):
        options_of_batch({"store": "dir:/x", "subscribe": "s", **told})


def test_option_texts_contain_no_secret() -> None:
    asked = of_batch(accessKey="me", secretKey="hidden-key")
    assert asked.cluster is not None
    assert asked.cluster.security.secret_key == "hidden-key"
    assert "hidden-key" not in repr(asked)
