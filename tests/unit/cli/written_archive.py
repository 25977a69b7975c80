"""Write an archive for commands."""

from __future__ import annotations

import zlib
from pathlib import Path

from neve.archive.format.journal import (
    AnyEntry,
    Commit,
    CommittedObject,
    Epoch,
    Gap,
    Intent,
    PlannedObject,
    RowGroup,
    encode_entry,
)
from neve.archive.format.keys import journal_key

DATA = b"PAR1 rows and footer PAR1"


def write_archive(root: Path) -> Path:
    """Write an archive of queue 0 of topic t: offsets 0…9 in one object, and a gap 10…14."""
    key = "topic=t/dt=2026-01-01/broker=b/x.parquet"
    name = CommittedObject(
        key=key, topic="t", day="2026-01-01", start=0, end=100, size=len(DATA), footer=0, etag="",
        checksum=("CRC32", f"{zlib.crc32(DATA):08x}"), sha256="", rows=10, wire_bytes=0, min_time=0, max_time=9,
        queues={0: (0, 9, 0)}, row_groups=[RowGroup(0, 10, 4, 10, 9, 0, 100, [(0, 0, 9)])],
    )  # fmt: skip
    intent = Intent(round=1, names=[PlannedObject(key, "t", "2026-01-01", 0, 100, {0: (0, 9)})])
    entries: list[AnyEntry] = [
        Epoch(epoch=1, owner="o", log_uuid="l"),
        intent,
        Commit(round=1, names=[name]),
        Gap(topic="t", queue=0, first=10, last=14, reason="test"),
    ]
    for seq, entry in enumerate(entries):
        path = root / journal_key("", "b", seq)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_entry(entry))
    data = root / key
    data.parent.mkdir(parents=True)
    data.write_bytes(DATA)
    return data
