"""Tests of checkpoints of version 2: complete, and incremental in cost."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import msgspec
import pytest

from neve.archive.catalog import queue_runs, topic_catalog
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.name_blocks import Block
from neve.archive.catalog.queue_runs import Spans, spans_of
from neve.archive.catalog.topic_parts import PACK_BYTES, RUN_BLOCKS_MAX, SMALL_PACKS, topics_in
from neve.archive.format.checkpoint import CheckpointHead, PackName, decode_checkpoint, encode_head
from neve.archive.format.envelope import Damaged
from neve.archive.format.journal import AnyEntry, Checkpoint, Commit, CommittedObject, Deleted, Expire, Gap, Topic
from tests.kit.archive.catalog_state import state_of
from tests.kit.archive.random_objects import QUEUES, name_of


class PackStore:
    """Packs and the newest checkpoint head of one broker."""

    def __init__(self) -> None:
        self.packs: dict[PackName, bytes] = {}
        self.head: CheckpointHead | None = None
        self.written: list[int] = []  # bytes of packs, by checkpoint

    def write(self, catalog: Catalog) -> CheckpointHead:
        seq, before = catalog.next_seq - 1, len(self.packs)
        mine: dict[PackName, bytes] = {}
        written = catalog.write_checkpoint("b", lambda number, data: mine.update({PackName(seq, number): data}))
        assert not mine.keys() & self.packs.keys() and before == len(self.packs)
        self.packs |= mine
        catalog.adopt_checkpoint(written)
        catalog.apply(seq + 1, Checkpoint(key="k", through_seq=seq))
        head = decode_checkpoint(written.content, "b", seq)
        assert isinstance(head, CheckpointHead)
        assert set(head.sizes()) <= self.packs.keys(), "what went is never named again"
        self.packs = {name: self.packs[name] for name in head.sizes()}
        self.head = head
        self.written.append(sum(map(len, mine.values())))
        return head

    def restored(self) -> Catalog:
        assert self.head is not None
        catalog = Catalog()
        catalog.restore(self.head, topics_in(self.head, self.packs.__getitem__))
        catalog.apply(catalog.next_seq, Checkpoint(key="k", through_seq=self.head.through_seq))
        return catalog

    def named_bytes(self) -> dict[PackName, int]:
        assert self.head is not None
        found: dict[PackName, int] = dict.fromkeys(self.packs, 0)
        for row in self.head.rows():
            for place in row.places:
                found[place.pack] += place.length
        return found


def apply(catalog: Catalog, *entries: AnyEntry) -> None:
    for entry in entries:
        catalog.apply(catalog.next_seq, entry)


def names(topic: str, first: int, count: int) -> list[CommittedObject]:
    random = Random(f"{topic} {first}")
    return [name_of(random, topic, number) for number in range(first, first + count)]


@pytest.mark.parametrize("seed", range(6))
def test_catalog_after_random_checkpoints_equals_all_entries(seed: int) -> None:
    random, store = Random(seed), PackStore()
    catalog, whole = Catalog(), Catalog()
    following = dict.fromkeys((f"topic-{number}" for number in range(8)), 0)
    live: list[CommittedObject] = []
    expired: list[str] = []

    def both(entry: AnyEntry) -> None:
        apply(catalog, entry)
        apply(whole, entry)

    for step in range(250):
        topic = random.choice(list(following)[: random.choice((1, 8))])
        match random.choice(
            ("commit", "commit", "commit", "expire", "delete", "gap", "tell", "write", "write", "start")
        ):
            case "commit":
                more = names(topic, following[topic], random.choice((1, 1, 3, 40)))
                following[topic] += len(more)
                live += more
                both(Commit(round=step, names=more))
            case "expire" if live:
                out = random.sample(live, min(len(live), random.choice((1, 5, 60))))
                live = [name for name in live if name not in out]
                expired += [name.key for name in out]
                both(Expire(keys=[name.key for name in out], delete_after_ms=step))
            case "delete":
                both(Deleted(keys=expired))
                expired = []
            case "gap":
                at = following[topic] * 30
                both(Gap(topic=topic, queue=1, first=at, last=at + random.randrange(20), reason="lost"))
                following[topic] += 1
            case "tell":
                both(Topic(topic=topic, deleted=True, minimums={0: random.randrange(50)}))
            case "write":
                whole.apply(whole.next_seq, Checkpoint(key="k", through_seq=whole.next_seq - 1))
                head = store.write(catalog)
                assert [row.objects for row in head.rows()] == [len(catalog.objects(row.topic)) for row in head.rows()]
                assert state_of(store.restored()) == state_of(catalog) == state_of(whole)
            case "start" if store.head is not None and store.head.through_seq == catalog.next_seq - 2:
                catalog = store.restored()
            case _:
                continue
        for queue in range(QUEUES):
            assert list(catalog.queue(topic, queue).runs()) == list(whole.queue(topic, queue).runs())
            assert catalog.find(topic, queue, 40) == whole.find(topic, queue, 40)
            assert catalog.max_offset(topic, queue) == whole.max_offset(topic, queue)
    assert state_of(catalog) == state_of(whole)
    assert len(store.written) > 20


def test_checkpoint_writes_only_changed_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, store = Catalog(), PackStore()
    for number in range(100):
        apply(catalog, Commit(round=number, names=names(f"topic-{number:03}", 0, 70)))
    store.write(catalog)
    unpacked: list[str] = []
    unpack = Block._unpack

    def counted(block: Block) -> tuple[CommittedObject, ...]:
        unpacked.append(block.topic)
        return unpack(block)

    monkeypatch.setattr(Block, "_unpack", counted)
    for again in range(3):
        if again == 2:
            catalog = store.restored()
        apply(catalog, Commit(round=200 + again, names=names("topic-050", 70 + again, 1)))
        store.write(catalog)
        assert store.written[-1] < store.written[0] / 100, "nothing of the 99 others, and of this one its end alone"
    store.write(catalog)
    assert store.written[-1] == 0, "nothing changed"
    assert unpacked == [], "no name was unpacked for any of it"
    assert state_of(store.restored()) == state_of(catalog)


def test_checkpoint_of_a_long_topic_writes_only_its_end() -> None:
    catalog, store = Catalog(), PackStore()
    total = 0
    for number in range(0, 12_000, 120):
        apply(catalog, Commit(round=number, names=names("t", number, 120)))
        store.write(catalog)
        total += store.written[-1]
    assert store.head is not None
    (row,) = store.head.rows()
    last_parts = sum(place.length for place in row.places)
    assert len(row.places) <= 12_000 / 32 / RUN_BLOCKS_MAX + 20
    assert total < 5 * last_parts, "each run is written a few times, not with each checkpoint"
    assert state_of(store.restored()) == state_of(catalog)


def test_sparse_packs_are_rewritten_and_their_number_is_bounded() -> None:
    catalog, store = Catalog(), PackStore()
    for number in range(150):
        apply(catalog, Commit(round=number, names=names(f"topic-{number}", 0, 3)))
        if number % 3 == 0:
            apply(catalog, Commit(round=number, names=names("busy", number, 3)))
        store.write(catalog)
        named = store.named_bytes()
        assert all(2 * size >= len(store.packs[name]) for name, size in named.items())
        assert len([name for name in named if 2 * len(store.packs[name]) < PACK_BYTES]) <= SMALL_PACKS + 1
    assert sum(store.written) < 30 * sum(store.named_bytes().values())
    assert state_of(store.restored()) == state_of(catalog)


def test_queue_spans_are_computed_only_on_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, store = Catalog(), PackStore()
    for number in range(20):
        apply(catalog, Commit(round=number, names=names(f"topic-{number}", 0, 40)))
    store.write(catalog)
    expected = catalog.max_offset("topic-3", 1), catalog.find("topic-3", 1, 100)
    laid: list[int] = []

    def counted(spans: Iterable[tuple[int, int, Block]]) -> Spans:
        laid.append(1)
        return spans_of(spans)

    monkeypatch.setattr(queue_runs, "spans_of", counted)
    monkeypatch.setattr(topic_catalog, "spans_of", counted)
    again = store.restored()
    assert laid == []
    for _ in range(2):
        assert (again.max_offset("topic-3", 1), again.find("topic-3", 1, 100)) == expected
        assert laid == [1], "of the queue that was asked for, once"
    for catalog_of_it in (again, catalog):
        apply(catalog_of_it, Commit(round=99, names=names("topic-3", 40, 1)))
        apply(catalog_of_it, Expire(keys=[names("topic-3", 0, 40)[0].key], delete_after_ms=5))
    assert laid == [1]
    assert again.find("topic-3", 1, 40 * 30) == catalog.find("topic-3", 1, 40 * 30)
    assert list(again.queue("topic-3", 1).runs()) == list(catalog.queue("topic-3", 1).runs())
    monkeypatch.setattr(topic_catalog, "LAID_WHEN_ASKED", 1)
    laid.clear()
    store.restored()
    assert len(laid) == 20 * QUEUES, "of topics of many blocks at once"


def test_checkpoint_without_its_predecessor_writes_all_parts() -> None:
    catalog, store = Catalog(), PackStore()
    apply(catalog, Commit(round=1, names=names("t", 0, 5)))
    store.write(catalog)
    apply(catalog, Checkpoint(key="another's", through_seq=catalog.next_seq - 1))
    first = set(store.packs)
    store.write(catalog)
    assert not first & set(store.packs)
    assert state_of(store.restored()) == state_of(catalog)


def test_packs_have_a_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neve.archive.catalog.topic_parts.PACK_BYTES", 2000)
    catalog, store = Catalog(), PackStore()
    for number in range(30):
        apply(catalog, Commit(round=number, names=names(f"topic-{number}", 0, 3)))
    store.write(catalog)
    assert len(store.packs) > 3
    assert state_of(store.restored()) == state_of(catalog)


@pytest.mark.parametrize("harm", ["flipped", "short", "empty", "of another", "a pack too few", "objects", "no part"])
def test_damaged_part_raises_and_leaves_the_catalog_unchanged(harm: str) -> None:
    catalog, store = Catalog(), PackStore()
    apply(catalog, Commit(round=1, names=names("t", 0, 100)), Commit(round=2, names=names("u", 0, 3)))
    head = store.write(catalog)
    (pack,) = store.packs
    data, rows, sizes = store.packs[pack], list(head.rows()), head.sizes()
    match harm:
        case "flipped":
            data = data[:-1] + bytes([data[-1] ^ 1])
        case "short":
            data = data[:-1]
        case "empty":
            data = b""
        case "of another":
            rows = [rows[0]._replace(places=rows[1].places), rows[1]]
        case "objects":
            rows = [rows[0]._replace(objects=99), rows[1]]
        case "no part":
            rows = [rows[0]._replace(places=()), rows[1]]
    found = decode_checkpoint(encode_head(head, sizes.items(), rows, head.entry))
    assert isinstance(found, CheckpointHead)
    if harm == "a pack too few":
        found = msgspec.structs.replace(found, packs=[])
    fresh = Catalog()
    with pytest.raises(Damaged):
        fresh.restore(found, topics_in(found, lambda name: data))
    assert (fresh.next_seq, fresh.topics()) == (0, [])
