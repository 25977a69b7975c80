"""Records of one queue, for a start that loads waiting messages and their marks."""

from __future__ import annotations

from collections.abc import Iterator

from broker.store.message_store import MessageStore
from neve.record.codec import MessageRecord, iter_records

_COUNT, _BYTES = 512, 4 << 20  # per read


def of_queue(store: MessageStore, topic: str, queue_id: int, offset: int) -> Iterator[MessageRecord]:
    """Yield the records from an offset to the current end of the queue."""
    offset, end = max(offset, store.queues.min_offset(topic, queue_id)), store.queues.max_offset(topic, queue_id)
    while offset < end:
        got = store.reader.get(topic, queue_id, offset, _COUNT, _BYTES)
        for buffer in got.buffers:
            yield from iter_records(buffer)
        if got.next_offset <= offset:
            return
        offset = got.next_offset
