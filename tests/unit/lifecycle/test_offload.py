"""Tests of archive rounds with a crash or fault at every step: offsets are complete, no unarchived eviction."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.objects.store import AccessDenied, ObjectStoreError, StoreUnavailable, UnknownOutcome
from lifecycle.retention import RetentionPolicy
from neve.archive.format.journal import COMPACT, Intent, PlannedObject
from tests.unit.lifecycle.fakes import SEGMENT, STEPS, Rig
from tiered.write.offload_plan import TopicUnreadable

HOUR = 3_600_000
OWN = "SCHEDULE_TOPIC_XXXX"  # a topic of the broker itself


def fill(rig: Rig) -> None:
    rig.hot.put("a", 0, 7)
    rig.hot.put("b", 0, 5)
    rig.hot.put("a", 1, 9)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("step", STEPS)
def test_offload_resumes_after_a_crash_at_every_step(rig: Rig, step: str, nth: int) -> None:
    fill(rig)
    with failpoint.armed(step, nth=nth), pytest.raises(FailpointError):
        rig.offload(evict=True)
        rig.hot.put("a", 0, 2)
        rig.offload(evict=True)
    rig.restart()
    rig.hot.put("a", 0, 1)
    rig.offload(evict=True)
    rig.offload(evict=True)
    assert rig.check_tiles("a", 0) == rig.hot.next["a", 0]
    assert (rig.check_tiles("b", 0), rig.check_tiles("a", 1)) == (5, 9)
    assert rig.journal.catalog.gaps() == []
    assert rig.journal.catalog.rounds.open_intents() == {}
    assert rig.hot.records == []  # all archived, so all evicted


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [StoreUnavailable("503"), UnknownOutcome("timeout"), AccessDenied("403")])
@pytest.mark.parametrize("skip", range(6))
def test_offload_survives_each_fault_of_each_write(
    rig: Rig, error: Exception, after: bool, skip: int, crash: bool
) -> None:
    fill(rig)
    rig.store.fail("put", error, after=after, skip=skip)
    try:
        rig.offload()
    except ObjectStoreError:
        assert rig.store.faults[0].times == 0
    rig.store.faults.clear()
    if crash:
        rig.restart()
    rig.offload(evict=True)
    assert (rig.check_tiles("a", 0), rig.check_tiles("b", 0), rig.check_tiles("a", 1)) == (7, 5, 9)
    assert rig.hot.records == []
    data = {key for key in rig.store.objects if key.startswith("topic=")}
    assert data == {name.key for name in rig.journal.catalog.objects()}  # no orphans


def test_failure_of_one_topic_does_not_block_others(rig: Rig) -> None:
    fill(rig)
    rig.store.fail("put", AccessDenied("no key for b"), match="topic=b", times=100)
    rig.offload(evict=True)
    assert rig.check_tiles("a", 0) == 7
    assert rig.journal.catalog.objects("b") == []
    assert rig.hot.evicted == []
    rig.store.faults.clear()
    rig.offload(evict=True)
    assert rig.check_tiles("b") == 5
    assert rig.hot.records == []


@pytest.mark.parametrize("verb", ["entries", "store_time"])
def test_unreadable_topic_is_skipped_and_does_not_block_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, verb: str
) -> None:
    fill(rig)
    readable = getattr(rig.hot, verb)

    def faulty(topic: str, *rest: int) -> Any:
        if topic == "b":
            raise TopicUnreadable("a queue has a hole")
        return readable(topic, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(rig.hot, verb, faulty)
        rig.offload(evict=True)
        rig.offload(evict=True)
        assert rig.check_tiles("a", 0) == 7
        assert rig.journal.catalog.objects("b") == []
        assert rig.hot.evicted == []
        assert rig.lifecycle.status()["set_aside"] == {"b": "a queue has a hole"}
        assert [record.message for record in caplog.records if "quarantined" in record.message] == [
            "topic b can't be archived and is quarantined: a queue has a hole"
        ]
    rig.offload(evict=True)
    assert rig.check_tiles("b") == 5
    assert rig.hot.records == []
    assert rig.lifecycle.status()["topics_set_aside"] == 0


def test_intent_stays_open_while_its_topic_is_unreadable(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(rig)
    with failpoint.armed("offload.after_intent"), pytest.raises(FailpointError):
        rig.offload()
    readable = rig.hot.entries

    def faulty(topic: str, start: int, end: int) -> Any:
        if topic == "b":
            raise TopicUnreadable("a file is gone")
        return readable(topic, start, end)

    with monkeypatch.context() as patch:
        patch.setattr(rig.hot, "entries", faulty)
        rig.offload(evict=True)
        assert rig.check_tiles("a", 0) == 7
        assert [name.topic for names in rig.journal.catalog.rounds.open_intents().values() for name in names] == ["b"]
        assert list(rig.lifecycle.set_aside()) == ["b"]
    rig.offload(evict=True)
    assert rig.check_tiles("b") == 5
    assert rig.journal.catalog.gaps() == []
    assert rig.lifecycle.set_aside() == {}


def test_deleted_topic_is_no_longer_reported_as_unreadable(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(rig)

    def faulty(topic: str, start: int, end: int) -> Any:
        raise TopicUnreadable("no file")

    with monkeypatch.context() as patch:
        patch.setattr(rig.hot, "entries", faulty)
        rig.offload()
        assert sorted(rig.lifecycle.set_aside()) == ["a", "b"]
        rig.hot.delete_topic("b")
        rig.offload()
        assert sorted(rig.lifecycle.set_aside()) == ["a"]


def test_object_key_with_other_content_is_aborted_and_planned_again(rig: Rig) -> None:
    rig.hot.put("a", count=3)
    with failpoint.armed("offload.after_intent"), pytest.raises(FailpointError):
        rig.offload()
    (intent,) = rig.journal.catalog.rounds.open_intents().values()
    rig.store.put(intent[0].key, b"someone else's")
    rig.offload()
    assert intent[0].key in rig.journal.aborted
    assert rig.store.get(intent[0].key) == b"someone else's"
    assert rig.check_tiles("a") == 3
    assert rig.journal.catalog.gaps() == []


def test_intents_above_the_recovered_log_are_closed_with_a_gap(rig: Rig) -> None:
    rig.hot.put("a", count=8)
    with failpoint.armed("offload.after_intent"), pytest.raises(FailpointError):
        rig.offload()
    rig.hot.lose_above(300)
    rig.restart()
    assert rig.attachment.queue_next == {("a", 0): 8}
    rig.hot.put("a", count=2)
    rig.offload(evict=True)
    assert [(gap.first, gap.last) for gap in rig.journal.catalog.gaps()] == [(3, 7)]
    assert rig.check_tiles("a") == 10


@pytest.mark.parametrize("nth", [2, 3])
def test_gap_is_recorded_once_if_the_abort_after_it_fails(rig: Rig, nth: int) -> None:
    rig.hot.put("a", count=8)
    with failpoint.armed("offload.after_intent"), pytest.raises(FailpointError):
        rig.offload()
    rig.hot.lose_above(300)
    rig.restart()
    with failpoint.armed("journal.before_put", nth=nth), pytest.raises(FailpointError):
        rig.offload()
        rig.offload()
    rig.offload()
    assert rig.journal.catalog.rounds.open_intents() == {}
    assert [(gap.first, gap.last) for gap in rig.journal.catalog.gaps()] == [(3, 7)]


def test_offsets_of_a_lost_intent_are_not_reused(rig: Rig) -> None:
    """The names are durable locally before the INTENT is put, so a truncated log does not reuse their offsets."""
    rig.hot.put("a", count=8)
    with failpoint.armed("journal.after_identity"), pytest.raises(FailpointError):
        rig.offload()
    rig.hot.lose_above(300)
    rig.restart()
    assert rig.attachment.resume_at == SEGMENT
    rig.hot.put("a", count=2)
    rig.offload()
    assert [record[3] for record in rig.hot.records] == [0, 1, 2, 8, 9]
    assert rig.check_tiles("a") == 10


def test_objects_hold_one_day_each(rig: Rig) -> None:
    rig.hot.put("a", count=3)
    rig.clock.advance(24 * HOUR)
    rig.hot.put("a", count=2)
    rig.clock.advance(48 * HOUR)
    rig.hot.put("a", count=1)
    rig.offload()
    names = rig.journal.catalog.objects("a")
    assert [(name.day, name.rows) for name in names] == [("2023-11-14", 3), ("2023-11-15", 2), ("2023-11-17", 1)]
    assert rig.check_tiles("a") == 6


def test_two_small_writes_per_round(rig: Rig) -> None:
    for number in range(8):
        rig.hot.put(f"t{number}")
    rig.store.requests.clear()
    rig.lifecycle.offload.run(roll=True)
    assert rig.store.requests["put"] == 8 + 2


def test_only_due_topics_are_written(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "s", RetentionPolicy(archive_min_bytes=500, archive_max_age_ms=HOUR))
    rig.hot.put("big", count=5)
    rig.hot.put("small", count=4)
    rig.lifecycle.offload.run()
    assert {name.topic for name in rig.journal.catalog.objects()} == {"big"}
    rig.clock.advance(HOUR)
    rig.lifecycle.offload.run()
    assert {name.topic for name in rig.journal.catalog.objects()} == {"big", "small"}


def test_system_topics_are_never_archived_and_hold_their_segment(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state", RetentionPolicy(archived=lambda topic: topic != OWN))
    rig.hot.put("a", count=5)
    rig.hot.put(OWN, 3, 2)
    rig.offload(evict=True)
    assert {name.topic for name in rig.journal.catalog.objects()} == {"a"}
    assert rig.hot.evicted == []
    rig.clock.advance(72 * HOUR)
    rig.hot.pinned = 500
    assert rig.lifecycle.evict.run() == []
    rig.hot.pinned = None
    assert rig.lifecycle.evict.run() == [0]


def test_internal_topic_holds_a_segment_only_while_messages_wait(tmp_path: Path) -> None:
    """Otherwise, a broker with delayed messages could not free disk space for fileReservedTime."""
    rig = Rig(
        tmp_path / "state", RetentionPolicy(archived=lambda topic: topic != OWN, internal=lambda topic: topic == OWN)
    )
    rig.hot.put("a", count=5)
    rig.hot.put(OWN, 3, 2)
    rig.hot.pinned = 500
    rig.offload(evict=True)
    assert rig.hot.evicted == []
    rig.hot.pinned = None
    rig.offload(evict=True)
    assert rig.hot.evicted == [0]
    assert {name.topic for name in rig.journal.catalog.objects()} == {"a"}


def test_late_intent_is_completed_once(rig: Rig) -> None:
    rig.hot.put("a", count=3)
    rig.store.fail("put", UnknownOutcome("timeout"), after=True, match="journal")
    rig.store.fail("get", StoreUnavailable("down"), match="journal", skip=1)  # the first read of the job succeeds
    with pytest.raises(UnknownOutcome):
        rig.offload()
    rig.offload()
    assert rig.check_tiles("a") == 3
    assert rig.journal.catalog.rounds.last_round == 1


def test_progress_and_status(rig: Rig) -> None:
    fill(rig)
    events: list[str] = []
    assert rig.lifecycle.status()["backlog_bytes"] == 2100
    rig.lifecycle.offload.run(roll=True, evict=True, progress=lambda event: events.append(event["event"]))
    assert {"intent", "uploaded", "commit", "evicted"} <= set(events)
    status = rig.lifecycle.status()
    assert (status["archive"], status["epoch"], status["backlog_bytes"], status["gaps"]) == ("online", 1, 0, 0)


def test_intents_are_appended_before_any_object(rig: Rig) -> None:
    fill(rig)
    seen: list[str] = []
    rig.store.on_call = lambda verb, key: seen.append(key) if verb == "put" else None
    rig.lifecycle.offload.run(roll=True)
    first_data = next(index for index, key in enumerate(seen) if key.startswith("topic="))
    assert any("journal" in key for key in seen[:first_data])


def test_stop_ends_the_job_after_the_current_round(rig: Rig) -> None:
    for _ in range(3):
        rig.hot.put("a", count=2)
        rig.hot.roll()

    def stop_at_commit(event: Mapping[str, object]) -> None:
        if event["event"] == "commit":
            rig.lifecycle.stop()

    assert len(rig.lifecycle.offload.run(roll=True, progress=stop_at_commit)) == 1
    assert rig.lifecycle.status()["backlog_bytes"] > 0
    assert rig.check_tiles("a") < 6


def test_topic_restarts_at_offset_zero_only_if_never_named(rig: Rig) -> None:
    rig.hot.put("a", count=3)
    rig.hot.put("b", count=3)
    assert "a" not in rig.journal.named
    assert rig.journal.restart_at_zero("a")
    rig.hot.delete_topic("a")
    rig.hot.put("a", count=2)
    rig.offload()
    assert (rig.check_tiles("a"), rig.check_tiles("b")) == (2, 3)
    assert "a" in rig.journal.named
    assert not rig.journal.restart_at_zero("a")
    rig.restart()
    assert not rig.journal.restart_at_zero("b")


def test_topic_with_possibly_stored_intent_does_not_restart_at_zero(rig: Rig) -> None:
    rig.hot.put("a", count=3)
    with failpoint.armed("journal.after_identity"), pytest.raises(FailpointError):
        rig.offload()
    assert not rig.journal.restart_at_zero("a")
    rig.restart()
    assert not rig.journal.restart_at_zero("a")


def test_round_planned_before_topic_restart_names_no_old_offset(rig: Rig) -> None:
    rig.hot.put("a", count=5)
    rig.hot.put("b", count=2)

    def delete(name: str) -> None:
        assert rig.journal.restart_at_zero("a")
        rig.hot.delete_topic("a")
        rig.hot.put("a", count=1)

    with failpoint.armed("offload.before_intent", action=delete):
        rig.offload()
    rig.offload()
    assert (rig.check_tiles("a"), rig.check_tiles("b")) == (1, 2)


def test_rows_after_aborted_and_committed_names_are_archived(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.hot.put("a", count=2)
    rig.clock.advance(24 * HOUR)
    rig.hot.put("a", count=2)
    first, second = (time // (24 * HOUR) for time in (rig.hot.records[0][4], rig.hot.records[2][4]))
    assert first < second, "a round of two names"
    with monkeypatch.context() as active:
        active.setattr(rig.hot, "roll", lambda: True)  # the segment stays open
        rig.store.fail("put", AccessDenied("not this one"), match="topic=a", times=1)
        rig.offload()
    ((_, (name,)),) = rig.journal.catalog.rounds.open_intents().items()
    assert name.queues == {0: (0, 1)}
    del rig.hot.records[:2]  # the topic was deleted and recreated
    rig.hot.put("a")
    rig.hot.roll()
    rig.hot.put("a")
    rig.offload(evict=True)
    assert [(gap.first, gap.last) for gap in rig.journal.catalog.gaps()] == [(0, 1)]
    assert rig.check_tiles("a") == 6
    assert rig.hot.records == []


def test_round_ignores_open_intents_of_compaction(rig: Rig) -> None:
    """The number may equal that of a round and the log may have the rows, but no round completes or aborts it."""
    fill(rig)
    rig.offload()
    catalog = rig.journal.catalog
    old = catalog.objects("a")[0]
    key = f"{old.key.removesuffix('.parquet')}.{catalog.rounds.last_round}.parquet"
    queues = {queue: (first, last) for queue, (first, last, _) in old.queues.items()}
    names = [PlannedObject(key, "a", old.day, old.start, old.end, queues)]
    rig.journal.append(Intent(kind=COMPACT, round=catalog.rounds.last_round, old=[old.key], names=names))
    under_way, number = catalog.rounds.open_rewrites(), catalog.rounds.last_round
    rig.hot.put("a", count=3)
    rig.hot.roll()
    rig.offload()
    assert catalog.rounds.open_rewrites() == under_way
    assert catalog.rounds.last_round == number + 1
    assert catalog.rounds.open_intents() == {}
    assert key not in rig.store.objects
    assert rig.check_tiles("a")


def test_full_offload_ends_at_the_log_end_of_its_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a broker with constant traffic, the job ends and evicts."""
    fill(rig)
    there, flush, most = rig.hot.tail, rig.hot.flush, 50

    def taken_meanwhile() -> int:
        end = flush()
        if rig.hot.next["a", 0] < most:
            rig.hot.put("a")
        return end

    monkeypatch.setattr(rig.hot, "flush", taken_meanwhile)
    rig.lifecycle.offload.run(roll=True, evict=True)
    assert rig.hot.next["a", 0] < most, "it follows what comes"
    assert rig.hot.evicted == list(range(0, there, SEGMENT))
    assert rig.check_tiles("b", 0) == 5
