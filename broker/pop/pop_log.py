"""What happens to a popped message, as records of the revive log: one compact JSON array for each event.

["p", group, topic, queue, next, pop time, visible at, in order, [offset, …], attempt]   handed out
["a", group, topic, queue, pop time, [offset, …]]                        acknowledged, or put to the retry topic
["c", group, topic, queue, offset, old pop time, pop time, visible at]   hidden for longer, or for less
["f", group, topic, queue, next]                                         a batch in order is seen again from there on
["r", group, topic, queue, next]                                         somebody set the group there
["g", group, topic, queue]                                               leaves the book; -1: all queues do
"""

import msgspec


class _Event(msgspec.Struct, array_like=True, frozen=True):
    group: str
    topic: str
    queue_id: int


class PopCheckPoint(_Event, frozen=True, tag="p"):
    """["p"] Offsets handed out at `pop_time`, in view again at `visible_at` (both ms); the queue goes on at
    `next_offset`.
    """

    next_offset: int
    pop_time: int
    visible_at: int
    in_order: bool
    offsets: list[int]
    attempt: str = ""


class Ack(_Event, frozen=True, tag="a"):
    """["a"] Offsets of one pop that are done with."""

    pop_time: int
    offsets: list[int]


class ChangeInvisibleTime(_Event, frozen=True, tag="c"):
    """["c"] One offset stays hidden until another `visible_at`, under a new `pop_time` (ms)."""

    offset: int
    old_pop_time: int
    pop_time: int
    visible_at: int


class Freed(_Event, frozen=True, tag="f"):
    """["f"] What an ordered queue has out comes again: it goes on at `next_offset`."""

    next_offset: int


class Reset(_Event, frozen=True, tag="r"):
    """["r"] The group was set elsewhere: nothing of the queue is out, it goes on at `next_offset`."""

    next_offset: int


class Gone(_Event, frozen=True, tag="g"):
    """["g"] The queue leaves the book. With queue -1 every queue does; an empty name then matches every name."""


Event = PopCheckPoint | Ack | ChangeInvisibleTime | Freed | Reset | Gone
_decoder: "msgspec.json.Decoder[Event]" = msgspec.json.Decoder(Event)


def encode_event(event: Event) -> bytes:
    return msgspec.json.encode(event)


def decode_event(data: bytes) -> Event:
    """Raises msgspec.DecodeError."""
    return _decoder.decode(data)
