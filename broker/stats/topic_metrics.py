"""Series by topic and by group: traffic, how far groups are behind, how far the archive is. Computed at a scrape.

A broker may have more topics and groups than a Prometheus should keep. Of each kind at most `metricsMaxSeries` are
told, those with the most traffic or the longest lag, and how many were left out. The figures are taken on the loop,
a slice at a time; sorting and rendering is for a thread.
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.broker_context import BrokerContext
from broker.stats.broker_stats import BrokerStats, TopicTraffic
from broker.tables.retry_names import RetryNames
from broker.validators import RETRY_PREFIX

# Queues looked at before other requests get their turn: about a millisecond.
_SLICE = 1_000


class Lag(NamedTuple):
    group: str
    topic: str
    messages: int


@dataclass(frozen=True, slots=True)
class Figures:
    """What one scrape found; `archive_ms` is the age of each topic's oldest message that is not archived."""

    traffic: list[TopicTraffic]
    lags: list[Lag]
    archive_ms: Mapping[str, int]


async def take_figures(context: BrokerContext, archive_ms: Mapping[str, int]) -> Figures:
    return Figures(await _topic_traffic(context.stats), await consumer_lags(context), archive_ms)


async def _topic_traffic(stats: BrokerStats) -> list[TopicTraffic]:
    told: list[TopicTraffic] = []
    for topic in stats.topics():
        told.append(stats.of(topic))
        if len(told) % _SLICE == 0:
            await asyncio.sleep(0)
    return told


async def consumer_lags(context: BrokerContext) -> list[Lag]:
    """Messages behind: those between where the group stands and the ends of a topic's queues.

    `mqadmin consumerProgress` counts offsets. Those that exist nowhere wait for nobody: a restore leaves out millions.

    For each topic where a group has a position, and its retry topics even if it has none there yet. A topic that a
    running group no longer subscribes to does not count.
    """
    lags: list[Lag] = []
    looked_at = 0
    pairs = dict.fromkeys(context.offsets.pairs())
    for topic, group in _with_retries(pairs, context.retry_names):
        config = context.topics.select(topic)
        if config is None or _has_left(context, group, topic):
            continue
        consumed = context.offsets.queues_of(group, topic)
        ends = [context.store.max_offset(topic, queue) for queue in range(config.read_queue_nums)]
        count = context.tiered.count_messages
        behind = sum(count(topic, queue, consumed.get(queue, 0), end) for queue, end in enumerate(ends))
        lags.append(Lag(group, topic, behind))
        looked_at += 1 + len(ends)
        if looked_at >= _SLICE:
            looked_at = 0
            await asyncio.sleep(0)
    return lags


def _with_retries(pairs: Mapping[tuple[str, str], None], names: RetryNames) -> Iterable[tuple[str, str]]:
    """Topics and groups with the topics where what failed waits; some of these do not exist."""
    more: set[tuple[str, str]] = set()
    for topic, group in pairs:
        yield topic, group
        for retry in (f"{RETRY_PREFIX}{group}", *names.to_read(group, topic)):
            if (retry, group) not in pairs and (retry, group) not in more:
                more.add((retry, group))
                yield retry, group


def _has_left(context: BrokerContext, group: str, topic: str) -> bool:
    live = context.clients.consumers.get(group)
    return live is not None and topic not in live.subscriptions and not topic.startswith(RETRY_PREFIX)


def families(figures: Figures, limit: int) -> list[Metric]:
    """At most `limit` topics, pairs of group and topic, and topics of the archive."""
    return [*_traffic(figures, limit), *_lags(figures, limit), *_archive(figures, limit), _left_out(figures, limit)]


def _traffic(figures: Figures, limit: int) -> list[Metric]:
    told = sorted(figures.traffic, key=lambda row: (-row.messages_in - row.messages_out, row.topic))[:limit]
    found: list[Metric] = []
    for name, text in (
        ("messages_in", "messages stored, by topic"),
        ("bytes_in", "bytes stored, by topic"),
        ("messages_out", "messages read, by topic"),
        ("bytes_out", "bytes read, by topic"),
    ):
        family = CounterMetricFamily(f"neve_topic_{name}_total", text, labels=["topic"])
        for row in told:
            family.add_metric([row.topic], getattr(row, name))
        found.append(family)
    return found


def _lags(figures: Figures, limit: int) -> list[Metric]:
    text = "messages that a group is behind, by group and topic"
    family = GaugeMetricFamily("neve_consumer_lag_messages", text, labels=["group", "topic"])
    for lag in sorted(figures.lags, key=lambda lag: (-lag.messages, lag.topic, lag.group))[:limit]:
        family.add_metric([lag.group, lag.topic], lag.messages)
    return [family]


def _archive(figures: Figures, limit: int) -> list[Metric]:
    text = "age of the oldest message that is not archived yet, by topic"
    family = GaugeMetricFamily("neve_archive_lag_seconds", text, labels=["topic"])
    for topic, age_ms in sorted(figures.archive_ms.items(), key=lambda item: (-item[1], item[0]))[:limit]:
        family.add_metric([topic], age_ms / 1000)
    return [family]


def _left_out(figures: Figures, limit: int) -> Metric:
    text = "topics, pairs of group and topic, and topics of the archive without series of their own, by kind"
    family = GaugeMetricFamily("neve_series_left_out", text, labels=["kind"])
    for kind, number in (
        ("topic", len(figures.traffic)),
        ("consumer", len(figures.lags)),
        ("archive", len(figures.archive_ms)),
    ):
        family.add_metric([kind], max(0, number - limit))
    return family
