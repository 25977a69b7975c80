"""Messages of an Apache master, in the copy of its log.

A message that was delivered later is in the log twice: where it waited, and in its target queue. For deliveries after
the last poll, the copies above the start of that poll are looked up. No copy counts for two messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from broker.store.message_store import MessageStore
from broker.waiting.half_messages import TRANSACTION_BITS
from neve.record.codec import MessageRecord, decode_record
from neve.record.layout import TRANSACTION_COMMIT
from neve.record.properties import PROPERTY_UNIQUE_KEY
from neve.remoting.names import CHECK_MAX_TOPIC


class Bound(NamedTuple):
    """Identity of a message that is delivered to a queue."""

    topic: str
    queue_id: int
    unique_key: str
    born_timestamp: int
    body_crc: int
    reconsume_times: int


def bound(record: MessageRecord, topic: str, queue_id: int, reconsume_times: int | None = None) -> Bound:
    times = record.reconsume_times if reconsume_times is None else reconsume_times
    unique = record.properties.get(PROPERTY_UNIQUE_KEY, "")
    return Bound(topic, queue_id, unique, record.born_timestamp, record.body_crc, times)


def target(record: MessageRecord) -> tuple[str, int]:
    """Return the target queue of a waiting message; an empty topic: it has none."""
    properties = record.properties
    queue = properties.get("REAL_QID", "0")
    return properties.get("REAL_TOPIC", ""), int(queue) if queue.isascii() and queue.isdigit() else 0


class Delivered:
    """Deliveries of the given messages above an offset, and the ends of transactions."""

    def __init__(self, store: MessageStore, asked: Collection[Bound], *, above: int, ended_above: int) -> None:
        """Search the log. `ended_above`: start of the search for ends of transactions."""
        self._copies = Counter[Bound]()
        #: Offsets of the half messages of committed messages, and (target, id) of transactions that were committed or
        #: dropped.
        self.committed_places: set[int] = set()
        self.ended_ids: set[tuple[str, str]] = set()
        names, keys = {one[:2] for one in asked}, frozenset(asked)
        for raw in store.reader.records_from(min(above, ended_above)):
            record = decode_record(raw)
            if record.physical_offset >= ended_above:
                self._note_end(record)
            if record.physical_offset >= above and (record.topic, record.queue_id) in names:
                key = bound(record, record.topic, record.queue_id)
                if key in keys:
                    self._copies[key] += 1

    def take(self, key: Bound) -> bool:
        """Use up a copy of this message. Return False if none is left."""
        found = self._copies[key] > 0
        if found:
            self._copies[key] -= 1
        return found

    def _note_end(self, record: MessageRecord) -> None:
        committed = record.sys_flag & TRANSACTION_BITS == TRANSACTION_COMMIT
        if committed and record.prepared_transaction_offset:  # it is 0 in a copy that was delivered later
            self.committed_places.add(record.prepared_transaction_offset)
        if committed or record.topic == CHECK_MAX_TOPIC:
            properties = record.properties
            if unique := properties.get(PROPERTY_UNIQUE_KEY):
                self.ended_ids.add((properties.get("REAL_TOPIC", record.topic), unique))
