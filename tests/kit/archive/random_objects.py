"""Random objects of a small catalog."""

from __future__ import annotations

from random import Random

from neve.archive.format.journal import CommittedObject, RowGroup
from neve.archive.format.keys import data_key

QUEUES = 3
STEP = 10  # maximum number of offsets of a queue in an object


def name_of(random: Random, topic: str, number: int, rewrite: int = 0, count: int = 1) -> CommittedObject:
    """Return an object of CommitLog ranges `number` to `number + count`, with random queues and holes."""
    groups: list[RowGroup] = []
    row = 0
    for index in range(random.choice((1, 1, 1, 3))):
        runs = []
        for queue in range(QUEUES):
            low = number * STEP * 3 + index * STEP
            if random.random() < 0.8:
                runs.append((queue, low + random.randrange(2), low + STEP * count - 1 - random.randrange(2)))
        if not runs:
            runs.append((0, number * STEP * 3 + index * STEP, number * STEP * 3 + index * STEP))
        rows = sum(last - first + 1 for _, first, last in runs)
        newest = random.choice((-1, number * 1000 + index))
        groups.append(RowGroup(row, rows, 4 + row * 10, rows * 10, newest, min(newest, number * 1000), rows * 20, runs))
        row += rows
    queues: dict[int, tuple[int, int, int]] = {}
    for group in groups:
        at = group.first_row
        for queue, first, last in group.runs:
            begin, _, place = queues.get(queue, (first, last, at))
            queues[queue] = begin, last, place
            at += last - first + 1
    start, end = number * 100, (number + count) * 100
    return CommittedObject(
        key=data_key("some/prefix", topic, "2026-01-01", "b 1", start=start, end=end, epoch=3, rewrite=rewrite),
        topic=topic, day="2026-01-01", start=start, end=end, size=row * 10 + 50, footer=46,
        etag=random.choice(("", '"quoted"', random.randbytes(16).hex(), "ABCD")),
        checksum=random.choice((("", ""), ("crc32", random.randbytes(4).hex()))), sha256=random.randbytes(32).hex(),
        rows=row, wire_bytes=row * 20, min_time=number * 1000, max_time=max(group.newest_ms for group in groups),
        queues=queues, row_groups=groups,
    )  # fmt: skip
