"""Series by topic and by group: traffic, how far groups are behind, how far the archive is. Computed at a scrape.

A broker may have more topics and groups than a Prometheus should keep. Of each kind at most `metricsMaxSeries` are
told, those with the most traffic or the longest lag, and how many were left out. The figures are taken on the loop,
a slice at a time, and no more rows are kept than are told; rendering is for a thread.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappush, heapreplace
from operator import itemgetter
from typing import Generic, TypeVar

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker.broker_stats import BrokerStats, TopicTraffic
from broker.clients.client_manager import ClientManager
from broker.reading.tiered_store import TieredStore
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.topic_config_manager import TopicConfigManager
from neve.remoting.names import RETRY_PREFIX

# Queues, or names, looked at before other requests get their turn: about an eighth of a millisecond.
_SLICE = 50
T = TypeVar("T")


class Lag(msgspec.Struct, frozen=True, gc=False):
    """How many messages a group has yet to consume of a topic."""

    group: str
    topic: str
    messages: int


class Largest(Generic[T]):
    """Of rows that come one by one those with the largest numbers, the earlier ones of those with the same."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[tuple[float, int, T]] = []  # a heap
        self.count = 0

    def add(self, number: float, row: T) -> None:
        self.count += 1
        if len(self._kept) < self._limit:
            heappush(self._kept, (number, -self.count, row))
        elif self._limit and number > self._kept[0][0]:
            heapreplace(self._kept, (number, -self.count, row))

    def rows(self) -> list[T]:
        """The largest first."""
        return [row for _, _, row in sorted(self._kept, key=itemgetter(0, 1), reverse=True)]

    @property
    def left_out(self) -> int:
        return self.count - len(self._kept)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one scrape found; of the archive: the age in ms of each topic's oldest message that is not archived."""

    traffic: Largest[TopicTraffic]
    lags: Largest[Lag]
    archive: Largest[tuple[str, int]]


class TopicMetrics:
    """Takes the figures of a scrape."""

    def __init__(
        self,
        stats: BrokerStats,
        store: MessageStore,
        tiered: TieredStore,
        *,
        topics: TopicConfigManager,
        offsets: ConsumerOffsetManager,
        clients: ClientManager,
        retry_names: RetryNames,
    ) -> None:
        self._stats, self._store, self._tiered = stats, store, tiered
        self._topics, self._offsets, self._clients, self._retry_names = topics, offsets, clients, retry_names

    async def take(self, archive: Largest[tuple[str, int]], limit: int) -> Figures:
        """On the loop; `archive`: the ages of what is not archived."""
        return Figures(await self._topic_traffic(limit), await self.consumer_lags(limit), archive)

    async def _topic_traffic(self, limit: int) -> Largest[TopicTraffic]:
        told = Largest[TopicTraffic](limit)
        for topic in self._stats.topics():
            row = self._stats.of(topic)
            told.add(row.messages_in + row.messages_out, row)
            if told.count % _SLICE == 0:
                await asyncio.sleep(0)
        return told

    async def consumer_lags(self, limit: int) -> Largest[Lag]:
        """Messages behind: those between where the group stands and the ends of a topic's queues.

        `mqadmin consumerProgress` counts offsets. Those that exist nowhere wait for nobody: a restore leaves out
        millions.

        For each topic where a group has a position, and its retry topics even if it has none there yet. A topic that a
        running group no longer subscribes to does not count.
        """
        lags = Largest[Lag](limit)
        looked_at, before, ends = 0, "", list[int]()
        for topic, group in _with_retries(self._offsets, self._retry_names):
            looked_at += 1
            if looked_at >= _SLICE:
                looked_at, before = 0, ""
                await asyncio.sleep(0)
            config = self._topics.select(topic)
            if config is None or self._has_left(group, topic):
                continue
            if topic != before:  # groups of one topic come one after the other
                before, ends = topic, [self._store.max_offset(topic, queue) for queue in range(config.read_queue_nums)]
                looked_at += len(ends)
            looked_at += len(ends) // 8  # to compare is less than to look up
            behind = self._behind(group, topic, ends)
            lags.add(behind, Lag(group, topic, behind))
        return lags

    def _behind(self, group: str, topic: str, ends: list[int]) -> int:
        """Most groups have read all: where they stand is compared with the ends, and nothing else is looked up."""
        behind, consumed = 0, self._offsets.standing(group, topic)
        for queue, end in enumerate(ends):
            if (at := consumed.get(queue, 0)) < end:
                behind += self._tiered.count_messages(topic, queue, at, end)
        return behind

    def _has_left(self, group: str, topic: str) -> bool:
        live = self._clients.consumers.get(group)
        return live is not None and topic not in live.subscriptions and not topic.startswith(RETRY_PREFIX)


def archive_ages(ages_ms: Mapping[str, int], limit: int) -> Largest[tuple[str, int]]:
    """For a thread."""
    told = Largest[tuple[str, int]](limit)
    for topic, age_ms in ages_ms.items():
        told.add(age_ms, (topic, age_ms))
    return told


def _with_retries(offsets: ConsumerOffsetManager, names: RetryNames) -> Iterator[tuple[str, str]]:
    """Topics and groups with the topics where what failed waits; some of these do not exist."""
    more: set[tuple[str, str]] = set()
    for topic, group in offsets.pairs():
        if (topic, group) not in more:  # it may stand there only since a moment ago
            yield topic, group
        for retry in (f"{RETRY_PREFIX}{group}", *names.to_read(group, topic)):
            if (retry, group) not in more and not offsets.stands(group, retry):
                more.add((retry, group))
                yield retry, group


def families(figures: Figures) -> Iterator[Metric]:
    """Of topics, of pairs of group and topic, and of topics of the archive; each is made when it is asked for."""
    yield from _traffic(figures.traffic)
    yield _lags(figures.lags)
    yield _archive(figures.archive)
    yield _left_out(figures)


def _traffic(traffic: Largest[TopicTraffic]) -> Iterator[Metric]:
    for name, text in (
        ("messages_in", "messages stored, by topic"),
        ("bytes_in", "bytes stored, by topic"),
        ("messages_out", "messages read, by topic"),
        ("bytes_out", "bytes read, by topic"),
    ):
        family = CounterMetricFamily(f"neve_topic_{name}_total", text, labels=["topic"])
        for row in traffic.rows():
            family.add_metric([row.topic], getattr(row, name))
        yield family


def _lags(lags: Largest[Lag]) -> Metric:
    text = "messages that a group is behind, by group and topic"
    family = GaugeMetricFamily("neve_consumer_lag_messages", text, labels=["group", "topic"])
    for lag in lags.rows():
        family.add_metric([lag.group, lag.topic], lag.messages)
    return family


def _archive(archive: Largest[tuple[str, int]]) -> Metric:
    text = "age of the oldest message that is not archived yet, by topic"
    family = GaugeMetricFamily("neve_archive_lag_seconds", text, labels=["topic"])
    for topic, age_ms in archive.rows():
        family.add_metric([topic], age_ms / 1000)
    return family


def _left_out(figures: Figures) -> Metric:
    text = "topics, pairs of group and topic, and topics of the archive without series of their own, by kind"
    family = GaugeMetricFamily("neve_series_left_out", text, labels=["kind"])
    family.add_metric(["topic"], figures.traffic.left_out)
    family.add_metric(["consumer"], figures.lags.left_out)
    family.add_metric(["archive"], figures.archive.left_out)
    return family
