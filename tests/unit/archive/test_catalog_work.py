"""Cost of catalog queries and entries, counted rather than timed: pulls take no lock, entries are incremental."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import msgspec
import pytest

from infra.clock import ManualClock
from neve.archive.catalog.catalog import Catalog, Location, ObjectTotals
from neve.archive.catalog.name_blocks import NAMES_MAX, UNPACKED_MAX, Block, blocks_of
from neve.archive.catalog.queue_runs import QueueRuns
from neve.archive.catalog.topic_catalog import LAID_WHEN_ASKED
from neve.archive.format.journal import (
    AnyEntry,
    Commit,
    CommittedObject,
    Deleted,
    Expire,
    Gap,
    Intent,
    PlannedObject,
    Replace,
    Unexpire,
)
from neve.archive.format.keys import data_key
from neve.archive.policy.expiry import expire_topic, plan_dropped, plan_expiry
from neve.archive.read.verify import tiling_faults, verify
from tests.kit.archive.catalog_state import state_of
from tests.kit.archive.checkpoints import put_checkpoint
from tests.kit.store.memory_store import MemoryStore
from tests.unit.archive.hourly_catalog import HOUR, filled, name_at


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the begins of blocks of which any part is decoded."""
    found: list[int] = []
    records = Block._records

    def counted(block: Block) -> bytes:
        found.append(block.begin)
        return records(block)

    monkeypatch.setattr(Block, "_records", counted)
    return found


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the begins of blocks that are unpacked."""
    found: list[int] = []
    unpack = Block._unpack

    def counted(block: Block) -> object:
        found.append(block.begin)
        return unpack(block)

    monkeypatch.setattr(Block, "_unpack", counted)
    return found


QUESTIONS: list[Callable[[Catalog], object]] = [
    lambda catalog: catalog.find("t", 0, 7),
    lambda catalog: catalog.min_offset("t", 0),
    lambda catalog: catalog.max_offset("t", 0),
    lambda catalog: catalog.recorded_minimum("t", 0),
    lambda catalog: catalog.queue("t", 0).has_all(0, 9),
    lambda catalog: catalog.queue("t", 0).by_time(HOUR),
    lambda catalog: catalog.next_location(next(catalog.queue("t", 0).runs())),
    lambda catalog: catalog.through("t"),
    lambda catalog: catalog.topic_entry("t"),
    lambda catalog: catalog.named_offsets("t"),
    lambda catalog: (catalog.object_count, catalog.gap_count, catalog.rounds.intent_end),
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_queries_of_a_pull_do_not_wait_for_an_entry(question: Callable[[Catalog], object]) -> None:
    catalog = filled(4)
    held, done = threading.Event(), threading.Event()

    def applying() -> None:
        with catalog._lock:
            held.set()
            assert done.wait(30)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(applying)
        assert held.wait(30)
        try:
            assert pool.submit(question, catalog).result(20) == question(filled(4))
        finally:
            done.set()


def test_reader_keeps_its_snapshot_while_the_queue_changes() -> None:
    catalog = filled(4)
    runs = catalog.queue("t", 0).runs()
    objects = catalog.topic("t").names()
    first = next(objects)
    catalog.apply(1, Expire(keys=[first.key, name_at(1).key], delete_after_ms=0))
    catalog.apply(2, Commit(round=2, names=[name_at(9)]))
    catalog.apply(3, Commit(round=3, names=[name_at(7)]))
    assert [run.first for run in runs] == [0, 5, 10, 15]
    assert [one.start for one in (first, *objects)] == [0, 1, 2, 3]
    assert [run.first for run in catalog.queue("t", 0).runs()] == [10, 15, 35, 45]
    assert [one.start for one in catalog.objects("t")] == [2, 3, 7, 9]


@pytest.mark.parametrize("gone", [1, 10, NAMES_MAX, 3 * NAMES_MAX + 1])
def test_expiry_removes_the_first_blocks_without_reading_the_rest(
    gone: int, unpacked: list[int], looked_at: list[int]
) -> None:
    catalog = filled(1000)
    unpacked.clear()
    looked_at.clear()
    keys = [name_at(number).key for number in range(gone)]
    catalog.apply(1, Expire(keys=keys, delete_after_ms=5))
    assert len(set(looked_at)) == -(-gone // NAMES_MAX)
    assert len(set(unpacked)) == (gone % NAMES_MAX > 0), "a block that goes whole stays packed"
    assert (catalog.min_offset("t", 0), catalog.object_count) == (gone * 5, 1000 - gone)
    unpacked.clear()
    assert catalog.topic("t").due(4) == []
    assert unpacked == []
    assert catalog.topic("t").due(5) == keys
    catalog.apply(2, Deleted(keys=keys[:1]))
    catalog.apply(3, Expire(keys=[name_at(500).key], delete_after_ms=5))
    assert not catalog.queue("t", 0).has_all(2490, 2510)
    assert catalog.queue("t", 0).has_all(2505, 5000)
    assert len(unpacked) < 20 + 2 * (-(-gone // NAMES_MAX))


@pytest.mark.parametrize("objects", [5 * NAMES_MAX, 50 * NAMES_MAX])
def test_expiry_unpacks_only_one_block(objects: int, unpacked: list[int]) -> None:
    """All objects but the last one are planned, expired, found due and deleted."""
    catalog = filled(objects)
    unpacked.clear()
    keys, minimums = expire_topic(catalog, "t", HOUR, objects * HOUR - 1)
    assert (len(keys), minimums) == (objects - 1, {0: 5 * objects - 5, 1: 5 * objects - 5})
    catalog.apply(1, Expire(keys=keys, delete_after_ms=5, minimums={"t": minimums}))
    due = catalog.topic("t").due(5)
    assert due == keys
    assert catalog.still_due(due, 5) == {"t": keys}
    catalog.apply(2, Deleted(keys=keys))
    assert (catalog.object_count, catalog.expiring_topics(), catalog.min_offset("t", 1)) == (1, [], 5 * objects - 5)
    assert len(set(unpacked)) == 1


@pytest.mark.parametrize("unknown", [None, 0, NAMES_MAX - 1])
def test_block_expires_only_when_all_its_row_groups_have_expired(unknown: int | None) -> None:
    names = [name_at(number) for number in range(NAMES_MAX)]
    if unknown is not None:
        (group,) = names[unknown].row_groups
        young = msgspec.structs.replace(group, newest_ms=-1)
        names[unknown] = msgspec.structs.replace(names[unknown], row_groups=[young])
    (block,) = blocks_of("t", names)
    newest = max(group.newest_ms for name in names for group in name.row_groups)
    assert block.expired(newest - 1) is None
    told = ([name.key for name in names], dict.fromkeys((0, 1), 5 * NAMES_MAX))
    assert block.expired(newest) == (told if unknown is None else None)
    limit = newest + HOUR
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=names))
    assert expire_topic(catalog, "t", HOUR, limit) == plan_expiry(names, HOUR, limit)


def test_block_ends_follow_from_row_groups_or_explicit_queues() -> None:
    plain = [name_at(number) for number in range(3)]
    without = [msgspec.structs.replace(name, row_groups=[]) for name in plain]
    assert [block.ends() for names in (plain, without) for block in blocks_of("t", names)] == [{0: 15, 1: 15}] * 2
    assert [block.name_keys() for block in blocks_of("t", plain)] == [[name.key for name in plain]]


def test_still_due_check_unpacks_no_block(unpacked: list[int]) -> None:
    catalog = filled(20 * NAMES_MAX)
    keys = [name_at(number).key for number in range(20 * NAMES_MAX)]
    catalog.apply(1, Expire(keys=keys, delete_after_ms=5))
    unpacked.clear()
    asked = keys[3:5]
    assert catalog.still_due(asked, 5) == {"t": asked}
    assert catalog.still_due(asked, 4) == {}
    assert unpacked == []


def test_query_of_an_expired_object_unpacks_only_its_block(unpacked: list[int]) -> None:
    catalog = filled(20 * NAMES_MAX)
    catalog.apply(1, Expire(keys=[name_at(number).key for number in range(19 * NAMES_MAX)], delete_after_ms=5))
    unpacked.clear()
    assert catalog.expiring_topics() == ["t"]
    assert unpacked == []
    assert (
        catalog.topic(name_at(3).topic).stays_until(name_at(3)),
        catalog.topic(name_at(19 * NAMES_MAX).topic).stays_until(name_at(19 * NAMES_MAX)),
    ) == (5, None)
    assert len(unpacked) == 1


@pytest.mark.parametrize("entry", ["expire", "replace"])
def test_change_does_not_rebuild_blocks_that_are_full_by_bytes(entry: str, unpacked: list[int]) -> None:
    """Names with many row groups fill blocks by bytes: two blocks are half full by number, but must not be joined."""

    def wide(number: int, rewrite: int = 0) -> CommittedObject:
        name = name_at(number)
        key = data_key("", "t", "2026-01-01", "b", start=number, end=number + 1, epoch=7, rewrite=rewrite)
        groups = [
            msgspec.structs.replace(name.row_groups[0], runs=[(queue, number * 5, number * 5 + 4)])
            for queue in range(256)
        ]
        return msgspec.structs.replace(name, key=key, row_groups=groups)

    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[wide(number) for number in range(60)]))
    for number in (3, 4):
        unpacked.clear()
        if entry == "expire":
            catalog.apply(number - 2, Expire(keys=[wide(number).key], delete_after_ms=5))
        else:
            catalog.apply(number - 2, Replace(old=[wide(number).key], new=[wide(number, 1)], delete_after_ms=5))
        assert len(set(unpacked)) <= 3


def test_offset_lookup_unpacks_one_block_and_queue_ends_none(unpacked: list[int]) -> None:
    catalog = filled(1000)
    unpacked.clear()
    assert (catalog.min_offset("t", 1), catalog.max_offset("t", 1)) == (0, 5000)
    assert (catalog.object_count, catalog.totals()) == (1000, ObjectTotals(1000, 10_000, 104_000, 1000, 999 * HOUR))
    assert not catalog.topic("t").may_expire(-1)
    assert unpacked == []
    found = catalog.find("t", 1, 2503)
    assert isinstance(found, Location)
    assert (found.name.key, found.first, found.last) == (name_at(500).key, 2500, 2504)
    assert len(unpacked) == 1
    assert catalog.find("t", 0, 2503) is not None
    assert catalog.next_location(found) is not None
    assert len(unpacked) == 1, "it stays unpacked for who asks next"
    assert [name.start for name in catalog.objects_at(777)] == [777]
    assert len(unpacked) == 2
    assert catalog.knows(name_at(70).key)
    assert not catalog.knows(name_at(70).key.replace("-e7", "-e8"))
    assert len(unpacked) == 3
    assert catalog.queue("t", 0).by_time(990 * HOUR) is not None
    assert len(unpacked) == 4


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of queue ranges in each block that is scanned."""
    found: list[int] = []
    slot: Any = vars(Block)["bounds"]

    def counted(block: Block) -> object:
        bounds = slot.__get__(block)
        found.append(len(bounds) // 3)
        return bounds

    monkeypatch.setattr(Block, "bounds", property(counted, slot.__set__))
    return found


def many_queues(rounds: int, queues: int = 1000) -> Catalog:
    catalog = Catalog()
    for number in range(rounds):
        catalog.apply(number, Commit(round=number, names=[name_at(number, queues=queues)]))
    return catalog


def test_queue_query_after_an_entry_does_not_scan_other_queues(walked: list[int]) -> None:
    catalog = many_queues(3)
    copied = catalog.topic("t").copy()
    for number in range(3, 6):
        catalog.apply(number, Commit(round=number, names=[name_at(number, queues=1000)]))
        walked.clear()
        assert {catalog.min_offset("t", queue) for queue in range(1000)} == {0}
        assert {catalog.max_offset("t", queue) for queue in range(1000)} == {5 * number + 5}
        assert walked == []
    assert copied is not None
    walked.clear()
    assert {held.max_offset() for held in copied.queues.values()} == {15}
    assert walked == [], "nor of a copy"


def test_expiry_of_many_queues_finds_lost_ones_in_one_pass(walked: list[int]) -> None:
    for laid in (1000, 100):
        catalog = many_queues(40, laid)
        catalog.apply(40, Commit(round=40, names=[name_at(40, queues=laid // 2)]))
        walked.clear()
        catalog.apply(41, Expire(keys=[name_at(number).key for number in range(40)], delete_after_ms=5))
        assert [catalog.recorded_minimum("t", queue) for queue in (0, laid // 2, laid - 1)] == [0, 200, 200]
        assert [catalog.min_offset("t", queue) for queue in (0, laid // 2, laid - 1)] == [200, None, None]
        assert sum(walked) < (2 * 20 + 10) * laid, (
            "each block of the forty, of two names or more, twice; and a few more"
        )


@pytest.mark.parametrize("objects", [1000, 4000])
def test_change_in_a_long_topic_does_not_scan_unchanged_blocks(objects: int, walked: list[int]) -> None:
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[name_at(number, queues=16) for number in range(objects)]))
    assert len(catalog.topic("t").blocks) * 16 > LAID_WHEN_ASKED, "else nothing is laid"
    walked.clear()
    catalog.apply(1, Expire(keys=[name_at(number).key for number in range(40)], delete_after_ms=5))
    middle = [name_at(objects // 2 + number, queues=16) for number in range(40)]
    rewritten = [msgspec.structs.replace(one, key=one.key.replace("-e7", "-e7.1")) for one in middle[:20]]
    catalog.apply(2, Replace(old=[one.key for one in middle], new=rewritten, delete_after_ms=5))
    catalog.apply(3, Unexpire(keys=[one.key for one in middle[20:]], minimums={}))
    assert sum(walked) < 40 * 16, "of some thirty blocks, and of up to a thousand none"
    assert catalog.min_offset("t", 3) == 200
    for number in (40, objects // 2 - 1, objects // 2 + 20, objects // 2 + 40, objects - 1):
        found = catalog.find("t", 15, number * 5)
        assert isinstance(found, Location)
        assert found.name.key == name_at(number).key
    found = catalog.find("t", 15, (objects // 2 + 19) * 5)
    assert isinstance(found, Location)
    assert found.name.key == rewritten[-1].key


def test_adding_a_gap_to_many_does_not_copy_the_list() -> None:
    catalog = Catalog()
    more = [("t", 0, 3 * number, 3 * number) for number in range(1, 500)]
    catalog.apply(0, Gap(topic="t", queue=0, first=0, last=0, reason="lost", more=more))
    of = catalog._topics["t"]
    held = of.queues[0].gaps
    before = list(held)
    copied = catalog.topic("t").copy()
    catalog.apply(1, Gap(topic="t", queue=0, first=3000, last=3001, reason="lost"))
    assert of.queues[0].gaps is held
    assert held == [*before, (3000, 3001)]
    assert copied is not None
    assert copied.queues[0].gaps == before, "one that was copied has its own"


def test_deletion_in_a_topic_with_a_gap_scans_no_block(walked: list[int]) -> None:
    catalog = filled(1000)
    catalog.apply(1, Gap(topic="t", queue=0, first=6000, last=6009, reason="lost"))
    catalog.apply(2, Gap(topic="t", queue=1, first=5000, last=5009, reason="lost"))
    catalog.apply(3, Expire(keys=[name_at(0).key], delete_after_ms=5, minimums={"t": {0: 5, 1: 5}}))
    walked.clear()
    catalog.apply(4, Deleted(keys=[name_at(0).key]))
    assert walked == []
    assert catalog.gap_count == 2
    minimums = {"t": {1: 5010}}
    catalog.apply(5, Expire(keys=[name_at(one).key for one in range(1, 1000)], delete_after_ms=5, minimums=minimums))
    catalog.apply(6, Deleted(keys=[name_at(one).key for one in range(1, 1000)]))
    assert catalog.queue("t", 1).gap_spans() == [], "it lies below all that is there"
    assert catalog.queue("t", 0).gap_spans() == [(6000, 6009)]


def test_few_blocks_stay_unpacked(unpacked: list[int]) -> None:
    catalog = filled(NAMES_MAX * (UNPACKED_MAX + 10))
    for _ in range(2):
        for number in range(0, catalog.object_count, NAMES_MAX):
            assert catalog.find("t", 0, number * 5) is not None
    held = [block for block in catalog._topics["t"].blocks if block.unpacked is not None]
    assert len(held) <= UNPACKED_MAX


@pytest.mark.parametrize("topics", [1, 5])
def test_catalog_needs_at_most_300_bytes_per_object(topics: int) -> None:
    """The limit holds for objects of eight queues and covers all catalog structures."""
    random = Random(1)
    names = {number: [name_at(one, f"topic-{number:05d}", 8, random) for one in range(100)] for number in range(topics)}
    batches = [list(batch) for batch in zip(*names.values(), strict=True)]
    del names
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        catalog = Catalog()
        for seq, batch in enumerate(batches):
            catalog.apply(seq, Commit(round=seq, names=batch))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert catalog.object_count == 100 * topics
    assert held / catalog.object_count <= 300


def test_expiry_plan_reads_expired_objects_and_one_more() -> None:
    catalog = filled(1000)
    looked = []

    def watched() -> Any:
        for one in catalog.topic("t").names():
            looked.append(one.start)
            yield one

    plan = plan_expiry(watched(), ttl_ms=HOUR, now_ms=4 * HOUR)
    assert (len(plan.keys), plan.minimums, looked) == (4, {0: 20, 1: 20}, [0, 1, 2, 3, 4])
    looked.clear()
    assert len(plan_dropped(watched(), {0: 10, 1: 10})) == 2
    assert looked == [0, 1, 2]


def test_deleted_object_leaves_no_trace_in_memory_or_checkpoint() -> None:
    catalog = filled(1)
    before = len(msgspec.json.encode(state_of(catalog)))
    seq = 1
    for number in range(1, 50):
        name = name_at(number)
        steps: tuple[AnyEntry, ...] = (
            Intent(round=number + 1, names=[PlannedObject(name.key, "t", "d", name.start, name.end, {})]),
            Commit(round=number + 1, names=[name]),
            Expire(keys=[name.key], delete_after_ms=0),
            Deleted(keys=[name.key]),
        )
        for entry in steps:
            catalog.apply(seq, entry)
            seq += 1
    state = state_of(catalog)
    assert (state.expiring, state.marks["open"], len(state.names)) == ([], {}, 1)
    assert len(msgspec.json.encode(state)) <= before + 16
    store = MemoryStore()
    put_checkpoint(store, catalog, "b")
    assert sum(len(data) for data, _ in store.objects.values()) < 1000


def test_repeated_commit_counts_once() -> None:
    catalog = filled(2)
    catalog.apply(1, Commit(round=1, names=[name_at(0), name_at(1)]))
    assert [run.first for run in catalog.queue("t", 0).runs()] == [0, 5]
    assert len(catalog.objects()) == 2


def test_verify_reads_the_gaps_of_each_queue_once(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = filled(2)
    for seq in range(1, 20):
        catalog.apply(seq, Gap(topic=f"other-{seq}", queue=0, first=0, last=9, reason="lost"))
    catalog.apply(20, Gap(topic="t", queue=0, first=10, last=14, reason="lost"))

    def all_gaps(topic: str | None = None) -> list[Gap]:
        raise AssertionError("each queue asked for the gaps of all")

    monkeypatch.setattr(catalog, "gaps", all_gaps)
    asked: list[tuple[str, int]] = []
    queue_of = catalog.queue

    def counted(topic: str, queue: int) -> QueueRuns:
        asked.append((topic, queue))
        return queue_of(topic, queue)

    monkeypatch.setattr(catalog, "queue", counted)
    store = MemoryStore(ManualClock())
    for number in range(2):
        store.put(name_at(number).key, bytes(104))
    assert verify(catalog, store).problems == []
    assert asked == [("t", 0), ("t", 1)]
    held = [(run.first, run.last) for run in catalog.queue("t", 0).runs()]
    assert list(tiling_faults([*held, *catalog.queue("t", 0).gap_spans()], 0)) == []
    assert catalog.queue("t", 0).count_existing(0, 20) == 15
    assert catalog.queue("t", 0).count_existing(12, 13) == 0
    assert catalog.queue("u", 0).count_existing(3, 13) == 10


@pytest.mark.parametrize("seed", range(4))
def test_from_highest_unpacks_only_the_highest_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    catalog = Catalog()
    topics = [f"t{number}" for number in range(5)]
    names = [
        msgspec.structs.replace(name_at(number, random.choice(topics)), wire_bytes=random.randrange(3))
        for number in range(1000)
    ]
    catalog.apply(0, Commit(round=1, names=names))
    floors = {topic: random.randrange(400) for topic in topics}
    end = random.randrange(500, 1010)
    fitting = [name for name in names if floors[name.topic] <= name.start and name.end <= end]
    expected = sorted(fitting, key=lambda name: (-name.end, name.wire_bytes, name.key))
    assert list(catalog.from_highest(floors.__getitem__, end)) == expected
    unpacked: list[Block] = []
    unpack = Block._unpack

    def counted(block: Block) -> tuple[CommittedObject, ...]:
        unpacked.append(block)
        return unpack(block)

    monkeypatch.setattr(Block, "_unpack", counted)
    assert next(catalog.from_highest(floors.__getitem__, end)) == expected[0]
    assert len(unpacked) <= len(topics) + 1
    assert catalog.totals().objects // NAMES_MAX > 4 * len(unpacked)


def test_expiring_near_unpacks_only_candidate_blocks(unpacked: list[int]) -> None:
    catalog = filled(4 * NAMES_MAX)
    keys = [name.key for name in catalog.objects("t")[: 3 * NAMES_MAX]]
    catalog.apply(1, Expire(keys=keys, delete_after_ms=9))
    unpacked.clear()
    row = 5 * (NAMES_MAX + 7)
    found = [(after, name.start) for after, name in catalog.topic("t").expiring_near({1: [(row, row)]})]
    assert (9, NAMES_MAX + 7) in found
    assert list(catalog.topic("t").expiring_near({2: [(row, row)]})) == []
    assert len(unpacked) == 1


def test_each_of_returns_a_snapshot() -> None:
    catalog = filled(3)
    first, second, third = (name.key for name in catalog.objects("t"))
    catalog.apply(1, Expire(keys=[first], delete_after_ms=9))
    asked = catalog.each_of("t")
    catalog.apply(2, Unexpire(keys=[first]))
    catalog.apply(3, Expire(keys=[second, third], delete_after_ms=10))
    assert [(until, name.key) for until, name in asked] == [(None, second), (None, third), (9, first)]
    assert [until for until, _ in catalog.each_of("t")] == [None, 10, 10]
