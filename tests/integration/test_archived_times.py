"""Times of archived messages, as reported by RocketMQ's tools and by metrics."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from pathlib import Path

from broker.broker_controller import BrokerController
from infra.clock import ManualClock
from infra.net.remoting_server import Connection
from neve.remoting.codes import RequestCode as Code
from tests.kit.broker.in_process import ask, offload, running, send

MINUTE_MS = 60_000


async def number(connection: Connection, code: int, field: str, **ext: object) -> int:
    answer = await ask(connection, code, **ext)
    assert answer.code == 0, answer.remark
    found = re.search(rb'"%b":(-?\d+)' % field.encode(), answer.body)
    assert found is not None, answer.body
    return int(found[1])


async def lag_latency_ms(broker: BrokerController) -> float:
    assert broker.metrics_address is not None
    url = "http://{}:{}/metrics".format(*broker.metrics_address)
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
    found = re.search(r'^rocketmq_consumer_lag_latency_milliseconds\{.*topic="orders".*\} (\S+)$', text, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def test_times_of_archived_messages_are_bounds_instead_of_zero(tmp_path: Path) -> None:
    clock = ManualClock()
    settings = [f"storeUrl=dir:{tmp_path}/store", "metricsExporterType=PROM", "metricsPromExporterHost=127.0.0.1"]
    settings.append("metricsPromExporterPort=0")
    async with running(tmp_path / "data", *settings, clock=clock) as (broker, connection):
        for _ in range(4):
            await send(connection, "orders")
            clock.advance(MINUTE_MS)
        broker.groups.require("g")
        broker.offsets.commit("g", "orders", 0, 2)
        group, topic = {"consumerGroup": "g", "topic": "orders"}, {"topic": "orders"}
        consumed = await number(connection, Code.GET_CONSUME_STATS, "lastTimestamp", **group)
        newest = await number(connection, Code.GET_TOPIC_STATS_INFO, "lastUpdateTimestamp", **topic)
        assert newest - consumed == 2 * MINUTE_MS
        await offload(broker)
        assert broker.store.queues.min_offset("orders", 0) == 4, "only the archive has them"
        archived = await number(connection, Code.GET_CONSUME_STATS, "lastTimestamp", **group)
        assert consumed <= archived <= newest
        assert await number(connection, Code.GET_TOPIC_STATS_INFO, "lastUpdateTimestamp", **topic) == newest
        broker.offsets.commit("g", "orders", 0, 4)
        assert await number(connection, Code.GET_CONSUME_STATS, "lastTimestamp", **group) == newest
        broker.offsets.commit("g", "orders", 0, 0)
        assert await number(connection, Code.GET_CONSUME_STATS, "lastTimestamp", **group) == 0, "nothing consumed"
        oldest_ms = clock.now_ms() - (consumed - MINUTE_MS)
        assert await lag_latency_ms(broker) >= oldest_ms
