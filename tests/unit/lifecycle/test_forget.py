"""Tests that the names of deleted topics are forgotten only when no trace of them is left."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from infra.objects.store import ObjectStoreError, StoreUnavailable, UnknownOutcome
from lifecycle.retention import RetentionPolicy
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import entries, read_catalog
from neve.archive.format.journal import AnyEntry, Forget, Intent, PlannedObject, Topic, encode_entry
from neve.archive.format.keys import journal_key
from neve.archive.policy.ttl import HOUR_MS as HOUR
from tests.kit.archive.catalog_state import state_of
from tests.kit.archive.checkpoints import put_checkpoint
from tests.kit.store.memory_store import MemoryStore
from tests.unit.lifecycle.fakes import Rig

DAY = 24 * HOUR


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: None))


def archived_and_deleted(rig: Rig) -> None:
    """Archive topics `a` and `b`, and delete `a`."""
    rig.hot.put("a", count=15)
    rig.hot.put("b", count=5)
    rig.offload(evict=True)
    rig.hot.delete_topic("a")
    rig.hot.deleted["a"] = {0: 15}
    rig.journal.append(Topic(topic="a", deleted=True, minimums={0: 15}))


def passed(rig: Rig, days: int) -> None:
    """Let days pass in which the objects of `a` expire and are deleted."""
    rig.lifecycle.expire.run()
    rig.clock.advance(days * DAY)
    rig.lifecycle.expire.run()


def test_deleted_topic_is_forgotten_after_objects_records_and_retention(rig: Rig) -> None:
    archived_and_deleted(rig)
    assert rig.lifecycle.forget.run() == 0
    passed(rig, 8)
    assert "a" in rig.journal.named
    assert rig.lifecycle.forget.run() == 1
    assert "a" not in rig.journal.named and rig.hot.deleted == {}
    assert rig.journal.catalog.named_topics() == ["b"]
    assert rig.journal.restart_at_zero("a"), "it begins at 0, should it come again"
    rig.restart()
    assert "a" not in rig.journal.named
    for whole in (True, False):
        catalog = read_catalog(rig.store, "b", whole=whole)
        assert catalog.named_topics() == ["b"] and catalog.recorded_minimum("a", 0) == 0
    rig.hot.put("a", count=3)
    rig.offload()
    assert [(run.first, run.last) for run in read_catalog(rig.store, "b").queue("a", 0).runs()] == [(0, 2)]


@pytest.mark.parametrize(
    "why", ["young", "not deleted", "expiring", "open", "in the log", "has queues", "made again", "of a set"]
)
def test_deleted_topic_is_kept_while_a_trace_of_it_may_exist(rig: Rig, why: str) -> None:
    archived_and_deleted(rig)
    passed(rig, 6 if why == "young" else 8)
    begin, end = rig.hot.confirmed_range()
    if why == "not deleted":
        rig.journal.append(Topic(topic="a", deleted=False))
        rig.clock.advance(8 * DAY)
    elif why == "expiring":
        rig.hot.put("a", count=3)
        rig.offload()
        rig.hot.delete_topic("a")
        rig.journal.append(Topic(topic="a", deleted=True, minimums={0: 18}))
        rig.clock.advance(8 * DAY)
        rig.lifecycle.expire.run()
    elif why == "open":
        name = PlannedObject(key="k", topic="a", day="2026-01-01", start=end, end=end + 100, queues={0: (15, 15)})
        rig.journal.append(Intent(round=99, names=[name]))
    elif why == "in the log":
        rig.policy = RetentionPolicy(ttl_hours=lambda topic: None, deleted_up_to=lambda topic: begin + 1)
    elif why == "has queues":
        rig.hot.put("a")
    elif why == "made again":
        rig.policy = RetentionPolicy(ttl_hours=lambda topic: None, exists=lambda topic: topic == "a")
    elif why == "of a set":
        rig.lifecycle.forget._is_alone = False
    assert rig.lifecycle.forget.run() == 0
    assert "a" in rig.journal.named and rig.hot.deleted == {"a": {0: 15}}
    assert not any(isinstance(entry, Forget) for _, entry in entries(rig.store, "b"))


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [StoreUnavailable("503"), UnknownOutcome("timeout")])
def test_forget_with_unknown_outcome_is_completed_by_the_next_run(
    rig: Rig, error: Exception, after: bool, crash: bool
) -> None:
    archived_and_deleted(rig)
    passed(rig, 8)
    rig.store.fail("put", error, after=after)
    with contextlib.suppress(ObjectStoreError):
        rig.lifecycle.forget.run()
    rig.store.faults.clear()
    if crash:
        rig.restart()
    rig.lifecycle.forget.run()
    assert "a" not in rig.journal.named and rig.hot.deleted == {}
    told = [entry for _, entry in entries(rig.store, "b") if isinstance(entry, Forget)]
    assert [entry.topics for entry in told] == [["a"]]


def test_forgotten_topic_is_in_no_checkpoint(rig: Rig) -> None:
    archived_and_deleted(rig)
    passed(rig, 8)
    rig.lifecycle.forget.run()
    packs: list[bytes] = []
    rig.journal.catalog.write_checkpoint("b", lambda number, data: packs.append(data))
    assert packs and not any(b"topic\xa1a" in data for data in packs)


def test_lazily_loaded_checkpoint_forgets_the_topic() -> None:
    store, catalog = MemoryStore(), Catalog()
    tombstones = [Topic(topic=topic, deleted=True, minimums={0: 7}) for topic in ("a", "b", "c")]
    again = Topic(topic="b", deleted=True, minimums={1: 3})
    told: list[AnyEntry] = [*tombstones, Forget(topics=["b"]), again]
    for seq, entry in enumerate(told):
        store.put(journal_key("", "x", seq), encode_entry(entry))
        catalog.apply(seq, entry)
        if seq == 2:
            put_checkpoint(store, catalog, "x")
    lazy = read_catalog(store, "x")
    assert lazy.topics() == ["a", "b", "c"] == catalog.topics()
    assert lazy.recorded_minimum("b", 0) == 0 and lazy.recorded_minimum("b", 1) == 3
    assert state_of(lazy, "x") == state_of(catalog, "x")
