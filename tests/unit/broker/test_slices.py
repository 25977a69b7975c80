"""Requests over all groups or topics work in slices: the work of each turn of the event loop is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.archiving.environment import AskLoop
from broker.store.queue_table import QueueTable
from broker.store.store_reader import StoreReader
from neve.remoting.body import lenient_loads
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, running, send
from tests.kit.clock.calls_per_turn import CallsPerTurn

Count = Callable[[type, str], CallsPerTurn]
TOPICS, QUEUES = 300, 2


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Count:
    def count(of: type, name: str) -> CallsPerTurn:
        counter = CallsPerTurn(getattr(of, name))

        def method(*args: Any) -> Any:
            return counter(*args)

        monkeypatch.setattr(of, name, method)
        return counter

    return count


async def test_progress_of_a_group_over_many_topics_is_collected_in_slices(tmp_path: Path, counted: Count) -> None:
    async with running(tmp_path) as (broker, connection):
        for number in range(TOPICS):
            broker.topics.create_plain(f"topic-{number}", QUEUES)
            for queue in range(QUEUES):
                broker.offsets.commit("g", f"topic-{number}", queue, 1)
        looked_at = counted(StoreReader, "shown_time")
        answer = await ask(connection, Code.GET_CONSUME_STATS, consumerGroup="g")
        assert answer.code == 0
        assert answer.body.count(b"consumerOffset") == looked_at.all == TOPICS * QUEUES
        assert looked_at.most <= 40


async def test_state_for_the_archive_is_captured_in_slices(tmp_path: Path, counted: Count) -> None:
    async with running(tmp_path) as (broker, _):
        store = broker.store
        for number in range(1_200):
            store.queue_for(f"topic-{number}", 0)
        taken = counted(QueueTable, "following_of")
        ask = AskLoop(asyncio.get_running_loop())
        state = await asyncio.to_thread(broker.archive.capture.from_thread, ask)
        assert taken.all == len(state.queues) >= 1_200
        assert taken.most <= 500


async def test_progress_of_all_groups_over_many_topics_is_collected_in_slices(tmp_path: Path, counted: Count) -> None:
    async with running(tmp_path) as (broker, connection):
        for group in ("g", "h"):
            broker.groups.find(group)
            for number in range(TOPICS):
                broker.topics.create_plain(f"topic-{number}", QUEUES)
                broker.offsets.commit(group, f"topic-{number}", 0, 1)
        looked_at = counted(QueueTable, "max_offset")
        answer = await ask(connection, Code.GET_BROKER_CONSUME_STATS, isOrder="false")
        assert answer.code == 0
        told = {name: parts for row in lenient_loads(answer.body)["consumeStatsList"] for name, parts in row.items()}
        assert len(told["g"]) == len(told["h"]) == TOPICS
        assert all(len(part["offsetTable"]) == QUEUES for part in told["g"])
        assert lenient_loads(answer.body)["totalDiff"] == -2 * TOPICS
        assert looked_at.all >= 2 * TOPICS * QUEUES
        assert looked_at.most <= 40


async def test_consumer_lags_are_looked_up_once_per_topic_in_slices(tmp_path: Path, counted: Count) -> None:
    async with running(tmp_path) as (broker, connection):
        for number in range(TOPICS):
            topic = f"topic-{number}"
            broker.topics.create_plain(topic, QUEUES)
            for group in ("g", "h", "i"):
                broker.offsets.commit(group, topic, 0, 1 if number else 0)
            if not number:
                await send(connection, topic)
        ends, minimums = counted(QueueTable, "max_offset"), counted(QueueTable, "min_offset")
        lags = await broker.topic_metrics.consumer_lags(10)
        assert (lags.count, [lag.messages for lag in lags.rows()][:4]) == (3 * TOPICS, [1, 1, 1, 0])
        assert ends.all <= 2 * TOPICS * QUEUES  # the groups of a topic may be in two slices
        assert ends.most <= 80  # the broker's own tasks read it as well
        assert minimums.all <= TOPICS


async def test_groups_of_deleted_topics_are_skipped_in_slices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as (broker, _):
        context = broker
        for number in range(1_200):
            context.offsets.commit("g", f"gone-{number}", 0, 1)
        passed = CallsPerTurn(context.topics.select)
        monkeypatch.setattr(context.topics, "select", passed)
        assert (await broker.topic_metrics.consumer_lags(10)).count == 0
        assert passed.all >= 1_200
        assert passed.most <= 300


async def test_committed_offsets_are_iterated_without_a_copy(tmp_path: Path) -> None:
    async with running(tmp_path) as (broker, _):
        offsets = broker.offsets
        for number in range(50):
            for group in ("g", "h"):
                offsets.commit(group, f"topic-{number}", 0, 1)
        pairs = offsets.pairs()
        seen = [next(pairs), next(pairs)]
        offsets.delete_topic("topic-1")
        offsets.commit("later", "topic-2", 0, 1)
        offsets.commit("g", "topic-new", 0, 1)
        seen += pairs
        assert ("topic-1", "g") not in seen
        assert ("topic-2", "later") in seen
        assert len(set(seen)) == len(seen) == 2 * 50 - 2 + 1


async def test_offsets_are_saved_in_slices_and_later_changes_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as (broker, _):
        offsets = broker.offsets
        for number in range(3_500):
            offsets.commit("g", f"topic-{number}", 0, 1)
        looked_at, pairs = CallsPerTurn(lambda pair: pair), offsets.pairs
        monkeypatch.setattr(offsets, "pairs", lambda: map(looked_at, pairs()))

        async def meanwhile() -> None:
            offsets.commit("g", "topic-0", 0, 2)
            offsets.delete_topic("topic-3499")
            offsets.commit("g", "topic-new", 0, 1)

        await asyncio.gather(offsets.file.save(), meanwhile())
        assert looked_at.all == 3_499
        assert looked_at.most <= 251
        assert offsets.file.dirty
        await offsets.file.save()
        saved = offsets.file.load()["offsetTable"]
        assert saved.keys() == {f"topic-{number}@g" for number in range(3_499)} | {"topic-new@g"}
        assert (saved["topic-0@g"], saved["topic-1@g"]) == ({"0": 2}, {"0": 1})
