"""Events of popped messages, as records of the revive log: one compact JSON array for each event.

["p", group, topic, queue, next, pop time, visible at, in order, [offset, …], attempt]   handed out
["a", group, topic, queue, pop time, [offset, …]]                        acknowledged, or put to the retry topic
["c", group, topic, queue, offset, old pop time, pop time, visible at]   invisible time changed
["f", group, topic, queue, next]                                         an ordered batch is visible again from `next`
["r", group, topic, queue, next]                                         the group's offset was reset
["g", group, topic, queue]                                               leaves the book; -1: all its queues do
"""

import msgspec


class _Event(msgspec.Struct, array_like=True, frozen=True):
    group: str
    topic: str
    queue_id: int


class PopCheckPoint(_Event, frozen=True, tag="p"):
    """["p"] Offsets handed out at `pop_time` and visible again at `visible_at` (both ms).

    `next_offset` is the next offset of the queue to hand out.
    """

    next_offset: int
    pop_time: int
    visible_at: int
    in_order: bool
    offsets: list[int]
    attempt: str = ""


class Ack(_Event, frozen=True, tag="a"):
    """["a"] Offsets of one pop that were acknowledged or moved to the retry topic."""

    pop_time: int
    offsets: list[int]


class ChangeInvisibleTime(_Event, frozen=True, tag="c"):
    """["c"] A new `visible_at` of one offset in flight, under a new `pop_time` (both ms)."""

    offset: int
    old_pop_time: int
    pop_time: int
    visible_at: int


class Freed(_Event, frozen=True, tag="f"):
    """["f"] The batch of an ordered queue is no longer in flight; the next pop starts at `next_offset`."""

    next_offset: int


class Reset(_Event, frozen=True, tag="r"):
    """["r"] The group's offset was reset: nothing of the queue is in flight, the next pop starts at `next_offset`."""

    next_offset: int


class QueueRemoved(_Event, frozen=True, tag="g"):
    """["g"] The queue leaves the book. With queue -1 every queue does; an empty name then matches every name."""


Event = PopCheckPoint | Ack | ChangeInvisibleTime | Freed | Reset | QueueRemoved
_decoder: "msgspec.json.Decoder[Event]" = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return msgspec.json.encode(event)


def decode_event(data: bytes) -> Event:
    """Decode an event. Raises msgspec.DecodeError."""
    return _decoder.decode(data)
