"""Tests that `neve topic ttl plan` predicts the next sweep of the broker, for random histories."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lifecycle.retention import RetentionPolicy
from neve.archive.catalog.catalog import Catalog
from neve.archive.policy.expiry import rows_below
from neve.archive.policy.ttl import HOUR_MS
from neve.cli.topic_ttl import expiry_plan
from tests.unit.lifecycle.fakes import Rig

TOPIC = "t"
_puts = st.tuples(st.just("put"), st.integers(0, 1), st.integers(1, 9))
_hours = st.tuples(st.just("hours"), st.integers(-60, 60))  # negative: older messages have store times in the future
_unknown = st.tuples(st.just("unknown"), st.booleans())
_others = st.sampled_from([("offload",), ("evict",), ("sweep",), ("unexpire",)])
_histories = st.lists(st.one_of(_puts, _puts, _hours, _unknown, _others), max_size=24)
# Three objects. The clock was 60 hours ahead when the middle one was stored.
_LIVE_IN_THE_MIDDLE: list[tuple[object, ...]] = [
    ("put", 0, 9), ("offload",), ("hours", 60), ("put", 0, 9), ("offload",), ("hours", -60), ("put", 0, 9),
    ("offload",), ("hours", 50),
]  # fmt: skip


@given(_histories, st.integers(0, 80), st.sampled_from([0, 1, 24, 1_000_000]))
@example(_LIVE_IN_THE_MIDDLE, 0, 24)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_ttl_plan_equals_the_next_sweep(history: list[tuple[object, ...]], later: int, ttl: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        rig = lived(Path(directory), history)
        rig.clock.advance(later * HOUR_MS)
        rig.lifecycle.safe_clock.confirm()
        rig.offload()  # the plan covers only the archive
        rig.policy = RetentionPolicy(ttl_hours=lambda topic: ttl)
        catalog = rig.journal.catalog
        plan = expiry_plan(TOPIC, [catalog], ttl, rig.clock.now_ms())
        before, rows = {name.key: name for name in catalog.objects(TOPIC)}, visible(catalog)
        rig.lifecycle.expire.run()
        gone = [name for key, name in before.items() if key not in {name.key for name in catalog.objects(TOPIC)}]
        assert plan["objects_deleted"] == len(gone)
        assert plan["bytes_deleted"] == sum(name.size for name in gone)
        assert (plan["rows_deleted"], plan["rows_kept"]) == (rows - visible(catalog), visible(catalog))


def test_ttl_keeps_expired_objects_above_a_live_one() -> None:
    with tempfile.TemporaryDirectory() as directory:
        rig = lived(Path(directory), _LIVE_IN_THE_MIDDLE)
        rig.policy = RetentionPolicy(ttl_hours=lambda topic: 24)
        plan = expiry_plan(TOPIC, [rig.journal.catalog], 24, rig.clock.now_ms())
        assert (plan["objects_deleted"], plan["rows_deleted"], plan["rows_kept"]) == (1, 9, 18)
        assert rig.lifecycle.expire.run()["expired"] == 1


def lived(directory: Path, history: list[tuple[object, ...]]) -> Rig:
    """Return a broker after this history. Its sweeps use a TTL of 24 hours."""
    rig = Rig(directory, RetentionPolicy(ttl_hours=lambda topic: 24))
    for verb, *arguments in history:
        match verb, arguments:
            case "put", [int(queue), int(count)]:
                rig.hot.put(TOPIC, queue, count)
            case "hours", [int(hours)]:
                rig.clock.set_wall(rig.clock.now_ms() + hours * HOUR_MS)
                rig.lifecycle.safe_clock.confirm()
            case "unknown", [bool(unknown)]:
                rig.worker.unknown_times = unknown
            case "offload", []:
                rig.offload()
            case "evict", []:
                rig.offload(evict=True)
            case "sweep", []:
                rig.lifecycle.expire.run()
            case "unexpire", []:
                rig.lifecycle.unexpire.run()
    return rig


def visible(catalog: Catalog) -> int:
    """Return the number of visible rows."""
    hidden = sum(rows_below(name, lambda q: catalog.recorded_minimum(TOPIC, q)) for name in catalog.objects(TOPIC))
    return sum(name.rows for name in catalog.objects(TOPIC)) - hidden


def test_ttl_of_local_log_hides_no_live_archived_row() -> None:
    """The clock went back, and a minimum hides every offset below it, also those of live rows."""
    with tempfile.TemporaryDirectory() as directory:
        rig = lived(
            Path(directory), [*_LIVE_IN_THE_MIDDLE[:5], ("evict",), ("hours", -60), ("put", 0, 9), ("hours", 50)]
        )
        rig.lifecycle.expire.run()
        catalog = rig.journal.catalog
        assert rig.hot.records, "the last nine are in no object yet"
        assert catalog.min_offset(TOPIC, 0) == 9, "stored 60 hours later by the clock of then: alive for ten hours more"
        rig.offload()
        rig.lifecycle.expire.run()
        assert visible(catalog) == 18
        rig.clock.advance(40 * HOUR_MS)
        rig.lifecycle.expire.run()
        assert visible(catalog) == 0
