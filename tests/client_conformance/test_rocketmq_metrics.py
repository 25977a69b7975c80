"""RocketMQ's metrics: after the same traffic Apache RocketMQ and neve report the same values under the same labels."""

from __future__ import annotations

import asyncio
import itertools
import re
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from neve.client import AsyncClient, Message
from tests.client_conformance.conftest import ClusterUnderTest
from tests.kit.clock.waiting import until

Series = dict[str, list[tuple[dict[str, str], float]]]
_S = 60
_BROKER = {"cluster": "DefaultCluster", "node_type": "broker"}
_DISK = {"storage_type": "local", "storage_medium": "disk"}
_CLIENT = {"language": "python", "version": "v5_3_3", "protocol_type": "remoting"}
_RPC = {"protocol_type": "remoting", "response_code": "success", "result": "success", "is_long_polling": "false"}


async def scraped(server: ClusterUnderTest) -> Series:
    """Return the series by name, without the labels of the broker and of the metrics library."""
    with await asyncio.to_thread(urllib.request.urlopen, f"http://{server.metrics}/metrics", timeout=_S) as answer:
        text = str(answer.read(), "utf-8")
    found: Series = {}
    for sample in itertools.chain.from_iterable(family.samples for family in text_string_to_metric_families(text)):
        labels = {name: value for name, value in sample.labels.items() if name not in ("otel_scope_name", "node_id")}
        found.setdefault(sample.name, []).append((labels, sample.value))
    return found


def of(series: Series, name: str, **wanted: str) -> dict[str, float]:
    """Return the values by the remaining labels; labels that all series share are left out."""
    return {
        ",".join(
            f"{key}={text}" for key, text in sorted(labels.items()) if key not in wanted and key not in _BROKER
        ): value
        for labels, value in series.get(name, [])
        if wanted.items() <= labels.items()
    }


def never(message: Message) -> Any:
    raise AssertionError(f"{message.msg_id} was asked about")


def test_equal_traffic_has_equal_metrics(run: Callable[..., None], unique: str, server: ClusterUnderTest) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        for number in range(10):
            await client.send(topic, b"x" * (10 if number < 5 else 2000))
        sized = of(await scraped(server), "rocketmq_message_size_bucket", topic=topic)
        assert sized == {
            f"is_system=false,le={bound},message_type=normal": count
            for bound, count in {
                "1024.0": 5,
                "4096.0": 10,
                "524288.0": 10,
                "1048576.0": 10,
                "2097152.0": 10,
                "4194304.0": 10,
                "+Inf": 10,
            }.items()
        }
        async with client.transaction_producer(unique, check=never) as producer:
            async with producer.transaction(topic, b"committed"):
                pass
            async with producer.transaction(topic, b"rolled back") as transaction:
                await transaction.rollback()
        group = f"g-{unique}"
        pair = {"consumer_group": group, "topic": topic, "is_retry": "false", "is_system": "false"}
        async with client.consumer(group, topic, start="earliest") as consumer:
            taken = [await consumer.receive(_S) for _ in range(11)]

            assert taken[0] is not None
            await taken[0].ack()

            async def has_ten_in_hand() -> bool:
                found = of(await scraped(server), "rocketmq_consumer_inflight_messages", **pair)
                return found == {"": 10}

            await until(has_ten_in_hand, "its position is known", _S)
            series = await scraped(server)
            assert of(series, "rocketmq_consumer_lag_messages", **pair) == {"": 10}
            assert of(series, "rocketmq_consumer_ready_messages", **pair) == {"": 0}
            (age,) = of(series, "rocketmq_consumer_lag_latency_milliseconds", **pair).values()
            assert 0 < age < _S * 1000
            assert of(series, "rocketmq_consumer_queueing_latency_milliseconds", **pair) == {"": 0}
            out = {"consumer_group": group, "topic": topic, "is_system": "false"}
            assert of(series, "rocketmq_messages_out_total", **out) == {"": 11}
            (read,) = of(series, "rocketmq_throughput_out_total", **out).values()
            told = {"consumer_group": group, "consume_mode": "push", "is_system": "false", **_CLIENT}
            assert of(series, "rocketmq_consumer_connections", **told) == {"": 1}
            assert of(series, "rocketmq_producer_connections", **_CLIENT)[""] >= 1
            for message in taken[1:]:
                assert message is not None
                await message.ack()

            async def nothing_left() -> bool:
                return of(await scraped(server), "rocketmq_consumer_lag_messages", **pair) == {"": 0}

            await until(nothing_left, "its acks are told", _S)
        into = {"topic": topic, "is_system": "false"}
        assert of(series, "rocketmq_messages_in_total", **into)["message_type=normal"] == 10
        stored = of(series, "rocketmq_throughput_in_total", **into)["message_type=normal"]
        assert 10_000 < stored < read

    run(work, queues=1)


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("rocketmq_broker_permission", {}),
        ("rocketmq_topic_number", {}),
        ("rocketmq_consumer_group_number", {}),
        ("rocketmq_storage_size_bytes", _DISK),
        ("rocketmq_storage_flush_behind_bytes", _DISK),
        ("rocketmq_storage_dispatch_behind_bytes", _DISK),
        ("rocketmq_storage_message_reserve_time_milliseconds", _DISK),
        ("rocketmq_rpc_latency_milliseconds_count", {**_RPC, "request_code": "send_message_v2"}),
        ("rocketmq_rpc_latency_milliseconds_count", {**_RPC, "request_code": "pull_message"}),
    ],
)
def test_broker_metrics_have_the_same_labels(
    run: Callable[..., None], server: ClusterUnderTest, name: str, labels: dict[str, str]
) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(topic, b"one")
        await client.pull(topic, 0, 0)
        assert list(of(await scraped(server), name, **labels)) == [""]

    run(work, queues=1)


def test_latency_buckets_and_processor_names_are_equal(run: Callable[..., None], server: ClusterUnderTest) -> None:
    async def work(client: AsyncClient, topic: str) -> None:
        await client.send(topic, b"one")
        series = await scraped(server)
        buckets = of(series, "rocketmq_rpc_latency_milliseconds_bucket", **_RPC, request_code="send_message_v2")
        bounds = [re.sub("le=", "", text) for text in buckets]
        assert bounds == ["1.0", "3.0", "5.0", "7.0", "10.0", "100.0", "1000.0", "2000.0", "3000.0", "+Inf"]
        assert {text.removeprefix("processor=") for text in of(series, "rocketmq_processor_watermark")} == {
            *("send", "async_put", "pull", "ack", "query_message", "client_manager", "heartbeat", "lite_pull"),
            *("transaction", "consumer_manager", "admin", "reply"),
        }

    run(work, queues=1)
