"""Ordered sending: which queue a message goes to. Equal keys give equal queues as long as a topic keeps its queues.

The queues are sorted by broker name and number, as Java's client has them, so that a Java and a Python producer put the
same key into the same queue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neve.client.model import Message, MessageQueue
from neve.errors import ClientError

QueueSelector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
#: A queue, the queue of that number on any of the topic's brokers, or one that is picked for the message.
Queue = int | MessageQueue | QueueSelector
OrderKey = str | int


def java_hash(key: OrderKey) -> int:
    """`hashCode` of a String, of an Integer, or of a Long for a number that is no Integer; −2³¹ … 2³¹ − 1."""
    if isinstance(key, str):
        code = 0
        encoded = key.encode("utf-16-be", "surrogatepass")
        for at in range(0, len(encoded), 2):  # over chars, of which a character beyond the BMP has two
            code = (31 * code + (encoded[at] << 8 | encoded[at + 1])) & 0xFFFFFFFF
    elif -(1 << 31) <= key < 1 << 31:
        return key
    elif -(1 << 63) <= key < 1 << 63:
        code = (key ^ ((key & (1 << 64) - 1) >> 32)) & 0xFFFFFFFF
    else:
        raise ClientError(f"an order key of {key.bit_length()} bits; a number may have 64")
    return code - (1 << 32) if code & 0x80000000 else code


def select_by_hash(key: OrderKey) -> QueueSelector:
    """RocketMQ's SelectMessageQueueByHash: the key's hash modulo the number of queues, without its sign."""
    code = java_hash(key)

    def select(queues: Sequence[MessageQueue], _: Message) -> MessageQueue:
        return queues[abs(code) % len(queues)]  # Java's remainder keeps the sign: |h % n| = |h| % n

    return select
