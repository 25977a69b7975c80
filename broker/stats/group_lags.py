"""Lags of consumer groups for RocketMQ's metrics: numbers and ages of messages by state."""

from __future__ import annotations

from collections.abc import AsyncIterator

from broker.pop.pop_book import PopBook
from broker.reading.tiered_store import TieredStore
from broker.stats.topic_metrics import Lag, TopicMetrics
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.retry_names import RetryNames
from broker.tables.topic_config_manager import TopicConfigManager
from infra.clock import Clock
from infra.loop.in_steps import LoopSlices, in_slices
from neve.remoting import names
from neve.remoting.names import RETRY_PREFIX

# Pairs of group and topic with ages: each may read the disk.
_TIMED = 100


class GroupLags:
    """Computes the lags, the largest first."""

    def __init__(
        self,
        clock: Clock,
        *,
        tiered: TieredStore,
        topics: TopicConfigManager,
        offsets: ConsumerOffsetManager,
        pops: PopBook,
        retry_names: RetryNames,
        topic_metrics: TopicMetrics,
    ) -> None:
        self._clock, self._tiered, self._topics, self._offsets = clock, tiered, topics, offsets
        self._pops, self._retry_names, self._topic_metrics = pops, retry_names, topic_metrics

    async def rows(self) -> AsyncIterator[tuple[dict[str, str], tuple[float | None, ...]]]:
        """Yield the labels of each pair of group and topic with the figures of `_ages`."""
        slices = LoopSlices()
        for number, lag in enumerate((await self._topic_metrics.lags()).found.rows()):
            config = self._topics.select(lag.topic)
            queues = 0 if config is None else config.read_queue_nums
            await slices.step(queues + 1)
            yield self._labels(lag), await self._ages(lag, queues, timed=number < _TIMED)

    def _labels(self, lag: Lag) -> dict[str, str]:
        """Return the labels of a lag; retries of popped messages have the label of their original topic."""
        is_retry, topic = lag.topic.startswith(RETRY_PREFIX), lag.topic
        if is_retry:
            owned = [owner.topic for owner in self._retry_names.owners(topic) if owner.group == lag.group]
            topic = next((owner for owner in owned if owner is not None), topic)
        system = is_system(topic, lag.group)
        return {"consumer_group": lag.group, "topic": topic, "is_retry": truth(is_retry), "is_system": system}

    async def _ages(self, lag: Lag, queues: int, *, timed: bool) -> tuple[float | None, ...]:
        """Return numbers of unacknowledged, in-flight and unfetched messages, and two ages in ms (None if unknown).

        The ages are those of the oldest unacknowledged and of the oldest unfetched message.
        """
        group, topic, tiered = lag.group, lag.topic, self._tiered
        in_hand = to_fetch = 0
        unacknowledged, unfetched = list[int](), list[int]()
        async for queue in in_slices(range(queues)):
            end = tiered.max_offset(topic, queue)
            at = max(self._offsets.query(group, topic, queue), 0)
            popped = self._pops.find(group, topic, queue)
            if popped is not None:
                fetched = max(popped.next_offset, at)
                in_hand += len(popped.flights)
            else:
                fetched = min(max(self._offsets.query_pull(group, topic, queue), at), end)
                in_hand += tiered.count_messages(topic, queue, at, fetched) if at < fetched else 0
            to_fetch += tiered.count_messages(topic, queue, fetched, end) if fetched < end else 0
            if timed:
                unacknowledged += self._time_at(topic, queue, at, end)
                unfetched += self._time_at(topic, queue, fetched, end)
        now_ms = self._clock.now_ms()
        ages = [
            max(now_ms - min(times), 0) if times else None if left else 0
            for left, times in ((lag.messages, unacknowledged), (to_fetch, unfetched))
        ]
        return (lag.messages, in_hand, to_fetch, *(ages if timed else (None, None)))

    def _time_at(self, topic: str, queue: int, offset: int, end: int) -> list[int]:
        """Return the store time of the first message from an offset on; its lower bound if only the archive has it."""
        if offset >= end:
            return []
        first = max(offset, self._tiered.min_offset(topic, queue))
        bounds = self._tiered.store_times_at_hand(topic, queue, first)
        return [bounds[0]] if bounds is not None else []


def is_system(topic: str, group: str) -> str:
    """Return the label of a topic and a group that RocketMQ creates itself."""
    return truth(names.is_system_topic(topic) or names.is_system_group(group))


def truth(is_so: bool) -> str:
    """Return a label's text of a truth value."""
    return "true" if is_so else "false"
