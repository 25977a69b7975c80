"""Tests of REPLACE: readers find each row once at every instant, and replaced objects never return."""

from __future__ import annotations

import pytest

from neve.archive.catalog.catalog import Location
from neve.archive.catalog.topic_catalog import LAID_WHEN_ASKED
from neve.archive.format.journal import Commit, Deleted, Expire, Replace
from neve.archive.policy.unexpiry import plan_unexpiry
from tests.kit.archive.catalog_state import expiring_keys
from tests.kit.archive.checkpoints import restored
from tests.unit.archive.replaced_objects import OLD, ROWS, before_each_line, catalog_of, name_of

NEW = name_of(0, 400, [(0, 0, 24)], [(0, 25, 29), (1, 0, 14)], rewrite=1)
REPLACE = Replace(old=[name.key for name in OLD], new=[NEW], delete_after_ms=99)


@pytest.mark.parametrize("by_checkpoint", [False, True])
@pytest.mark.parametrize("laid", [0, LAID_WHEN_ASKED])
def test_replace_never_hides_or_duplicates_a_row(
    by_checkpoint: bool, laid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neve.archive.catalog.topic_catalog.LAID_WHEN_ASKED", laid)
    catalog = catalog_of(Commit(round=1, names=OLD))
    catalog = restored(catalog) if by_checkpoint else catalog

    def look() -> None:
        for queue, count in ROWS.items():
            for offset in range(count):
                found = catalog.find("t", queue, offset)
                assert isinstance(found, Location), f"offset {offset} of queue {queue} is nowhere"
                assert found.first <= offset <= found.last
            spans = [(run.first, run.last) for run in catalog.queue("t", queue).runs()]
            assert sum(last - first + 1 for first, last in spans) == count
            assert (catalog.min_offset("t", queue), catalog.max_offset("t", queue)) == (0, count)
            assert catalog.queue("t", queue).has_all(0, count)
        keys = [name.key for name in catalog.objects("t")]
        assert keys in ([name.key for name in OLD], [NEW.key])
        assert catalog.topics_with_objects() == ["t"]

    with before_each_line(look) as lines:
        catalog.apply(1, REPLACE)
    assert lines[0] > 20
    assert [name.key for name in catalog.objects("t")] == [NEW.key]
    assert expiring_keys(catalog) == dict.fromkeys(REPLACE.old, 99)


def test_rewrite_changes_no_mark_of_the_log_and_no_minimum() -> None:
    before = catalog_of(Commit(round=1, names=OLD), Expire(keys=[], delete_after_ms=0, minimums={"t": {0: 3}}))
    after = catalog_of(Commit(round=1, names=OLD), Expire(keys=[], delete_after_ms=0, minimums={"t": {0: 3}}), REPLACE)
    for catalog in (before, after):
        assert catalog.through("t") == 400
        assert catalog.next_uncovered("t", 0) == (400, None)
        assert catalog.recorded_minimum("t", 0) == catalog.min_offset("t", 0) == 3
        assert catalog.named_offsets("t") == {0: 29, 1: 14}
        assert catalog.next_seq - 1 == (2 if catalog is after else 1)
    assert after.rounds.intent_end == before.rounds.intent_end and after.rounds.last_round == before.rounds.last_round


def test_checkpoint_after_replace_restores_the_same_catalog() -> None:
    catalog = catalog_of(Commit(round=1, names=OLD), REPLACE)
    again = restored(catalog)
    assert again.objects() == catalog.objects() == [NEW]
    assert expiring_keys(again) == expiring_keys(catalog)


@pytest.mark.parametrize("new_expired", [False, True])
@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_unexpire_never_returns_a_replaced_object(new_expired: bool, by_checkpoint: bool) -> None:
    catalog = catalog_of(Commit(round=1, names=OLD), REPLACE)
    if new_expired:
        catalog.apply(2, Expire(keys=[NEW.key], delete_after_ms=100, minimums={"t": {0: 30, 1: 15}}))
    if by_checkpoint:
        catalog = restored(catalog)
    undo = plan_unexpiry(catalog, {}, lambda topic: None, 60, lambda key: True)
    assert undo.keys == ([NEW.key] if new_expired else [])
    assert undo.minimums == ({"t": {0: 0, 1: 0}} if new_expired else {})


def test_object_replaced_twice_does_not_return() -> None:
    again = name_of(0, 400, [(0, 0, 29), (1, 0, 14)], rewrite=2)
    catalog = catalog_of(Commit(round=1, names=OLD), REPLACE, Replace(old=[NEW.key], new=[again], delete_after_ms=100))
    assert plan_unexpiry(catalog, {}, lambda topic: None, 60, lambda key: True).keys == []
    catalog.apply(3, Deleted(keys=REPLACE.old))
    assert plan_unexpiry(catalog, {}, lambda topic: None, 60, lambda key: True).keys == []


def test_offsets_of_overlapping_runs_in_a_block_are_found() -> None:
    """An older copy of a log, archived later, may have overlapping runs; `verify` reports them."""
    names = [name_of(0, 100, [(0, 0, 9)]), name_of(100, 200, [(0, 3, 4)]), name_of(200, 300, [(0, 12, 13)])]
    catalog = catalog_of(Commit(round=1, names=names))
    found = [catalog.find("t", 0, at) for at in range(14)]
    assert [one.name.start if isinstance(one, Location) else None for one in found] == [
        0, 0, 0, 100, 100, 0, 0, 0, 0, 0, None, None, 200, 200
    ]  # fmt: skip
