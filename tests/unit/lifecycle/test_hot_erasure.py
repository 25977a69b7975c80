"""Tests that each member hides the rows in its local log that the journal records as erased."""

from __future__ import annotations

from pathlib import Path

import pytest

from lifecycle.hot_erasure import HotErasure
from lifecycle.hot_store import Hidden
from lifecycle.retention import RetentionPolicy
from neve.archive.format.journal import ERASED, Expire, Gap
from tests.unit.lifecycle.fakes import Rig
from tests.unit.lifecycle.members import ArchivingSet


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    rig.hot.put("a", 0, 9)
    rig.hot.put("a", 1, 4)
    rig.hot.put("b", 0, 6)
    return rig


def gap(topic: str, queue: int, first: int, last: int, reason: str = f"{ERASED}e1.7") -> Gap:
    return Gap(topic=topic, queue=queue, first=first, last=last, reason=reason)


def test_only_gaps_of_erasures_are_hidden(rig: Rig) -> None:
    """Other gaps hide nothing: an older copy of the log may have brought the lost messages back."""
    for one in (gap("a", 0, 2, 3), gap("a", 0, 4, 5, "lost"), gap("a", 1, 0, 0), gap("b", 0, 1, 1, "not archived")):
        rig.journal.append(one)
    assert rig.lifecycle.hot_erasure.run() == 2
    assert rig.hot.hidden == {("a", 0): {2, 3}, ("a", 1): {0}}
    assert rig.hot.minimums == {}


def test_hot_erasure_hides_each_journal_entry_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    hide, asked = rig.hot.hide_erased, list[int]()

    def hide_erased(rows: list[tuple[str, int, int, int]]) -> Hidden:
        asked.append(len(rows))
        return hide(rows)

    monkeypatch.setattr(rig.hot, "hide_erased", hide_erased)
    job = rig.lifecycle.hot_erasure.run
    rig.journal.append(gap("a", 0, 2, 3))
    assert [job(), job(), job()] == [1, 0, 0]
    assert asked == [1]
    rig.journal.append(gap("b", 0, 2, 3))
    assert [job(), job()] == [1, 0]
    assert asked == [1, 2]


def test_hot_erasure_retries_after_a_disk_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.journal.append(gap("a", 0, 2, 3))
    hide = rig.hot.hide_erased

    def full(rows: object) -> int:
        raise OSError("no room")

    monkeypatch.setattr(rig.hot, "hide_erased", full)
    with pytest.raises(OSError, match="no room"):
        rig.lifecycle.hot_erasure.run()
    monkeypatch.setattr(rig.hot, "hide_erased", hide)
    assert rig.lifecycle.hot_erasure.run() == 1


def test_hot_erasure_resumes_after_restart(rig: Rig) -> None:
    rig.journal.append(gap("a", 0, 2, 3))
    rig.restart()
    assert rig.lifecycle.hot_erasure.run() == 1
    assert rig.hot.hidden == {("a", 0): {2, 3}}


def test_copied_log_hides_no_offset_that_may_be_reused(rig: Rig) -> None:
    """If that log continued below its archive, or the topic was recreated, the offsets belong to other messages."""
    rig.journal.append(gap("a", 0, 2, 3))
    rig.journal.append(gap("b", 0, 1, 1))
    lifecycle, at = rig.lifecycle, [500]
    policy = RetentionPolicy(deleted_up_to=lambda topic: 100 if topic == "a" else 0)
    job = HotErasure(
        rig.hot, rig.journal, lambda: policy, lifecycle.turns, described_below=lambda: at[0], is_copy=True
    )  # fmt: skip
    assert job.run() == 0
    at[0] = 1 << 62
    assert job.run() == 1
    assert rig.hot.hidden == {("b", 0): {1}}


def test_slave_hides_erased_rows_after_it_follows_the_journal(tmp_path: Path) -> None:
    both = ArchivingSet(tmp_path)
    both.a.hot.put("a", 0, 9)
    both.replicate()
    both.elect(both.a)
    both.a.journal.ownership.ensure_online()
    both.a.journal.append(gap("a", 0, 2, 3))
    both.a.journal.append(gap("a", 0, 9, 9))
    assert both.a.lifecycle.hot_erasure.run() == 1
    slave = both.b.lifecycle
    assert slave.hot_erasure.run() == 0, "it has not read of it"
    slave.evict.run()  # this job runs every ten seconds and follows the journal
    assert slave.hot_erasure.run() == 1
    assert both.b.hot.hidden == {("a", 0): {2, 3}}
    both.a.hot.put("a", 0, 1)
    both.replicate()
    assert slave.hot_erasure.run() == 1, "though the journal has nothing new: it had to get it first"
    assert both.b.hot.hidden == {("a", 0): {2, 3, 9}}


def test_unexpire_keeps_erased_rows_hidden(rig: Rig) -> None:
    rig.journal.append(gap("a", 0, 2, 3))
    rig.lifecycle.hot_erasure.run()
    rig.journal.append(Expire(keys=[], delete_after_ms=1 << 60, minimums={"a": {0: 6}}))
    rig.hot.minimums["a", 0] = 6
    rig.lifecycle.unexpire.run()
    assert rig.hot.min_offset("a", 0) == 0
    assert rig.hot.erased("a") == {0: [(2, 2), (3, 3)]}
