"""Delay levels: neve uses RocketMQ's queues, one per level in the order of delivery. Only positions are polled.

A message after the last poll's position is delivered if its copy is in the log. After the first message of a level that
is not delivered, none of the level is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from broker.metadata.last_poll import LastPoll
from broker.promotion.stored import Bound, Delivered, bound, target
from broker.store.message_store import MessageStore
from broker.waiting.queue_records import of_queue
from broker.waiting.schedule_message import ScheduleMessage
from neve.remoting.names import SCHEDULE_TOPIC


class Delayed(NamedTuple):
    """A message that may have been delivered since the last poll."""

    level: int
    offset: int
    bound: Bound


def perhaps_delivered(store: MessageStore, schedule: ScheduleMessage, poll: LastPoll, horizon: int) -> list[Delayed]:
    """Return the messages of each level that were due by `horizon` (ms), in order."""
    found = list[Delayed]()
    for level in range(1, schedule.max_level + 1):
        for record in of_queue(store, SCHEDULE_TOPIC, level - 1, poll.delays.get(level, 0)):
            if schedule.deliver_time(level, record.store_timestamp) > horizon:
                break
            found.append(Delayed(level, record.queue_offset, bound(record, *target(record))))
    return found


def positions(poll: LastPoll, candidates: Sequence[Delayed], delivered: Delivered) -> dict[int, int]:
    """Map each level to the offset of its next message to deliver."""
    found, behind = dict(poll.delays), set[int]()
    for one in candidates:
        if one.level in behind:
            continue
        if delivered.take(one.bound):
            found[one.level] = one.offset + 1
        else:
            behind.add(one.level)
    return found
