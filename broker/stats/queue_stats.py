"""Figures of a queue for RocketMQ's tools: its first and last offsets, and the progress of a group."""

from broker.reading.tiered_store import TieredStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager


class QueueFigures:
    """Describes queues from memory, without reading the archive.

    The time of an archived message is the newest store time of its row group, so it is never earlier than the true
    time. As in RocketMQ, 0 means that no message exists.
    """

    def __init__(self, tiered: TieredStore, offsets: ConsumerOffsetManager) -> None:
        self._tiered, self._offsets = tiered, offsets

    def of_topic(self, topic: str, queue: int) -> dict[str, int]:
        """Return RocketMQ's TopicOffset, and the number of messages if some offsets have none."""
        tiered = self._tiered
        high, low = max(tiered.max_offset(topic, queue), 0), max(tiered.min_offset(topic, queue), 0)
        described = {
            "lastUpdateTimestamp": self._no_earlier_than(topic, queue, high - 1),
            "maxOffset": high,
            "minOffset": low,
        }
        messages = tiered.count_messages(topic, queue, low, high)
        if messages != high - low:  # Java clients ignore unknown fields
            described["messages"] = messages
        local = tiered.local_min_offset(topic, queue)
        if local > low:
            described["localMinOffset"] = local  # messages below it are in the archive only
            cold = tiered.count_messages(topic, queue, low, min(local, high))
            if cold != min(local, high) - low:
                described["coldMessages"] = cold
        return described

    def count_messages(self, topic: str, queue: int, first: int, end: int) -> int:
        """Return the number of messages in [first, end), without the offsets that have none."""
        return self._tiered.count_messages(topic, queue, first, end)

    def stored_ms(self, topic: str, queue: int, offset: int) -> int:
        """Return a message's store time, or its lower bound if only the archive has it; -1 if there is none."""
        bounds = self._tiered.store_times_at_hand(topic, queue, offset)
        return -1 if bounds is None else bounds[0]

    def _no_earlier_than(self, topic: str, queue: int, offset: int) -> int:
        """Return a message's store time, or its upper bound if only the archive has it; 0 if there is none."""
        bounds = self._tiered.store_times_at_hand(topic, queue, offset) if offset >= 0 else None
        return 0 if bounds is None else bounds[1]

    def of_group(self, group: str, topic: str, queue: int) -> dict[str, int]:
        """Return RocketMQ's OffsetWrapper, and the number of messages left if that is not its lag."""
        tiered = self._tiered
        high, consumed = max(tiered.max_offset(topic, queue), 0), max(self._offsets.query(group, topic, queue), 0)
        described = {
            "brokerOffset": high,
            "consumerOffset": consumed,
            "lastTimestamp": self._no_earlier_than(topic, queue, consumed - 1),
            "pullOffset": max(consumed, self._offsets.query_pull(group, topic, queue)),
        }
        if consumed < high:
            left = tiered.count_messages(topic, queue, consumed, high)
            if left != high - consumed:
                described["messages"] = left
            local = min(tiered.local_min_offset(topic, queue), high)
            if consumed < local and (cold := tiered.count_messages(topic, queue, consumed, local)):
                described["coldMessages"] = cold
        return described
