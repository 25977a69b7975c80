"""Tests of `neve topic show --tiers` and `neve broker drain` with given broker answers."""

from __future__ import annotations

from typing import Any

from neve.admin.drain import Remaining
from neve.cli.topic_tiers import tiers_of
from neve.client import MessageQueue


def answer(**queues: dict[str, int]) -> dict[str, Any]:
    return {"offsetTable": {MessageQueue("T", "b", int(name[1:])): entry for name, entry in queues.items()}}


def test_topic_tiers_count_each_part_of_a_queue() -> None:
    told = answer(
        q0={"minOffset": 10, "maxOffset": 100, "localMinOffset": 40, "archivedOffset": 60, "notArchivedSince": 5_000},
        q1={"minOffset": 0, "maxOffset": 50, "messages": 30, "localMinOffset": 50, "archivedOffset": 50},
        q2={"minOffset": 0, "maxOffset": 7, "archivedOffset": 0, "notArchivedSince": 9_000},
    )
    told["archived"] = {"objects": 3, "rows": 80, "bytes": 4096, "newest_ms": 4_000}
    tiers = tiers_of("T", {"a": told}, 20_000)
    assert [(row["min"], row["hot"], row["archived"], row["max"], row["cold"]) for row in tiers.offsets] == [
        (10, 40, 60, 100, 30),
        (0, 50, 50, 50, 30),  # 20 of its offsets do not exist
        (0, 0, 0, 7, 0),
    ]
    assert tiers.summary["messages"] == 90 + 30 + 7
    assert (tiers.summary["in_archive_alone"], tiers.summary["on_brokers"]) == (60, 67)
    assert tiers.syncs == [{"broker": "a", "newest_archived_ms": 4_000, "not_archived": 47, "behind_ms": 15_000}]


def test_offsets_skipped_by_a_restore_are_in_no_tier() -> None:
    told = answer(
        q0={"minOffset": 0, "maxOffset": 1_010, "messages": 13, "localMinOffset": 1_008, "coldMessages": 10}
        | {"archivedOffset": 10, "notArchived": 3, "notArchivedSince": 5_000},
        q1={"minOffset": 0, "maxOffset": 1_010, "messages": 10, "localMinOffset": 1_010, "coldMessages": 10}
        | {"archivedOffset": 10, "notArchived": 0},
    )
    told["archived"] = {"objects": 2, "rows": 20, "bytes": 4096, "newest_ms": 4_000}
    tiers = tiers_of("T", {"a": told}, 20_000)
    assert (tiers.summary["in_archive_alone"], tiers.summary["on_brokers"]) == (20, 3)
    assert tiers.summary["not_archived"] == 3


def test_broker_without_archive_has_no_tiers() -> None:
    tiers = tiers_of("T", {"a": answer(q0={"minOffset": 2, "maxOffset": 5})}, 0)
    assert (tiers.sizes, tiers.syncs) == ([], [])
    assert (tiers.summary["messages"], tiers.summary["in_archive_alone"]) == (3, None)


def test_broker_is_drained_if_nothing_remains() -> None:
    nothing = Remaining({"g": 0}, 0, 0, 0)
    assert nothing.is_empty
    assert Remaining({}, 0, None, None).is_empty  # an Apache broker
    for left in (Remaining({"g": 1}, 0, 0, 0), Remaining({}, 1, 0, 0), Remaining({}, 0, 1, 0), Remaining({}, 0, 0, 1)):
        assert not left.is_empty
    assert str(Remaining({"g": 3, "h": 0}, 1, 2, None)) == "g 3 to read, 1 delayed, 2 timers"
