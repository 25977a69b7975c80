"""The broker as its bucket keeps it, taken on the loop in slices: other requests are served in between.

What changes meanwhile is in it or not, as if the capture had come a moment earlier or later for that topic. A restore
takes for each queue the highest offset that any part speaks of; a topic is therefore captured after its offsets, so
that none of them speaks of a topic that the state doesn't know.
"""

from collections.abc import Generator

from broker.broker_context import BrokerContext
from broker.tables.consumer_offset_manager import SEPARATOR
from broker.tables.subscription_group_manager import SYSTEM_GROUPS, SubscriptionGroupConfig
from infra import collector
from neve.archive.state import BrokerState

# Topics, or a group's positions in a topic, that are taken before others get their turn: less than a millisecond.
_SLICE = 200


def capture_state(context: BrokerContext) -> BrokerState:
    """At a start and at a stop, when nobody waits."""
    capture = capture_in_slices(context)
    while (state := next_slice(capture)) is None:
        pass
    return state


def next_slice(capture: Generator[None, None, BrokerState]) -> BrokerState | None:
    """The state with the last slice, None with those before."""
    try:
        next(capture)
    except StopIteration as end:
        assert isinstance(end.value, BrokerState)
        return end.value
    return None


def capture_in_slices(context: BrokerContext) -> Generator[None, None, BrokerState]:
    """Each step is done at once; between two the broker may go on."""
    store = context.store
    offsets: dict[str, dict[int, int]] = {}
    for number, (topic, group) in enumerate(context.offsets.pairs()):
        if positions := context.offsets.queues_of(group, topic):
            offsets[topic + SEPARATOR + group] = positions
        if number % _SLICE == _SLICE - 1:
            if number < _SLICE:
                collector.leave_alone()  # it grows to a row for each group in each topic
            yield
    queues: dict[str, dict[int, int]] = {}
    following = store.following_topics()
    yield
    for number, topic in enumerate(following):
        queues[topic] = store.following_of(topic)
        if number % _SLICE == _SLICE - 1:
            yield
    topics = []
    for number, topic in enumerate(list(context.topics.topics)):
        if (config := context.topics.select(topic)) is not None:
            topics.append(config.to_wire())
        if number % _SLICE == _SLICE - 1:
            yield
    return BrokerState(
        broker=context.config.broker_name,
        log_uuid=store.log_uuid,
        log_end=store.max_physical_offset,
        topics=topics,
        groups=[config.to_wire() for config in context.groups.groups.values() if not is_stock(config)],
        forbidden=context.groups.forbidden(),
        offsets=offsets,
        queues=queues,
        pending={
            "timers": len(context.timers),
            "delayed": context.schedule.pending(),
            "half_messages": len(context.transactions),
        },
    )


def is_stock(config: SubscriptionGroupConfig) -> bool:
    """A group that every broker makes for itself, as it makes it."""
    name = config.group_name
    return name in SYSTEM_GROUPS and config == SubscriptionGroupConfig(group_name=name)
