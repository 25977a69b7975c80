"""Timers: neve uses RocketMQ's queue. Its timing wheel and checkpoint show which messages are delivered.

    delivered    due before the checkpoint's time and below its offset, or the copy is in the log
    finished     its delay exceeded the wheel, so it was appended again with TIMER_ROLL_TIMES one higher

neve has one mark: all messages due up to a time are delivered, all below a log offset are finished. The mark's time is
therefore after the latest delivered one, and its offset above the last finished one. Messages that wait on the wrong
side of the mark are appended again.

RocketMQ's pops use timers, too: their check points and acknowledgements wait here until they are due (`pops`).

There may be millions of timers. Each is kept as its offset and identity only, and is read again when it is needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from broker.metadata.last_poll import LastPoll
from broker.metadata.stock_tables import TimerCheckPoint
from broker.promotion.stored import Bound, Delivered, bound, target
from broker.store.message_store import MessageStore
from broker.waiting.timer_message import RECALL_KEY, TimersTakenOver, recall_key
from neve.record.codec import decode_record
from neve.remoting.names import REVIVE_LOG_PREFIX, WHEEL_TIMER_TOPIC

_ROLLS = "TIMER_ROLL_TIMES"


class Timer(NamedTuple):
    """A timer that is not delivered according to the checkpoint."""

    due: int  # ms, negative for a recall
    physical_offset: int
    bound: Bound
    rolls: int

    @property
    def is_of_pops(self) -> bool:
        return self.bound.topic.startswith(REVIVE_LOG_PREFIX)


class UnreadableTimers(msgspec.Struct, frozen=True):
    """Timers without a checkpoint: it is unknown which of them are delivered."""

    count: int


def not_delivered(store: MessageStore, poll: LastPoll) -> list[Timer] | UnreadableTimers:
    """Return the timers that are not delivered according to the checkpoint, in the order of their queue."""
    run = store.reader.entries(WHEEL_TIMER_TOPIC, store.min_physical_offset, store.max_physical_offset).get(0)
    if run is None:
        return []
    if poll.timers is None:
        return UnreadableTimers(len(run.tags))
    found = list[Timer]()
    columns = zip(run.physical.tolist(), run.tags.tolist(), strict=True)
    for offset, (position, due) in enumerate(columns, run.first_offset):
        if _waits(poll.timers, due, offset) and (raw := store.reader.record_at(position)) is not None:
            record = decode_record(raw)
            rolls = record.properties.get(_ROLLS, "0")
            times = int(rolls) if rolls.isascii() and rolls.isdigit() else 0
            found.append(Timer(due, position, bound(record, *target(record)), times))
    return found


def _waits(check_point: TimerCheckPoint, due: int, offset: int) -> bool:
    return abs(due) >= check_point.read_ms or offset >= check_point.next_offset


def perhaps_delivered(timers: Sequence[Timer], horizon: int) -> list[Bound]:
    """Return the targets of the timers that were due by `horizon` (ms)."""
    return [timer.bound for timer in timers if 0 <= timer.due <= horizon and not timer.is_of_pops]


def sort_out(
    store: MessageStore, timers: Sequence[Timer], check_point: TimerCheckPoint, delivered: Delivered, horizon: int
) -> TimersTakenOver:
    """Return the mark, and the timers to append again."""
    rolled = Counter((timer.bound, timer.due, timer.rolls - 1) for timer in timers if timer.rolls)
    read_ms, below, waiting = check_point.read_ms, 0, list[Timer]()
    for timer in timers:
        place = (timer.bound, timer.due, timer.rolls)
        if timer.is_of_pops:
            continue
        if rolled[place] > 0:
            rolled[place] -= 1
            below = max(below, timer.physical_offset + 1)
        elif 0 <= timer.due <= horizon and delivered.take(timer.bound):
            read_ms = max(read_ms, timer.due + 1)
        else:
            waiting.append(timer)
    stays = [one.physical_offset for one in waiting if _stays(one, read_ms, below)]
    recalls = {_recalls(store, one) for one in waiting if one.due < 0}
    return TimersTakenOver(
        time=read_ms - 1,
        below=max(below, min(stays, default=0)),
        again=[
            (one.physical_offset, one.due)
            for one in waiting
            # appended again, it would follow its recall, which is due at the same time
            if not (_stays(one, read_ms, below) or _recalled_by(one) in recalls)
        ],
        is_empty=not stays,
    )


def _recalls(store: MessageStore, timer: Timer) -> str | None:
    """Return the message that a recall cancels."""
    raw = store.reader.record_at(timer.physical_offset)
    return None if raw is None else decode_record(raw).properties.get(RECALL_KEY)


def _recalled_by(timer: Timer) -> str:
    return recall_key(timer.bound.topic, timer.bound.unique_key)


def _stays(timer: Timer, read_ms: int, below: int) -> bool:
    return abs(timer.due) >= read_ms and timer.physical_offset >= below
