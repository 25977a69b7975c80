"""The broker as its bucket keeps it, taken on the loop in slices: other requests are served in between.

What changes meanwhile is in it or not, as if the capture had come a moment earlier or later for that topic. A restore
takes for each queue the highest offset that any part speaks of; a topic is therefore captured after its offsets, so
that none of them speaks of a topic that the state doesn't know.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from broker.archiving.ask_loop import Ask
from broker.archiving.pins import Pins
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import SEPARATOR, ConsumerOffsetManager
from broker.tables.subscription_group_manager import SubscriptionGroupConfig, SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfigManager
from infra.loop.in_steps import at_once
from infra.process import collector
from neve.archive.format.broker_state import BrokerState
from neve.remoting.names import METADATA_LOG, SYSTEM_GROUPS

# Topics, or a group's positions in a topic, that are taken before others get their turn: less than a millisecond.
_SLICE = 200


class Tables(NamedTuple):
    """What of a broker's tables is kept in its bucket, and put back by a restore."""

    topics: TopicConfigManager
    groups: SubscriptionGroupManager
    offsets: ConsumerOffsetManager


class StateCapture:
    """Takes the state of the broker of this name."""

    def __init__(self, broker: str, store: MessageStore, tables: Tables, pins: Pins) -> None:
        self._broker, self._store, self._tables, self._pins = broker, store, tables, pins

    def at_once(self) -> BrokerState:
        """Capture the state without yielding: at a start and at a stop."""
        return at_once(self.in_slices())

    def from_thread(self, ask: Ask) -> BrokerState:
        """For a job, while the broker serves."""
        capture = self.in_slices()
        while (state := ask.call(lambda: next_slice(capture))) is None:
            pass
        return state

    def in_slices(self) -> Generator[None, None, BrokerState]:
        """Each step is done at once; between two the broker may go on."""
        store, tables = self._store, self._tables
        offsets: dict[str, dict[int, int]] = {}
        for number, (topic, group) in enumerate(tables.offsets.pairs()):
            if positions := tables.offsets.queues_of(group, topic):
                offsets[topic + SEPARATOR + group] = positions
            if number % _SLICE == _SLICE - 1:
                if number < _SLICE:
                    collector.freeze_new()  # it grows to a row for each group in each topic
                yield
        queues: dict[str, dict[int, int]] = {}
        following = store.following_topics()
        yield
        for number, topic in enumerate(following):
            if topic != METADATA_LOG:  # a new log begins with the tables as they are put back
                queues[topic] = store.following_of(topic)
            if number % _SLICE == _SLICE - 1:
                yield
        topics = []
        for number, topic in enumerate(list(tables.topics.topics)):
            if (config := tables.topics.select(topic)) is not None:
                topics.append(config.to_wire())
            if number % _SLICE == _SLICE - 1:
                yield
        return BrokerState(
            broker=self._broker,
            log_uuid=store.log_uuid,
            log_end=store.max_physical_offset,
            topics=topics,
            groups=[config.to_wire() for config in tables.groups.groups.values() if not is_stock(config)],
            forbidden=tables.groups.forbidden(),
            offsets=offsets,
            queues=queues,
            pending=self._pins.counts(),
        )


def next_slice(capture: Generator[None, None, BrokerState]) -> BrokerState | None:
    """The state with the last slice, None with those before."""
    try:
        next(capture)
    except StopIteration as end:
        assert isinstance(end.value, BrokerState)
        return end.value
    return None


def is_stock(config: SubscriptionGroupConfig) -> bool:
    """A group that every broker makes for itself, as it makes it."""
    name = config.group_name
    return name in SYSTEM_GROUPS and config == SubscriptionGroupConfig(group_name=name)
