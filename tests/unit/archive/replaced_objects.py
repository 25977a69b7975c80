"""A catalog whose objects are replaced by compaction."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import AnyEntry
from neve.archive.format.keys import data_key
from tests.kit.archive.journal_entries import DAY, committed

ROWS = {0: 30, 1: 15}


def name_of(start: int, end: int, *groups: list[tuple[int, int, int]], rewrite: int = 0, newest: int = 50) -> Any:
    key = data_key("", "t", DAY, "b", start=start, end=end, epoch=3, rewrite=rewrite)
    return committed(key, *groups, start=start, end=end, newest=newest)


OLD = [
    name_of(0, 100, [(0, 0, 9), (1, 0, 4)]),
    name_of(100, 200, [(0, 10, 14)], [(0, 15, 19), (1, 5, 9)]),
    name_of(300, 400, [(0, 20, 29)], [(1, 10, 14)]),
]


def catalog_of(*entries: AnyEntry) -> Catalog:
    catalog = Catalog()
    for seq, entry in enumerate(entries):
        catalog.apply(seq, entry)
    return catalog


@contextmanager
def before_each_line(look: Callable[[], None]) -> Iterator[list[int]]:
    """Call `look` before each executed line of the catalog code, and yield the count."""
    lines = [0]

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if "/neve/archive/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            lines[0] += 1
            sys.settrace(None)
            try:
                look()
            finally:
                sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)
