"""One moment of the broker as its bucket keeps it. On the loop: no message comes in between."""

from broker.broker_context import BrokerContext
from broker.subscription_group_manager import SYSTEM_GROUPS, SubscriptionGroupConfig
from neve.archive.state import BrokerState


def capture_state(context: BrokerContext) -> BrokerState:
    store = context.store
    return BrokerState(
        broker=context.config.broker_name,
        log_uuid=store.log_uuid,
        log_end=store.max_physical_offset,
        topics=[config.to_wire() for config in context.topics.topics.values()],
        groups=[config.to_wire() for config in context.groups.groups.values() if not is_stock(config)],
        forbidden=context.groups.forbidden(),
        offsets=context.offsets.table(),
        queues=store.following_offsets(),
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
