"""What the simulation of the storage side found in the catalog, each as a history of its own."""

from __future__ import annotations

import pytest

from neve.archive.catalog import Catalog
from neve.archive.checkpoint import decode_checkpoint, encode_checkpoint
from neve.archive.journal import Abort, Commit, Deleted, Expire, Gap, Topic
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
