"""Tests of the compactor: its objects have the records of their inputs once, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neve.archive.rows.rebuild import rebuild
from neve.archive.rows.schema import DamagedObject
from tests.kit.archive.records import TOPIC, Run
from tests.kit.archive.sealed_objects import SMALL, Sealed, SealedLog
from tiered.write import compactor
from tiered.write.compactor import Input
from tiered.write.segment_writer import GROUP_SIZES, GroupSizes, in_order, plan_groups


def records_in(one: Input) -> Sealed:
    found: Sealed = {}
    with pq.ParquetFile(one.path, page_checksum_verification=True) as file:
        for index, group in enumerate(one.name.row_groups):
            rebuilt = rebuild(file.read_row_group(index), TOPIC)
            row = 0
            for queue, first, last in group.runs:
                for offset in range(first, last + 1):
                    assert (queue, offset) not in found
                    found[queue, offset] = bytes(rebuilt.record(row))
                    row += 1
            assert row == group.rows == len(rebuilt.positions) - 1
    return found


COUNTS = st.dictionaries(st.integers(0, 3), st.integers(1, 12), min_size=1)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(COUNTS, min_size=1, max_size=6), st.integers(0, 1 << 30), st.sampled_from([SMALL, GroupSizes(300, 1)]))
def test_compaction_keeps_each_record_once(
    tmp_path_factory: pytest.TempPathFactory, objects: list[dict[int, int]], seed: int, sizes: GroupSizes
) -> None:
    log = SealedLog(tmp_path_factory.mktemp("log"), seed)
    for counts in objects:
        log.object_of(counts)
    made = log.compact(sizes=sizes)
    assert records_in(made) == log.sealed
    assert made.name.rows == len(log.sealed)
    assert made.name.wire_bytes == sum(map(len, log.sealed.values()))
    assert made.name.sha256 == hashlib.sha256(b"".join(log.sealed[at] for at in sorted(log.sealed))).hexdigest()
    lasts = {queue: end - 1 for queue, end in log.next.items()}
    assert {queue: bounds[:2] for queue, bounds in made.name.queues.items()} == {
        q: (0, end) for q, end in lasts.items()
    }
    assert all(group.wire_bytes <= sizes.most or group.rows == 1 for group in made.name.row_groups)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(COUNTS, min_size=1, max_size=4), st.dictionaries(st.integers(0, 3), st.integers(0, 20)))
def test_only_rows_below_the_minimums_are_dropped(
    tmp_path_factory: pytest.TempPathFactory, objects: list[dict[int, int]], below: dict[int, int]
) -> None:
    log = SealedLog(tmp_path_factory.mktemp("log"))
    for counts in objects:
        log.object_of(counts)
    left = {at: raw for at, raw in log.sealed.items() if at[1] >= below.get(at[0], 0)}
    if not left:
        with pytest.raises(DamagedObject, match="without rows"):
            log.compact(below=below)
        return
    assert records_in(log.compact(below=below)) == left


def test_row_groups_equal_those_of_a_single_round(tmp_path: Path) -> None:
    log = SealedLog(tmp_path)
    for _ in range(5):
        log.object_of({0: 9, 1: 3, 2: 30})
    made = log.compact()
    sizes = {queue: np.array([len(log.sealed[queue, at]) for at in range(end)]) for queue, end in log.next.items()}
    entries = in_order({queue: Run(0, np.zeros(len(held)), held) for queue, held in sizes.items()})
    groups = [(group.first_row, group.first_row + group.rows) for group in made.name.row_groups]
    assert groups == list(plan_groups(entries, SMALL))
    assert pq.read_metadata(made.path).num_row_groups == len(groups) > 3


def test_hundred_thousand_mixed_records_survive_two_compactions(tmp_path: Path) -> None:
    log = SealedLog(tmp_path)
    for number in range(20):
        log.object_of(dict.fromkeys(range(4), 1250), GroupSizes(1 << 18, 1 << 14))
        assert log.inputs[number].name.rows == 5000
    sizes = GroupSizes(1 << 20, 1 << 16)
    halves = [log.compact(log.inputs[:10], sizes=sizes), log.compact(log.inputs[10:], sizes=sizes)]
    made = log.compact(halves, sizes=sizes)
    assert len(log.sealed) == 100_000
    assert records_in(made) == log.sealed
    assert made.name.sha256 == hashlib.sha256(b"".join(log.sealed[at] for at in sorted(log.sealed))).hexdigest()


def test_small_row_groups_are_read_once_for_any_number_of_queues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SealedLog(tmp_path)
    for _ in range(6):
        log.object_of({0: 2, 1: 2, 2: 2}, GroupSizes())
    read: list[str] = []

    class Counting(pq.ParquetFile):  # type: ignore[misc]
        def read_row_group(self, index: int, **options: Any) -> Any:
            read.append(str(index))
            return super().read_row_group(index, **options)

    monkeypatch.setattr(pq, "ParquetFile", Counting)
    log.compact()
    written = 1 + sum(map(len, log.sealed.values())) // SMALL.most
    assert len(read) <= 6 + written + 3


def test_compactor_bounds_the_bytes_of_held_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compactor, "GROUPS_BYTES", 1000)
    log = SealedLog(tmp_path)
    for _ in range(5):
        log.object_of({0: 6, 1: 6})
    groups = compactor._Groups(log.inputs)
    for part in compactor._parts(log.inputs):
        groups.read(part.number, part.group)
        assert len(groups._held) == 1 or groups._bytes <= 1000
        assert groups._bytes == sum(len(records.wire) for _, records in groups._held.values())
    assert records_in(log.compact()) == log.sealed


def test_row_group_merged_from_many_does_not_retain_their_tables(tmp_path: Path) -> None:
    log = SealedLog(tmp_path)
    for _ in range(20):
        log.object_of({0: 1, 1: 80}, GROUP_SIZES)
    held = [(rows, records) for queue, rows, records in compactor._rows(log.inputs, {}, {}) if queue == 0]
    assert len(held) == 20
    whole = log.inputs[0].name.wire_bytes
    assert sum(rows.get_total_buffer_size() for rows, _ in held) < 2 * whole
    assert sum(memoryview(records.wire.obj).nbytes for _, records in held) < whole


def other_sha(one: Input) -> Input:
    return Input(one.path, msgspec.structs.replace(one.name, sha256="0" * 64))


def shifted(one: Input) -> Input:
    groups = [
        msgspec.structs.replace(group, runs=[(q, first + 1, last + 1) for q, first, last in group.runs])
        for group in one.name.row_groups
    ]
    return Input(one.path, msgspec.structs.replace(one.name, row_groups=groups))


def cut(one: Input) -> Input:
    one.path.write_bytes(one.path.read_bytes()[:-20])
    return one


def flipped(one: Input) -> Input:
    raw = bytearray(one.path.read_bytes())
    raw[one.name.row_groups[0].offset + 40] ^= 1
    one.path.write_bytes(raw)
    return one


@pytest.mark.parametrize("spoil", [other_sha, shifted, cut, flipped])
def test_input_that_differs_from_the_journal_makes_no_object(tmp_path: Path, spoil: Callable[[Input], Input]) -> None:
    log = SealedLog(tmp_path)
    for _ in range(3):
        log.object_of({0: 20, 1: 5})
    inputs = [log.inputs[0], spoil(log.inputs[1]), log.inputs[2]]
    with pytest.raises(DamagedObject):
        log.compact(inputs)
    assert list(tmp_path.glob("made-*")) == []


def test_offset_in_two_inputs_makes_no_object(tmp_path: Path) -> None:
    log = SealedLog(tmp_path)
    one = log.object_of({0: 20})
    with pytest.raises(DamagedObject, match="in two of the objects"):
        log.compact([one, one])


def test_file_that_fails_verification_is_not_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SealedLog(tmp_path)
    log.object_of({0: 20})
    written = pq.ParquetWriter.write_table

    def with_a_fault(self: Any, table: pa.Table, **options: Any) -> None:
        at = table.schema.get_field_index("flag")
        wrong = table.set_column(at, table.schema.field(at), pa.array([7] * len(table), pa.int32()))
        written(self, wrong, **options)

    monkeypatch.setattr(pq.ParquetWriter, "write_table", with_a_fault)
    with pytest.raises(DamagedObject, match="does not rebuild"):
        log.compact()
    assert list(tmp_path.glob("made-*")) == []
