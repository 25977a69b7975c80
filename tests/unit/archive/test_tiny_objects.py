"""Tests of objects of few rows: low overhead, without loss of content."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from neve.archive.rows.row_groups import decode_group, may_span
from neve.archive.rows.schema import (
    FEW_ROWS,
    STATISTICS,
    TEXTS,
    TINY_BYTES,
    TINY_STATISTICS,
    ObjectFacts,
    describe,
    parse_footer,
)
from neve.record.codec import encode_record
from tests.kit.archive.records import T0, TOPIC, Run
from tiered.write.bloom_filter import filter_reads
from tiered.write.segment_writer import encode

BASE = 5_000_000_000


def sealed(count: int) -> list[bytes]:
    """Return records of messages like those of a client, with 300 bytes each."""
    records, at = [], BASE
    for number in range(count):
        properties = (
            b"KEYS\x01order-%08d\x02UNIQ_KEY\x017F0000010B2E18B4AAC2%012X\x02CLUSTER\x01DefaultCluster\x02"
            b"WAIT\x01true\x02TAGS\x01created\x02" % (number, number)
        )
        body = (b'{"order": %08d, "status": "created", "amount": %d}' % (number, number * 7)).ljust(100, b"x")
        records.append(
            encode_record(
                topic=TOPIC.encode(), body=body, properties=properties, queue_id=1, flag=0, queue_offset=number,
                physical_offset=at, sys_flag=0, born_timestamp=T0 + number, born_host=("10.0.0.1", 51234),
                store_timestamp=T0 + number, store_host=("10.0.0.2", 10911),
            )
        )  # fmt: skip
        at += len(records[-1])
    return records


def write(directory: Path, records: list[bytes]) -> tuple[Any, bytes]:
    wire = b"".join(records)
    (directory / "log").write_bytes(wire)
    sizes = np.array([len(raw) for raw in records])
    facts = ObjectFacts("DefaultCluster", "broker-a", TOPIC, "2026-01-02", 1, BASE, BASE + len(wire))
    runs = {1: Run(0, BASE + np.cumsum(sizes) - sizes, sizes)}
    files = [(str(directory / "log"), BASE, len(wire))]
    return encode(runs, files, directory / "o.parquet", facts=facts, key="k").name, wire


@pytest.mark.parametrize(("count", "beside"), [(1, 3300), (4, 2800)])
def test_object_of_few_rows_has_little_overhead(tmp_path: Path, count: int, beside: int) -> None:
    name, wire = write(tmp_path, sealed(count))
    assert name.size - len(wire) <= beside
    assert name.footer <= 2400


@pytest.mark.parametrize(("count", "compressed"), [(1, {"body", "wire"}), (4, set(TEXTS)), (FEW_ROWS, None)])
def test_object_of_few_rows_compresses_only_long_columns(
    tmp_path: Path, count: int, compressed: set[str] | None
) -> None:
    write(tmp_path, sealed(count))
    group = pq.ParquetFile(tmp_path / "o.parquet").metadata.row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    found = {chunk.path_in_schema for chunk in chunks if chunk.compression == "ZSTD"}
    assert found == (compressed or {chunk.path_in_schema for chunk in chunks})


def test_tiny_object_is_self_contained(tmp_path: Path) -> None:
    name, wire = write(tmp_path, sealed(3))
    data = (tmp_path / "o.parquet").read_bytes()
    metadata = parse_footer(data[-name.footer :])
    again = describe(metadata, key="k", size=len(data), footer=name.footer, etag="", checksum=name.checksum)
    assert again == name
    (group,) = name.row_groups
    part = data[group.offset : group.offset + group.length]
    rows = decode_group(metadata, 0, group.offset, part, size=len(data), topic=TOPIC, wire_bytes=len(wire))
    assert bytes(rows.wire) == wire
    (read,) = filter_reads(metadata)
    filters = data[read.start : read.start + read.length]
    assert read.may_hold(filters, b"order-00000002") == {0}
    assert not read.may_hold(filters, b"nobody"), "a query reads so many row groups and no more"
    places = {place: may_span(metadata, 0, place) for place in (BASE - 1, BASE, BASE + len(wire) - 1, BASE + len(wire))}
    assert places[BASE] and not places[BASE - 1] and not places[BASE + len(wire)]


@pytest.mark.parametrize("is_tiny", [True, False])
def test_tiny_object_has_no_indexes_for_partial_reads(tmp_path: Path, is_tiny: bool) -> None:
    size = len(sealed(1)[0])
    _, wire = write(tmp_path, sealed(TINY_BYTES // size + (0 if is_tiny else 1)))
    assert (len(wire) <= TINY_BYTES) == is_tiny
    group = pq.read_metadata(tmp_path / "o.parquet").row_group(0)
    columns = [group.column(index) for index in range(group.num_columns)]
    bounded = [column.path_in_schema for column in columns if column.is_stats_set]
    assert sorted(bounded) == sorted(TINY_STATISTICS if is_tiny else STATISTICS)
    assert any(column.has_offset_index for column in columns) != is_tiny
    assert any(column.has_dictionary_page for column in columns) != is_tiny
