"""Entries of a journal with default values."""

from neve.archive.format.journal import (
    COMPACT,
    CommittedObject,
    Intent,
    PlannedObject,
    RowGroup,
)

DAY = "2026-01-02"


def committed(
    key: str, *groups: list[tuple[int, int, int]], start: int = 0, end: int = 100, newest: int = 50
) -> CommittedObject:
    row_groups = [
        RowGroup(index * 10, 10, index * 1000, 1000, newest + index, newest, 4096, list(runs))
        for index, runs in enumerate(groups)
    ]
    queues: dict[int, tuple[int, int, int]] = {}
    for group in groups:
        for queue, first, last in group:
            low, _, row = queues.get(queue, (first, last, 0))
            queues[queue] = (low, last, row)
    return CommittedObject(
        key=key, topic="t", day=DAY, start=start, end=end, size=1, footer=1, etag="e", checksum=("crc32", "0"),
        sha256="", rows=10, wire_bytes=1, min_time=0, max_time=newest, queues=queues, row_groups=row_groups,
    )  # fmt: skip


def intent(round_number: int, *names: CommittedObject) -> Intent:
    return Intent(
        round=round_number,
        names=[
            PlannedObject(n.key, n.topic, n.day, n.start, n.end, {q: (a, b) for q, (a, b, _) in n.queues.items()})
            for n in names
        ],
    )


def to_compact(number: int, old: list[str], *names: CommittedObject) -> Intent:
    return Intent(kind=COMPACT, round=number, old=old, names=intent(number, *names).names)
