"""Tiers of a topic: the offsets that are archived, local, or both (request 202 with `tiers`).

offset:  min ........ local min ........ archived ........ max
         └─ archive only ──┘└── both ──────┘└─ local only ──┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog


class Archived(NamedTuple):
    """Visible objects of a topic in the archive; `newest_ms` is the store time of the newest message."""

    objects: int
    rows: int
    bytes: int
    newest_ms: int


class TopicTiers:
    """Archived part of topics; `catalog` returns the catalog of this broker's archive, None without one."""

    def __init__(self, catalog: Callable[[], Catalog | None]) -> None:
        self._catalog = catalog

    def archived_offset(self, topic: str, queue: int) -> int | None:
        """Return the offset after the highest archived one of a queue; None without an archive."""
        catalog = self._catalog()
        return None if catalog is None else catalog.max_offset(topic, queue) or 0

    async def archived(self, topic: str) -> Archived | None:
        """Return the archived objects of a topic, None without an archive. Runs in a thread: there may be 100,000."""
        catalog = self._catalog()
        return None if catalog is None else await asyncio.to_thread(_archived, catalog, topic)


def _archived(catalog: Catalog, topic: str) -> Archived:
    objects = rows = size = newest_ms = 0
    for name in catalog.topic(topic).names():
        objects, rows, size, newest_ms = objects + 1, rows + name.rows, size + name.size, max(newest_ms, name.max_time)
    return Archived(objects, rows, size, newest_ms)
