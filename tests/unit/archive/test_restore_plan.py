"""Tests of the restore plan: no offset is reused, and lost messages are counted."""

from __future__ import annotations

from typing import Any

import msgspec

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.broker_state import BrokerState, encode_state
from neve.archive.format.journal import AnyEntry, Commit, Epoch, Expire, Gap, Topic, encode_entry
from neve.archive.format.keys import journal_key, state_key
from tests.kit.archive.journal_entries import committed, intent
from tests.kit.store.memory_store import MemoryStore
from tiered.journal.restore_plan import LOG_MARGIN, QUEUE_MARGIN, Basis, RestorePlan, gaps_of, plan_restore, read_basis

SEGMENT = 1000
ENTRIES: list[AnyEntry] = [
    Epoch(epoch=1, owner="o", log_uuid="u"),
    Commit(round=1, names=[committed("a", [(0, 0, 9), (1, 0, 4)])]),
    intent(2, committed("b", [(0, 10, 14)], start=100, end=250)),
]
STATE = BrokerState(
    broker="b", epoch=1, number=7, next_seq=3, log_end=1100, time_ms=5,
    topics=[
        {"topicName": "t", "readQueueNums": 4, "writeQueueNums": 4, "attributes": {"reserve.time": "72"}},
        {"topicName": "rmq_sys_wheel_timer", "readQueueNums": 1, "writeQueueNums": 1},
    ],
    groups=[{"groupName": "g"}], forbidden={"g": ["t"]},
    offsets={"t@g": {0: 12, 1: 3, 3: 40}, "gone@g": {0: 9}},
    queues={"t": {0: 20, 1: 5, 2: 7}, "rmq_sys_wheel_timer": {0: 3}, "gone": {0: 6}},
    pending={"timers": 3, "half_messages": 1},
)  # fmt: skip


def catalog_of(*entries: AnyEntry) -> Catalog:
    catalog = Catalog()
    for seq, entry in enumerate(entries):
        catalog.apply(seq, entry)
    return catalog


def plan(
    catalog: Catalog | None = None, state: BrokerState | None = STATE, deleted: tuple[str, ...] = ()
) -> RestorePlan:
    return plan_restore(
        catalog or catalog_of(*ENTRIES), Basis(state, list(deleted)), "b", segment=SEGMENT,
        archived=lambda topic: not topic.startswith("rmq_sys_"),
    )  # fmt: skip


def test_restored_queues_resume_above_every_known_offset() -> None:
    made = plan()
    highest = {0: 20, 1: 5, 2: 7, 3: 40}  # the state, the objects, the state, a group's offset
    assert made.queues["t"] == {queue: end + QUEUE_MARGIN for queue, end in highest.items()}
    assert made.queues["rmq_sys_wheel_timer"] == {0: 3 + QUEUE_MARGIN}, "ids of half messages and timers are given once"
    assert made.ended == {"gone": {0: 9 + QUEUE_MARGIN}}
    higher = plan(catalog_of(*ENTRIES, intent(3, committed("c", [(0, 50, 59)], start=3000, end=4000))))
    assert higher.queues["t"][0] == 60 + QUEUE_MARGIN


def test_restored_log_resumes_at_a_segment_above_every_known_offset() -> None:
    assert plan().log_start % SEGMENT == 0
    assert plan().log_start >= 1100 + LOG_MARGIN
    assert plan(state=None).log_start >= 250 + LOG_MARGIN


def test_fully_consumed_group_has_no_lag_after_restore() -> None:
    made = plan()
    assert made.offsets == {"t@g": {0: 12 + 8 + QUEUE_MARGIN, 1: 3, 3: 40 + QUEUE_MARGIN}}


def test_restore_counts_lost_messages_by_topic() -> None:
    report = plan().report
    assert report["lost"] == {"messages": 17, "by_topic": {"t": 17}, "timers": 3, "half_messages": 1}
    assert (report["topics"], report["groups"], report["objects"], report["messages"]) == (1, 1, 1, 10)


def test_restore_without_state_uses_topics_and_ends_of_the_archive() -> None:
    made = plan(state=None)
    assert made.topics == [{"topicName": "t", "readQueueNums": 2, "writeQueueNums": 2}]
    assert made.queues == {"t": {0: 15 + QUEUE_MARGIN, 1: 5 + QUEUE_MARGIN}}
    assert (made.groups, made.offsets, made.report["state"]) == ([], {}, None)


def test_queues_below_a_known_queue_are_restored() -> None:
    """A fully expired topic is not recreated, but its next offsets are kept."""
    expired = Expire(keys=[], delete_after_ms=1, minimums={"old": {3: 9}})
    made = plan(catalog_of(*ENTRIES, expired), state=None)
    assert made.ended["old"] == {3: 9 + QUEUE_MARGIN, **dict.fromkeys((0, 1, 2), QUEUE_MARGIN)}


def test_restore_records_the_hole_as_one_gap() -> None:
    catalog = catalog_of(*ENTRIES)
    queues = {"t": plan().queues["t"]}
    (gap,) = gaps_of(catalog, queues)
    catalog.apply(catalog.next_seq, gap)
    spans = [(found.queue, found.first, found.last + 1) for found in catalog.gaps()]
    assert spans == [(queue, first, queues["t"][queue]) for queue, first in ((0, 15), (1, 5), (2, 0), (3, 0))]
    assert all(isinstance(found, Gap) and not found.more for found in catalog.gaps())
    assert gaps_of(catalog, queues) == []
    assert catalog.named_offsets("t")[2] == queues["t"][2] - 1


def test_expired_range_is_no_gap() -> None:
    catalog = catalog_of(*ENTRIES[:2], Expire(keys=["a"], delete_after_ms=1, minimums={"t": {2: 5}}))
    (gap,) = gaps_of(catalog, {"t": {2: 9}})
    assert (gap.first, gap.last) == (5, 8)


def test_restore_keeps_topics_newer_than_the_state_and_drops_deleted() -> None:
    young = msgspec.structs.replace(committed("y", [(2, 0, 9)]), topic="young")
    entries: list[AnyEntry] = [
        *ENTRIES,
        Topic(topic="t", deleted=True, minimums={0: 20, 1: 5}),
        Commit(round=9, names=[young]),
    ]
    store = MemoryStore()
    for seq, entry in enumerate(entries):
        store.put(journal_key("", "b", seq), encode_entry(entry))
    store.put(state_key("", "b", 0), encode_state(STATE))
    basis = read_basis(store, "b")
    assert basis.state is not None
    assert (basis.state.number, basis.deleted) == (7, ["t"])
    made = plan(catalog_of(*entries), basis.state, tuple(basis.deleted))
    names: list[Any] = [topic["topicName"] for topic in made.topics]
    assert names == ["rmq_sys_wheel_timer", "young"]
    assert made.ended["t"] == {0: 20 + QUEUE_MARGIN, 1: 5 + QUEUE_MARGIN, 2: 7 + QUEUE_MARGIN, 3: 40 + QUEUE_MARGIN}
    assert "t@g" not in made.offsets


def test_empty_queue_of_last_state_resumes_above_the_margin() -> None:
    state = msgspec.structs.replace(STATE, queues={}, offsets={})
    assert plan(catalog_of(ENTRIES[0]), state).queues["t"] == dict.fromkeys(range(4), QUEUE_MARGIN)


def test_recreated_topic_is_restored() -> None:
    entries = [
        *ENTRIES[:2],
        Topic(topic="t", deleted=True, minimums={0: 10, 1: 5}),
        Commit(round=2, names=[committed("again", [(0, 10, 12)], start=500, end=600)]),
    ]
    made = plan(catalog_of(*entries), STATE, ("t",))
    assert [topic["topicName"] for topic in made.topics if topic["topicName"] == "t"] == ["t"]
    assert made.queues["t"][0] >= 13
