"""Tests of retention: TTL is never early, only expired objects are deleted, and sweeps delete only orphans."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.loop.pace import Pace
from infra.loop.threads import SYSTEM_THREADS
from infra.objects.store import NotFound, StoreUnavailable, UnknownOutcome
from lifecycle.hot_expiry import ExpiryRecord, HotExpiry
from lifecycle.retention import Pending, RetentionPolicy, due_topics, upload_rate, waited_as_by_default
from lifecycle.retention_jobs import RetentionJobs
from lifecycle.safe_clock import ClocksDisagree, SafeClock
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.topic_catalog import TopicCatalog
from neve.archive.format.journal import ERASED, Commit, CommittedObject, Expire, Gap, RowGroup, Topic, Unexpire
from neve.archive.policy.expiry import plan_expiry
from neve.archive.policy.ttl import FOR_EVER_HOURS
from neve.archive.read.verify import verify
from tests.kit.archive.catalog_state import expiring_keys
from tests.kit.clock.waiting import wait_until
from tests.unit.lifecycle.fakes import Rig
from tests.unit.lifecycle.members import MemberHot
from tiered.worker.failed import WorkerFailed
from tiered.write.offload_plan import TopicUnreadable

HOUR = 3_600_000
DAY = 24 * HOUR
TTL = 48


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Return a rig with two objects of `a`, an hour apart, with a TTL of 48 h, and one of `b` without a TTL."""
    rig = Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: TTL if topic == "a" else None))
    rig.hot.put("a", count=3)
    rig.hot.put("b", count=3)
    rig.offload()
    rig.clock.advance(HOUR)
    rig.hot.put("a", count=2)
    rig.offload(evict=True)
    return rig


def data(rig: Rig, topic: str) -> list[str]:
    return sorted(key for key in rig.store.objects if key.startswith(f"topic={topic}/"))


def test_expires_at_its_time_and_deletes_after_the_grace(rig: Rig) -> None:
    first, second = data(rig, "a")
    rig.clock.advance((TTL - 1) * HOUR - 1)
    assert rig.lifecycle.expire.run()["expired"] == 0
    rig.clock.advance(1)
    assert rig.lifecycle.expire.run() == {"expired": 1, "deleted": 0, "raised": 0}
    assert [name.key for name in rig.journal.catalog.objects("a")] == [second]
    assert rig.journal.catalog.min_offset("a", 0) == 3
    rig.clock.advance(24 * HOUR - 1)
    assert rig.lifecycle.expire.run()["deleted"] == 0
    assert first in rig.store.objects
    rig.clock.advance(1)
    assert rig.lifecycle.expire.run()["deleted"] == 1
    assert data(rig, "a") == [second]
    assert len(data(rig, "b")) == 1


def test_expiry_uses_the_earlier_clock_and_stops_on_disagreement(rig: Rig) -> None:
    rig.clock.advance((TTL - 1) * HOUR)
    rig.store.clock_offset_ms = -60_000
    assert rig.lifecycle.expire.run()["expired"] == 0
    rig.store.clock_offset_ms = -6 * 60_000
    with pytest.raises(ClocksDisagree):
        rig.lifecycle.expire.run()
    rig.store.clock_offset_ms = 60_000
    assert rig.lifecycle.expire.run()["expired"] == 1


def test_clock_jump_without_a_store_clock_expires_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.store, "now_ms", lambda: None)
    rig.clock.set_wall(rig.clock.now_ms() + 10_000 * HOUR)
    assert rig.lifecycle.expire.run()["expired"] == 0
    assert rig.journal.catalog.min_offset("a", 0) == 0
    rig.clock.advance((TTL - 1) * HOUR)
    assert rig.lifecycle.expire.run()["expired"] == 1, "that much time has passed by both clocks"


def test_start_with_a_clock_far_ahead_expires_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rig.store, "now_ms", lambda: None)
    rig.lifecycle.safe_clock.look()
    right = rig.clock.now_ms()
    rig.clock.set_wall(right + 10_000 * HOUR)
    rig.restart()
    assert rig.lifecycle.expire.run()["expired"] == 0
    assert rig.lifecycle.status()["clock"]["trusted"] is False
    rig.lifecycle.safe_clock.confirm()
    assert rig.lifecycle.expire.run()["expired"] == 2


def test_clock_jump_without_archive_hides_and_deletes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    local = without_archive(rig, ttl_hours=lambda topic: TTL)
    rig.hot.put("a", count=15)
    rig.clock.set_wall(rig.clock.now_ms() + 10_000 * HOUR)
    assert local.expire.run()["raised"] == 0
    assert local.evict.run() == []
    rig.clock.advance(TTL * HOUR)
    assert local.expire.run()["raised"] == 1
    assert local.evict.run() == [0]


def test_objects_with_unknown_times_and_later_ones_are_kept(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: 1))
    rig.worker.unknown_times = True
    rig.hot.put("a")
    rig.offload()
    rig.worker.unknown_times = False
    rig.hot.put("a")
    rig.offload()
    rig.clock.advance(1000 * HOUR)
    assert rig.lifecycle.expire.run()["expired"] == 0


@pytest.mark.parametrize("hours", [None, -1, 0, FOR_EVER_HOURS])
def test_topic_without_ttl_never_expires(rig: Rig, hours: int | None) -> None:
    assert RetentionPolicy(ttl_hours=lambda topic: hours).ttl_ms("a") is None


def test_crash_between_deletion_and_its_entry_repeats_the_deletion(rig: Rig) -> None:
    rig.clock.advance((TTL - 1) * HOUR)
    with failpoint.armed("ttl.after_expire"), pytest.raises(FailpointError):
        rig.lifecycle.expire.run()
    rig.restart()
    rig.clock.advance(24 * HOUR)
    with failpoint.armed("ttl.after_delete"), pytest.raises(FailpointError):
        rig.lifecycle.expire.run()
    rig.restart()
    assert rig.lifecycle.expire.run()["deleted"] >= 1
    assert expiring_keys(rig.journal.catalog) == {} or all(
        after > rig.clock.now_ms() for after in expiring_keys(rig.journal.catalog).values()
    )


def test_deletion_of_a_batch_looks_up_only_its_topics(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.clock.advance(TTL * HOUR)
    assert rig.lifecycle.expire.run()["expired"] == 2
    rig.journal.append(Gap(topic="b", queue=0, first=3, last=3, reason=f"{ERASED}one"))
    rig.clock.advance(24 * HOUR)
    monkeypatch.setattr("lifecycle.expire.DELETE_BATCH", 1)
    each, looks, forgotten = Catalog._each, list[str](), list[CommittedObject]()

    def look(catalog: Catalog) -> Iterable[TopicCatalog]:
        looks.append("all")
        return each(catalog)

    monkeypatch.setattr(Catalog, "_each", look)
    monkeypatch.setattr(Catalog, "known_topics", lambda of: pytest.fail("no topic is asked for but the batch's"))
    rig.lifecycle.expire._forget = forgotten.extend
    pace = Pace(rig.clock, SYSTEM_THREADS)
    assert rig.lifecycle.expire._delete_expired(rig.journal, rig.clock.now_ms(), pace) == 2, "a batch each"
    assert (looks, forgotten) == (["all"], [])


def test_object_restored_between_two_batches_is_not_deleted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = data(rig, "a")
    rig.clock.advance(TTL * HOUR)
    assert rig.lifecycle.expire.run()["expired"] == 2
    rig.clock.advance(24 * HOUR)
    monkeypatch.setattr("lifecycle.expire.DELETE_BATCH", 1)
    delete = rig.store.delete_many

    def delete_and_bring_back(keys: list[str]) -> None:
        delete(keys)
        rig.journal.append(Unexpire(keys=[second]))
        rig.journal.append(Expire(keys=[second], delete_after_ms=rig.clock.now_ms() + HOUR))

    monkeypatch.setattr(rig.store, "delete_many", delete_and_bring_back)
    assert rig.lifecycle.expire.run()["deleted"] == 1
    assert data(rig, "a") == [second], "its time has not come again"
    assert first not in rig.store.objects


def test_failed_cache_clear_delays_only_entries_of_erased_objects(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: TTL)
    rig.journal.append(Gap(topic="a", queue=0, first=5, last=5, reason=f"{ERASED}one"))
    erased, others = data(rig, "a"), data(rig, "b")
    rig.clock.advance(TTL * HOUR)
    assert rig.lifecycle.expire.run()["expired"] == 3
    rig.clock.advance(24 * HOUR)
    monkeypatch.setattr("lifecycle.expire.DELETE_BATCH", 1)
    asked: list[list[str]] = []

    def forget(names: Sequence[CommittedObject]) -> None:
        asked.append([name.key for name in names])
        if len(asked) == 1:
            raise WorkerFailed("StoreUnavailable", "the tier worker has not answered for 300 s")

    rig.lifecycle.expire._forget = forget
    assert rig.lifecycle.expire.run()["deleted"] == len(others) == 1
    assert sorted(expiring_keys(rig.journal.catalog)) == erased
    assert data(rig, "a") == data(rig, "b") == [], "nobody fetches it any more in any case"
    assert asked == [erased[:1]], "once for all: each may take minutes"
    assert caplog.text.count("retrying") == 1
    monkeypatch.undo()
    assert rig.lifecycle.expire.run()["deleted"] == 2
    assert asked[1:] == [erased], "all of a batch together"
    assert expiring_keys(rig.journal.catalog) == {}


def test_ttl_applies_to_the_hot_tier(rig: Rig) -> None:
    rig.hot.put("a", count=2)
    low = rig.hot.next["a", 0] - 2
    rig.clock.advance(TTL * HOUR - 1)
    rig.lifecycle.expire.run()
    assert rig.hot.minimums.get(("a", 0), 0) <= low
    rig.clock.advance(1)
    assert rig.lifecycle.expire.run()["raised"] == 1
    assert rig.hot.minimums["a", 0] == low + 2


def test_hot_ttl_skips_topics_that_cannot_have_expired(tmp_path: Path) -> None:
    """Each check of a queue is a step of the event loop, and there may be 80,000 queues to check each minute."""
    rig = Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: TTL))
    looked: list[list[str]] = []
    aged = rig.hot.aged

    def looking(before: Mapping[str, int]) -> Any:
        looked.append(sorted(before))
        return aged(before)

    rig.hot.aged = looking  # type: ignore[method-assign]
    rig.hot.put("a")
    rig.clock.advance(HOUR)
    rig.hot.put("b")
    rig.lifecycle.expire.run()
    rig.hot.put("a", queue=1)
    rig.lifecycle.expire.run()
    assert looked == [["a", "b"], []]
    rig.clock.advance((TTL - 1) * HOUR)
    assert rig.lifecycle.expire.run()["raised"] == 1
    assert looked[2:] == [["a"]]
    assert rig.lifecycle.expire.run()["raised"] == 0
    assert looked[3:] == [["a"]], "what is left of it was not known"
    rig.clock.advance(HOUR)
    assert rig.lifecycle.expire.run()["raised"] == 2
    assert (rig.hot.minimums["b", 0], rig.hot.minimums["a", 1]) == (1, 1)
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: 1000)
    rig.lifecycle.unexpire.run()
    assert rig.hot.minimums["a", 0] == 0
    looked.clear()
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: TTL)
    assert rig.lifecycle.expire.run()["raised"] == 3, "what came back is looked at anew"
    assert looked == [["a", "b"]]


def test_hot_ttl_expires_messages_stored_after_a_clock_step_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: TTL))
    expiry = HotExpiry(rig.hot, ExpiryRecord(None, lambda: rig.policy, rig.clock), lambda: rig.policy)
    now = rig.clock.now_ms()
    rig.hot.put("a")
    rig.clock.set_wall(now + 3650 * DAY)
    rig.hot.put("b")
    assert expiry.hide(rig.clock.now_ms()) == 1
    assert expiry.hide(rig.clock.now_ms()) == 0, "of what is left, nothing is older than that"
    rig.clock.set_wall(now)
    assert expiry.hide(now) == 0
    rig.hot.put("a")
    assert expiry.hide(now + TTL * HOUR - 1) == 0
    assert expiry.hide(now + TTL * HOUR) == 1
    assert rig.hot.minimums["a", 0] == 2


def _begin_again(rig: Rig, topic: str) -> None:
    rig.hot.delete_topic(topic)
    rig.hot.put(topic, count=3)


@pytest.mark.parametrize("verb", ["offset_by_time", "min_offset"])
def test_topic_recreated_during_ttl_scan_keeps_its_new_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The topic is deleted and recreated between the scan and the EXPIRE; the scan saw its old messages."""
    rig = Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: TTL))
    rig.hot.put("a", count=5)
    rig.clock.advance(TTL * HOUR)
    look, pending = getattr(rig.hot, verb), ["a"]

    def looked(*arguments: Any) -> Any:
        found = look(*arguments)
        if pending and arguments[0] == pending[0]:
            assert rig.journal.restart_at_zero(pending[0])
            _begin_again(rig, pending.pop())
        return found

    monkeypatch.setattr(rig.hot, verb, looked)
    rig.lifecycle.expire.run()
    assert pending == []
    assert rig.hot.min_offset("a", 0) == 0
    assert rig.journal.catalog.recorded_minimum("a", 0) == 0
    rig.offload()
    assert rig.check_tiles("a") == 3


def test_topic_named_by_a_pending_expire_does_not_restart_at_zero(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: TTL))
    rig.hot.put("a", count=5)
    rig.clock.advance(TTL * HOUR)
    asked = []
    rig.store.on_call = lambda verb, key: asked.append(rig.journal.restart_at_zero("a")) if verb == "put" else None
    with failpoint.armed("journal.before_put"), pytest.raises(FailpointError):
        rig.lifecycle.expire.run()
    assert not rig.journal.restart_at_zero("a")
    rig.restart()
    assert not rig.journal.restart_at_zero("a"), "the EXPIRE may stand: a start must know of it"
    rig.lifecycle.expire.run()
    assert set(asked) == {False}


def test_recreated_topic_without_archive_keeps_its_new_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "state")
    local = RetentionJobs(
        rig.hot, lambda: RetentionPolicy(ttl_hours=lambda topic: TTL), rig.clock, SafeClock(rig.clock)
    )
    rig.hot.put("a", count=5)
    rig.clock.advance(TTL * HOUR)
    expire = rig.hot.expire_below

    def expired(rising: Mapping[str, Mapping[int, int]], before: Mapping[str, int]) -> Mapping[str, TopicUnreadable]:
        _begin_again(rig, "a")
        return expire(rising, before)

    monkeypatch.setattr(rig.hot, "expire_below", expired)
    local.expire.run()
    assert rig.hot.min_offset("a", 0) == 0


def test_rows_expired_in_an_archive_gap_stay_hidden(rig: Rig) -> None:
    """An open round may commit these rows later, although higher offsets are archived already."""
    rig.hot.put("a", count=2)
    rig.clock.advance(HOUR)
    rig.hot.put("a")
    after = rig.journal.catalog.objects("a")[-1]
    group = msgspec.structs.replace(after.row_groups[0], rows=1, runs=[(0, 7, 7)], newest_ms=rig.clock.now_ms())
    later = msgspec.structs.replace(
        after, key=after.key.replace("a/", "a/x", 1), rows=1, queues={0: (7, 7, 0)}, row_groups=[group]
    )
    rig.journal.append(Commit(round=9, names=[later]))
    rig.clock.advance((TTL - 1) * HOUR)
    assert rig.lifecycle.expire.run()["raised"] == 1
    assert rig.journal.catalog.recorded_minimum("a", 0) == 7


def test_objects_of_a_deleted_topic_are_deleted_after_the_grace(rig: Rig) -> None:
    rig.journal.append(Topic(topic="b", deleted=True, minimums={0: 3}))
    assert rig.lifecycle.expire.run()["expired"] == 1
    assert len(data(rig, "b")) == 1
    rig.clock.advance(24 * HOUR)
    rig.lifecycle.expire.run()
    assert data(rig, "b") == []
    assert len(data(rig, "a")) == 2


def test_sweep_reports_before_it_deletes_and_ignores_foreign_keys(rig: Rig) -> None:
    orphan = data(rig, "a")[0].replace("-e1.", "-e7.")
    foreign = orphan.replace("broker=b/", "broker=other/")
    for key in (orphan, foreign, "topic=a/notes.txt", "topic=a/dt=2026-01-01/x.parquet", "other/file"):
        rig.store.put(key, b"?")
    assert rig.lifecycle.sweep.run(repair=True) == []  # the orphan is younger than 48 h
    rig.clock.advance(48 * HOUR)
    before = set(rig.store.objects)
    assert rig.lifecycle.sweep.run(repair=True) == [orphan]  # reported, not deleted
    assert set(rig.store.objects) == before
    rig.lifecycle.sweep.run(repair=True)
    assert before - set(rig.store.objects) == {orphan}


def test_sweep_yields_its_turn_between_topics(rig: Rig) -> None:
    orphan = data(rig, "b")[0].replace("-e1.", "-e7.")
    rig.store.put(orphan, b"?")
    rig.clock.advance(48 * HOUR)
    assert rig.lifecycle.sweep.run() == [orphan]
    turns, listed, seen = rig.lifecycle.turns, list[str](), list[list[str]]()

    def another_job() -> None:
        with turns:
            seen.append(list(listed))

    waiting = threading.Thread(target=another_job)

    def note(verb: str, key: str) -> None:
        if verb == "list" and key.startswith("topic="):
            listed.append(key)
            if len(listed) == 1:
                waiting.start()
                wait_until(lambda: len(turns._line) == 2, "somebody waits for a turn")

    rig.store.on_call = note
    assert rig.lifecycle.sweep.run(repair=True) == [orphan]
    rig.store.on_call = None
    waiting.join()
    assert len(listed) > 1
    assert seen == [listed[:1]]
    assert orphan not in rig.store.objects


def test_sweep_keeps_orphan_that_is_committed_during_the_sweep(rig: Rig) -> None:
    key = data(rig, "a")[0].replace("-e1.", "-e7.")
    rig.store.put(key, b"?")
    rig.clock.advance(48 * HOUR)
    assert rig.lifecycle.sweep.run() == [key]
    (known, *_) = rig.journal.catalog.objects("a")

    def name_it(verb: str, listed: str) -> None:
        if verb == "list" and listed.startswith("topic=b"):
            rig.store.on_call = None
            rig.journal.append(Commit(round=9, names=[msgspec.structs.replace(known, key=key)]))

    rig.store.on_call = name_it
    assert rig.lifecycle.sweep.run(repair=True) == []
    assert key in rig.store.objects


def test_sweep_keeps_objects_of_open_intents(rig: Rig) -> None:
    rig.hot.put("a", count=2)
    with failpoint.armed("offload.before_commit"), pytest.raises(FailpointError):
        rig.offload()
    rig.clock.advance(100 * HOUR)
    assert rig.lifecycle.sweep.run() == []


def test_missing_object_is_reported_instead_of_expired(rig: Rig) -> None:
    key = data(rig, "b")[0]
    rig.store.delete(key)
    (problem,) = verify(rig.journal.catalog, rig.store).problems
    assert key in problem
    with pytest.raises(NotFound):
        rig.store.get(key)
    assert rig.journal.catalog.min_offset("b", 0) == 0


def test_nothing_is_evicted_before_its_commit(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    rig.hot.put("a", count=15)
    rig.hot.disk = 0.99
    rig.clock.advance(1000 * HOUR)
    assert rig.lifecycle.evict.run() == []
    rig.store.fail("*", StoreUnavailable("down"), times=1000)
    with pytest.raises(StoreUnavailable):
        rig.lifecycle.evict.run()
    rig.store.faults.clear()
    rig.lifecycle.offload.run()
    assert rig.lifecycle.evict.run() == [0]
    assert rig.check_tiles("a") == 15


def test_eviction_waits_for_age_or_a_crowded_disk(rig: Rig) -> None:
    rig.hot.put("b", count=30)
    rig.offload()
    assert rig.lifecycle.evict.run() == []
    rig.hot.disk = 0.9
    assert rig.lifecycle.evict.run() != []


def without_archive(rig: Rig, **rules: Any) -> RetentionJobs:
    policy = RetentionPolicy(archived=lambda topic: False, delete_hours=None, force_mark=0.85)
    return RetentionJobs(rig.hot, lambda: replace(policy, **rules), rig.clock, SafeClock(rig.clock))


def fill_by_segments(rig: Rig, empty: float, each: float) -> None:
    """Set the disk use ratio to `empty` plus `each` per sealed segment."""

    def ratio() -> float:
        return empty + each * sum(segment.sealed for segment in rig.hot.segments())

    rig.hot.disk_ratio = ratio  # type: ignore[method-assign]


def test_eviction_without_archive_deletes_by_age(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    local = without_archive(rig)
    rig.hot.put("a", count=15)
    rig.clock.advance(72 * HOUR - 1)
    assert local.evict.run() == []
    rig.clock.advance(1)
    assert local.evict.run() == [0]
    assert local.status()["archive"] == "off"


def test_unconfirmed_segments_are_not_evicted_by_age(tmp_path: Path) -> None:
    """A broker set without an archive may still truncate the log at the confirmed offset."""
    rig = Rig(tmp_path / "state")
    hot = MemberHot(rig.clock)
    policy = RetentionPolicy(archived=lambda topic: False)
    local = RetentionJobs(hot, lambda: policy, rig.clock, SafeClock(rig.clock), is_member=True)
    hot.put("a", count=25)
    rig.clock.advance(72 * HOUR)
    hot.confirmed = 1990
    assert local.evict.run() == [0]
    hot.confirmed = 2000
    assert local.evict.run() == [1000]


def test_eviction_without_archive_waits_for_its_hours_or_a_crowded_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    hour = datetime.fromtimestamp(rig.clock.now_ms() / 1000).hour  # noqa: DTZ006 - settings use local time
    local = without_archive(rig, delete_hours=frozenset({(hour + 2) % 24}))
    rig.hot.put("a", count=35)
    rig.clock.advance(72 * HOUR)
    assert local.evict.run() == []
    rig.hot.disk = 0.76
    assert local.evict.run() == [0, 1000, 2000]
    rig.hot.disk = 0.1
    rig.hot.put("a", count=10)
    rig.clock.advance(72 * HOUR)
    assert local.evict.run() == []
    rig.clock.advance(2 * HOUR)
    assert local.evict.run() == [3000]


def test_eviction_without_archive_ignores_age_on_a_full_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    rig.hot.put("a", count=95)
    fill_by_segments(rig, 0.10, 0.08)
    assert without_archive(rig).evict.run() == [], "82 %: only what is old enough goes"
    assert without_archive(rig, force_mark=math.inf).evict.run() == []
    fill_by_segments(rig, 0.15, 0.08)
    assert without_archive(rig, force_mark=math.inf).evict.run() == []
    assert without_archive(rig).evict.run() == [0], "87 %: down to 5 below the mark of 85"


def test_crowded_disk_is_relieved_down_to_the_lower_mark(tmp_path: Path) -> None:
    """Otherwise, brokers that share a disk would each evict all of their segments."""
    rig = Rig(tmp_path / "state")
    rig.hot.put("a", count=95)
    rig.lifecycle.offload.run(roll=True)
    fill_by_segments(rig, 0.0, 0.08)
    assert rig.lifecycle.evict.run() == [0, 1000], "from 80 % over 72 % to 64 %"
    rig.hot.put("a", count=10)
    assert rig.lifecycle.evict.run() == [], "72 % is no reason to begin"


def test_unarchived_topics_do_not_block_eviction_on_a_crowded_disk(tmp_path: Path) -> None:
    """Otherwise, message traces would block all evictions."""
    rig = Rig(tmp_path / "state", RetentionPolicy(archived=lambda topic: topic != "RMQ_SYS_TRACE_TOPIC"))
    rig.hot.put("RMQ_SYS_TRACE_TOPIC")
    rig.hot.put("a", count=15)
    rig.offload()
    assert rig.lifecycle.evict.run() == []
    rig.hot.disk = 0.76
    assert rig.lifecycle.evict.run() == [0, 1000]


def test_unarchived_segment_is_evicted_only_if_its_topic_was_deleted(tmp_path: Path) -> None:
    """A topic missing from the topic table may be a lost table, so its messages are kept until they are archived."""
    gone: dict[str, int] = {}
    rig = Rig(
        tmp_path / "state",
        RetentionPolicy(deleted_up_to=lambda topic: gone.get(topic, 0), ttl_hours=lambda topic: None),
    )
    rig.hot.put("lost", count=15)
    rig.hot.disk = 0.99
    rig.clock.advance(1000 * HOUR)
    assert rig.lifecycle.evict.run() == []
    gone["lost"] = 900
    assert rig.lifecycle.evict.run() == [], "its record at 900 is of the topic that came again"
    gone["lost"] = 1000
    assert rig.lifecycle.evict.run() == [0]


def test_upload_rate_rises_with_backlog_age_and_disk_use() -> None:
    policy = RetentionPolicy(upload_bytes_per_second=1000, archive_max_age_ms=HOUR, disk_mark=0.75)
    assert upload_rate(policy, -1, 10 * HOUR, 0.1) == 1000
    assert upload_rate(policy, 10 * HOUR, 10 * HOUR, 0.1) == 1000
    assert upload_rate(policy, 7 * HOUR, 10 * HOUR, 0.1) == 3000
    assert upload_rate(policy, 7 * HOUR, 10 * HOUR, 0.76) == 0
    assert upload_rate(RetentionPolicy(), 0, 10 * HOUR, 0.1) == 0


def test_topic_is_due_by_its_own_max_age_or_its_bytes() -> None:
    own = {"quick": HOUR // 60, "patient": 6 * HOUR}
    policy = RetentionPolicy(archive_min_bytes=500, archive_max_age_ms=HOUR, own_max_age_ms=own.get)

    def due(age: int, size: int = 100) -> set[str]:
        pending = {topic: Pending(size, 100 * DAY - age) for topic in ("quick", "patient", "other")}
        return set(due_topics(pending, (), {}, policy, 100 * DAY))

    assert due(HOUR // 60 - 1) == set()
    assert due(HOUR // 60) == {"quick"}
    assert due(HOUR) == {"quick", "other"}
    assert due(6 * HOUR - 1) == {"quick", "other"}
    assert due(6 * HOUR) == {"quick", "other", "patient"}
    assert due(1, size=500) == {"quick", "other", "patient"}


@pytest.mark.parametrize(
    ("age", "stored", "looks"),
    [
        # max age, store time and due time, in hours from midnight
        (24, -9, 0),
        (24, -24, 0),
        (24, 1, 24),
        (48, -9, 24),
        (48, -25, 0),
        (48, -24, 24),
        (30, -9, 0),
        (30, 7, 24),
        (23, -9, 14),
    ],
)
def test_topic_with_a_long_max_age_is_due_at_the_end_of_its_day(age: int, stored: int, looks: int) -> None:
    policy = RetentionPolicy(archive_max_age_ms=age * HOUR)
    pending = {"t": Pending(1, 100 * DAY + stored * HOUR)}
    due = [
        hour for hour in range(stored, stored + age + 1) if due_topics(pending, (), {}, policy, 100 * DAY + hour * HOUR)
    ]
    assert due[0] == looks
    assert looks - stored <= age


def test_topic_within_its_own_max_age_does_not_raise_the_upload_rate() -> None:
    policy = RetentionPolicy(archive_max_age_ms=HOUR, own_max_age_ms={"patient": 24 * HOUR, "quick": HOUR // 4}.get)
    now = 100 * DAY
    assert waited_as_by_default({}, policy, now) == -1
    assert waited_as_by_default({"patient": Pending(1, -1)}, policy, now) == -1
    patient = {"patient": Pending(1, now - 12 * HOUR)}
    assert waited_as_by_default(patient, policy, now) == now - HOUR // 2
    assert waited_as_by_default(patient | {"other": Pending(1, now - 2 * HOUR)}, policy, now) == now - 2 * HOUR
    assert waited_as_by_default(patient | {"quick": Pending(1, now - HOUR)}, policy, now) == now - 4 * HOUR


def test_upload_rate_follows_the_policy_and_is_reset_on_stop(rig: Rig) -> None:
    assert set(rig.worker.rates) == {0}
    rig.policy = RetentionPolicy(upload_bytes_per_second=500, archive_max_age_ms=HOUR)
    rig.hot.put("a")
    rig.clock.advance(2 * HOUR)
    rig.offload()
    assert max(rig.worker.rates) == 1000
    assert rig.lifecycle.status()["upload_bytes_per_second"] == 500, "the backlog is gone"
    rig.hot.disk = 0.9
    rig.lifecycle.throttle.adjust()
    assert rig.worker.rates[-1] == 0
    rig.hot.disk = 0.1
    rig.lifecycle.throttle.adjust()
    assert rig.worker.rates[-1] == 500
    rig.lifecycle.stop()
    assert rig.worker.rates[-1] == 0


def test_expiry_within_an_object_covers_only_the_start_of_each_queue(rig: Rig) -> None:
    name = rig.journal.catalog.objects("a")[0]

    def group(newest: int, *runs: tuple[int, int, int]) -> RowGroup:
        return RowGroup(0, 1, 4, 100, newest, newest, 100, list(runs))

    now = 10 * HOUR
    old, young, unknown = HOUR, now, -1
    groups = [group(old, (0, 0, 4)), group(old, (0, 5, 9), (1, 0, 1)), group(unknown, (1, 2, 3)), group(old, (1, 4, 5))]
    groups += [group(young, (2, 0, 3)), group(old, (3, 0, 8))]
    held = msgspec.structs.replace(name, row_groups=groups)
    after = msgspec.structs.replace(name, key="later", start=name.end, row_groups=[group(old, (0, 10, 12))])
    assert plan_expiry([held, after], HOUR, now) == ([], {0: 10, 1: 2, 3: 9})
    assert plan_expiry([held], HOUR, now, lambda queue: 9) == ([], {0: 10})
    assert plan_expiry([held], HOUR, now, lambda queue: 10) == ([], {})


def test_rows_expired_before_their_round_stay_hidden(rig: Rig) -> None:
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: 1 if topic == "c" else None)
    rig.hot.put("c", count=2)
    rig.clock.advance(HOUR + 1)
    rig.hot.put("c", count=2)
    rig.lifecycle.expire.run()
    assert rig.hot.min_offset("c", 0) == 2
    rig.offload()
    assert rig.journal.catalog.min_offset("c", 0) == 2, "a queue's minimum never moves back"
    rig.check_tiles("c")


def test_power_cut_after_unknown_expiry_hides_no_later_message(rig: Rig) -> None:
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: 1 if topic == "c" else None)
    rig.hot.put("c", count=3)
    rig.clock.advance(HOUR + 1)
    rig.store.fail("put", UnknownOutcome("timeout"), after=True, match="journal")
    rig.store.fail("get", StoreUnavailable("down"), match="journal", skip=1)  # the read-back
    with pytest.raises(UnknownOutcome):
        rig.lifecycle.expire.run()
    rig.hot.lose_above(rig.hot.synced)
    assert rig.hot.next["c", 0] == 3, "a start without the store gives no offset that the entry may hide"


def test_nothing_is_evicted_as_expired_while_the_clocks_disagree(rig: Rig) -> None:
    rig.policy = RetentionPolicy(ttl_hours=lambda topic: 1, reserved_ms=0)
    rig.hot.put("d", count=3)
    rig.hot.roll()
    rig.clock.advance(2 * HOUR)
    rig.store.clock_offset_ms = -2 * HOUR
    rig.lifecycle.evict.run()
    held = [record for record in rig.hot.records if record[1] == "d"]
    assert len(held) == 3, "by the store's clock it has not expired, and no archive has it"
    rig.store.clock_offset_ms = 0
    rig.lifecycle.evict.run()
    assert [record for record in rig.hot.records if record[1] == "d"] == []
