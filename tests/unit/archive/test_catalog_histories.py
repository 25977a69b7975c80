"""Regression tests of defects in the catalog that the storage simulation found."""

from __future__ import annotations

import pytest

from neve.archive.catalog.catalog import Catalog, GapHit, Location
from neve.archive.format.journal import Abort, AnyEntry, Commit, Deleted, Expire, Gap, Topic
from neve.archive.read.verify import verify
from tests.kit.archive.checkpoints import restored
from tests.kit.archive.journal_entries import committed, intent
from tests.kit.store.memory_store import MemoryStore


def test_through_advances_over_a_later_day_committed_first() -> None:
    early = committed("early", [(0, 0, 4)], start=0, end=100)
    late = committed("late", [(0, 5, 9)], start=100, end=200)
    catalog = Catalog()
    catalog.apply(0, intent(1, early, late))
    catalog.apply(1, Commit(round=1, names=[late]))
    assert catalog.through("t") == 0
    assert catalog.next_uncovered("t", 0) == (0, 100), "a further round must not take the later day again"
    catalog.apply(2, Commit(round=1, names=[early]))
    assert catalog.through("t") == 200
    assert catalog.next_uncovered("t", 0) == (200, None)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("aborted", [False, True])
def test_range_of_a_deleted_object_is_not_archived_again(checkpoint: bool, aborted: bool) -> None:
    early = committed("early", [(0, 0, 4)], start=0, end=100)
    late = committed("late", [(0, 5, 9)], start=100, end=200)
    catalog = Catalog()
    catalog.apply(0, intent(1, early, late))
    catalog.apply(1, Commit(round=1, names=[late]))
    catalog.apply(2, Expire(keys=[late.key], delete_after_ms=0, minimums={"t": {0: 10}}))
    catalog.apply(3, Deleted(keys=[late.key]))
    if checkpoint:
        catalog = restored(catalog)
    if aborted:
        catalog.apply(4, Abort(round=1, keys=[early.key]))
        assert catalog.next_uncovered("t", 0) == (0, 100)
        assert catalog.next_uncovered("t", 100) == (200, None)
    else:
        catalog.apply(4, Commit(round=1, names=[early]))
        assert catalog.through("t") == 200


def test_minimum_offset_is_an_archived_offset() -> None:
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[committed("old", [(0, 0, 9)], start=0, end=100)]))
    catalog.apply(1, Topic(topic="t", deleted=True, minimums={0: 10}))
    catalog.apply(2, Gap(topic="t", queue=0, first=10, last=99, reason="restored"))
    assert catalog.min_offset("t", 0) is None
    catalog.apply(3, Commit(round=2, names=[committed("new", [(0, 100, 104)], start=100, end=200)]))
    assert catalog.min_offset("t", 0) == 100


def test_queue_expired_before_its_first_round_is_known() -> None:
    catalog = Catalog()
    catalog.apply(0, Expire(keys=[], delete_after_ms=0, minimums={"t": {3: 7}}))
    assert catalog.named_offsets("t") == {3: 6}
    assert "t" in catalog.named_topics()


@pytest.mark.parametrize("gap_first", [True, False])
def test_offset_of_an_object_is_in_no_gap_even_after_expiry(gap_first: bool) -> None:
    old, later = committed("old", [(0, 0, 4)], start=0, end=100), committed("later", [(0, 20, 24)], start=200, end=300)
    back = committed("back", [(0, 7, 9), (0, 12, 12)], start=100, end=200)
    gap, commit = Gap(topic="t", queue=0, first=5, last=19, reason="lost"), Commit(round=2, names=[back])
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[old, later]))
    entries: list[AnyEntry] = [gap, commit] if gap_first else [commit, gap]
    for seq, entry in enumerate(entries, 1):
        catalog.apply(seq, entry)
    left = [(5, 6), (10, 11), (13, 19)]
    assert catalog.queue("t", 0).gap_spans() == [(gap.first, gap.last) for gap in catalog.gaps("t")] == left
    assert catalog.gap_count == len(catalog.gaps()) == 3
    assert catalog.queue("t", 0).count_existing(0, 25) == 5 + 4 + 5
    assert [catalog.find("t", 0, offset) for offset in (6, 13)] == [GapHit(5, 7), GapHit(13, 20)]
    found = catalog.find("t", 0, 8)
    assert isinstance(found, Location)
    assert found.name.key == back.key
    assert not [problem for problem in verify(catalog, MemoryStore()).problems if "offsets" in problem]
    catalog.apply(3, Expire(keys=[back.key], delete_after_ms=0, minimums={}))
    catalog.apply(4, Deleted(keys=[back.key]))
    after = restored(catalog)
    assert after.queue("t", 0).gap_spans() == catalog.queue("t", 0).gap_spans() == left


def test_repeated_gap_is_counted_once() -> None:
    catalog = Catalog()
    catalog.apply(0, Gap(topic="t", queue=0, first=5, last=9, reason="lost"))
    catalog.apply(1, Gap(topic="t", queue=0, first=5, last=9, reason="lost"))
    catalog.apply(2, Gap(topic="t", queue=0, first=3, last=12, reason="lost"))
    assert catalog.queue("t", 0).gap_spans() == [(3, 4), (5, 12)]
    assert catalog.queue("t", 0).count_existing(0, 20) == 10


def test_gap_is_dropped_once_no_object_below_it_can_return() -> None:
    old, later = committed("old", [(0, 0, 4)], start=0, end=100), committed("later", [(0, 20, 24)], start=200, end=300)
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[old, later]))
    catalog.apply(1, Gap(topic="t", queue=0, first=5, last=19, reason="restored"))
    catalog.apply(2, Gap(topic="t", queue=0, first=25, last=30, reason="restored"))
    catalog.apply(3, Gap(topic="t", queue=1, first=0, last=9, reason="restored"))
    catalog.apply(4, Expire(keys=[old.key], delete_after_ms=0, minimums={"t": {0: 20}}))
    assert catalog.queue("t", 0).gap_spans() == [(5, 19), (25, 30)], (
        "the old one may come back, and the gap is above it"
    )
    catalog.apply(5, Deleted(keys=[old.key]))
    after = restored(catalog)
    assert after.queue("t", 0).gap_spans() == catalog.queue("t", 0).gap_spans() == [(25, 30)]
    assert after.queue("t", 1).gap_spans() == [(0, 9)], "a queue of which nothing has expired"
    assert after.gap_count == catalog.gap_count == 2
    assert after.find("t", 0, 10) is None, "as all below the minimum"
    assert not [problem for problem in verify(catalog, MemoryStore()).problems if "offsets" in problem]


def test_repeated_restores_of_an_idle_queue_make_one_gap() -> None:
    catalog = Catalog()
    for number in range(3):
        catalog.apply(
            number, Gap(topic="t", queue=0, first=10 * number, last=10 * number + 9, reason="restored", epoch=number)
        )
    catalog.apply(3, Gap(topic="t", queue=0, first=30, last=39, reason="lost"))
    assert [(gap.first, gap.last, gap.reason) for gap in catalog.gaps("t")] == [(0, 29, "restored"), (30, 39, "lost")]
    assert restored(catalog).queue("t", 0).gap_spans() == catalog.queue("t", 0).gap_spans() == [(0, 29), (30, 39)]
    assert catalog.find("t", 0, 12) == GapHit(0, 30)
    assert catalog.gap_count == 2


def test_gap_across_an_object_is_split_and_joined() -> None:
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[committed("a", [(0, 13, 19)], start=0, end=100)]))
    catalog.apply(1, Gap(topic="t", queue=0, first=5, last=9, reason="lost"))
    catalog.apply(2, Gap(topic="t", queue=0, first=7, last=25, reason="lost"))
    assert (
        [(gap.first, gap.last) for gap in catalog.gaps("t")] == [(5, 12), (20, 25)] == catalog.queue("t", 0).gap_spans()
    )
