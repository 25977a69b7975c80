"""Tests of key queries in the local store: each step is bounded for any index content."""

from __future__ import annotations

from pathlib import Path
from struct import Struct
from typing import Any

import pytest

from broker.store import key_index, reading, store_reader
from broker.store.key_index import BLOCK, CHAIN_MAX, IndexFile, hashes_of, start_of
from broker.store.store_reader import QUERY_STEP
from infra.clock import ManualClock
from infra.loop.in_steps import Steps, at_once
from neve.record.codec import decode_record
from tests.kit.store.colliding_keys import colliding_words
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import OpenStore, PutOne

LONG = 1 << 60
HOUR_MS = 3_600_000


def test_colliding_keys_of_one_message_make_one_entry() -> None:
    words = colliding_words("t", 12345)[:3000]
    assert len(set(words)) == 3000
    assert hashes_of(start_of("t"), " ".join(words)) == [12345]


class QueryCosts:
    """Counts the chain entries, blocks and records that one step of a query reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries = self.blocks = self.looks = 0
        entry, in_block, store_time_at = key_index._ENTRY, IndexFile._in_block, reading.store_time_at
        work = self

        class CountedEntry:
            size = entry.size

            def unpack_from(self, *args: Any) -> tuple[Any, ...]:
                work.entries += 1
                return entry.unpack_from(*args)

        def counted_block(file: IndexFile, first: int, end_number: int, *args: int) -> list[int]:
            assert end_number - first <= BLOCK
            self.blocks += 1
            return in_block(file, first, end_number, *args)

        def counted_look(*args: Any) -> int:
            self.looks += 1
            return store_time_at(*args)

        assert isinstance(entry, Struct)
        monkeypatch.setattr(key_index, "_ENTRY", CountedEntry())
        monkeypatch.setattr(IndexFile, "_in_block", counted_block)
        monkeypatch.setattr(reading, "store_time_at", counted_look)

    def run(self, steps: Steps[store_reader.KeyHits]) -> tuple[list[bytes], int, int]:
        """Return the hits, the longest step in records and the records of all steps; checks each step."""
        longest = total = 0
        while True:
            self.entries = self.blocks = self.looks = 0
            try:
                next(steps)
            except StopIteration as end:
                hits: store_reader.KeyHits = end.value
                assert hits.unsearched_from is None
                return hits.records, max(longest, self.looks), total + self.looks
            finally:
                assert self.entries <= CHAIN_MAX
                assert self.blocks <= 1
            longest, total = max(longest, self.looks), total + self.looks


def test_key_query_work_of_one_step_is_bounded(
    monkeypatch: pytest.MonkeyPatch, open_store: OpenStore, put: PutOne, clock: ManualClock
) -> None:
    """10,000 messages with one key in two index files; a query by time reads only those of its hour."""
    store = open_store(index_entries=6_000, commit_log_file_size=1 << 20)
    begun = clock.now_ms()
    for number in range(10_000):
        put(store, body=b"%d" % number, keys="tenant")
        clock.advance(10_000)
    work = QueryCosts(monkeypatch)

    def ask_for(begin: int, end: int, hidden: bool = False) -> Steps[store_reader.KeyHits]:
        return store.reader.query("t", "tenant", 64, begin, end, is_hit=lambda _: not hidden)

    hits, longest, total = work.run(ask_for(begun + HOUR_MS, begun + HOUR_MS + 99_999))
    assert [decode_record(raw).body for raw in hits] == [b"%d" % number for number in range(369, 359, -1)]
    assert total <= 10 + 2, "the hour, and the first entry of each file, whose time is a bound"
    hits, longest, total = work.run(ask_for(0, 1))
    assert (hits, total) == ([], 2)
    hits, longest, total = work.run(ask_for(0, LONG, hidden=True))
    assert (hits, longest, total) == ([], QUERY_STEP, 10_000)


def test_key_query_finds_same_records_by_chain_and_by_block(
    monkeypatch: pytest.MonkeyPatch, open_store: OpenStore, put: PutOne, clock: ManualClock
) -> None:
    store, right = open_store(index_entries=1_000), clock.now_ms()
    stored: list[tuple[int, bytes, str]] = []
    for number in range(600):
        clock.set_wall(right + number * 700 + (HOUR_MS if 200 <= number < 300 else 0))
        body, keys = b"%d" % number, "a b" if number % 3 else "b"
        stored.append((put(store, body=body, keys=keys).store_timestamp, body, keys))
    monkeypatch.setattr(store_reader, "_QUERY_LIMIT", 1_000)
    asked = [(0, LONG), (right + 50_000, right + 100_000), (right + HOUR_MS, LONG), (0, right), (LONG, LONG)]

    def check() -> None:
        for key in "ab":
            for begin, end in asked:
                records = at_once(store.reader.query("t", key, 1_000, begin, end, is_hit=lambda _: True)).records
                expected = [body for time, body, keys in stored if key in keys and begin <= time <= end]
                assert [decode_record(raw).body for raw in records] == expected[::-1]

    check()
    monkeypatch.setattr(key_index, "CHAIN_MAX", 10_000)
    check()


def test_key_query_survives_eviction_between_steps(open_store: OpenStore, put: PutOne, disk: SimDisk) -> None:
    store = open_store()
    for number in range(1_000):
        put(store, body=b"%d" % number, keys="tenant")
    steps = store.reader.query("t", "tenant", 64, 0, LONG, is_hit=lambda raw: decode_record(raw).body == b"0")
    next(steps)
    store.after_flush(store.visibility.flush())
    index_files = len(disk.list_dir(Path("/store/index")))
    for segment in store.reader.segments()[:-1]:
        store.take_out(segment.base)()
    assert len(disk.list_dir(Path("/store/index"))) < index_files
    assert at_once(steps).records == []
