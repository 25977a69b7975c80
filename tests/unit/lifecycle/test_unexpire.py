"""Tests of unexpire: an expiry can be undone until the objects are deleted."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.loop.locks import Event
from infra.loop.pace import Pace
from infra.loop.threads import SystemThreads
from lifecycle.retention import RetentionPolicy
from lifecycle.retention_jobs import RetentionJobs
from lifecycle.safe_clock import SafeClock
from neve.archive.format.journal import AnyEntry, Expire, Topic, Unexpire
from tests.kit.archive.catalog_state import expiring_keys
from tests.kit.clock.waiting import wait_until
from tests.unit.lifecycle.fakes import Rig

HOUR = 3_600_000
TTL = 48


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Return a rig with three objects of `a` (3, 2 and 4 messages), an hour apart, and 2 unarchived messages."""
    rig = Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: TTL if topic == "a" else None))
    for count in (3, 2, 4):
        rig.hot.put("a", count=count)
        rig.offload(evict=True)
        rig.clock.advance(HOUR)
    rig.hot.put("a", count=2)
    return rig


def expire_by_mistake(rig: Rig) -> None:
    """Expire with a clock a year ahead that an operator and the store confirm."""
    right = rig.clock.now_ms()
    rig.clock.set_wall(right + 365 * 24 * HOUR)
    rig.lifecycle.safe_clock.confirm()
    assert rig.lifecycle.expire.run()["expired"] == 3
    assert rig.journal.catalog.objects("a") == []
    rig.clock.set_wall(right)
    rig.lifecycle.safe_clock.confirm()


def test_unexpire_restores_objects_expired_by_a_wrong_clock(rig: Rig) -> None:
    names = rig.journal.catalog.objects("a")
    expire_by_mistake(rig)
    assert rig.hot.min_offset("a", 0) == 11
    assert rig.lifecycle.unexpire.run() == {"objects": 3, "local_queues": 1}
    assert rig.journal.catalog.objects("a") == names
    assert rig.journal.catalog.min_offset("a", 0) == 0
    assert rig.hot.min_offset("a", 0) == 9
    assert rig.lifecycle.expire.run()["expired"] == 0
    rig.clock.advance(25 * HOUR)
    assert rig.lifecycle.expire.run()["deleted"] == 0, "nothing of it is deleted after the grace"
    rig.offload()
    assert rig.check_tiles("a") == 11


def test_objects_restored_during_a_deletion_are_not_deleted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting the objects of a year takes minutes, so other jobs may run after each batch."""
    monkeypatch.setattr("lifecycle.expire.DELETE_BATCH", 1)
    rig.clock.advance((TTL + 3) * HOUR)
    assert rig.lifecycle.expire.run()["expired"] == 3
    rig.clock.advance(25 * HOUR)
    rig.policy = RetentionPolicy()  # the operator removes the TTL
    delete_many = rig.store.delete_many
    back = threading.Thread(target=rig.lifecycle.unexpire.run)

    def asked_meanwhile(keys: Sequence[str]) -> None:
        if not back.ident:
            back.start()
            wait_until(lambda: len(rig.lifecycle.turns._line) == 2)  # it waits for the turn after this batch
        delete_many(keys)

    monkeypatch.setattr(rig.store, "delete_many", asked_meanwhile)
    assert rig.lifecycle.expire.run()["deleted"] == 1
    back.join(10)
    left = rig.journal.catalog.objects("a")
    assert len(left) == 2
    assert all(rig.store.head(name.key) for name in left)


def test_large_expiry_is_written_in_parts_but_visible_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lifecycle.expire.EXPIRE_BATCH", 2)
    append, entries, seen = rig.journal.append, list[Expire](), list[int]()

    def watched(entry: AnyEntry, **more: Any) -> int:
        number = append(entry, **more)
        if isinstance(entry, Expire):
            entries.append(entry)
            seen.append(rig.journal.catalog.recorded_minimum("a", 0))
        return number

    monkeypatch.setattr(rig.journal, "append", watched)
    rig.clock.advance((TTL + 3) * HOUR)
    assert rig.lifecycle.expire.run()["expired"] == 3
    archived = [entry for entry in entries if entry.keys]
    assert [len(entry.keys) for entry in archived] == [2, 1]
    assert seen[: len(archived)] == [9, 9]
    assert rig.journal.catalog.objects("a") == []


def test_topic_after_a_full_batch_expires_visibly_at_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        rig.hot.put("b", count=2)
        rig.offload()
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: TTL)
    monkeypatch.setattr("lifecycle.expire.EXPIRE_BATCH", 1)
    append, seen = rig.journal.append, list[tuple[int, int]]()

    def watched(entry: AnyEntry, **more: Any) -> int:
        number = append(entry, **more)
        if isinstance(entry, Expire) and entry.keys:
            minimums = rig.journal.catalog.recorded_minimum("a", 0), rig.journal.catalog.recorded_minimum("b", 0)
            seen.append(minimums)
        return number

    monkeypatch.setattr(rig.journal, "append", watched)
    rig.clock.advance((TTL + 3) * HOUR)
    objects = rig.journal.catalog.object_count
    assert rig.lifecycle.expire.run()["expired"] == objects
    a = [minimums[0] for minimums in seen]
    b = [minimums[1] for minimums in seen]
    assert set(a) == {11}
    assert set(b) == {0, 6}
    assert rig.journal.catalog.object_count == 0


def test_large_expiry_is_paced_and_releases_its_turn_while_waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lifecycle.expire.EXPIRE_BATCH", 1)
    monkeypatch.setattr("lifecycle.expire.DELETE_BATCH", 1)
    append, waits = rig.journal.append, list[float]()

    def worked(entry: AnyEntry, **more: Any) -> int:
        rig.clock.worked_s += 0.01
        return append(entry, **more)

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            if len(waits) == 1:
                assert rig.lifecycle.unexpire.run()["objects"] == 0, "another job has its turn"
            return False

    class Noting(SystemThreads):
        def event(self) -> Event:
            return Waited()

    rig.lifecycle.expire._pace = lambda: Pace(rig.clock, Noting())
    monkeypatch.setattr(rig.journal, "append", worked)
    rig.policy = dataclasses.replace(rig.policy, grace_ms=0)
    rig.clock.advance((TTL + 3) * HOUR)
    told = rig.lifecycle.expire.run()
    assert told["expired"] >= 3
    assert len(waits) >= 2 * 3 - 1
    assert sum(waits) >= 99 * 0.01 * (len(waits) - 1)
    rig.lifecycle.expire.run()
    assert (rig.journal.catalog.objects("a"), expiring_keys(rig.journal.catalog)) == ([], {})


def test_unexpired_objects_stay_visible_after_restart(rig: Rig) -> None:
    expire_by_mistake(rig)
    rig.lifecycle.unexpire.run()
    rig.restart()
    assert rig.journal.catalog.min_offset("a", 0) == 0
    assert expiring_keys(rig.journal.catalog) == {}


def test_rightly_expired_objects_stay_expired(rig: Rig) -> None:
    expire_by_mistake(rig)
    rig.clock.advance((TTL - 3) * HOUR)
    assert rig.lifecycle.unexpire.run()["objects"] == 2
    assert rig.journal.catalog.min_offset("a", 0) == 3
    assert len(expiring_keys(rig.journal.catalog)) == 1


def test_unexpire_restores_objects_after_a_ttl_is_removed(rig: Rig) -> None:
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: 1)
    assert rig.lifecycle.expire.run()["expired"] == 3
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: None)
    assert rig.lifecycle.unexpire.run()["objects"] == 3
    assert rig.journal.catalog.min_offset("a", 0) == 0


def test_unexpire_restores_nothing_below_a_deleted_object(rig: Rig) -> None:
    names = rig.journal.catalog.objects("a")
    expire_by_mistake(rig)
    rig.store.delete(names[1].key)
    assert rig.lifecycle.unexpire.run()["objects"] == 1
    assert rig.journal.catalog.min_offset("a", 0) == 5
    assert [name.key for name in rig.journal.catalog.objects("a")] == [names[2].key]


def test_unexpire_does_not_restore_a_deleted_topic(rig: Rig) -> None:
    rig.hot.delete_topic("a")
    rig.journal.append(Topic(topic="a", deleted=True, minimums={0: 11}))
    rig.lifecycle.expire.run()
    assert rig.lifecycle.unexpire.run()["objects"] == 0
    assert rig.journal.catalog.min_offset("a", 0) is None
    rig.journal.append(Unexpire(keys=[], minimums={"a": {0: 0}}))
    assert rig.journal.catalog.recorded_minimum("a", 0) == 11, "nor by a plan that was made before it was deleted"


def test_unexpire_without_archive_restores_rows_of_the_local_log(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    policy = RetentionPolicy(archived=lambda topic: False, ttl_hours=lambda topic: TTL)
    local = RetentionJobs(rig.hot, lambda: policy, rig.clock, SafeClock(rig.clock))
    rig.hot.put("a", count=5)
    right = rig.clock.now_ms()
    rig.clock.set_wall(right + 365 * 24 * HOUR)
    local.safe_clock.confirm()
    assert local.expire.run()["raised"] == 1
    rig.clock.set_wall(right)
    local.safe_clock.confirm()
    assert local.unexpire.run() == {"objects": 0, "local_queues": 1}
    assert rig.hot.min_offset("a", 0) == 0
