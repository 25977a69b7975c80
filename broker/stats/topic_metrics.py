"""Metrics by topic and by group: traffic, consumer lag, and archive lag.

A broker may have more topics and groups than Prometheus should store. At most `metricsMaxSeries` series of each kind
are exported, those with the most traffic or the largest lag, and the number of omitted ones. Traffic is counted at each
scrape. Lags are computed from each queue. For tens of thousands of pairs of group and topic, that is 0.1 s of the event
loop, so it is spread in small slices over many seconds (`infra/observe/latest_result`, `infra/loop/in_steps`).
Rendering runs in a thread.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappush, heapreplace
from operator import itemgetter
from typing import Generic, TypeVar

import msgspec

from broker.broker_stats import BrokerStats, TopicTraffic
from broker.clients.client_manager import ClientManager
from broker.reading.tiered_store import TieredStore
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.loop.in_steps import LoopPace, in_slices
from infra.loop.pace import SCRAPE_SHARE, SHARE
from infra.observe.latest_result import AgedResult, LatestResult
from infra.observe.metrics import Series
from neve.remoting.names import RETRY_PREFIX

# Queues or names processed in one turn of the event loop: about 0.12 ms.
_SLICE = 50
_COUNTED_AT_ONCE = 400  # topics whose traffic is compared in one turn, in about the same time
_NAMES_AT_ONCE = 1_000  # names whose prefix is checked in one turn, in about the same time
T = TypeVar("T")
U = TypeVar("U")


class Lag(msgspec.Struct, frozen=True, gc=False):
    """Number of messages of a topic that a group has not consumed."""

    group: str
    topic: str
    messages: int


class Largest(Generic[T]):
    """The rows with the largest numbers among all that are added; of equal numbers, the earlier rows."""

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

    def add_all(self, rows: Iterable[tuple[float, T]]) -> None:
        """Add many rows; most are rejected by a comparison of their number alone."""
        least = self._kept[0][0] if len(self._kept) >= max(self._limit, 1) else -math.inf
        for number, row in rows:
            if number > least:
                self.add(number, row)
                least = self._kept[0][0] if len(self._kept) >= max(self._limit, 1) else -math.inf
            else:
                self.count += 1

    def of(self, make: Callable[[T], U]) -> "Largest[U]":
        """Return a copy with each row converted by `make`."""
        made = Largest[U](self._limit)
        made.count = self.count
        made._kept = [(number, place, make(row)) for number, place, row in self._kept]
        return made

    def rows(self) -> list[T]:
        """Return the rows, the largest first."""
        return [row for _, _, row in sorted(self._kept, key=itemgetter(0, 1), reverse=True)]

    @property
    def left_out(self) -> int:
        """Number of rows that were not kept."""
        return self.count - len(self._kept)


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one scrape; `archive` has the age in ms of each topic's oldest unarchived message."""

    traffic: Largest[TopicTraffic]
    lags: Largest[Lag]
    archive: Largest[tuple[str, int]]
    lags_age_s: float  # since the lags were computed
    archive_age_s: float


class TopicMetrics:
    """Computes the figures of a scrape."""

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
        clock: Clock,
        limit: Callable[[], int],
    ) -> None:
        """Create it; `limit` returns the maximum number of series of one kind."""
        self._clock, self._limit = clock, limit
        self._last_lags = LatestResult("look-at-lags", self._sample_lags, clock)
        self._stats, self._store, self._tiered = stats, store, tiered
        self._topics, self._offsets, self._clients, self._retry_names = topics, offsets, clients, retry_names

    async def take(self, archive: Awaitable[AgedResult[Largest[tuple[str, int]]]]) -> Figures:
        """Compute the figures on the event loop; `archive` returns the archive ages, computed concurrently."""
        lags, waits = await asyncio.gather(self.lags(), archive)
        traffic = await self._topic_traffic(self._limit())
        return Figures(traffic, lags.found, waits.found, lags.age_s, waits.age_s)

    async def lags(self) -> AgedResult[Largest[Lag]]:
        """Return the consumer lags, computed now or at the last scrape."""
        return await self._last_lags.get()

    def close(self) -> None:
        self._last_lags.close()

    async def _topic_traffic(self, limit: int) -> Largest[TopicTraffic]:
        largest, stats = Largest[str](limit), self._stats
        topics = stats.topics()
        for first in range(0, len(topics), _COUNTED_AT_ONCE):
            some = topics[first : first + _COUNTED_AT_ONCE]
            largest.add_all(zip(stats.messages_of(some), some, strict=True))
            await asyncio.sleep(0)
        rows: dict[str, TopicTraffic] = {}
        async for topic in in_slices(largest.rows()):
            rows[topic] = stats.of(topic)
        return largest.of(rows.__getitem__)

    async def _sample_lags(self, is_first: bool) -> Largest[Lag]:
        return await self.consumer_lags(self._limit(), SCRAPE_SHARE if is_first else SHARE)

    async def consumer_lags(self, limit: int, share: float = SCRAPE_SHARE) -> Largest[Lag]:
        """Compute the numbers of messages between committed offsets and the ends of queues, by group and topic.

        `mqadmin consumerProgress` counts offsets. Offsets without a message do not count here, because a restore leaves
        out millions.

        Covers each topic in which a group has a committed offset, and its retry topics even without one. A topic is
        omitted if a running group no longer subscribes to it. `share` is the share of the event loop's time.
        """
        lags, pace = Largest[Lag](limit), LoopPace(self._clock, share)
        examined, before, ends = 0, "", list[int]()
        for pair in self._pairs():
            examined += 1
            if pair is None or examined >= _SLICE:
                examined, before = 0, ""
                await pace.pause()
            if pair is None:
                continue
            topic, group = pair
            config = self._topics.select(topic)
            if config is None or self._has_left(group, topic):
                continue
            if topic != before:  # the pairs of one topic are adjacent
                before, ends = topic, []
                for queue in range(config.read_queue_nums):
                    ends.append(self._store.queues.max_offset(topic, queue))
                    examined += 1
                    if examined >= _SLICE:
                        examined = 0
                        await pace.pause()
            behind = 0
            for first in range(0, len(ends), 8):
                behind += self._behind(group, topic, ends, first)
                examined += 1  # eight comparisons cost about as much as one lookup
                if examined >= _SLICE:
                    examined = 0
                    await pace.pause()
            lags.add(behind, Lag(group, topic, behind))
        return lags

    def _pairs(self) -> Iterator[tuple[str, str] | None]:
        """Yield topic and group, then retry topics in which a group has no committed offset.

        None ends a slice of work.
        """
        yield from self._offsets.pairs()
        names, read = list(self._topics.topics), self._retry_names.unread_by
        for first in range(0, len(names), _NAMES_AT_ONCE):
            retries = [name for name in names[first : first + _NAMES_AT_ONCE] if name.startswith(RETRY_PREFIX)]
            yield None
            for number, name in enumerate(retries):
                yield from ((name, group) for group in read(name, self._offsets.topics_of))
                if number % _SLICE == _SLICE - 1:
                    yield None

    def _behind(self, group: str, topic: str, ends: list[int], first: int) -> int:
        """Return the messages left in eight queues. For most groups that is a comparison of offsets with ends only."""
        behind, consumed = 0, self._offsets.committed_offsets(group, topic)
        for queue, end in enumerate(ends[first : first + 8], first):
            if (at := consumed.get(queue, 0)) < end:
                behind += self._tiered.count_messages(topic, queue, at, end)
        return behind

    def _has_left(self, group: str, topic: str) -> bool:
        live = self._clients.consumers.get(group)
        return live is not None and topic not in live.subscriptions and not topic.startswith(RETRY_PREFIX)


def archive_ages(ages_ms: Mapping[str, int], limit: int) -> Largest[tuple[str, int]]:
    """Select the topics with the highest ages; runs in a thread."""
    largest = Largest[tuple[str, int]](limit)
    for topic, age_ms in ages_ms.items():
        largest.add(age_ms, (topic, age_ms))
    return largest


def families(figures: Figures) -> Iterator[Series]:
    """Yield the series of topics, of pairs of group and topic, and of archived topics, each created on demand."""
    yield from _traffic(figures.traffic)
    yield _lags(figures.lags)
    yield _archive(figures.archive)
    yield _left_out(figures)
    yield _ages(figures)


def _traffic(traffic: Largest[TopicTraffic]) -> Iterator[Series]:
    rows = traffic.rows()
    for name, text in (
        ("messages_in", "messages stored, by topic"),
        ("bytes_in", "bytes stored, by topic"),
        ("messages_out", "messages read, by topic"),
        ("bytes_out", "bytes read, by topic"),
    ):
        samples = [((row.topic,), getattr(row, name)) for row in rows]
        yield Series(f"neve_topic_{name}_total", "counter", text, ("topic",), samples)


def _lags(lags: Largest[Lag]) -> Series:
    text = "unread messages of a group, by group and topic"
    samples = [((lag.group, lag.topic), lag.messages) for lag in lags.rows()]
    return Series("neve_consumer_lag_messages", "gauge", text, ("group", "topic"), samples)


def _archive(archive: Largest[tuple[str, int]]) -> Series:
    text = "age of the oldest unarchived message, by topic"
    samples = [((topic,), age_ms / 1000) for topic, age_ms in archive.rows()]
    return Series("neve_archive_lag_seconds", "gauge", text, ("topic",), samples)


def _left_out(figures: Figures) -> Series:
    text = "topics, pairs of group and topic, and topics of the archive without series of their own, by kind"
    samples = [
        (("topic",), figures.traffic.left_out),
        (("consumer",), figures.lags.left_out),
        (("archive",), figures.archive.left_out),
    ]
    return Series("neve_series_left_out", "gauge", text, ("kind",), samples)


def _ages(figures: Figures) -> Series:
    text = "age of the lag figures of groups and of the archive, by kind"
    samples = [(("consumer",), figures.lags_age_s), (("archive",), figures.archive_age_s)]
    return Series("neve_series_age_seconds", "gauge", text, ("kind",), samples)
