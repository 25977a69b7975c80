"""What the simulation of the storage side found in the catalog, each as a history of its own."""

from __future__ import annotations

import pytest

from neve.archive.catalog import Catalog, GapHit, Location
from neve.archive.checkpoint import decode_checkpoint, encode_checkpoint
from neve.archive.journal import Abort, AnyEntry, Commit, Deleted, Expire, Gap, Topic
from neve.archive.verify import verify
from tests.doubles.memory_store import MemoryStore
from tests.unit.archive.test_keys_journal_catalog import committed, intent


def test_a_topic_is_settled_through_the_later_day_that_was_committed_first() -> None:
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
def test_an_object_that_was_deleted_before_the_one_below_it_was_committed_is_not_made_again(
    checkpoint: bool, aborted: bool
) -> None:
    early = committed("early", [(0, 0, 4)], start=0, end=100)
    late = committed("late", [(0, 5, 9)], start=100, end=200)
    catalog = Catalog()
    catalog.apply(0, intent(1, early, late))
    catalog.apply(1, Commit(round=1, names=[late]))
    catalog.apply(2, Expire(keys=[late.key], delete_after_ms=0, minimums={"t": {0: 10}}))
    catalog.apply(3, Deleted(keys=[late.key]))
    if checkpoint:
        state = decode_checkpoint(encode_checkpoint(catalog.state("b")), "b")
        catalog = Catalog()
        catalog.restore(state)
    if aborted:
        catalog.apply(4, Abort(round=1, keys=[early.key]))
        assert catalog.next_uncovered("t", 0) == (0, 100)
        assert catalog.next_uncovered("t", 100) == (200, None)
    else:
        catalog.apply(4, Commit(round=1, names=[early]))
        assert catalog.through("t") == 200


def test_the_minimum_is_an_offset_that_the_archive_has() -> None:
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[committed("old", [(0, 0, 9)], start=0, end=100)]))
    catalog.apply(1, Topic(topic="t", deleted=True, minimums={0: 10}))
    catalog.apply(2, Gap(topic="t", queue=0, first=10, last=99, reason="restored"))
    assert catalog.min_offset("t", 0) is None
    catalog.apply(3, Commit(round=2, names=[committed("new", [(0, 100, 104)], start=100, end=200)]))
    assert catalog.min_offset("t", 0) == 100


def test_a_queue_that_expired_before_its_first_round_is_known() -> None:
    catalog = Catalog()
    catalog.apply(0, Expire(keys=[], delete_after_ms=0, minimums={"t": {3: 7}}))
    assert catalog.named_offsets("t") == {3: 6}
    assert "t" in catalog.named_topics()


@pytest.mark.parametrize("gap_first", [True, False])
def test_what_an_object_holds_is_in_no_gap_also_when_it_has_expired(gap_first: bool) -> None:
    old, later = committed("old", [(0, 0, 4)], start=0, end=100), committed("later", [(0, 20, 24)], start=200, end=300)
    back = committed("back", [(0, 7, 9), (0, 12, 12)], start=100, end=200)
    gap, commit = Gap(topic="t", queue=0, first=5, last=19, reason="lost"), Commit(round=2, names=[back])
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[old, later]))
    entries: list[AnyEntry] = [gap, commit] if gap_first else [commit, gap]
    for seq, entry in enumerate(entries, 1):
        catalog.apply(seq, entry)
    left = [(5, 6), (10, 11), (13, 19)]
    assert catalog.gap_spans("t", 0) == [(gap.first, gap.last) for gap in catalog.gaps("t")] == left
    assert catalog.gap_count == len(catalog.gaps()) == 3
    assert catalog.count_existing("t", 0, 0, 25) == 5 + 4 + 5
    assert [catalog.find("t", 0, offset) for offset in (6, 13)] == [GapHit(5, 7), GapHit(13, 20)]
    found = catalog.find("t", 0, 8)
    assert isinstance(found, Location)
    assert found.name.key == back.key
    assert not [problem for problem in verify(catalog, MemoryStore()).problems if "offsets" in problem]
    catalog.apply(3, Expire(keys=[back.key], delete_after_ms=0, minimums={}))
    catalog.apply(4, Deleted(keys=[back.key]))
    after = Catalog()
    after.restore(decode_checkpoint(encode_checkpoint(catalog.state("b")), "b"))
    assert after.gap_spans("t", 0) == catalog.gap_spans("t", 0) == left


def test_a_gap_that_is_told_twice_is_counted_once() -> None:
    catalog = Catalog()
    catalog.apply(0, Gap(topic="t", queue=0, first=5, last=9, reason="lost"))
    catalog.apply(1, Gap(topic="t", queue=0, first=5, last=9, reason="lost"))
    catalog.apply(2, Gap(topic="t", queue=0, first=3, last=12, reason="lost"))
    assert catalog.gap_spans("t", 0) == [(3, 4), (5, 9), (10, 12)]
    assert catalog.count_existing("t", 0, 0, 20) == 10
