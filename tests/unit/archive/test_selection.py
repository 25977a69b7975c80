"""Tests of object selection by time: complete, and without unpacking names of other times."""

from __future__ import annotations

from random import Random

import pytest

from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.name_blocks import Block
from neve.archive.format.journal import Commit, CommittedObject, RowGroup
from neve.archive.format.keys import data_key
from neve.archive.read.selection import Selection, choose

HOUR = 3_600_000
NAMES = 400


def name(number: int, chance: Random) -> CommittedObject:
    """Return an object of two row groups, some of them with unknown times."""
    at, first = number * HOUR, 20 * number
    groups = []
    for index in range(2):
        oldest, newest = at + chance.randrange(HOUR // 2), at + HOUR // 2 + chance.randrange(HOUR)
        if chance.random() < 0.05:
            oldest = newest = -1
        low = first + 10 * index
        groups.append(RowGroup(10 * index, 10, 4 + 100 * index, 100, newest, oldest, 1000, [(0, low, low + 9)]))
    key = data_key("", "t", "1970-01-01", "b", start=100 * number, end=100 * number + 100, epoch=1)
    return CommittedObject(
        key=key, topic="t", day="1970-01-01", start=100 * number, end=100 * number + 100, size=300, footer=0, etag="",
        checksum=("", ""), sha256="", rows=20, wire_bytes=2000, min_time=max(min(one.oldest_ms for one in groups), 0),
        max_time=max(one.newest_ms for one in groups), queues={0: (first, first + 19, 0)}, row_groups=groups,
    )  # fmt: skip


@pytest.fixture
def catalog() -> Catalog:
    chance, made = Random(3), Catalog()
    names = [name(number, chance) for number in range(NAMES)]
    for first in range(0, NAMES, 50):
        made.apply(made.next_seq, Commit(round=1, names=names[first : first + 50]))
    return made


def test_selection_covers_every_object_that_may_have_the_time(catalog: Catalog) -> None:
    chance = Random(4)
    objects = catalog.objects("t")
    for _ in range(200):
        start, end = sorted(chance.randrange(-HOUR, (NAMES + 2) * HOUR) for _ in range(2))
        bounds = chance.choice([(start, end), (start, None), (None, end), (start, start)])
        wanted = Selection(*bounds)
        low, high = (-1 if bounds[0] is None else bounds[0]), (1 << 62 if bounds[1] is None else bounds[1])
        expected = [
            (one.key, groups)
            for one in objects
            if (
                groups := [n for n, g in enumerate(one.row_groups) if not 0 <= g.newest_ms < low and g.oldest_ms < high]
            )
        ]
        assert [(one.name.key, one.groups) for one in choose({"b": catalog}, "t", wanted)] == expected


def test_selection_of_an_hour_unpacks_only_its_blocks(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    unpacked: list[Block] = []
    unpack = Block._unpack

    def counted(block: Block) -> tuple[CommittedObject, ...]:
        unpacked.append(block)
        return unpack(block)

    certain = [one for one in catalog.objects("t") if all(group.oldest_ms >= 0 for group in one.row_groups)]
    known = Catalog()
    known.apply(0, Commit(round=1, names=certain))
    monkeypatch.setattr(Block, "_unpack", counted)
    start = certain[100].row_groups[0].oldest_ms
    found = list(choose({"b": known}, "t", Selection(start, start + 1)))
    assert certain[100].key in {one.name.key for one in found}
    assert len(unpacked) <= 2
