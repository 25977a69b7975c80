"""RocketMQ's own metrics, by its names, labels and units, for dashboards and alerts that were made for its brokers.

    metricsExporterType=PROM    http://metricsPromExporterHost:metricsPromExporterPort/metrics, as in RocketMQ

Figures that neve has under another name are repeated here. The only extra counting per message is that of body sizes,
and only while the port is open. Metrics of parts that neve does not have (thread pools, the timer wheel, RocksDB) are
omitted or constantly 0. docs/reference/metrics.md lists both.

At most `metricsMaxSeries` topics, pairs of group and topic, and groups are exported, as on neve's own page. Ages are
computed only for the pairs with the largest lag, because each may read the disk.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from broker.broker_stats import BrokerStats
from broker.clients.client_manager import ClientChannel, ClientManager
from broker.config import BrokerConfig
from broker.intake.intake import COMMITTED
from broker.stats.group_lags import GroupLags, is_system, truth
from broker.stats.topic_metrics import Largest
from broker.store.message_store import MessageStore
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.loop.in_steps import in_slices
from infra.observe.metrics import Histogram
from neve.record.codec import decode_record
from neve.remoting import names
from neve.remoting.names import DLQ_PREFIX, RETRY_PREFIX
from neve.remoting.releases import release_of

_PROTOCOL = {"protocol_type": "remoting"}
_LOCAL_DISK = {"storage_type": "local", "storage_medium": "disk"}
# Request codes that stand for all sends and all pulls, because nearly all use them.
_SEND, _PULL = "send_message_v2", "pull_message"
#: Upper bounds (s) of RocketMQ's histogram of requests; neve's histogram has them and more in between.
RPC_BOUNDS = (0.001, 0.003, 0.005, 0.007, 0.01, 0.1, 1.0, 2.0, 3.0)
_PROCESSORS = (
    *("send", "async_put", "pull", "ack", "query_message", "client_manager", "heartbeat", "lite_pull", "transaction"),
    *("consumer_manager", "admin", "reply"),
)
_MODES = {"CONSUME_ACTIVELY": "pull", "CONSUME_PASSIVELY": "push", "CONSUME_POP": "pop"}
_KINDS = ("transaction", "delay")


class Sample(NamedTuple):
    """One series: the labels that distinguish it, and its value."""

    labels: Mapping[str, str]
    value: float


class Family(NamedTuple):
    """All series of one metric."""

    name: str
    text: str
    samples: list[Sample]

    def metric(self, common: Mapping[str, str]) -> Metric:
        """Convert to a counter if the name ends with `_total`, otherwise to a gauge. Runs in a thread."""
        labels = [*common, *(self.samples[0].labels if self.samples else ())]
        made = (CounterMetricFamily if self.name.endswith("_total") else GaugeMetricFamily)(
            self.name, self.text, labels=labels
        )
        for sample in self.samples:
            made.add_metric([*common.values(), *sample.labels.values()], sample.value)
        return made


class Distribution(NamedTuple):
    """All histograms of one metric."""

    name: str
    text: str
    samples: list[tuple[Mapping[str, str], list[tuple[str, float]], float]]

    def metric(self, common: Mapping[str, str]) -> Metric:
        labels = [*common, *(self.samples[0][0] if self.samples else ())]
        made = HistogramMetricFamily(self.name, self.text, labels=labels)
        for values, buckets, total in self.samples:
            made.add_metric([*common.values(), *values.values()], buckets=buckets, sum_value=total)
        return made


class Transactions(NamedTuple):
    """Ended transactions by outcome and topic, and the number of open ones."""

    committed: Counter[str]
    rolled_back: Counter[str]
    open: Callable[[], int]


class Gauges(NamedTuple):
    """Numbers of waiting timers and pulls, and of revived messages; used bytes of the data disk."""

    timers: Callable[[], int]
    pulls: Callable[[], int]
    revived: Callable[[], int]
    used_bytes: Callable[[], int]


class RequestLatencies(NamedTuple):
    """Latencies of sends and of pulls."""

    sends: Histogram
    pulls: Histogram


class RocketmqMetrics:
    """RocketMQ's metrics of a broker: captured on the event loop in slices, rendered in a thread."""

    def __init__(
        self,
        config: BrokerConfig,
        clock: Clock,
        *,
        stats: BrokerStats,
        store: MessageStore,
        topics: TopicConfigManager,
        groups: SubscriptionGroupManager,
        clients: ClientManager,
        lags: GroupLags,
        latencies: RequestLatencies,
        transactions: Transactions,
        gauges: Gauges,
    ) -> None:
        self._config, self._clock, self._stats, self._store = config, clock, stats, store
        self._topics, self._groups, self._clients, self._lag_figures = topics, groups, clients, lags
        self._latencies, self._transactions, self._gauges = latencies, transactions, gauges
        self._common = {
            **config.metrics_labels,
            "cluster": config.broker_cluster_name,
            "node_type": "broker",
            "node_id": config.broker_name,
        }

    async def take(self) -> Iterator[Metric]:
        """Capture the current figures; the iterator creates each metric on demand, in a thread."""
        limit = self._config.metrics_max_series
        families = itertools.chain(
            await self._traffic_in(limit),
            await self._traffic_out(limit),
            await self._lags(),
            await self._connections(limit),
            self._of_transactions(limit),
            self._of_broker(),
            self._of_store(),
            [self._requests()],
        )
        return (family.metric(self._common) for family in list(families))

    async def _traffic_in(self, limit: int) -> list[Family | Distribution]:
        largest, dead = Largest[str](limit), Largest[tuple[str, int]](limit)
        async for topic in in_slices(self._stats.topics()):
            count = self._stats.of(topic).messages_in
            if topic.startswith(DLQ_PREFIX):
                dead.add(count, (topic, count))
            elif count and not topic.startswith(RETRY_PREFIX):
                largest.add(count, topic)
        messages, throughput = list[Sample](), list[Sample]()
        sizes = list[tuple[Mapping[str, str], list[tuple[str, float]], float]]()
        async for topic in in_slices(largest.rows()):
            labels = {"topic": topic, "is_system": truth(names.is_system_topic(topic))}
            for kind, (count, size) in self._kinds(topic).items():
                if count:
                    messages.append(Sample({**labels, "message_type": kind}, count))
                    throughput.append(Sample({**labels, "message_type": kind}, size))
            if (sized := self._stats.sizes_of(topic)) is not None:
                sizes.append(({**labels, "message_type": self._plain(topic)}, sized.buckets(), sized.sum))
        lost = [
            Sample({"consumer_group": name.removeprefix(DLQ_PREFIX), "topic": name, "is_system": "false"}, number)
            for name, number in dead.rows()
        ]
        return [
            Family("rocketmq_messages_in_total", "messages stored, by topic and kind", messages),
            Family("rocketmq_throughput_in_total", "bytes of messages stored, by topic and kind", throughput),
            Distribution("rocketmq_message_size", "bytes of a stored message, by topic", sizes),
            Family("rocketmq_send_to_dlq_messages_total", "messages sent to the dead letters of a group", lost),
        ]

    def _plain(self, topic: str) -> str:
        """Return the type of a topic's plain messages, by its declared message type."""
        config = self._topics.select(topic)
        declared = "" if config is None else config.attributes.get("message.type", "").lower()
        return "fifo" if declared == "fifo" else "normal"

    def _kinds(self, topic: str) -> dict[str, tuple[int, int]]:
        """Return messages and bytes received by kind, without commits, whose half messages were counted."""
        row = self._stats.of(topic)
        found = {kind: self._stats.of_kind(topic, kind) for kind in (*_KINDS, COMMITTED)}
        count = row.messages_in - sum(each for each, _ in found.values())
        size = row.bytes_in - sum(each for _, each in found.values())
        del found[COMMITTED]
        return {**found, self._plain(topic): (max(count, 0), max(size, 0))}

    async def _traffic_out(self, limit: int) -> list[Family]:
        largest = Largest[tuple[str, str]](limit)
        async for topic, group in in_slices(self._stats.readings()):
            if not topic.startswith((RETRY_PREFIX, DLQ_PREFIX)):
                largest.add(self._stats.of_reading(topic, group)[0], (topic, group))
        messages, throughput = list[Sample](), list[Sample]()
        async for topic, group in in_slices(largest.rows()):
            count, size = self._stats.of_reading(topic, group)
            labels = {"topic": topic, "consumer_group": group, "is_system": is_system(topic, group)}
            messages.append(Sample(labels, count))
            throughput.append(Sample(labels, size))
        return [
            Family("rocketmq_messages_out_total", "messages read, by topic and group", messages),
            Family("rocketmq_throughput_out_total", "bytes of messages read, by topic and group", throughput),
        ]

    async def _lags(self) -> list[Family]:
        columns: tuple[list[Sample], ...] = ([], [], [], [], [])
        async for labels, figures in self._lag_figures.rows():
            for samples, value in zip(columns, figures, strict=True):
                if value is not None:
                    samples.append(Sample(labels, value))
        return [
            Family(name, text, samples)
            for (name, text), samples in zip(
                (
                    ("rocketmq_consumer_lag_messages", "messages that a group has not acknowledged"),
                    ("rocketmq_consumer_inflight_messages", "messages delivered to a group and not acknowledged"),
                    ("rocketmq_consumer_ready_messages", "messages that a group has not fetched"),
                    (
                        "rocketmq_consumer_lag_latency_milliseconds",
                        "age of the oldest message that a group has not acknowledged",
                    ),
                    (
                        "rocketmq_consumer_queueing_latency_milliseconds",
                        "age of the oldest message that a group has not fetched",
                    ),
                ),
                columns,
                strict=True,
            )
        ]

    async def _connections(self, limit: int) -> list[Family]:
        producers: Counter[tuple[tuple[str, str], ...]] = Counter()
        consumers: Counter[tuple[tuple[str, str], ...]] = Counter()
        async for channels in in_slices(list(self._clients.producers.values())):
            for channel in list(channels.values()):
                producers[*_of_client(channel)] += 1
        async for group in in_slices(list(self._clients.consumers.values())):
            mode = _MODES.get(group.consume_type, group.consume_type.lower())
            is_system = truth(names.is_system_group(group.name))
            of_group = (("consumer_group", group.name), ("consume_mode", mode), ("is_system", is_system))
            for channel in list(group.channels.values()):
                consumers[*of_group, *_of_client(channel)] += 1
        return [
            Family("rocketmq_producer_connections", "connections of producers", _most(producers, limit)),
            Family("rocketmq_consumer_connections", "connections of consumers, by group", _most(consumers, limit)),
        ]

    def _of_transactions(self, limit: int) -> list[Family]:
        ended = self._transactions
        return [
            Family(
                "rocketmq_commit_messages_total", "transactions committed, by topic", _by_topic(ended.committed, limit)
            ),
            Family(
                "rocketmq_rollback_messages_total",
                "transactions rolled back, by topic",
                _by_topic(ended.rolled_back, limit),
            ),
            Family("rocketmq_half_messages", "open transactions", [Sample({}, ended.open())]),
        ]

    def _of_broker(self) -> list[Family]:
        """Figures of the broker; only pulls of a backlog are queued, all other requests are processed immediately."""
        waiting = {**dict.fromkeys(_PROCESSORS, 0), "pull": self._gauges.pulls()}
        return [
            Family(
                "rocketmq_processor_watermark",
                "requests waiting for a handler",
                [Sample({"processor": name}, number) for name, number in waiting.items()],
            ),
            Family("rocketmq_broker_permission", "brokerPermission", [Sample({}, self._config.broker_permission)]),
            Family("rocketmq_topic_number", "topics", [Sample({}, len(self._topics.topics))]),
            Family("rocketmq_consumer_group_number", "consumer groups", [Sample({}, len(self._groups.groups))]),
            Family(
                "rocketmq_pop_revive_retry_messages_total",
                "popped messages redelivered after their invisible time",
                [Sample({}, self._gauges.revived())],
            ),
        ]

    def _of_store(self) -> list[Family]:
        store = self._store
        raw = store.reader.record_at(store.min_physical_offset)
        first = decode_record(raw) if raw is not None else None
        kept_ms = 0 if first is None else max(self._clock.now_ms() - first.store_timestamp, 0)
        return [
            Family(name, text, [Sample(_LOCAL_DISK, number)])
            for name, text, number in (
                ("rocketmq_storage_size_bytes", "used bytes of the data disk", self._gauges.used_bytes()),
                (
                    "rocketmq_storage_flush_behind_bytes",
                    "bytes appended and not yet flushed",
                    store.max_physical_offset - store.visibility.flushed,
                ),
                ("rocketmq_storage_dispatch_behind_bytes", "bytes appended and not yet in a queue", 0),
                (
                    "rocketmq_storage_message_reserve_time_milliseconds",
                    "age of the oldest message on the local disk",
                    kept_ms,
                ),
                ("rocketmq_timing_messages", "pending timer messages", self._gauges.timers()),
            )
        ]

    def _requests(self) -> Distribution:
        text = "time from reading a send, or from the start of a pull's read, to the answer"
        samples = list[tuple[Mapping[str, str], list[tuple[str, float]], float]]()
        for code, histogram in ((_SEND, self._latencies.sends), (_PULL, self._latencies.pulls)):
            labels = {
                **_PROTOCOL,
                "request_code": code,
                "response_code": "success",
                "is_long_polling": "false",
                "result": "success",
            }
            samples.append((labels, in_milliseconds(histogram), histogram.sum * 1000))
        return Distribution("rocketmq_rpc_latency_milliseconds", text, samples)


def in_milliseconds(histogram: Histogram) -> list[tuple[str, float]]:
    """Return cumulative counts by RocketMQ's bounds, converted to ms."""
    counted = dict(zip((*histogram.bounds, None), itertools.accumulate(histogram.counts), strict=True))
    return [*((str(bound * 1000), float(counted[bound])) for bound in RPC_BOUNDS), ("+Inf", float(counted[None]))]


def _of_client(channel: ClientChannel) -> tuple[tuple[str, str], ...]:
    release = release_of(channel.version)
    version = str(channel.version)
    if release is not None:
        version = f"v{release.major}_{release.minor}_{release.patch}" + ("_snapshot" if release.is_snapshot else "")
    return (("language", channel.language.lower()), ("version", version), *_PROTOCOL.items())


def _most(counted: Counter[tuple[tuple[str, str], ...]], limit: int) -> list[Sample]:
    return [Sample(dict(labels), number) for labels, number in counted.most_common(limit)]


def _by_topic(counted: Counter[str], limit: int) -> list[Sample]:
    return [Sample({"topic": topic}, number) for topic, number in counted.most_common(limit)]
