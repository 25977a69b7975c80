"""Tests of journal reads: binary search for the end, and checkpoints equal to their entries."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from neve.archive.catalog.catalog import Catalog, OutOfOrder
from neve.archive.catalog.journal_reader import journal_end, read_catalog
from neve.archive.format.checkpoint import KIND, decode_checkpoint
from neve.archive.format.envelope import Damaged, seal, unseal
from neve.archive.format.journal import (
    AnyEntry,
    Checkpoint,
    Epoch,
    NewerFormat,
    anchor,
    encode_entry,
)
from neve.archive.format.keys import checkpoint_key, journal_key, pack_key
from tests.kit.archive.catalog_state import state_of
from tests.kit.archive.checkpoints import put_checkpoint, restored
from tests.kit.store.memory_store import MemoryStore
from tests.unit.archive.checkpoint_fields import ENTRIES, ERASURES, REWRITES


def after(count: int, entries: list[AnyEntry] = ENTRIES) -> Catalog:
    catalog = Catalog()
    for seq, entry in enumerate(entries[:count]):
        catalog.apply(seq, entry)
    return catalog


def test_catalog_from_a_checkpoint_equals_catalog_from_all_entries() -> None:
    entries = [*REWRITES, *ERASURES]
    whole = after(len(entries), entries)
    for cut in range(1, len(entries) + 1):
        catalog = restored(after(cut, entries))
        for seq in range(cut, len(entries)):
            catalog.apply(seq, entries[seq])
        assert state_of(catalog) == state_of(whole), cut
        for topic, queue in (("t", 0), ("t", 1), ("gone", 0), ("none", 0)):
            for offset in range(45):
                assert catalog.find(topic, queue, offset) == whole.find(topic, queue, offset), (cut, queue, offset)
            assert list(catalog.queue(topic, queue).runs()) == list(whole.queue(topic, queue).runs())
            assert catalog.recorded_minimum(topic, queue) == whole.recorded_minimum(topic, queue)
        assert (catalog.topics(), catalog.queues("t")) == (whole.topics(), whole.queues("t"))


def test_only_masters_of_the_same_log_are_counted() -> None:
    catalog = after(len(ENTRIES))
    assert catalog.master_epoch == 0
    for epoch, said, highest in ((3, 4, 4), (4, 0, 4), (5, 6, 6)):
        catalog.apply(catalog.next_seq, Epoch(epoch=epoch, owner="q", log_uuid="u", master_epoch=said))
        assert (catalog.epoch, catalog.master_epoch) == (epoch, highest)
        assert restored(catalog).master_epoch == highest
    catalog.apply(catalog.next_seq, Epoch(epoch=6, owner="r", log_uuid="restored"))
    assert catalog.master_epoch == 0


def test_catalog_refuses_an_older_checkpoint() -> None:
    catalog = after(5)
    with pytest.raises(OutOfOrder):
        catalog.restore(decode_checkpoint(after(4).write_checkpoint("b", lambda number, data: None).content))


@pytest.mark.parametrize("end", [0, 1, 2, 3, 7, 8, 9, 1000, 1_000_003])
def test_journal_end_is_found_in_logarithmic_requests(end: int) -> None:
    for known in {0, 1, end // 2, end - 1, end} & set(range(end + 1)):
        asked: list[int] = []

        def stands(seq: int, asked: list[int] = asked) -> bool:
            asked.append(seq)
            return seq < end

        assert journal_end(stands, known) == end
        assert len(asked) <= 2 * max(end - known, 1).bit_length() + 1
        assert all(seq >= known for seq in asked)


def journal_in(store: MemoryStore, *checkpoints: int) -> None:
    """Write the entries, with a CHECKPOINT entry and its object after each of the given counts."""
    catalog, newest = Catalog(), -1
    pending: list[AnyEntry] = list(ENTRIES)
    while pending:
        seq = catalog.next_seq
        entry: AnyEntry = pending.pop(0)
        entry = msgspec.structs.replace(entry, checkpoint=newest)
        store.put(journal_key("", "b", seq), encode_entry(entry), if_absent=True)
        catalog.apply(seq, entry, anchor(encode_entry(entry)))
        if isinstance(entry, Checkpoint):
            newest = entry.through_seq
        elif len(ENTRIES) - len(pending) in checkpoints:
            content = put_checkpoint(store, catalog, "b")
            key = checkpoint_key("", "b", seq)
            pending.insert(0, Checkpoint(key=key, through_seq=seq, sha256=hashlib.sha256(content).hexdigest()))


def packs_of(store: MemoryStore, seq: int) -> list[str]:
    head = decode_checkpoint(store.objects[checkpoint_key("", "b", seq)][0], "b", seq)
    return [pack_key("", "b", *name) for name in head.sizes()]


def test_only_entries_after_the_checkpoint_are_read() -> None:
    store = MemoryStore()
    journal_in(store, 5, 13)
    full = state_of(after(len(ENTRIES)))
    read: list[str] = []
    store.on_call = lambda verb, key: read.append(key) if verb in {"get", "get_range"} else None
    assert state_of(read_catalog(store, "b", whole=True)).names == full.names
    entries = [key for key in read if "/journal/" in key]
    assert len(set(entries)) == 5, (
        "the one before, the CHECKPOINT, two entries behind it, and the first that is not there"
    )
    assert [key for key in read if "/checkpoint/" in key] == [checkpoint_key("", "b", 13), *packs_of(store, 13)]
    read.clear()
    catalog = read_catalog(store, "b")
    assert [key for key in read if "/checkpoint/" in key] == [checkpoint_key("", "b", 13)]
    read.clear()
    assert catalog.objects("t") == full.names
    assert catalog.max_offset("t", 0) is not None
    assert read == [packs_of(store, 13)[-1]], "of the topic alone, once"


@pytest.mark.parametrize("harm", ["gone", "cut", "flipped", "empty", "of another broker"])
def test_damaged_checkpoint_falls_back_to_earlier_ones_then_the_journal(harm: str) -> None:
    store = MemoryStore()
    journal_in(store, 5, 13)
    full = state_of(read_catalog(store, "b"))
    for number in (13, 4):
        key = checkpoint_key("", "b", number)
        data = store.objects.pop(key)[0]
        harmed = {
            "cut": data[:-9],
            "flipped": data[:-20] + bytes([data[-20] ^ 1]) + data[-19:],
            "empty": b"",
            "of another broker": put_checkpoint(MemoryStore(), after(5), "c"),
        }
        if harm in harmed:
            store.put(key, harmed[harm])
        read: list[str] = []
        store.on_call = lambda verb, key, read=read: read.append(key) if verb == "get" else None
        assert state_of(read_catalog(store, "b")) == full
        assert (journal_key("", "b", 0) in read) == (number == 4), "only without any checkpoint is all of it read"
        store.on_call = None
    store.objects.pop(journal_key("", "b", 0))
    assert read_catalog(store, "b").next_seq == 0, "with no checkpoint, all of the journal is read"


def test_checkpoint_of_a_newer_format_is_refused() -> None:
    store = MemoryStore()
    journal_in(store, 13)
    store.put(checkpoint_key("", "b", 12), seal(KIND, 99, b"{}"))
    with pytest.raises(NewerFormat, match="99"):
        read_catalog(store, "b")


def test_envelope_bounds_its_unpacked_size() -> None:
    data = seal("X", 1, b"a" * 1000)
    assert unseal("X", 1, data, 1000) == b"a" * 1000
    with pytest.raises(Damaged):
        unseal("X", 1, data, 999)
    with pytest.raises(Damaged):
        unseal("Y", 1, data, 1000)
    lying = msgspec.msgpack.decode(data)
    with pytest.raises(Damaged):
        unseal("X", 1, msgspec.msgpack.encode({**lying, "size": 10}), 1000)
