"""The monthly cost of an archive: requests, objects, bytes and money, from a topic's traffic and the settings.

The model uses means, so it is not a bill. A month has 30 days. The messages of a topic arrive at random, one in `gap`
seconds on average:

    wait       seconds until a round archives a topic: archiveMaxAge, or archiveMinBytes of records, whichever is first,
               and at least archivePeriod. During this time messages are in the local copies only.
    objects    per day: (one day + wait) / (wait + gap), and at most one for each message. The oldest message waits, the
               next round's first message arrives after it, and a round across midnight makes an object for each day.
               If both age and bytes need a day or more, there is one object for each day with messages.
    stored     records at the measured ratio of stored to wire bytes, and OBJECT_BYTES for each object. With compaction
               a day has as few objects as COMPACTED_BYTES allow; its original objects remain during the grace period,
               so the last two days are stored twice.
    requests   a PUT for each object. A compaction makes a GET for each old object, a PUT for each new one, and three
               journal entries for each topic and day that it reduces. Requests that no single topic causes are listed
               under BROKER: INTENT and COMMIT of each round, a state slot each statePeriod, a GET of the journal
               each 3 s.
    local      the bytes produced in fileReservedTime, or archiveMaxAge if that is longer, on the disk of each replica.
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
OBJECT_BYTES = 3_400  # fixed size of an object without its rows
COMPACTED_BYTES = 128 << 20
COMPACTION_ENTRIES = 3  # INTENT, REPLACE, DELETED
COMPACTION_LAG_DAYS = 2
BROKER = "(broker)"
TOTAL = "(all)"
_LOOK_S = 3  # seconds between two reads of the journal by an idle broker


class StorePrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prices of the object store."""

    put_per_1000: float = 0.0
    get_per_1000: float = 0.0
    delete_per_1000: float = 0.0
    gb_month: float = 0.0
    minimum_object_bytes: int = 0  # a smaller object is billed as one of this size


class DiskPrices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The prices of a broker's own disk."""

    gb_month: float = 0.0


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The operator's price table; a GB has 10⁹ bytes."""

    currency: str = ""
    store: StorePrices = StorePrices()
    disk: DiskPrices = DiskPrices()


class DailyTraffic(msgspec.Struct, frozen=True):
    """The mean traffic of a topic per day; `stored_ratio` is stored bytes of rows per wire byte."""

    topic: str
    messages: float
    wire_bytes: float
    stored_ratio: float


class Setting(msgspec.Struct, frozen=True):
    """A configuration of the broker; `keep_days` is the TTL of messages in days."""

    max_age_s: float
    min_bytes: int = 8 << 20
    compaction: bool = False
    keep_days: float = MONTH_DAYS
    replicas: int = 1
    reserved_days: float = 3.0
    period_s: float = 10.0
    state_period_s: float = 10.0


class MonthlyCost(msgspec.Struct, frozen=True):
    """The cost of a month in the steady state, when as many messages expire as arrive."""

    topic: str
    objects_a_day: float = 0.0
    objects: float = 0.0  # stored at any time
    puts: float = 0.0
    gets: float = 0.0
    deletes: float = 0.0
    stored_bytes: float = 0.0
    billed_bytes: float = 0.0  # with the minimum billed size
    local_bytes: float = 0.0
    unarchived_bytes: float = 0.0  # upper bound

    def money(self, prices: Prices) -> float:
        """Return the price in the currency of the price table."""
        store = prices.store
        requests = (
            self.puts * store.put_per_1000 + self.gets * store.get_per_1000 + self.deletes * store.delete_per_1000
        )
        bytes_ = self.billed_bytes * store.gb_month + self.local_bytes * prices.disk.gb_month
        return requests / 1000 + bytes_ / GB


def costs_of(traffic: Sequence[DailyTraffic], setting: Setting, prices: Prices) -> list[MonthlyCost]:
    """Return the costs of each topic, of the broker itself, and their sum."""
    topics = [_cost_of_topic(one, setting, prices) for one in traffic]
    by_day = any(one.messages and wait_of(one, setting) >= DAY_S for one in traffic)
    often = sum(objects_a_day(one, setting) for one in traffic if wait_of(one, setting) < DAY_S)
    rounds = min(DAY_S / setting.period_s, often + by_day)
    broker = MonthlyCost(
        BROKER,
        puts=MONTH_DAYS * (2 * rounds + DAY_S / setting.state_period_s),
        gets=MONTH_DAYS * DAY_S / _LOOK_S,
    )
    return [*topics, broker, _sum([*topics, broker])]


def wait_of(one: DailyTraffic, setting: Setting) -> float:
    """Return the seconds from a topic's first message after a round to the round that archives it."""
    fills = setting.min_bytes * DAY_S / one.wire_bytes if one.wire_bytes else setting.max_age_s
    return max(setting.period_s, min(setting.max_age_s, fills))


def objects_a_day(one: DailyTraffic, setting: Setting) -> float:
    """Return the objects per day of a topic before any compaction."""
    if not one.messages:
        return 0.0
    wait = wait_of(one, setting)
    if wait >= DAY_S:
        return -expm1(-one.messages)  # the share of days with messages
    return min(one.messages, (DAY_S + wait) / (wait + DAY_S / one.messages))


def _cost_of_topic(one: DailyTraffic, setting: Setting, prices: Prices) -> MonthlyCost:
    made, rows = objects_a_day(one, setting), one.wire_bytes * one.stored_ratio
    left = float(ceil(rows / COMPACTED_BYTES)) if setting.compaction else made
    compacts = setting.compaction and left < made
    count, kept = made, [(made, setting.keep_days)]  # (objects per day, days that they are kept)
    puts, gets = made, 0.0
    if compacts:
        count, kept = left, [(left, setting.keep_days), (made, min(COMPACTION_LAG_DAYS, setting.keep_days))]
        puts, gets = made + left + COMPACTION_ENTRIES, made
    least = prices.store.minimum_object_bytes
    sizes = [(rows + number * OBJECT_BYTES, number, days) for number, days in kept]
    return MonthlyCost(
        one.topic,
        objects_a_day=count,
        objects=sum(number * days for number, days in kept),
        puts=MONTH_DAYS * puts,
        gets=MONTH_DAYS * gets,
        deletes=MONTH_DAYS * (made + (left if compacts else 0.0)),  # as many are deleted as created
        stored_bytes=sum(size * days for size, _, days in sizes),
        billed_bytes=sum(max(size, number * least) * days for size, number, days in sizes),
        local_bytes=one.wire_bytes * max(setting.reserved_days, setting.max_age_s / DAY_S) * setting.replicas,
        unarchived_bytes=one.wire_bytes * wait_of(one, setting) / DAY_S,
    )


def _sum(costs: Sequence[MonthlyCost]) -> MonthlyCost:
    names = [name for name in MonthlyCost.__struct_fields__ if name != "topic"]
    return MonthlyCost(TOTAL, **{name: sum(getattr(one, name) for one in costs) for name in names})


def traffic_seen(objects: Iterable[CommittedObject], days: float) -> list[DailyTraffic]:
    """Return the traffic of an archive's topics in its newest `days`, ordered by wire bytes.

    The period ends at the newest message of any topic. It is shorter if the archive is, but at least an hour.
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


def _traffic_of(topic: str, names: Sequence[CommittedObject], days: float) -> DailyTraffic:
    wire = sum(one.wire_bytes for one in names)
    stored = sum(max(0, one.size - OBJECT_BYTES) for one in names)
    return DailyTraffic(topic, sum(one.rows for one in names) / days, wire / days, stored / wire if wire else 0.0)
