"""Selects the queue of a message. Equal order keys select the same queue as long as the topic keeps its queues.

The queues are sorted by broker name and number, as in Java's client, so that Java and Python producers select the same
queue for a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neve.client.model import Message, MessageQueue
from neve.errors import ClientError

QueueSelector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
#: A queue, the number of a queue on any broker of the topic, or a function that selects a queue for the message.
Queue = int | MessageQueue | QueueSelector
OrderKey = str | int


def java_hash(key: OrderKey) -> int:
    """Return Java's `hashCode` of a String, an Integer, or a Long for a larger number: −2³¹ … 2³¹ − 1."""
    if isinstance(key, str):
        code = 0
        encoded = key.encode("utf-16-be", "surrogatepass")
        for at in range(0, len(encoded), 2):  # by UTF-16 code units
            code = (31 * code + (encoded[at] << 8 | encoded[at + 1])) & 0xFFFFFFFF
    elif -(1 << 31) <= key < 1 << 31:
        return key
    elif -(1 << 63) <= key < 1 << 63:
        code = (key ^ ((key & (1 << 64) - 1) >> 32)) & 0xFFFFFFFF
    else:
        raise ClientError(f"an order key has at most 64 bits, got {key.bit_length()}")
    return code - (1 << 32) if code & 0x80000000 else code


def select_by_hash(key: OrderKey) -> QueueSelector:
    """Return RocketMQ's SelectMessageQueueByHash: the hash modulo the number of queues, without its sign."""
    code = java_hash(key)

    def select(queues: Sequence[MessageQueue], _: Message) -> MessageQueue:
        return queues[abs(code) % len(queues)]  # Java's remainder keeps the sign: |h % n| = |h| % n

    return select
