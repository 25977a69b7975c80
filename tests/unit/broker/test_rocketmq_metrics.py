"""RocketMQ's metrics: what they count, the limit of their number, and access to them."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import re
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.stats.rocketmq_metrics import RPC_BOUNDS, in_milliseconds
from infra.config.properties import ConfigError
from infra.net.remoting_server import Connection
from infra.observe.metrics import LATENCIES, Histogram
from infra.process.startup import StartupError
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, running, send

Rows = list[tuple[dict[str, str], float]]
_ON = ("metricsExporterType=PROM", "metricsPromExporterHost=127.0.0.1", "metricsPromExporterPort=0")
_OWN = ("cluster", "node_type", "node_id")


def with_broker(root: Path, work: Callable[[BrokerController, Connection], Awaitable[None]], *settings: str) -> None:
    async def main() -> None:
        async with running(root / "data", *_ON, *settings) as (broker, connection):
            await work(broker, connection)

    asyncio.run(main())


def get(address: tuple[str, int], path: str, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def scrape(broker: BrokerController) -> dict[str, Rows]:
    """Return the metrics by name, without the labels that all of them have."""
    assert broker.metrics_address is not None
    status, text = await asyncio.to_thread(get, broker.metrics_address, "/metrics")
    assert status == 200
    found: dict[str, Rows] = {}
    for sample in itertools.chain.from_iterable(family.samples for family in text_string_to_metric_families(text)):
        labels = {name: value for name, value in sample.labels.items() if name not in _OWN}
        found.setdefault(sample.name, []).append((labels, sample.value))
    return found


def kinds(rows: Rows, topic: str) -> dict[str, float]:
    return {labels["message_type"]: value for labels, value in rows if labels["topic"] == topic and value}


def test_message_is_counted_once_for_its_topic_by_its_kind(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for _ in range(3):
            await send(connection, "T")
        await send(connection, "T", properties="DELAY\x0118\x02")
        await send(connection, "T", properties="TIMER_DELAY_SEC\x013600\x02")
        half = await send(connection, "T", properties="TRAN_MSG\x01true\x02PGROUP\x01p\x02")
        assert kinds((await scrape(broker))["rocketmq_messages_in_total"], "T") == {
            "normal": 3, "delay": 2, "transaction": 1
        }  # fmt: skip
        assert (await scrape(broker))["rocketmq_half_messages"] == [({}, 1)]
        assert (await scrape(broker))["rocketmq_timing_messages"][0][1] == 1
        place = {"tranStateTableOffset": half.ext["queueOffset"], "commitLogOffset": int(half.ext["msgId"][-16:], 16)}
        ended = await ask(connection, Code.END_TRANSACTION, producerGroup="p", commitOrRollback=8, **place)
        assert ended.code == 0, ended.remark
        found = await scrape(broker)
        assert kinds(found["rocketmq_messages_in_total"], "T") == {"normal": 3, "delay": 2, "transaction": 1}
        assert found["rocketmq_half_messages"] == [({}, 0)]
        assert found["rocketmq_commit_messages_total"] == [({"topic": "T"}, 1)]
        assert "rocketmq_rollback_messages_total" not in found

    with_broker(tmp_path, work)


def test_plain_messages_of_a_fifo_topic_are_counted_as_fifo(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        made = await ask(
            connection, Code.UPDATE_AND_CREATE_TOPIC, topic="F", defaultTopic="TBW102", readQueueNums=1,
            writeQueueNums=1, perm=6, topicFilterType="SINGLE_TAG", topicSysFlag=0, order="false",
            attributes="+message.type=FIFO",
        )  # fmt: skip
        assert made.code == 0, made.remark
        await send(connection, "F")
        assert kinds((await scrape(broker))["rocketmq_messages_in_total"], "F") == {"fifo": 1}

    with_broker(tmp_path, work)


def test_retries_are_counted_for_their_topic_and_dead_letters_by_group(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for topic, number in (("T", 5), ("%RETRY%g+T", 2), ("%DLQ%g", 3)):
            for _ in range(number):
                await send(connection, topic)
        broker.offsets.commit("g", "T", 0, 3)
        broker.offsets.commit_pull("g", "T", 0, 4)
        found = await scrape(broker)
        pair = {"consumer_group": "g", "topic": "T", "is_system": "false"}
        for name, own, retried in (("lag", 2, 2), ("inflight", 1, 0), ("ready", 1, 2)):
            assert sorted(value for _, value in found[f"rocketmq_consumer_{name}_messages"]) == sorted([own, retried])
            assert ({**pair, "is_retry": "false"}, own) in found[f"rocketmq_consumer_{name}_messages"]
            assert ({**pair, "is_retry": "true"}, retried) in found[f"rocketmq_consumer_{name}_messages"]
        (dead,) = found["rocketmq_send_to_dlq_messages_total"]
        assert (dead[0]["consumer_group"], dead[1]) == ("g", 3)
        topics = {labels["topic"] for labels, _ in found["rocketmq_messages_in_total"]}
        assert topics == {"T"}, "retries and dead letters are none of what producers sent"

    with_broker(tmp_path, work)


def test_number_of_series_is_limited_by_metrics_max_series(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        for number in range(6):
            for _ in range(number + 1):
                await send(connection, f"T{number}")
            broker.offsets.commit("g", f"T{number}", 0, 0)
            broker.stats.got(f"T{number}", "g", number + 1, 100)
        found = await scrape(broker)
        for name in ("messages_in_total", "throughput_in_total", "messages_out_total", "consumer_lag_messages"):
            assert {labels["topic"] for labels, _ in found[f"rocketmq_{name}"]} == {"T4", "T5"}, name
        assert {labels["topic"] for labels, _ in found["rocketmq_message_size_bucket"]} == {"T4", "T5"}

    with_broker(tmp_path, work, "metricsMaxSeries=2")


def test_every_series_has_the_configured_labels(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        assert broker.metrics_address is not None
        _, text = await asyncio.to_thread(get, broker.metrics_address, "/metrics")
        rows = re.findall(r"^rocketmq_\w+({.*?}) ", text, re.MULTILINE)
        assert len(rows) > 20
        assert all('hall="east"' in row and 'node_type="broker"' in row for row in rows)

    with_broker(tmp_path, work, "metricsLabel=hall:east")


@pytest.mark.parametrize("text", ["hall", "hall:", "1hall:east", "hall:a:b", "topic:x"])
def test_invalid_metrics_label_is_refused_at_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="metricsLabel"):
        BrokerConfig(metrics_label=text).metrics_labels  # noqa: B018


def test_metrics_port_serves_other_machines_only_the_metrics(tmp_path: Path) -> None:
    async def work(broker: BrokerController, connection: Connection) -> None:
        assert broker.metrics_address is not None
        assert broker.admin_address is not None
        elsewhere = {"Host": "broker-a.example:5557"}
        ask_there = asyncio.to_thread
        assert (await ask_there(get, broker.metrics_address, "/metrics", **elsewhere))[0] == 200
        for path in ("/archive/status", "/readyz", "/archive/ls"):
            assert (await ask_there(get, broker.metrics_address, path, **elsewhere))[0] == 404
        assert (await ask_there(get, broker.admin_address, "/metrics", **elsewhere))[0] == 403

    with_broker(tmp_path, work)


async def test_metrics_are_neither_exported_nor_counted_by_default(tmp_path: Path) -> None:
    async with running(tmp_path / "data") as (broker, connection):
        await send(connection, "T")
        assert broker.metrics_address is None
        assert broker.stats.sizes_of("T") is None


async def test_occupied_metrics_port_is_named_at_the_start(tmp_path: Path) -> None:
    async with running(tmp_path / "a", *_ON) as (broker, _):
        assert broker.metrics_address is not None
        with pytest.raises(StartupError, match="metricsPromExporterPort"):
            async with running(tmp_path / "b", *_ON[:2], f"metricsPromExporterPort={broker.metrics_address[1]}"):
                pass


def test_unsupported_exporter_type_logs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with running(tmp_path / "data", "metricsExporterType=OTLP_GRPC") as (broker, _):
            assert broker.metrics_address is None

    asyncio.run(main())
    assert "metricsExporterType=OTLP_GRPC: metrics are not pushed" in caplog.text


def test_request_times_are_reported_in_rocketmqs_buckets() -> None:
    assert set(RPC_BOUNDS) <= set(LATENCIES)
    histogram = Histogram(LATENCIES)
    for seconds in (0.0001, 0.001, 0.0011, 0.05, 2.5, 9):
        histogram.observe(seconds)
    assert dict(in_milliseconds(histogram)) == {
        "1.0": 2, "3.0": 3, "5.0": 3, "7.0": 3, "10.0": 3, "100.0": 4, "1000.0": 4, "2000.0": 4, "3000.0": 5, "+Inf": 6
    }  # fmt: skip
