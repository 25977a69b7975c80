"""Tests of erasure matching and of ERASE entries: other messages stay visible once, and no offset is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from neve.archive.catalog import queue_runs, topic_catalog
from neve.archive.catalog.catalog import GapHit, Location
from neve.archive.catalog.name_blocks import NAMES_MAX, Block
from neve.archive.catalog.queue_runs import without
from neve.archive.format.journal import ERASED, Commit, Deleted, Erase, Expire, Gap, Replace
from neve.archive.policy.erasure import Verdict, holds, is_meant, spans_of_rows, topics_to_search
from neve.archive.policy.unexpiry import may_come_back, plan_unexpiry
from neve.archive.read.verify import tiling_faults
from neve.record.codec import decode_record
from tests.kit.archive.catalog_state import expiring_keys
from tests.kit.archive.checkpoints import restored
from tests.kit.archive.records import record
from tests.unit.archive.replaced_objects import OLD, ROWS, before_each_line, catalog_of, name_of
from tiered.write.merge import rows_left

REST = name_of(100, 200, [(0, 10, 11), (0, 13, 14)], [(0, 15, 19), (1, 5, 8)], rewrite=1)
ERASE = Erase(id="e3.9", old=[OLD[1].key], new=[REST], rows=[("t", 0, 12, 12), ("t", 1, 9, 9)], delete_after_ms=99)
GONE = {(0, 12), (1, 9)}


def test_erase_never_hides_a_kept_row_or_loses_an_offset() -> None:
    catalog = catalog_of(Commit(round=1, names=OLD))

    def look() -> None:
        for queue, count in ROWS.items():
            for offset in range(count):
                found = catalog.find("t", queue, offset)
                if (queue, offset) in GONE and isinstance(found, GapHit):
                    assert found.next_offset == offset + 1
                else:
                    assert isinstance(found, Location), f"offset {offset} of queue {queue} is nowhere"
                    assert found.first <= offset <= found.last
            assert (catalog.min_offset("t", queue), catalog.max_offset("t", queue)) == (0, count)

    with before_each_line(look) as lines:
        catalog.apply(1, ERASE)
    assert lines[0] > 20
    assert [name.key for name in catalog.objects("t")] == [OLD[0].key, REST.key, OLD[2].key]
    assert expiring_keys(catalog) == {OLD[1].key: 99}
    assert [(gap.queue, gap.first, gap.last, gap.reason) for gap in catalog.gaps("t")] == [
        (0, 12, 12, f"{ERASED}e3.9"), (1, 9, 9, f"{ERASED}e3.9")
    ]  # fmt: skip
    assert catalog.gap_count == 2
    for queue in ROWS:
        spans = [(run.first, run.last) for run in catalog.queue("t", queue).runs()] + catalog.queue(
            "t", queue
        ).gap_spans()
        assert list(tiling_faults(spans, 0)) == []


def test_rewrite_changes_no_mark_of_the_log_and_no_minimum() -> None:
    before, after = (catalog_of(Commit(round=1, names=OLD), *more) for more in ((), (ERASE,)))
    for catalog in (before, after):
        assert catalog.through("t") == 400
        assert catalog.recorded_minimum("t", 0) == 0
        assert catalog.named_offsets("t") == {0: 29, 1: 14}
    assert after.rounds.intent_end == before.rounds.intent_end and after.rounds.last_round == before.rounds.last_round


@pytest.mark.parametrize("by_checkpoint", [False, True])
def test_erased_object_stays_out_while_its_replacement_may_return(by_checkpoint: bool) -> None:
    expire = Expire(keys=[name.key for name in (OLD[0], REST)], delete_after_ms=100, minimums={"t": {0: 20, 1: 10}})
    catalog = catalog_of(Commit(round=1, names=OLD), ERASE, expire)
    catalog = restored(catalog) if by_checkpoint else catalog
    undo = plan_unexpiry(catalog, {}, lambda topic: None, 60, lambda key: True)
    assert set(undo.keys) == {OLD[0].key, REST.key}
    assert undo.minimums == {"t": {0: 0, 1: 0}}


def test_object_can_be_erased_without_replacement() -> None:
    rows = [("t", 0, 10, 14), ("t", 0, 15, 19), ("t", 1, 5, 9)]
    catalog = catalog_of(
        Commit(round=1, names=OLD), Erase(id="e1.1", old=[OLD[1].key], new=[], rows=rows, delete_after_ms=5)
    )
    assert catalog.find("t", 0, 13) == GapHit(10, 15)
    assert not may_come_back(catalog, OLD[1])
    assert plan_unexpiry(catalog, {}, lambda topic: None, 60, lambda key: True).keys == []
    catalog.apply(2, Deleted(keys=[OLD[1].key]))
    assert expiring_keys(catalog) == {}


def test_may_come_back_unpacks_only_neighbouring_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name_of(at * 100, at * 100 + 100, [(0, at * 10, at * 10 + 9)]) for at in range(20 * NAMES_MAX)]
    gone, kept = names[: 10 * NAMES_MAX], names[10 * NAMES_MAX :]
    made = name_of(kept[0].start, kept[1].end, [(0, kept[0].start // 10, kept[1].end // 10 - 1)], rewrite=1)
    catalog = catalog_of(
        Commit(round=1, names=names),
        Expire(keys=[name.key for name in gone], delete_after_ms=5),
        Replace(old=[name.key for name in kept[:2]], new=[made], delete_after_ms=99),
    )
    unpacked: list[int] = []
    unpack = Block._unpack

    def counted(block: Block) -> object:
        unpacked.append(block.begin)
        return unpack(block)

    monkeypatch.setattr(Block, "_unpack", counted)
    for name, comes_back in ((gone[3 * NAMES_MAX], True), (gone[-1], True), (kept[0], False), (kept[1], False)):
        unpacked.clear()
        assert may_come_back(catalog, name) is comes_back
        assert len(unpacked) <= 2
    catalog.apply(3, Expire(keys=[made.key], delete_after_ms=9))
    assert not may_come_back(catalog, kept[1]), "its rows are in another, expired itself"
    assert may_come_back(catalog, made)


def test_erase_of_an_expired_object_only_advances_its_deletion() -> None:
    new = name_of(0, 400, [(0, 0, 24)], [(0, 25, 29), (1, 0, 14)], rewrite=1)
    replace = Replace(old=[name.key for name in OLD], new=[new], delete_after_ms=99)
    rows = [("t", 0, 12, 12)]
    for after, until in ((50, 50), (200, 99)):
        catalog = catalog_of(
            Commit(round=1, names=OLD), replace,
            Erase(id="e1.1", old=[OLD[1].key], new=[], rows=rows, delete_after_ms=after),
        )  # fmt: skip
        assert catalog.gaps("t") == [], "another object has the row, in view"
        assert isinstance(catalog.find("t", 0, 12), Location)
        assert expiring_keys(catalog) == {OLD[0].key: 99, OLD[1].key: until, OLD[2].key: 99}


def test_row_in_two_objects_is_no_gap_while_one_is_in_view() -> None:
    """Runs of a queue may overlap. The shorter of two runs with the same start must not hide the longer one."""
    both = [name_of(0, 100, [(0, 0, 29)]), name_of(100, 200, [(0, 10, 11)]), name_of(200, 300, [(0, 12, 20)])]
    rows = [("t", 0, 12, 20), ("t", 0, 25, 34)]
    catalog = catalog_of(
        Commit(round=1, names=both), Erase(id="e1.1", old=[both[2].key], new=[], rows=rows, delete_after_ms=5)
    )
    assert catalog.queue("t", 0).gap_spans() == [(30, 34)]
    assert [(gap.first, gap.last) for gap in catalog.gaps("t")] == [(30, 34)]


# ---- matching messages

TOPICS = {"orders", "a_orders", "events", "big_events"}


@pytest.mark.parametrize(
    ("topic", "properties", "verdict"),
    [
        ("orders", "KEYS\x01x who y\x02", Verdict.YES),
        ("orders", "UNIQ_KEY\x01who\x02", Verdict.YES),
        ("orders", "KEYS\x01whose\x02note\x01who\x02", Verdict.NO),
        ("orders", "", Verdict.NO),
        ("%RETRY%g", "KEYS\x01who\x02RETRY_TOPIC\x01orders\x02", Verdict.YES),
        ("%RETRY%g", "KEYS\x01who\x02RETRY_TOPIC\x01prices\x02", Verdict.NO),
        ("%RETRY%g", "KEYS\x01who\x02", Verdict.NO),
        ("%DLQ%g", "KEYS\x01who\x02RETRY_TOPIC\x01orders\x02", Verdict.YES),
        ("%DLQ%g", "KEYS\x01who\x02DLQ_ORIGIN_TOPIC\x01orders\x02", Verdict.YES),
        ("%DLQ%g", "KEYS\x01who\x02RETRY_TOPIC\x01%RETRY%g+orders\x02", Verdict.YES),
        ("%RETRY%g+orders", "KEYS\x01who\x02", Verdict.YES),
        ("%RETRY%g+prices", "KEYS\x01who\x02", Verdict.NO),
        ("%RETRY%g+orders", "KEYS\x01who\x02RETRY_TOPIC\x01prices\x02", Verdict.YES),
        ("%RETRY%g+prices", "KEYS\x01who\x02DLQ_ORIGIN_TOPIC\x01orders\x02", Verdict.NO),
        ("%RETRY%g_orders", "KEYS\x01who\x02", Verdict.YES),
        ("%RETRY%g_orders", "KEYS\x01who\x02RETRY_TOPIC\x01prices\x02", Verdict.UNKNOWN),
        ("%RETRY%g_orders", "KEYS\x01who\x02RETRY_TOPIC\x01orders\x02", Verdict.YES),
        ("%RETRY%g_prices", "KEYS\x01who\x02RETRY_TOPIC\x01prices\x02", Verdict.NO),
        ("%RETRY%g_a_orders", "KEYS\x01who\x02RETRY_TOPIC\x01prices\x02", Verdict.UNKNOWN),
        ("%DLQ%g", "KEYS\x01who\x02RETRY_TOPIC\x01%RETRY%g_a_orders\x02", Verdict.UNKNOWN),
        ("%RETRY%g_b_orders", "KEYS\x01who\x02", Verdict.YES),
        ("%RETRY%g_a_orders", "KEYS\x01who\x02", Verdict.UNKNOWN),
        ("prices", "KEYS\x01who\x02RETRY_TOPIC\x01prices\x02", Verdict.NO),
    ],
)
def test_message_matches_by_key_and_original_topic(topic: str, properties: str, verdict: Verdict) -> None:
    raw = record(0, topic=topic.encode(), properties=properties.encode())
    assert is_meant(decode_record(raw), "orders", "who", TOPICS) is verdict


def test_erasure_searches_the_topic_and_retry_topics() -> None:
    known = {"orders", "orders2", "%RETRY%g", "%DLQ%g", "%RETRY%g+orders"}
    assert topics_to_search(known, "orders", retries=True) == ["%DLQ%g", "%RETRY%g", "%RETRY%g+orders", "orders"]
    assert topics_to_search(known, "orders", retries=False) == ["orders"]
    assert spans_of_rows([(1, 4), (0, 2), (0, 3), (0, 5), (0, 2)]) == {0: [(2, 3), (5, 5)], 1: [(4, 4)]}


class CountedSpans(Sequence[tuple[int, int]]):
    """A sequence of spans that counts its reads."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans, self.looks = spans, 0

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, place: Any) -> Any:
        found = self.spans[place]
        self.looks += len(found) if isinstance(place, slice) else 1
        return found


def test_search_in_many_spans_reads_only_touching_ones() -> None:
    spans = CountedSpans([(at, at + 1) for at in range(0, 40_000, 4)])
    assert rows_left(20_000, 20_009, 0, spans) == [(20_002, 20_003), (20_006, 20_007)]
    assert not holds(name_of(0, 100, [(0, 20_002, 20_003), (1, 0, 9)]), {0: spans})
    assert holds(name_of(0, 100, [(0, 20_003, 20_004)]), {0: spans})
    assert spans.looks < 200


def test_lost_rows_are_found_in_one_pass_over_spans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs, looks = 2_000, 0
    old = name_of(0, 100, [(0, 2 * at, 2 * at) for at in range(runs)])
    catalog = catalog_of(
        Commit(round=1, names=[old]), Gap(topic="t", queue=0, first=1, last=1, reason="r", more=[("t", 0, 5, 5)])
    )

    def counted(first: int, last: int, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        nonlocal looks
        looks += len(spans := list(spans))
        return without(first, last, spans)

    for module in (queue_runs, topic_catalog):
        monkeypatch.setattr(module, "without", counted)
    rows = [("t", 0, 2 * at, 2 * at) for at in range(runs)]
    assert catalog.lost_by(Erase(id="e1.1", old=[old.key], new=[], rows=rows, delete_after_ms=5)) == []
    assert catalog.lost_by(Erase(id="e1.1", old=[old.key], new=[], rows=rows[1:], delete_after_ms=5)) == [old.key]
    assert looks <= 2 * runs
