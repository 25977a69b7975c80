"""Tests of the byte search in the log, across read borders and up to the end of the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.store.errors import StoreCorrupt
from broker.store.log_search import records_with
from infra.disk.filesystem import RealDisk
from neve.record.codec import decode_record
from tests.kit.archive.records import record

END = (64).to_bytes(4, "big") + (-875286124).to_bytes(4, "big", signed=True)


def written(path: Path, *parts: bytes) -> int:
    path.write_bytes(b"".join(parts))
    return path.stat().st_size


def found(path: Path, size: int, text: bytes = b"needle") -> list[int]:
    raws = records_with(RealDisk(), path, size, text)
    return [decode_record(raw).queue_offset for raw in raws if raw is not None]


@pytest.mark.parametrize("end", [b"", END + bytes(56), bytes(4096)])
def test_search_finds_each_record_once_over_all_pieces(tmp_path: Path, end: bytes) -> None:
    bodies = [bytes(300_000) + b"needle" * (at % 3 == 0) + bytes(at) for at in range(20)]
    bodies[7] = bytes(3 << 20) + b"needle"  # longer than one read
    records = [record(at, body=body) for at, body in enumerate(bodies)]
    size = written(tmp_path / "log", *records, end)
    assert found(tmp_path / "log", size) == sorted({*range(0, 20, 3), 7})
    assert found(tmp_path / "log", size, b"nothing") == []
    assert found(tmp_path / "log", sum(map(len, records[:2]))) == [0], "up to a size"


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\x50abcdefgh", record(1)[:-1], (1 << 30).to_bytes(4, "big") + record(1)[4:]]
)
def test_search_reports_a_place_without_a_record(tmp_path: Path, damage: bytes) -> None:
    size = written(tmp_path / "log", record(0, body=b"needle"), damage)
    raws = records_with(RealDisk(), tmp_path / "log", size, b"needle")
    with pytest.raises(StoreCorrupt, match="has no record at"):
        list(raws)
