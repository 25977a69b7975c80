"""One moment of the broker as its bucket keeps it. On the loop: no message comes in between."""

from broker.broker_context import BrokerContext
from neve.archive.state import BrokerState


def capture_state(context: BrokerContext) -> BrokerState:
    store = context.store
    return BrokerState(
        broker=context.config.broker_name,
        log_uuid=store.log_uuid,
        log_end=store.max_physical_offset,
        topics=[config.to_wire() for config in context.topics.topics.values()],
        groups=[config.to_wire() for config in context.groups.groups.values()],
        forbidden=context.groups.forbidden(),
        offsets=context.offsets.table(),
        queues=store.following_offsets(),
        pending={
            "timers": len(context.timers),
            "delayed": context.schedule.pending(),
            "half_messages": len(context.transactions),
        },
    )
