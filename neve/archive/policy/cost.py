"""What an archive costs: requests, objects, bytes and money of a month, by a topic's traffic and the settings.

A model of means, not a bill. A month has 30 days. For a topic whose messages come at random, one in `gap` seconds:

    wait       until a round takes it: archiveMaxAge, or archiveMinBytes of records, whichever is first, and no less
               than archivePeriod. So much of it is in the local copies alone.
    objects    a day: (one day + wait) / (wait + gap), and no more than messages: the oldest message waits, the next
               round's comes after it, and a round that reaches over midnight makes an object for each day. One for
               each day that has messages, where both age and bytes need a day or more: it goes when a day has ended
    stored     records at the ratio of what is stored to what was on the wire, and OBJECT_BYTES for each object. With
               compaction a closed day is as few objects as COMPACTED_BYTES allow, and what they were made of lies for
               the grace beside them: the last two days are there in the old form, too
    requests   a PUT for each object; compaction: a GET for each old object, a PUT for each new one, and three entries
               of the journal for each topic and day that it makes less of. What no topic causes by itself stands under
               BROKER: INTENT and COMMIT of each round, a state slot each statePeriod, the look at the journal each 3 s
    local      what is produced in fileReservedTime, or archiveMaxAge if that is longer, on the disk of each replica
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil, expm1

import msgspec

from neve.archive.format.journal import CommittedObject

DAY_S = 86_400
DAY_MS = DAY_S * 1000
HOUR_MS = 3_600_000
MONTH_DAYS = 30
GB = 10**9
OBJECT_BYTES = 3_400  # of an object beside its rows
COMPACTED_BYTES = 128 << 20
COMPACTION_ENTRIES = 3  # INTENT, REPLACE, DELETED
COMPACTION_LAG_DAYS = 2
BROKER = "(broker)"
TOTAL = "(all)"
_LOOK_S = 3  # an idle broker makes 20 GETs a minute


class StorePrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the object store bills."""

    put_per_1000: float = 0.0
    get_per_1000: float = 0.0
    delete_per_1000: float = 0.0
    gb_month: float = 0.0
    minimum_object_bytes: int = 0  # a smaller object is billed as one of this size


class DiskPrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a broker's own disk costs."""

    gb_month: float = 0.0


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operator's price table; a GB has 10⁹ bytes."""

    currency: str = ""
    store: StorePrices = StorePrices()
    disk: DiskPrices = DiskPrices()


class Traffic(msgspec.Struct, frozen=True):
    """What a topic brings in a day, by mean; `stored_ratio`: bytes of rows in an object for each on the wire."""

    topic: str
    messages: float
    wire_bytes: float
    stored_ratio: float


class Setting(msgspec.Struct, frozen=True):
    """As the broker is configured, or may be; `keep_days`: how long messages stay, their TTL."""

    max_age_s: float
    min_bytes: int = 8 << 20
    compaction: bool = False
    keep_days: float = MONTH_DAYS
    replicas: int = 1
    reserved_days: float = 3.0
    period_s: float = 10.0
    state_period_s: float = 10.0


class Cost(msgspec.Struct, frozen=True):
    """Of a month, once messages lie as long as they are kept."""

    topic: str
    objects_a_day: float = 0.0
    objects: float = 0.0  # that are there
    puts: float = 0.0
    gets: float = 0.0
    deletes: float = 0.0
    stored_bytes: float = 0.0
    billed_bytes: float = 0.0  # with the smallest size that the store bills
    local_bytes: float = 0.0
    unarchived_bytes: float = 0.0  # at most, in the local copies alone

    def money(self, prices: Prices) -> float:
        store = prices.store
        requests = (
            self.puts * store.put_per_1000 + self.gets * store.get_per_1000 + self.deletes * store.delete_per_1000
        )
        bytes_ = self.billed_bytes * store.gb_month + self.local_bytes * prices.disk.gb_month
        return requests / 1000 + bytes_ / GB


def costs_of(traffic: Sequence[Traffic], setting: Setting, prices: Prices) -> list[Cost]:
    """Of each topic, of the broker itself, and the sum of all."""
    topics = [_cost_of_topic(one, setting, prices) for one in traffic]
    by_day = any(one.messages and wait_of(one, setting) >= DAY_S for one in traffic)
    often = sum(objects_a_day(one, setting) for one in traffic if wait_of(one, setting) < DAY_S)
    rounds = min(DAY_S / setting.period_s, often + by_day)
    broker = Cost(
        BROKER,
        puts=MONTH_DAYS * (2 * rounds + DAY_S / setting.state_period_s),
        gets=MONTH_DAYS * DAY_S / _LOOK_S,
    )
    return [*topics, broker, _sum([*topics, broker])]


def wait_of(one: Traffic, setting: Setting) -> float:
    """Seconds from a topic's first message after a round to the next round that takes it."""
    fills = setting.min_bytes * DAY_S / one.wire_bytes if one.wire_bytes else setting.max_age_s
    return max(setting.period_s, min(setting.max_age_s, fills))


def objects_a_day(one: Traffic, setting: Setting) -> float:
    """How many rounds make of a topic, before any compaction."""
    if not one.messages:
        return 0.0
    wait = wait_of(one, setting)
    if wait >= DAY_S:
        return -expm1(-one.messages)  # days that have any
    return min(one.messages, (DAY_S + wait) / (wait + DAY_S / one.messages))


def _cost_of_topic(one: Traffic, setting: Setting, prices: Prices) -> Cost:
    made, rows = objects_a_day(one, setting), one.wire_bytes * one.stored_ratio
    left = float(ceil(rows / COMPACTED_BYTES)) if setting.compaction else made
    compacts = setting.compaction and left < made
    count, kept = made, [(made, setting.keep_days)]  # objects of a day, and for how many days they are there
    puts, gets = made, 0.0
    if compacts:
        count, kept = left, [(left, setting.keep_days), (made, min(COMPACTION_LAG_DAYS, setting.keep_days))]
        puts, gets = made + left + COMPACTION_ENTRIES, made
    least = prices.store.minimum_object_bytes
    sizes = [(rows + number * OBJECT_BYTES, number, days) for number, days in kept]
    return Cost(
        one.topic,
        objects_a_day=count,
        objects=sum(number * days for number, days in kept),
        puts=MONTH_DAYS * puts,
        gets=MONTH_DAYS * gets,
        deletes=MONTH_DAYS * (made + (left if compacts else 0.0)),  # as many go as come
        stored_bytes=sum(size * days for size, _, days in sizes),
        billed_bytes=sum(max(size, number * least) * days for size, number, days in sizes),
        local_bytes=one.wire_bytes * max(setting.reserved_days, setting.max_age_s / DAY_S) * setting.replicas,
        unarchived_bytes=one.wire_bytes * wait_of(one, setting) / DAY_S,
    )


def _sum(costs: Sequence[Cost]) -> Cost:
    names = [name for name in Cost.__struct_fields__ if name != "topic"]
    return Cost(TOTAL, **{name: sum(getattr(one, name) for one in costs) for name in names})


def traffic_seen(objects: Iterable[CommittedObject], days: float) -> list[Traffic]:
    """Of the newest `days` that an archive has, its topics with the most on the wire first.

    The time runs to the newest message of any, and begins with the oldest if there is less; an hour at least.
    """
    known = [one for one in objects if one.max_time >= 0]
    if not known:
        return []
    end = max(one.max_time for one in known)
    begin = max(end - days * DAY_MS, min(one.min_time for one in known))
    span_days = max(end - begin, HOUR_MS) / DAY_MS
    seen: dict[str, list[CommittedObject]] = {}
    for one in known:
        if one.max_time > begin or end == begin:
            seen.setdefault(one.topic, []).append(one)
    found = [_traffic_of(topic, names, span_days) for topic, names in seen.items()]
    return sorted(found, key=lambda one: (-one.wire_bytes, one.topic))


def _traffic_of(topic: str, names: Sequence[CommittedObject], days: float) -> Traffic:
    wire = sum(one.wire_bytes for one in names)
    stored = sum(max(0, one.size - OBJECT_BYTES) for one in names)
    return Traffic(topic, sum(one.rows for one in names) / days, wire / days, stored / wire if wire else 0.0)
