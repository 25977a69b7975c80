"""Metrics by topic and by group, as Prometheus scrapes them from the admin port."""

from __future__ import annotations

import asyncio
import itertools
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.broker_controller import BrokerController
from broker.tables.topic_config_manager import TopicConfig
from infra.loop.in_steps import LoopPace
from infra.net.remoting_server import Connection
from neve.archive.format.journal import Gap
from neve.remoting.body import lenient_loads
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, offload, running, send

Series = dict[str, dict[tuple[str, ...], float]]


def with_broker(root: Path, work: Callable[[BrokerController, Connection], Awaitable[None]], *settings: str) -> None:
    async def main() -> None:
        async with running(root / "data", *settings) as (broker, connection):
            await work(broker, connection)

    asyncio.run(main())


async def scrape(broker: BrokerController) -> Series:
    """Return the metrics by name and label values."""
    assert broker.admin_address is not None
    url = "http://{}:{}/metrics".format(*broker.admin_address)
    with await asyncio.to_thread(urllib.request.urlopen, url, timeout=20) as answer:
        text = str(answer.read(), "utf-8")
    found: Series = {}
    for sample in itertools.chain.from_iterable(family.samples for family in text_string_to_metric_families(text)):
        found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def commit(broker: BrokerController, group: str, topic: str, offset: int) -> None:
    broker.offsets.commit(group, topic, 0, offset)


async def subscribe(connection: Connection, group: str, topic: str) -> None:
    subscription = b'{"topic":"%b","subString":"*","subVersion":1}' % topic.encode()
    member = b'{"groupName":"%b","subscriptionDataSet":[%b]}' % (group.encode(), subscription)
    answer = await ask(connection, Code.HEART_BEAT, b'{"clientID":"c","consumerDataSet":[%b]}' % member)
    assert answer.code == 0, answer.remark


def test_consumer_lag_counts_unconsumed_messages_and_retries(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for topic, number in (("T", 5), ("%RETRY%g", 2), ("%RETRY%g_T", 1), ("%RETRY%other", 4)):
            for _ in range(number):
                await send(connection, topic)
        commit(broker, "g", "T", 3)
        commit(broker, "done", "T", 5)
        assert (await scrape(broker))["neve_consumer_lag_messages"] == {
            ("g", "T"): 2,
            ("g", "%RETRY%g"): 2,
            ("g", "%RETRY%g_T"): 1,
            ("done", "T"): 0,
        }
        commit(broker, "g", "%RETRY%g", 1)
        assert (await scrape(broker))["neve_consumer_lag_messages"]["g", "%RETRY%g"] == 1

    with_broker(tmp_path, work)


def test_topic_that_a_running_group_left_does_not_count_as_lag(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for topic in ("left", "kept"):
            await send(connection, topic)
            commit(broker, "g", topic, 0)
        assert (await scrape(broker))["neve_consumer_lag_messages"] == {("g", "left"): 1, ("g", "kept"): 1}
        await subscribe(connection, "g", "kept")
        assert (await scrape(broker))["neve_consumer_lag_messages"] == {("g", "kept"): 1, ("g", "%RETRY%g"): 0}

    with_broker(tmp_path, work)


def test_messages_and_bytes_are_counted_by_topic(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for topic, number in (("a", 3), ("b", 1)):
            for _ in range(number):
                await send(connection, topic)
        ext = {"consumerGroup": "g", "topic": "a", "queueId": 0, "queueOffset": 1, "maxMsgNums": 32, "sysFlag": 4}
        read = await ask(connection, Code.PULL_MESSAGE, **ext, subscription="*", commitOffset=0, subVersion=0)
        assert read.code == 0, read.remark
        found = await scrape(broker)
        size = len(read.body) // 2
        assert found["neve_topic_messages_in_total"] == {("a",): 3, ("b",): 1}
        assert found["neve_topic_bytes_in_total"] == {("a",): 3 * size, ("b",): size}
        assert found["neve_topic_messages_out_total"] == {("a",): 2, ("b",): 0}
        assert found["neve_topic_bytes_out_total"] == {("a",): 2 * size, ("b",): 0}
        assert found["neve_messages_out_total"][()] == 2

    with_broker(tmp_path, work)


def test_archive_lag_of_a_topic_is_reported_until_it_is_archived(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        await send(connection, "T")
        found = await scrape(broker)
        assert found["neve_archive_lag_seconds"].keys() == {("T",)}
        lag = found["neve_archive_lag_seconds"]["T",]
        assert found["neve_archive_backlog_age_seconds"][()] == pytest.approx(lag)
        assert lag < 60
        await offload(broker)
        assert "neve_archive_lag_seconds" not in await scrape(broker)

    with_broker(tmp_path, work, f"storeUrl=dir:{tmp_path / 'archive'}")


def test_largest_series_are_reported_and_the_number_of_the_others(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for topic, number in (("a", 1), ("b", 3), ("c", 2)):
            for _ in range(number):
                await send(connection, topic)
            commit(broker, "g", topic, 0)
        assert (await ask(connection, Code.UPDATE_BROKER_CONFIG, b"metricsMaxSeries=1\n")).code == 0
        found = await scrape(broker)
        assert found["neve_topic_messages_in_total"] == {("b",): 3}
        assert found["neve_consumer_lag_messages"] == {("g", "b"): 3}
        assert found["neve_series_left_out"] == {("topic",): 2, ("consumer",): 2, ("archive",): 0}

    with_broker(tmp_path, work)


def test_lags_of_many_queues_are_computed_in_slices(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        context = broker
        for number in range(40):
            context.topics.update(TopicConfig(topic_name=f"t{number}", read_queue_nums=1000, write_queue_nums=1000))
            context.offsets.commit("g", f"t{number}", 0, 0)
        loop, turns = asyncio.get_running_loop(), 0
        looking = asyncio.create_task(broker.topic_metrics.consumer_lags(10))

        def another_turn() -> None:
            nonlocal turns
            turns += 1
            if not looking.done():
                loop.call_soon(another_turn)

        loop.call_soon(another_turn)
        lags = await looking
        assert (lags.count, len(lags.rows()), lags.left_out) == (40, 10, 30)
        assert turns >= 40

    with_broker(tmp_path, work)


def test_nonexistent_offsets_do_not_count_as_lag(tmp_path: Path) -> None:
    """Offsets that a restore omitted, and expired ones."""

    async def work(broker: BrokerController, connection: Connection) -> None:
        store, journal = broker.store, broker.archive.journal
        assert journal is not None
        for _ in range(5):
            await send(connection, "T")
        commit(broker, "g", "T", 2)
        assert broker.topics.select("T") is not None
        (queue,) = store.queues.names_of("T")
        store.queue_changes.create_queue_at("T", queue, 10_000_005)
        gap = Gap(topic="T", queue=queue, first=5, last=10_000_004, reason="restored")
        await asyncio.to_thread(journal.append, gap)
        await send(connection, "T")
        assert store.queues.max_offset("T", queue) > 10_000_000
        assert (await scrape(broker))["neve_consumer_lag_messages"]["g", "T"] == 4
        answer = await ask(connection, Code.GET_TOPIC_STATS_INFO, topic="T")
        table = lenient_loads(answer.body)["offsetTable"]
        assert [entry.get("messages") for entry in table.values() if entry["maxOffset"]] == [6]
        answer = await ask(connection, Code.GET_CONSUME_STATS, consumerGroup="g", topic="T")
        table = lenient_loads(answer.body)["offsetTable"]
        assert [entry["messages"] for entry in table.values() if entry["consumerOffset"]] == [4]
        store.queue_changes.set_min_offset("T", queue, 4)
        assert (await scrape(broker))["neve_consumer_lag_messages"]["g", "T"] == 2

    with_broker(tmp_path, work, f"storeUrl=dir:{tmp_path / 'store'}")


def test_slow_lag_lookup_reports_the_last_values_and_their_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for _ in range(3):
            await send(connection, "T")
        commit(broker, "g", "T", 1)
        found = await scrape(broker)
        assert found["neve_consumer_lag_messages"] == {("g", "T"): 2}
        assert found["neve_series_age_seconds"].keys() == {("consumer",), ("archive",)}
        resume = asyncio.Event()

        async def is_slow(pace: LoopPace) -> None:
            await resume.wait()

        monkeypatch.setattr(LoopPace, "pause", is_slow)
        commit(broker, "g", "T", 3)
        await send(connection, "T")
        found = await scrape(broker)
        assert found["neve_consumer_lag_messages"] == {("g", "T"): 2}
        assert found["neve_topic_messages_in_total"] == {("T",): 4}, "traffic is counted each time"
        assert found["neve_series_age_seconds"]["consumer",] > 0.4
        resume.set()
        assert (await scrape(broker))["neve_consumer_lag_messages"] == {("g", "T"): 1}

    with_broker(tmp_path, work)
