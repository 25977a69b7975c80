"""Batches of messages for a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from broker.store.appender import Send
from broker.store.message_store import MessageStore
from neve.record.codec import iter_records

Open = Callable[..., MessageStore]
HOST = ("10.0.0.1", 7)
COUNT = 400


def body(number: int) -> bytes:
    return b"%d" % number * (1 + number % 90)


def queues(store: MessageStore) -> list[list[bytes]]:
    """Return the visible message bodies of each queue."""
    reads = [store.reader.get("t", queue, 0, COUNT, 1 << 20) for queue in range(4)]
    return [[record.body for part in read.buffers for record in iter_records(part)] for read in reads]


def sends(store: MessageStore, numbers: Iterable[int]) -> list[Send]:
    """Return messages of several sizes for four queues."""
    return [
        (
            store.queue_for("t", number % 4),
            body(number), b"n\x01%d\x02" % number, number % 3, f"key{number}", 0, 0, 1, 0, 0,
        )
        for number in numbers
    ]  # fmt: skip
