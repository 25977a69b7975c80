"""A queue in figures, as RocketMQ's tools ask for them: where it begins and ends, where a group stands in it."""

from broker.reading.tiered_store import TieredStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager


class QueueStats:
    """Describes queues from memory, without a read of the archive.

    The time of an archived message is the newest store time of its row group: it is never earlier than the true time.
    It is 0, as in RocketMQ, only where no message exists.
    """

    def __init__(self, tiered: TieredStore, offsets: ConsumerOffsetManager) -> None:
        self._tiered, self._offsets = tiered, offsets

    def of_topic(self, topic: str, queue: int) -> dict[str, int]:
        """As RocketMQ's TopicOffset has it, and how many messages there are where offsets are missing."""
        tiered = self._tiered
        high, low = max(tiered.max_offset(topic, queue), 0), max(tiered.min_offset(topic, queue), 0)
        described = {
            "lastUpdateTimestamp": self._no_earlier_than(topic, queue, high - 1),
            "maxOffset": high,
            "minOffset": low,
        }
        messages = tiered.count_messages(topic, queue, low, high)
        if messages != high - low:  # Java's clients pass over what they do not know
            described["messages"] = messages
        local = tiered.local_min_offset(topic, queue)
        if local > low:
            described["localMinOffset"] = local  # what is below it, the archive alone has
            cold = tiered.count_messages(topic, queue, low, min(local, high))
            if cold != min(local, high) - low:
                described["coldMessages"] = cold
        return described

    def count_messages(self, topic: str, queue: int, first: int, end: int) -> int:
        """Return the number of messages in [first, end), without offsets that hold none."""
        return self._tiered.count_messages(topic, queue, first, end)

    def stored_ms(self, topic: str, queue: int, offset: int) -> int:
        """Store time of a message, or its lower bound if only the archive has it; -1 if there is none."""
        bounds = self._tiered.store_times_at_hand(topic, queue, offset)
        return -1 if bounds is None else bounds[0]

    def _no_earlier_than(self, topic: str, queue: int, offset: int) -> int:
        """Store time of a message, or its upper bound if only the archive has it; 0 if there is none."""
        bounds = self._tiered.store_times_at_hand(topic, queue, offset) if offset >= 0 else None
        return 0 if bounds is None else bounds[1]

    def of_group(self, group: str, topic: str, queue: int) -> dict[str, int]:
        """As RocketMQ's OffsetWrapper has it, and how many messages are left where that is not its lag."""
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
