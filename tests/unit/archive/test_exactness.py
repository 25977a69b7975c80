"""Tests that each record rebuilt from its row equals the sealed record byte for byte."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neve.archive.format.journal import CommittedObject
from neve.archive.rows.column_encoder import table_of
from neve.archive.rows.rebuild import Records, joined_views, rebuild, tag_codes, views
from neve.archive.rows.row_encoder import Entries, exact_rows, with_wire
from neve.archive.rows.schema import GROUP_BYTES, DamagedObject, ObjectFacts
from neve.record.layout import MAGIC_V2
from neve.record.properties import tags_code
from tests.kit.archive.records import T0, TOPIC, Run, record
from tiered.write import segment_writer
from tiered.write.segment_writer import MissingBytes, describe_file, encode, in_order, plan_groups

I32 = st.integers(-(1 << 31), (1 << 31) - 1)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
HOSTS = st.tuples(st.sampled_from(["10.0.0.1", "0.0.0.0", "255.255.255.255", "fe80::1", "::", "2001:db8::ff"]), I32)
PROPERTIES = st.one_of(
    st.sampled_from(
        [b"", b"\x02", b"\x01", b"k\x01\x02", b"\x01v\x02", b"k\x01v", b"a\x01b\x02a\x01c\x02", b"k\x02", b"\x02\x02"]
    ),
    st.lists(st.sampled_from([b"KEYS", b"TAGS", b"UNIQ_KEY", b"\x01", b"\x02", b"\xff", b"a b", b"\0"])).map(b"".join),
    st.binary(max_size=60),
)  # fmt: skip


def entries_of(records: Sequence[bytes]) -> Entries:
    offsets = np.arange(len(records))
    sizes = np.array([len(raw) for raw in records], np.int32)
    return Entries(np.full(len(records), 1, np.int32), offsets, 1000 + offsets, sizes)


def sealed_of(records: Sequence[bytes]) -> Records:
    return Records(memoryview(b"".join(records)), np.cumsum([0, *map(len, records)]))


def rows_of(records: Sequence[bytes], topic: str = TOPIC) -> pa.Table:
    return table_of(entries_of(records), sealed_of(records), topic)


def assert_exact(records: Sequence[bytes], topic: str = TOPIC) -> pa.Table:
    table = rows_of(records, topic)
    rebuilt = rebuild(table, topic)
    assert [bytes(rebuilt.record(row)) for row in range(len(records))] == list(records)
    assert len(tag_codes(table, rebuilt)) == len(records)
    # A file written before the rows are compared needs no rewrite.
    assert table_of(entries_of(records), sealed_of(records), topic, compare_all=False).to_pylist() == table.to_pylist()
    # The vectorized path and the path by row give identical results.
    one_by_one = exact_rows(entries_of(records).each(), [memoryview(raw) for raw in records], topic)
    assert table.to_pylist() == with_wire(one_by_one, sealed_of(records), topic).to_pylist()
    return table


@st.composite
def odd_records(draw: st.DrawFn) -> list[bytes]:
    records = []
    for offset in range(draw(st.integers(1, 6))):
        raw = record(
            draw(st.sampled_from([offset, 0, 99])),
            body=draw(st.binary(max_size=40)),
            properties=draw(PROPERTIES),
            queue_id=draw(st.sampled_from([1, -1])),
            flag=draw(I32),
            sys_flag=draw(I32),
            born_timestamp=draw(st.one_of(I64, st.just(T0), st.just(1 << 62))),
            store_timestamp=draw(st.one_of(I64, st.just(T0))),
            born_host=draw(HOSTS),
            store_host=draw(HOSTS),
            reconsume_times=draw(I32),
            prepared_transaction_offset=draw(I64),
            body_crc=draw(st.one_of(st.none(), st.integers(0, (1 << 31) - 1))),
        )
        damaged = bytearray(raw)
        for _ in range(draw(st.integers(0, 2))):
            damaged[draw(st.integers(0, len(raw) - 1))] ^= 1 << draw(st.integers(0, 7))
        records.append(bytes(damaged))
    return records


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(odd_records())
def test_sealed_records_are_rebuilt_exactly(records: list[bytes]) -> None:
    assert_exact(records)


NAMES = st.sampled_from(["KEYS", "TAGS", "UNIQ_KEY", "k", "ä", "", "k\x01"])
VALUES = st.one_of(st.sampled_from(["", " ", "a  b ", "ä", "tag"]), st.text(max_size=5))
COMMON = st.builds(
    lambda body, pairs, tail, hosts, born: {
        "body": body,
        "properties": b"\x02".join(f"{name}\x01{value}".encode() for name, value in pairs) + tail,
        "born_host": hosts[0],
        "store_host": hosts[1],
        "born_timestamp": T0 + born,
    },
    st.binary(max_size=40),
    st.lists(st.tuples(NAMES, VALUES), max_size=4),
    st.sampled_from([b"\x02", b""]),
    st.tuples(HOSTS, HOSTS),
    st.integers(-3, 3),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(COMMON, min_size=1, max_size=8), odd_records(), st.randoms())
def test_mixed_common_and_odd_records_are_rebuilt_exactly(
    common: list[dict[str, Any]], odd: list[bytes], random: Any
) -> None:
    """Each record has its queue offset, so common records take the vectorized path."""
    kinds: list[dict[str, Any] | bytes] = [*common, *odd]
    random.shuffle(kinds)
    assert_exact([kind if isinstance(kind, bytes) else record(row, **kind) for row, kind in enumerate(kinds)])


def test_common_records_take_the_vectorized_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "neve.archive.rows.column_encoder.exact_rows", lambda *_: pytest.fail("a common record went the slow way")
    )
    assert_exact([
        record(0), record(1, properties=b""), record(2, properties=b"a\x01b"), record(3, born_host=("fe80::1", 9)),
        record(4, store_host=("::2", 9), body=b""), record(5, properties="k\x01\xe4\x02".encode()),
    ])  # fmt: skip
    assert_exact([record(0, topic=b"t" * 200)], "t" * 200)
    assert_exact([record(row, properties=b"name-%d\x01v\x02x\x01y" % row) for row in range(200)])


def test_common_records_fill_their_columns_without_wire() -> None:
    table = assert_exact([record(0), record(1, born_host=("fe80::1", 9), properties=b"k\x01\x02j\x01v")])
    assert table.column("wire").null_count == 2
    first, second = table.to_pylist()
    assert (first["msg_id"], first["tags"], first["keys"]) == ("ABC", "täg", ["k1", "k2"])
    assert first["properties_tail"] and not second["properties_tail"]
    assert second["properties"] == [("k", ""), ("j", "v")] and second["born_host"] == "[fe80::1]:9"
    assert tag_codes(table, rebuild(table, TOPIC)).tolist() == [tags_code("täg"), 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"properties": b"a\x01\xff\x02"},
        {"properties": b"a\x01b\x02a\x01c\x02"},
        {"properties": b"novalue\x02"},
        {"born_timestamp": 1 << 62},
        {"store_timestamp": -1},
    ],
)
def test_odd_shapes_keep_the_record_and_are_not_damaged(changes: dict[str, Any]) -> None:
    (row,) = assert_exact([record(0, **changes)]).to_pylist()
    assert row["wire"] is not None and row["damaged"] is False


def test_unusual_record_versions_are_kept_in_wire() -> None:
    raw = record(0)
    at = raw.index(b"\x06" + TOPIC.encode())
    short_v2 = bytearray(raw[:at] + b"\x00" + raw[at:])
    short_v2[:4] = len(short_v2).to_bytes(4, "big")
    short_v2[4:8] = MAGIC_V2.to_bytes(4, "big", signed=True)
    unknown = raw[:4] + b"\x01\x02\x03\x04" + raw[8:]
    rows = assert_exact([bytes(short_v2), unknown]).to_pylist()
    assert all(row["wire"] is not None and not row["damaged"] for row in rows)


def test_long_topic_is_version_2_without_wire() -> None:
    topic = "t" * 200
    (row,) = assert_exact([record(0, topic=topic.encode())], topic).to_pylist()
    assert row["wire"] is None and row["damaged"] is False


@pytest.mark.parametrize("position", [0, 90, 8, 20])
def test_damaged_record_is_kept_in_wire_with_keys_of_its_queue_entry(position: int) -> None:
    raw = bytearray(record(0))
    raw[position] ^= 0x40
    (row,) = assert_exact([bytes(raw)]).to_pylist()
    assert row["damaged"] and row["wire"] == bytes(raw)
    assert (row["queue_id"], row["queue_offset"], row["commit_log_offset"]) == (1, 0, 1000)


def write(tmp_path: Path, records: Sequence[bytes], files: Sequence[tuple[str, int, int]] | None = None) -> Any:
    log = tmp_path / "log"
    log.write_bytes(b"".join(records))
    sizes = np.array([len(raw) for raw in records])
    physical = 1000 + np.cumsum(sizes) - sizes
    facts = ObjectFacts("c", "b", TOPIC, "2026-01-02", 1, 1000, 1000 + int(sizes.sum()))
    named = files if files is not None else [(str(log), 1000, int(sizes.sum()))]
    return encode({1: Run(0, physical, sizes)}, named, tmp_path / "o.parquet", facts=facts, key="k")


def laid_out(count: int, **changes: Any) -> list[bytes]:
    records, at = [], 1000
    for offset in range(count):
        records.append(record(offset, physical_offset=at, **changes))
        at += len(records[-1])
    return records


def test_file_has_its_metadata_and_indexes(tmp_path: Path) -> None:
    records = laid_out(50, body=b"x" * 300_000)
    written = write(tmp_path, records)
    name = written.name
    assert name.sha256 == hashlib.sha256(b"".join(records)).hexdigest()
    assert (written.wire_rows, written.damaged_rows, name.rows) == (0, 0, 50)
    assert name.queues == {1: (0, 49, 0)} and (name.min_time, name.max_time) == (T0 + 1, T0 + 1)
    assert len(name.row_groups) > 1 and all(group.wire_bytes <= GROUP_BYTES for group in name.row_groups)
    assert [group.first_row for group in name.row_groups] == np.cumsum([0, *(g.rows for g in name.row_groups)])[
        :-1
    ].tolist()
    metadata = pq.read_metadata(written.content)
    columns = {
        metadata.row_group(0).column(i).path_in_schema: metadata.row_group(0).column(i)
        for i in range(metadata.num_columns)
    }
    assert {"msg_id", "keys.list.element"} <= set(columns)
    assert columns["queue_offset"].statistics.max == name.row_groups[0].runs[0][2]
    assert columns["queue_offset"].has_offset_index and columns["msg_id"].compression == "ZSTD"


def test_bloom_filters_exist(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    path = write(tmp_path, laid_out(50)).content
    query = "select path_in_schema from parquet_metadata(?) where bloom_filter_offset is not null"
    found = {row[0] for row in duckdb.sql(query, params=[str(path)]).fetchall()}
    assert {name.replace(" ", "") for name in found} == {"msg_id", "keys,list,element"}


def test_file_that_fails_verification_is_not_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def describe_and_spoil(path: Path, key: str) -> CommittedObject:
        name = describe_file(path, key)
        raw = bytearray(path.read_bytes())
        group = pq.read_metadata(path).row_group(0)
        body = next(group.column(i) for i in range(group.num_columns) if group.column(i).path_in_schema == "body")
        raw[body.data_page_offset + body.total_compressed_size - 5] ^= 0x10
        path.write_bytes(raw)
        return name

    monkeypatch.setattr(segment_writer, "describe_file", describe_and_spoil)
    with pytest.raises(DamagedObject):
        write(tmp_path, laid_out(50))
    assert not (tmp_path / "o.parquet").exists()


def test_row_that_rebuilds_differently_keeps_the_record_in_wire(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []

    def with_a_fault(entries: Entries, sealed: Records, topic: str, *, compare_all: bool) -> pa.Table:
        modes.append(compare_all)
        table = table_of(entries, sealed, topic, compare_all=False)
        flags = table.column("flag").to_pylist()
        flags[7] += 1
        at = table.schema.get_field_index("flag")
        wrong = table.set_column(at, table.schema.field(at), pa.array(flags, pa.int32()))
        return with_wire(wrong, sealed, topic) if compare_all else wrong

    monkeypatch.setattr(segment_writer, "table_of", with_a_fault)
    records = laid_out(50)
    written = write(tmp_path, records)
    assert modes == [False, True]
    assert written.wire_rows == 1
    rebuilt = rebuild(pq.read_table(written.content), TOPIC)
    assert bytes(rebuilt.wire) == b"".join(records)


def test_strings_of_any_length_are_joined_from_any_place() -> None:
    """An Arrow string view contains up to 12 bytes inline, and only a reference to longer ones."""
    source = bytes(range(256)) * 2
    begins = np.array([500, 0, 300, 7, 100, 499, 256, 3])
    sizes = np.array([12, 13, 0, 11, 256, 13, 1, 12])
    joined = joined_views(views(source, begins, sizes), [source])
    assert joined.to_pylist() == [source[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]


def test_entry_outside_the_files_is_refused_without_leftovers(tmp_path: Path) -> None:
    with pytest.raises(MissingBytes):
        write(tmp_path, laid_out(5), files=[])
    assert not (tmp_path / "o.parquet").exists()


def test_row_groups_end_by_bytes_and_at_a_change_of_queue() -> None:
    def plan(*queues: tuple[int, int]) -> list[tuple[int, int]]:
        runs = {q: Run(0, np.zeros(count), np.full(count, size)) for q, (count, size) in enumerate(queues)}
        return list(plan_groups(in_order(runs)))

    assert plan((10, 100), (10, 100)) == [(0, 20)]
    assert plan((10, 30_000), (10, 100)) == [(0, 10), (10, 20)]
    assert plan((5, 2 << 20)) == [(0, 2), (2, 4), (4, 5)]
    assert plan((2, 5 << 20), (1, 1)) == [(0, 1), (1, 2), (2, 3)]
