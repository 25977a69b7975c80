"""A catalog with one object per queue and hour."""

from __future__ import annotations

from random import Random

import msgspec

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import (
    Commit,
    CommittedObject,
    RowGroup,
)
from neve.archive.format.keys import data_key

HOUR = 3_600_000


def name_of(number: int, topic: str = "t", queues: int = 2) -> CommittedObject:
    """Return an object with five offsets of each queue, an hour after the previous object."""
    runs = [(queue, number * 5, number * 5 + 4) for queue in range(queues)]
    group = RowGroup(0, 5 * queues, 4, 100, number * HOUR, number * HOUR, 1000, runs)
    return CommittedObject(
        key=f"topic={topic}/{number:06d}", topic=topic, day="d", start=number, end=number + 1, size=104, footer=4,
        etag="", checksum=("", ""), sha256="", rows=5 * queues, wire_bytes=1000, min_time=number * HOUR,
        max_time=number * HOUR, queues={queue: (first, last, 0) for queue, first, last in runs}, row_groups=[group],
    )  # fmt: skip


def name_at(number: int, topic: str = "t", queues: int = 2, random: Random | None = None) -> CommittedObject:
    """Return the same object with a realistic key and random digests."""
    key = data_key("", topic, "2026-01-01", "b", start=number, end=number + 1, epoch=7)
    digits = {} if random is None else {"etag": random.randbytes(16).hex(), "sha256": random.randbytes(32).hex()}
    told = ("crc32", "8d3f00a1" if random is None else random.randbytes(4).hex())
    name = name_of(number, topic, queues)
    where = {queue: (first, last, queue * 5) for queue, (first, last, _) in name.queues.items()}
    return msgspec.structs.replace(name, key=key, day="2026-01-01", queues=where, checksum=told, **digits)


def filled(count: int, topic: str = "t") -> Catalog:
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[name_at(number, topic) for number in range(count)]))
    return catalog
