"""Tests of lazy catalogs: a reader loads only requested topics, with the state of all entries."""

from __future__ import annotations

from random import Random

import pytest

from infra.objects.store import StoreUnavailable
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.format.journal import (
    Deleted,
    Expire,
    Gap,
    Intent,
    PlannedObject,
    Replace,
    Topic,
    Unexpire,
)
from neve.archive.format.keys import journal_key
from neve.archive.read.verify import verify
from tests.kit.archive.catalog_state import expiring_keys, state_of
from tests.kit.archive.growing_journal import CUT, TOPICS, GrowingJournal
from tests.kit.archive.random_objects import QUEUES, name_of


def same(found: Catalog, expected: Catalog, topics: list[str]) -> None:
    for topic in topics:
        assert found.objects(topic) == expected.objects(topic)
        assert found.has_topic(topic) == (topic in expected.topics())
        assert found.queues(topic) == expected.queues(topic)
        assert (found.through(topic), found.topic_entry(topic)) == (
            expected.through(topic),
            expected.topic_entry(topic),
        )
        assert (found.gaps(topic), found.named_offsets(topic)) == (expected.gaps(topic), expected.named_offsets(topic))
        for queue in range(QUEUES):
            assert found.recorded_minimum(topic, queue) == expected.recorded_minimum(topic, queue)
            assert (found.min_offset(topic, queue), found.max_offset(topic, queue)) == (
                expected.min_offset(topic, queue),
                expected.max_offset(topic, queue),
            )
            assert list(found.queue(topic, queue).runs()) == list(expected.queue(topic, queue).runs())
            assert found.find(topic, queue, 35) == expected.find(topic, queue, 35)
            assert found.queue(topic, queue).by_time(2000) == expected.queue(topic, queue).by_time(2000)


def every_kind_of_entry(journal: GrowingJournal) -> None:
    """Append one entry of each kind after the checkpoint, for known topics and a new one."""
    old = journal.catalog.objects("topic-03")[:3]
    gone = journal.catalog.objects(CUT)[:2]
    made = name_of(Random(1), "topic-03", 0, rewrite=1, count=3)
    journal.append(
        Intent(round=9, names=[PlannedObject("k", "topic-01", "2026-01-01", 900, 1000, {7: (0, 9)})]),
        Replace(old=[name.key for name in old], new=[made], delete_after_ms=5),
        Expire(keys=[name.key for name in gone], delete_after_ms=7, minimums={"topic-04": {0: 4}}),
        Unexpire(keys=[gone[1].key, "of another grammar"], minimums={CUT: {0: 1}}),
        Gap(topic="topic-05", queue=0, first=1000, last=1009, reason="lost", more=[("topic-06", 1, 2000, 2001)]),
        Topic(topic="topic-07", deleted=True, minimums={0: 5000}),
        Deleted(keys=[gone[0].key]),
    )
    journal.commit("topic-08", 40)
    journal.following["new"] = 0
    journal.commit("new", 2)


@pytest.fixture
def journal() -> GrowingJournal:
    """Return a journal with parts of three checkpoints and entries after the last."""
    made = GrowingJournal()
    for topic in TOPICS:
        made.commit(topic, 5)
    made.checkpoint()
    for topic in TOPICS[::3]:
        made.commit(topic, 90)
    made.checkpoint()
    made.commit("topic-02", 3)
    made.checkpoint()
    every_kind_of_entry(made)
    return made


def test_lazy_topics_equal_those_of_all_entries(journal: GrowingJournal) -> None:
    topics = [*TOPICS, "new", "none"]
    for order in (topics, topics[::-1], Random(1).sample(topics, len(topics)) * 2):
        same(read_catalog(journal.store, "b"), journal.catalog, order)


def test_lazy_catalog_totals_equal_those_of_all_entries(journal: GrowingJournal) -> None:
    found, expected = read_catalog(journal.store, "b"), journal.catalog
    assert (found.topics(), found.topics_with_objects()) == (expected.topics(), expected.topics_with_objects())
    assert (found.object_count, found.gap_count) == (expected.object_count, expected.gap_count)
    assert (found.totals(), found.named_topics()) == (expected.totals(), expected.named_topics())
    assert (expiring_keys(found), found.gaps()) == (expiring_keys(expected), expected.gaps())
    assert sorted(name.key for name in found.objects()) == sorted(name.key for name in expected.objects())
    assert {name.key for name in found.objects_at(250)} == {name.key for name in expected.objects_at(250)}
    live = expected.objects()
    assert found.are_live(live) and all(found.knows(name.key) for name in live[::40])
    assert not found.knows("of another grammar")
    assert state_of(found) == state_of(expected)


def test_lazy_topic_is_loaded_alone_and_once(journal: GrowingJournal) -> None:
    found = read_catalog(journal.store, "b")
    read = journal.reads()
    same(found, journal.catalog, ["topic-10"])
    assert len(read) == 1 and read[0] in journal.packs()
    same(found, journal.catalog, ["topic-10", "none"])
    assert len(read) == 1


def test_iteration_over_all_topics_holds_and_requests_little(
    journal: GrowingJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neve.archive.catalog.lazy_topics.LOADED_OBJECTS", 100)
    found = read_catalog(journal.store, "b")
    read = journal.reads()
    assert sorted(name.key for name in found.each_object()) == sorted(name.key for name in journal.catalog.objects())
    assert found._lazy is not None
    assert sum(of.count for of in found._lazy._loaded.values()) <= 100
    assert len(read) <= 3 * len(journal.packs()), "much at a time, though topics are taken one by one"
    assert found._lazy._ahead == {}, "nothing follows the last one"
    same(found, journal.catalog, TOPICS)
    for name in journal.catalog.objects():
        journal.store.put(name.key, bytes(name.size))
    checked = verify(found, journal.store)
    assert (checked.objects, checked.gaps) == (journal.catalog.object_count, journal.catalog.gap_count)
    assert checked.problems == verify(journal.catalog, journal.store).problems


@pytest.mark.parametrize("harm", ["gone", "flipped", "cut"])
@pytest.mark.parametrize("newest_alone", [True, False])
def test_damaged_part_falls_back_to_earlier_checkpoint_then_entries(
    journal: GrowingJournal, harm: str, newest_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neve.archive.catalog.lazy_topics.LOADED_OBJECTS", 1)
    packs = journal.packs()
    for key in packs[-1:] if newest_alone else packs:
        data, when = journal.store.objects.pop(key)
        if harm == "flipped":
            journal.store.objects[key] = (bytes(byte ^ 1 for byte in data), when)
        elif harm == "cut":
            journal.store.objects[key] = (data[: len(data) // 2], when)
    found = read_catalog(journal.store, "b")
    read = journal.reads()
    same(found, journal.catalog, [*TOPICS, "new", *TOPICS[::-1]])
    assert (journal_key("", "b", 0) in read) == (not newest_alone), "only where no checkpoint has it"


def test_failed_topic_load_raises_and_is_retried(journal: GrowingJournal) -> None:
    found = read_catalog(journal.store, "b")
    journal.store.fail("get_range", StoreUnavailable("down"), times=2)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            found.max_offset("topic-08", 0)
    same(found, journal.catalog, ["topic-08"])
