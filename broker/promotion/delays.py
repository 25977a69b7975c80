"""Delay levels: RocketMQ's queues are neve's, one a level in the order of delivery; only the position is polled.

What a poll has not told of is delivered if its copy is in the log, and what lies behind one that is not delivered is
none either.
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
    """One that may have been delivered since."""

    level: int
    offset: int
    bound: Bound


def perhaps_delivered(store: MessageStore, schedule: ScheduleMessage, poll: LastPoll, horizon: int) -> list[Delayed]:
    """Of each level those that were due by a time (ms), in their order."""
    found = list[Delayed]()
    for level in range(1, schedule.max_level + 1):
        for record in of_queue(store, SCHEDULE_TOPIC, level - 1, poll.delays.get(level, 0)):
            if schedule.deliver_time(level, record.store_timestamp) > horizon:
                break
            found.append(Delayed(level, record.queue_offset, bound(record, *target(record))))
    return found


def positions(poll: LastPoll, candidates: Sequence[Delayed], delivered: Delivered) -> dict[int, int]:
    """Level → the next one to deliver."""
    found, behind = dict(poll.delays), set[int]()
    for one in candidates:
        if one.level in behind:
            continue
        if delivered.take(one.bound):
            found[one.level] = one.offset + 1
        else:
            behind.add(one.level)
    return found
