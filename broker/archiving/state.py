"""State of a broker for its bucket, captured on the event loop in slices, with other requests in between.

A concurrent change of a topic is included or not, as if the capture had been a moment later or earlier. A restore uses
the highest offset of each queue that any part contains. Topics are captured after their offsets, so that the state has
no offset of an unknown topic.
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

# Topics, or committed offsets of a topic and group, per slice: less than a millisecond.
_SLICE = 200


class Tables(NamedTuple):
    """Tables that the bucket stores and a restore recovers."""

    topics: TopicConfigManager
    groups: SubscriptionGroupManager
    offsets: ConsumerOffsetManager


class StateCapture:
    """Captures the state of one broker."""

    def __init__(self, broker: str, store: MessageStore, tables: Tables, pins: Pins) -> None:
        self._broker, self._store, self._tables, self._pins = broker, store, tables, pins

    def at_once(self) -> BrokerState:
        """Capture the state without yielding: at a start and at a stop."""
        return at_once(self.in_slices())

    def from_thread(self, ask: Ask) -> BrokerState:
        """Capture the state from a job's thread while the broker serves requests."""
        capture = self.in_slices()
        while (state := ask.call(lambda: next_slice(capture))) is None:
            pass
        return state

    def in_slices(self) -> Generator[None, None, BrokerState]:
        """Capture the state; each step is atomic, and the broker may serve requests between two steps."""
        store, tables = self._store, self._tables
        offsets: dict[str, dict[int, int]] = {}
        for number, (topic, group) in enumerate(tables.offsets.pairs()):
            if positions := tables.offsets.queues_of(group, topic):
                offsets[topic + SEPARATOR + group] = positions
            if number % _SLICE == _SLICE - 1:
                if number < _SLICE:
                    collector.freeze_new()  # the capture grows to one row for each topic and group
                yield
        queues: dict[str, dict[int, int]] = {}
        following = store.following_topics()
        yield
        for number, topic in enumerate(following):
            if topic != METADATA_LOG:  # a restored log begins with the tables as they are restored
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
    """Run one slice; return the state after the last one, None after the others."""
    try:
        next(capture)
    except StopIteration as end:
        assert isinstance(end.value, BrokerState)
        return end.value
    return None


def is_stock(config: SubscriptionGroupConfig) -> bool:
    """Return whether a group is one that every broker creates itself, with unchanged settings."""
    name = config.group_name
    return name in SYSTEM_GROUPS and config == SubscriptionGroupConfig(group_name=name)
