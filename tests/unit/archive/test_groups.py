"""Tests of row group decoding: which bytes and columns are read."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neve.archive.rows import row_groups as groups
from neve.archive.rows.rebuild import COLUMNS
from neve.archive.rows.row_groups import decode_group
from neve.archive.rows.schema import SCHEMA, describe, parse_footer

DATA = Path(__file__).with_name("golden.parquet").read_bytes()
FOOTER = int.from_bytes(DATA[-8:-4], "little") + 8
METADATA = parse_footer(DATA[-FOOTER:])
NAME = describe(METADATA, key="k", size=len(DATA), footer=FOOTER, etag="", checksum=("", ""))


def decode(index: int) -> bytes:
    group = NAME.row_groups[index]
    part = DATA[group.offset : group.offset + group.length]
    return bytes(
        decode_group(
            METADATA, index, group.offset, part, size=len(DATA), topic=NAME.topic, wire_bytes=group.wire_bytes
        ).wire
    )


def test_fetched_bytes_are_decoded_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = [decode(index) for index in range(len(NAME.row_groups))]

    def copied(*_: object) -> bytes:
        raise AssertionError("a part of the row group was copied")

    monkeypatch.setattr(groups._OneRange, "read", copied)
    assert [decode(index) for index in range(len(NAME.row_groups))] == wire


def test_columns_not_needed_for_records_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[pa.Table] = []
    whole = pq.ParquetFile.read_row_group

    def noted(*arguments: object, **options: object) -> pa.Table:
        read.append(whole(*arguments, **options))
        return read[-1]

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    decode(0)
    assert [sorted(table.column_names) for table in read] == [sorted(COLUMNS)]
    assert set(SCHEMA.names) - set(COLUMNS) == {"msg_id", "keys", "body_codec", "damaged"}
