"""Pops: RocketMQ stores check points of popped messages, and acknowledgements, as timers of its revive log.

rmq_sys_REVIVE_LOG_<cluster>, JSON, by TAGS; in rmq_sys_wheel_timer until, or until a second before, it is visible again
    ck      {"so":first offset,"pt":pop time,"it":invisible ms,"bm":bits of those acknowledged,"n":count,"q":queue,
             "t":topic,"c":group,"d":[offset - so,…],"bn":broker}                               handed out
    ack     {"ao":offset,"so":…,"c":…,"t":…,"q":…,"pt":…,"bn":…}                                  acknowledged
    bAck    the same with "aol":[offset,…]

A check point is finished when CID_RMQ_SYS_REVIVE_GROUP has passed it in the revive log. Its unacknowledged messages are
in the group's pop-retry topic then, perhaps above the last poll. Of all other check points, the unacknowledged messages
are in flight. RocketMQ's receipt handles contain offset and pop time, as neve's do: clients can acknowledge here.

Ordered pops have no check point: the group's committed offset is the first unacknowledged message.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from broker.metadata.last_poll import LastPoll
from broker.pop.pop_queue import Flight, Key
from broker.promotion.stored import Bound, Delivered, bound
from broker.promotion.timers import Timer
from broker.store.message_store import MessageStore
from broker.waiting.queue_records import of_queue
from neve.record.codec import MessageRecord, decode_record
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)

GROUP = "CID_RMQ_SYS_REVIVE_GROUP"
# A check point is written at most this long after the pop time that it contains.
_WRITTEN_WITHIN_MS = 2000
# Records below the revive group's committed offset that are read as well: a check point that is waiting by the poll of
# timers may be in the revive log by the poll of groups.
_LOOK_BACK = 4096
_CHECK_POINT, _ACKS = "ck", ("ack", "bAck")


class _CheckPoint(msgspec.Struct, rename={
    "start": "so", "pop_time": "pt", "invisible": "it", "bits": "bm", "count": "n", "queue_id": "q", "topic": "t",
    "group": "c", "differences": "d", "broker": "bn",
}):  # fmt: skip
    start: int
    pop_time: int
    invisible: int
    count: int
    queue_id: int
    topic: str
    group: str
    bits: int = 0
    differences: list[int] | None = None
    broker: str | None = None

    @property
    def offsets(self) -> list[int]:
        return [self.start + one for one in (self.differences or range(self.count))]


class _Ack(msgspec.Struct):
    t: str
    c: str
    q: int
    so: int
    pt: int
    ao: int = -1
    aol: list[int] = []
    bn: str | None = None


class _LongAck(msgspec.Struct, rename="camel"):
    """Acknowledgement as RocketMQ before 5.0 writes it."""

    topic: str
    consumer_group: str
    queue_id: int
    start_offset: int
    pop_time: int
    ack_offset: int = -1


_Pop = tuple[str, str, int, int, int]  # topic, group, queue, first offset, pop time


class Out(NamedTuple):
    """An unacknowledged message."""

    key: Key
    offset: int
    flight: Flight
    back_at: tuple[Bound, ...]  # where it would be if it had been revived


class PopsInFlight(NamedTuple):
    """Messages in flight by the log, and the next offset of each queue that was popped since the last poll."""

    out: list[Out]
    handed_out: dict[Key, int]


def not_acknowledged(
    store: MessageStore, poll: LastPoll, revive_log: str, broker: str, timers: Sequence[Timer]
) -> PopsInFlight:
    """Return the messages in flight: those of all check points that no poll shows as finished."""
    check_points = dict[_Pop, tuple[_CheckPoint, int]]()
    acknowledged = dict[_Pop, set[int]]()
    passed = set[_Pop]()
    for record, is_passed in _records(store, poll, revive_log, timers):
        found = _read(record)
        if isinstance(found, _CheckPoint):
            pop = (found.topic, found.group, found.queue_id, found.start, found.pop_time)
            if is_passed:
                passed.add(pop)
            elif found.broker in (None, "", broker):
                check_points[pop] = found, record.physical_offset
        elif found is not None:
            pop, offsets = found
            acknowledged.setdefault(pop, set()).update(offsets)
    out, handed_out, since = dict[tuple[Key, int], Out](), dict[Key, int](), _asked_ms(store, poll) - _WRITTEN_WITHIN_MS
    for pop, (check_point, place) in check_points.items():
        if pop in passed:
            continue
        key = (check_point.group, check_point.topic, check_point.queue_id)
        # otherwise the poll has its offset, also after a reset
        if place >= poll.asked_at and check_point.pop_time >= since:
            handed_out[key] = max(handed_out.get(key, 0), max(check_point.offsets, default=-1) + 1)
        for one in _out(store, check_point, key, acknowledged.get(pop, set())):
            known = out.get((key, one.offset))
            if known is None or _time(known.flight) < _time(one.flight):
                out[key, one.offset] = one
    return PopsInFlight(list(out.values()), handed_out)


def perhaps_back(pops: PopsInFlight, horizon: int) -> list[Bound]:
    """Return where the messages would be that became visible again by `horizon` (ms)."""
    return [place for one in pops.out if one.flight.visible_at <= horizon for place in one.back_at]


def sort_out(
    pops: PopsInFlight, positions: Mapping[Key, int], delivered: Delivered, horizon: int
) -> list[tuple[Key, int, list[tuple[int, Flight]]]]:
    """Return the next offset of each queue, and its messages in flight.

    `positions`: committed offsets of the groups at the last poll.
    """
    flights = dict[Key, list[tuple[int, Flight]]]()
    for one in pops.out:
        if one.flight.visible_at <= horizon and any(delivered.take(place) for place in one.back_at):
            continue
        flights.setdefault(one.key, []).append((one.offset, one.flight))
    found = list[tuple[Key, int, list[tuple[int, Flight]]]]()
    for key in flights.keys() | pops.handed_out.keys():
        out, committed = flights.get(key, []), positions.get(key, -1)
        following = max(committed, pops.handed_out.get(key, -1))
        if following < 0:  # no poll has the group: none of its messages may be skipped
            following = min((offset for offset, _ in out), default=0)
        # a group that was reset gets the messages above again, as new ones
        found.append((key, following, [one for one in out if one[0] < following]))
    return sorted(found, key=lambda one: one[0])


def _asked_ms(store: MessageStore, poll: LastPoll) -> int:
    """Return the store time of the last record when the master's log was polled."""
    raw = next(store.reader.records_from(poll.asked_at - 1), None)
    last = None if raw is None else decode_record(raw)
    return 0 if last is None or last.physical_offset >= poll.asked_at else last.store_timestamp


def _records(
    store: MessageStore, poll: LastPoll, revive_log: str, timers: Sequence[Timer]
) -> Iterator[tuple[MessageRecord, bool]]:
    """Yield the records, and whether the revive group has passed each."""
    for queue_id in store.queues.names_of(revive_log):
        position = poll.position(revive_log, GROUP, queue_id)
        for record in of_queue(store, revive_log, queue_id, position - _LOOK_BACK):
            yield record, record.queue_offset <= position
    for timer in timers:
        if timer.bound.topic == revive_log and (raw := store.reader.record_at(timer.physical_offset)) is not None:
            yield decode_record(raw), False


def _read(record: MessageRecord) -> _CheckPoint | tuple[_Pop, list[int]] | None:
    tag = record.properties.get("TAGS")
    try:
        if tag == _CHECK_POINT:
            return msgspec.json.decode(record.body, type=_CheckPoint)
        if tag not in _ACKS:
            return None
        if b'"consumerGroup"' in record.body:
            long = msgspec.json.decode(record.body, type=_LongAck)
            pop = long.topic, long.consumer_group, long.queue_id, long.start_offset, long.pop_time
            return pop, [long.ack_offset]
        ack = msgspec.json.decode(record.body, type=_Ack)
    except msgspec.MsgspecError as error:
        log.error("the master's revive log at %d: %s", record.physical_offset, error)
        return None
    return (ack.t, ack.c, ack.q, ack.so, ack.pt), ack.aol or [ack.ao]


def _out(store: MessageStore, check_point: _CheckPoint, key: Key, acknowledged: set[int]) -> Iterator[Out]:
    visible_at = check_point.pop_time + check_point.invisible
    for index, offset in enumerate(check_point.offsets):
        if offset in acknowledged or check_point.bits >> index & 1:
            continue
        flight = Flight(check_point.pop_time, visible_at, in_order=False)
        yield Out(key, offset, flight, _back_at(store, key, offset))


def _back_at(store: MessageStore, key: Key, offset: int) -> tuple[Bound, ...]:
    """Return its places in the group's pop-retry topics, for both forms of the name; empty: it is unreadable."""
    group, topic, queue_id = key
    entry = store.reader.entry(topic, queue_id, offset)
    raw = None if entry is None else store.reader.record_at(entry[0])
    if raw is None:
        return ()
    names = (
        (topic,) if topic.startswith(RETRY_PREFIX) else tuple(f"{RETRY_PREFIX}{group}{sign}{topic}" for sign in "_+")
    )
    record = decode_record(raw)
    return tuple(bound(record, name, 0, record.reconsume_times + 1) for name in names)


def _time(flight: Flight) -> tuple[int, int]:
    return flight.pop_time, flight.visible_at
