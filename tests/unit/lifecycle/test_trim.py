"""Tests of trim: an operator sets the first offset of queues in both tiers."""

from __future__ import annotations

from pathlib import Path

import pytest

from infra import failpoint
from lifecycle.retention import RetentionPolicy
from lifecycle.retention_jobs import RetentionJobs
from lifecycle.safe_clock import SafeClock
from lifecycle.trim import Trimmed, TrimRefused
from neve.archive.catalog.journal_reader import entries
from neve.archive.format.journal import Expire
from tests.unit.lifecycle.fakes import Rig

HOUR = 3_600_000


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Return a rig with three objects of `a` (3, 2 and 4 messages), 2 unarchived messages, and no TTL."""
    rig = Rig(tmp_path / "state", RetentionPolicy(ttl_hours=lambda topic: None))
    for count in (3, 2, 4):
        rig.hot.put("a", count=count)
        rig.offload(evict=True)
        rig.clock.advance(HOUR)
    rig.hot.put("a", count=2)
    return rig


def lowest(rig: Rig) -> int | None:
    """Return the first offset that readers of the archive see."""
    return rig.journal.catalog.min_offset("a", 0)


def test_trim_deletes_whole_objects_after_grace_and_hides_a_part(rig: Rig) -> None:
    names = rig.journal.catalog.objects("a")
    assert rig.lifecycle.trim.run("a", {0: 4}) == Trimmed("a", {0: 4}, 1)
    assert rig.journal.catalog.objects("a") == names[1:]
    assert (lowest(rig), rig.journal.catalog.recorded_minimum("a", 0)) == (4, 4)
    assert rig.lifecycle.expire.run()["expired"] == 0
    rig.clock.advance(25 * HOUR)
    assert rig.lifecycle.expire.run()["deleted"] == 1
    assert rig.journal.catalog.objects("a") == names[1:]
    assert lowest(rig) == 4


def test_trim_of_unarchived_messages_survives_their_round(rig: Rig) -> None:
    assert rig.lifecycle.trim.run("a", {0: 10}) == Trimmed("a", {0: 10}, 3)
    assert rig.hot.min_offset("a", 0) == 10
    assert rig.journal.catalog.objects("a") == []
    rig.offload(evict=True)
    assert lowest(rig) == 10
    assert rig.journal.catalog.queue("a", 0).count_existing(10, 11) == 1


def test_trim_of_all_messages_keeps_counting_offsets(rig: Rig) -> None:
    rig.lifecycle.trim.run("a", {0: 11})
    rig.hot.put("a", count=1)
    assert rig.hot.min_offset("a", 0) == 11
    rig.offload(evict=True)
    assert (lowest(rig), rig.journal.catalog.max_offset("a", 0)) == (11, 12)


def test_trim_refuses_offsets_above_the_end_and_ignores_lower_ones(rig: Rig) -> None:
    rig.lifecycle.trim.run("a", {0: 5})
    seq = rig.journal.catalog.next_seq
    assert rig.lifecycle.trim.run("a", {0: 3}).begins == {0: 5}
    assert rig.journal.catalog.next_seq == seq, "there is nothing to record"
    with pytest.raises(TrimRefused, match="queue 0 ends at 11"):
        rig.lifecycle.trim.run("a", {0: 12})
    with pytest.raises(TrimRefused, match="no message in queue 7"):
        rig.lifecycle.trim.run("a", {0: 6, 7: 1})
    with pytest.raises(TrimRefused, match="no message in queue 0"):
        rig.lifecycle.trim.run("nobody", {0: 1})
    assert lowest(rig) == 5


def test_repeated_trim_completes_one_killed_between_archive_and_log(rig: Rig) -> None:
    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failpoint, "hit", lambda name: die() if name == "trim.after_expire" else None)
        with pytest.raises(Killed):
            rig.lifecycle.trim.run("a", {0: 10})
    assert lowest(rig) is None
    assert rig.hot.min_offset("a", 0) < 10
    assert rig.lifecycle.trim.run("a", {0: 10}) == Trimmed("a", {0: 10}, 0)
    assert rig.hot.min_offset("a", 0) == 10


def test_large_trim_writes_the_minimum_with_its_first_entry(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lifecycle.trim._BATCH", 2)
    before = rig.journal.catalog.next_seq
    assert rig.lifecycle.trim.run("a", {0: 9}).objects == 3
    found = [entry for _, entry in entries(rig.journal.store, rig.journal.broker, rig.journal.prefix, before)]
    told = [(len(one.keys), one.minimums, one.reason) for one in found if isinstance(one, Expire)]
    assert told == [(2, {"a": {0: 9}}, "trimmed"), (1, {}, "trimmed")]


def test_trim_can_be_undone_within_the_grace(rig: Rig) -> None:
    names = rig.journal.catalog.objects("a")
    rig.lifecycle.trim.run("a", {0: 10})
    rig.lifecycle.unexpire.run()
    assert rig.journal.catalog.objects("a") == names
    assert lowest(rig) == 0


def test_trim_without_archive_is_refused_in_a_broker_set(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "state")
    rig.hot.put("a", count=5)

    def local(*, is_member: bool) -> RetentionJobs:
        clock = SafeClock(rig.clock)
        return RetentionJobs(rig.hot, RetentionPolicy, rig.clock, clock, is_member=is_member)

    with pytest.raises(TrimRefused, match="without an archive"):
        local(is_member=True).trim.run("a", {0: 2})
    assert local(is_member=False).trim.run("a", {0: 2}) == Trimmed("a", {0: 2}, 0)
    assert rig.hot.min_offset("a", 0) == 2
