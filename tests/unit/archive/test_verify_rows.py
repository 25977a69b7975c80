"""Tests of the deep verification of an object: any change of its bytes or journal record is found."""

from __future__ import annotations

import random

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from neve.archive.format.journal import CommittedObject
from neve.archive.read.verify import Fault, object_faults
from neve.archive.read.verify_rows import row_faults
from neve.archive.rows.schema import parse_footer
from neve.archive.store.source import Head
from tests.kit.archive.written_rows import row, written


class OneObject:
    """A store with a single object."""

    def __init__(self, data: bytes, size: int | None = None) -> None:
        self.data, self.size = data, len(data) if size is None else size

    def head(self, key: str) -> Head:
        return Head(self.size)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self.data[start : start + length]


ROWS = [[row(0, offset) for offset in range(20)], [row(1, offset) for offset in range(5, 25)]]
NAME, DATA = written(ROWS)


def faults(data: bytes, name: CommittedObject = NAME) -> list[Fault]:
    return list(object_faults(name, OneObject(data), row_faults))


def test_sound_object_has_no_fault() -> None:
    assert faults(DATA) == []


@pytest.mark.parametrize("seed", range(3))
def test_verify_finds_any_flipped_bit(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(25):
        at = chance.randrange(len(DATA))
        damaged = bytearray(DATA)
        damaged[at] ^= 1 << chance.randrange(8)
        assert faults(bytes(damaged)), f"byte {at}"


def test_verify_reports_only_the_offsets_of_a_damaged_row_group() -> None:
    metadata = parse_footer(DATA[-NAME.footer :])
    chunk = metadata.row_group(1).column(metadata.schema.names.index("body"))
    damaged = bytearray(DATA)
    begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    damaged[begin + chunk.total_compressed_size - 20] ^= 4
    found = faults(bytes(damaged))
    assert {(one.queue, one.first, one.last) for one in found} == {(1, 5, 24), (None, None, None)}
    assert all(one.key == NAME.key for one in found)


def test_verify_finds_any_changed_row_without_a_file_checksum() -> None:
    """Pages have checksums and records have hashes. Only statistics have bits that do not affect rows."""
    name = msgspec.structs.replace(NAME, checksum=("", ""))
    group = NAME.row_groups[0]
    whole, seen = pq.read_table(pa.BufferReader(DATA)), 0
    for at in range(group.offset, group.offset + group.length, 41):
        damaged = bytearray(DATA)
        damaged[at] ^= 1
        if faults(bytes(damaged), name):
            seen += 1
        else:
            assert pq.read_table(pa.BufferReader(bytes(damaged))).equals(whole), f"byte {at}"
    assert seen > 20


def test_verify_finds_a_valid_but_foreign_object() -> None:
    name, data = written([[row(0, offset) for offset in range(20)], [row(1, offset) for offset in range(6, 26)]])
    padded = msgspec.structs.replace(NAME, size=len(data), footer=name.footer, checksum=("", ""))
    padded = msgspec.structs.replace(
        padded,
        row_groups=[
            msgspec.structs.replace(one, offset=other.offset, length=other.length, wire_bytes=other.wire_bytes)
            for one, other in zip(NAME.row_groups, name.row_groups, strict=True)
        ],
    )
    texts = [one.message() for one in faults(data, padded)]
    assert any("the row is of queue 1 offset 6" in text for text in texts)
    assert any("SHA-256 of its records" in text for text in texts)


def test_verify_finds_missing_truncated_and_shrinking_objects() -> None:
    class Nothing(OneObject):
        def head(self, key: str) -> Head:
            raise FileNotFoundError(key)

    assert [one.text for one in object_faults(NAME, Nothing(b""), row_faults)] == ["the object is missing"]
    assert "the journal records" in faults(DATA[:-5])[0].text
    shrinking = list(object_faults(NAME, OneObject(DATA[:200], len(DATA)), row_faults))
    assert shrinking


def test_verify_reports_each_row_archived_damaged() -> None:
    """The file and the journal hashes are sound; only the rows show the damage."""
    bad = row(0, 3) | {"body_crc": 7}
    marked = row(0, 4) | {"body_crc": 7, "damaged": True}
    framed = row(0, 5) | {"wire": b"\0\0\0\x63 no record"}
    name, data = written([[row(0, 2), bad, marked, framed]])
    found = [(one.queue, one.first, one.last, one.text.partition(",")[0]) for one in faults(data, name)]
    assert found == [
        (0, 3, 3, "the body does not match its CRC"),
        (0, 5, 5, "the record is framed wrongly"),
    ]


def test_verify_reports_rows_outside_the_times_of_their_row_group() -> None:
    """Such a row group would expire or be skipped together with a newer row."""
    group = msgspec.structs.replace(NAME.row_groups[0], newest_ms=1_700_000_000_000 + 17)
    name = msgspec.structs.replace(NAME, row_groups=[group, NAME.row_groups[1]])
    found = faults(DATA, name)
    assert [(one.queue, one.first) for one in found] == [(0, 18), (0, 19)]
