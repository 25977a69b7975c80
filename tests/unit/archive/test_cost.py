"""Tests of the cost model: exact figures, and agreement with the scheduling rule that it models."""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec
import pytest

from lifecycle.retention import Pending, RetentionPolicy, due_topics
from neve.archive.format.journal import CommittedObject
from neve.archive.policy.cost import (
    BROKER,
    COMPACTED_BYTES,
    DAY_MS,
    DAY_S,
    HOUR_MS,
    OBJECT_BYTES,
    TOTAL,
    DailyTraffic,
    DiskPrices,
    MonthlyCost,
    Prices,
    Setting,
    StorePrices,
    costs_of,
    objects_a_day,
    traffic_seen,
    wait_of,
)
from tests.kit.archive.journal_entries import committed

HOURLY = DailyTraffic("hourly", messages=24, wire_bytes=24_000, stored_ratio=0.5)
FREE = Prices()
T0 = 1_790_000_000_000 // DAY_MS * DAY_MS


def test_cost_of_a_slow_topic_with_hourly_rounds() -> None:
    """Objects wait an hour and messages arrive hourly: 12 rounds a day, and a half more for midnight."""
    topic, broker, total = costs_of([HOURLY], Setting(max_age_s=3600, replicas=2), FREE)
    assert topic == MonthlyCost(
        "hourly",
        objects_a_day=12.5,
        objects=375,
        puts=375,
        gets=0,
        deletes=375,
        stored_bytes=30 * (12_000 + 12.5 * OBJECT_BYTES),
        billed_bytes=30 * (12_000 + 12.5 * OBJECT_BYTES),
        local_bytes=2 * 3 * 24_000,
        unarchived_bytes=1000,
    )
    assert (broker.topic, broker.puts, broker.gets) == (BROKER, 30 * (2 * 12.5 + 8640), 30 * 28_800)
    assert (total.topic, total.puts, total.stored_bytes) == (TOTAL, 375 + broker.puts, topic.stored_bytes)


def test_compaction_trades_requests_for_objects() -> None:
    topic = costs_of([HOURLY], Setting(max_age_s=3600, compaction=True), FREE)[0]
    assert topic == MonthlyCost(
        "hourly",
        objects_a_day=1,
        objects=30 * 1 + 2 * 12.5,
        puts=30 * (12.5 + 1 + 3),
        gets=30 * 12.5,
        deletes=30 * 13.5,
        stored_bytes=30 * (12_000 + OBJECT_BYTES) + 2 * (12_000 + 12.5 * OBJECT_BYTES),
        billed_bytes=30 * (12_000 + OBJECT_BYTES) + 2 * (12_000 + 12.5 * OBJECT_BYTES),
        local_bytes=3 * 24_000,
        unarchived_bytes=1000,
    )


def test_cost_model_skips_compaction_of_one_object_a_day() -> None:
    rare = DailyTraffic("rare", messages=0.5, wire_bytes=500, stored_ratio=0.5)
    plain, compacted = (costs_of([rare], Setting(max_age_s=3600, compaction=on), FREE)[0] for on in (False, True))
    assert plain.objects_a_day == 0.5, "no more objects than messages"
    assert compacted == plain


def test_cost_of_fast_topic_is_bounded_by_bytes_and_period() -> None:
    fast = DailyTraffic("fast", messages=86_400_000, wire_bytes=86_400 * (1 << 20), stored_ratio=0.5)
    setting = Setting(max_age_s=3600, min_bytes=64 << 20)
    assert wait_of(fast, setting) == 64
    assert objects_a_day(fast, setting) == pytest.approx((DAY_S + 64) / 64.001)
    assert wait_of(fast, msgspec.structs.replace(setting, min_bytes=1 << 20)) == 10
    compacted = costs_of([fast], msgspec.structs.replace(setting, compaction=True), FREE)[0]
    assert compacted.objects_a_day == 43_200 * (1 << 20) / COMPACTED_BYTES + 0.5, "rounded up: 337.5 to 338"


def test_money_sums_each_kind_by_its_price() -> None:
    prices = Prices("EUR", StorePrices(0.5, 0.25, 0.125, 2.0, minimum_object_bytes=131_072), DiskPrices(4.0))
    topic = costs_of([HOURLY], Setting(max_age_s=3600, compaction=True), prices)[0]
    assert topic.billed_bytes == 30 * 131_072 + 2 * 12.5 * 131_072
    requests = 495 * 0.5 / 1000 + 375 * 0.25 / 1000 + 405 * 0.125 / 1000
    assert topic.money(prices) == pytest.approx(requests + topic.billed_bytes * 2 / 1e9 + 72_000 * 4 / 1e9, rel=1e-12)
    assert topic.money(FREE) == 0


def test_max_age_beyond_log_retention_extends_the_retention() -> None:
    topic = costs_of([HOURLY], Setting(max_age_s=5 * DAY_S), FREE)[0]
    assert topic.local_bytes == 5 * 24_000


@pytest.mark.parametrize(
    ("every_s", "age_s"),
    [
        (600, 3600),
        (3600, 3600),
        (3600, 6 * 3600),
        (7 * 3600, 3600),
        (600, DAY_S),
        (7 * 3600, DAY_S),
        (3600, 3 * DAY_S),
        (2 * DAY_S, DAY_S),
    ],
)
def test_modelled_object_count_equals_the_scheduling_rule(every_s: int, age_s: int) -> None:
    """Random messages over weeks, archived by the rule when due, with one object per day."""
    policy = RetentionPolicy(archive_max_age_ms=age_s * 1000)
    noise, days, made, oldest, pending = random.Random(3), 60, 0, 0, list[int]()
    coming = T0 + noise.expovariate(1 / every_s) * 1000
    for now in range(T0, T0 + days * DAY_MS, 60_000):
        while coming <= now:
            pending.append(int(coming))
            coming += noise.expovariate(1 / every_s) * 1000
        if due_topics({"t": Pending(1000 * len(pending), pending[0])} if pending else {}, (), {}, policy, now):
            made += len({at // DAY_MS for at in pending})
            oldest = max(oldest, now - pending[0])
            pending = []
    said = objects_a_day(DailyTraffic("t", DAY_S / every_s, 1000 * DAY_S / every_s, 0.5), Setting(max_age_s=age_s))
    assert made / days == pytest.approx(said, rel=0.12)
    assert oldest <= age_s * 1000 + 60_000, "the bound holds"


def placed(topic: str, day: float, rows: int, wire: int, size: int) -> CommittedObject:
    """Return an object that spans an hour, `day` days after the start."""
    begin = T0 + int(day * DAY_MS)
    base = committed(f"{topic}-{day}", [(0, 0, rows - 1)])
    changes = {"topic": topic, "rows": rows, "wire_bytes": wire, "size": size, "min_time": begin}
    return msgspec.structs.replace(base, **changes, max_time=begin + HOUR_MS)


def seen(objects: Iterable[CommittedObject], days: float) -> list[DailyTraffic]:
    return traffic_seen(objects, days)


def test_traffic_rates_use_the_newest_days() -> None:
    end = 10 - 1 / 24  # the newest object ends at the end of the tenth day
    objects = [
        placed("old", 0, 1000, 1_000_000, 9000),
        placed("slow", 7, 20, 8000, OBJECT_BYTES + 4000),
        placed("slow", end, 20, 8000, OBJECT_BYTES + 2000),
        placed("fast", 8, 4000, 4_000_000, OBJECT_BYTES + 1_000_000),
    ]
    assert seen(objects, 4) == [
        DailyTraffic("fast", 1000, 1_000_000, 0.25),
        DailyTraffic("slow", 10, 4000, 6000 / 16_000),
    ]
    assert [one.topic for one in seen(objects, 100)] == ["fast", "old", "slow"]
    assert seen(objects, 100)[2].messages == 4, "ten days, as much as there is"


def test_traffic_of_a_single_object_is_averaged_over_an_hour() -> None:
    one = placed("t", 0, 10, 1000, OBJECT_BYTES)
    assert seen([msgspec.structs.replace(one, max_time=one.min_time)], 7) == [DailyTraffic("t", 240, 24_000, 0)]
    assert seen([msgspec.structs.replace(one, min_time=-1, max_time=-1)], 7) == []
