"""What expired by mistake can be taken back until it is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from lifecycle.lifecycle import LocalLifecycle
from lifecycle.retention import Policy
from lifecycle.safe_clock import SafeClock
from neve.archive.journal import NewerFormat, Topic, Unexpire, decode_entry, encode_entry
from tests.unit.lifecycle.fakes import Rig

HOUR = 3_600_000
TTL = 48


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Three objects of `a` with 3, 2 and 4 messages, an hour apart; all but 2 more messages are archived."""
    rig = Rig(tmp_path / "state", Policy(ttl_hours=lambda topic: TTL if topic == "a" else None))
    for count in (3, 2, 4):
        rig.hot.put("a", count=count)
        rig.offload(evict=True)
        rig.clock.advance(HOUR)
    rig.hot.put("a", count=2)
    return rig


def expire_by_mistake(rig: Rig) -> None:
    """The clock is a year ahead, an operator confirms it, and a store has the same wrong time."""
    right = rig.clock.now_ms()
    rig.clock.set_wall(right + 365 * 24 * HOUR)
    rig.lifecycle.safe_clock.confirm()
    assert rig.lifecycle.expire.run()["expired"] == 3
    assert rig.journal.catalog.objects("a") == []
    rig.clock.set_wall(right)
    rig.lifecycle.safe_clock.confirm()


def test_what_a_wrong_clock_expired_comes_back(rig: Rig) -> None:
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


def test_a_start_finds_it_back(rig: Rig) -> None:
    expire_by_mistake(rig)
    rig.lifecycle.unexpire.run()
    rig.restart()
    assert rig.journal.catalog.min_offset("a", 0) == 0
    assert rig.journal.catalog.expiring() == {}


def test_what_has_expired_by_the_right_time_stays_expired(rig: Rig) -> None:
    expire_by_mistake(rig)
    rig.clock.advance((TTL - 3) * HOUR)
    assert rig.lifecycle.unexpire.run()["objects"] == 2
    assert rig.journal.catalog.min_offset("a", 0) == 3
    assert len(rig.journal.catalog.expiring()) == 1


def test_a_ttl_that_was_set_too_short_is_taken_back_with_it(rig: Rig) -> None:
    rig.policy = Policy(ttl_hours=lambda topic: 1)
    assert rig.lifecycle.expire.run()["expired"] == 3
    rig.policy = Policy(ttl_hours=lambda topic: None)
    assert rig.lifecycle.unexpire.run()["objects"] == 3
    assert rig.journal.catalog.min_offset("a", 0) == 0


def test_nothing_comes_back_below_an_object_that_is_gone(rig: Rig) -> None:
    names = rig.journal.catalog.objects("a")
    expire_by_mistake(rig)
    rig.store.delete(names[1].key)
    assert rig.lifecycle.unexpire.run()["objects"] == 1
    assert rig.journal.catalog.min_offset("a", 0) == 5
    assert [name.key for name in rig.journal.catalog.objects("a")] == [names[2].key]


def test_a_deleted_topic_does_not_come_back(rig: Rig) -> None:
    rig.hot.delete_topic("a")
    rig.journal.append(Topic(topic="a", deleted=True, minimums={0: 11}))
    rig.lifecycle.expire.run()
    assert rig.lifecycle.unexpire.run()["objects"] == 0
    assert rig.journal.catalog.min_offset("a", 0) is None
    rig.journal.append(Unexpire(keys=[], minimums={"a": {0: 0}}))
    assert rig.journal.catalog.recorded_minimum("a", 0) == 11, "nor by a plan that was made before it was deleted"


def test_without_an_archive_what_the_log_still_has_comes_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    policy = Policy(archived=lambda topic: False, ttl_hours=lambda topic: TTL)
    local = LocalLifecycle(rig.hot, lambda: policy, rig.clock, SafeClock(rig.clock))
    rig.hot.put("a", count=5)
    right = rig.clock.now_ms()
    rig.clock.set_wall(right + 365 * 24 * HOUR)
    local.safe_clock.confirm()
    assert local.expire.run()["raised"] == 1
    rig.clock.set_wall(right)
    local.safe_clock.confirm()
    assert local.unexpire.run() == {"objects": 0, "local_queues": 1}
    assert rig.hot.min_offset("a", 0) == 0


def test_a_program_that_does_not_know_it_refuses_the_journal() -> None:
    data = encode_entry(Unexpire(keys=["x"]))
    assert decode_entry(data) == Unexpire(keys=["x"])
    assert Unexpire(keys=[]).version == 2
    with pytest.raises(NewerFormat, match="of format 3"):
        decode_entry(encode_entry(Unexpire(keys=["x"], version=3)))
    with pytest.raises(NewerFormat):
        decode_entry(data.replace(b"UNEXPIRE", b"SOMETHIN"))
