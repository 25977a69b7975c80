"""Where a topic's messages lie, for who asks for it (request 202 with `tiers`).

offset:  min ........ local min ........ archived ........ max
         └─ archive alone ─┘└── both ──────┘└─ local alone ─┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from neve.archive.catalog.catalog import Catalog


class Archived(NamedTuple):
    """A topic in the archive, in the readers' view."""

    objects: int
    rows: int
    bytes: int
    newest_ms: int


class TopicTiers:
    """`catalog`: of this broker's archive; None: it has none."""

    def __init__(self, catalog: Callable[[], Catalog | None]) -> None:
        self._catalog = catalog

    def archived_offset(self, topic: str, queue: int) -> int | None:
        """One above the highest offset of a queue that the archive has; None: without an archive."""
        catalog = self._catalog()
        return None if catalog is None else catalog.max_offset(topic, queue) or 0

    async def archived(self, topic: str) -> Archived | None:
        """None: without an archive. In a thread: a topic may have a hundred thousand objects."""
        catalog = self._catalog()
        return None if catalog is None else await asyncio.to_thread(_archived, catalog, topic)


def _archived(catalog: Catalog, topic: str) -> Archived:
    objects = rows = size = newest_ms = 0
    for name in catalog.topic(topic).names():
        objects, rows, size, newest_ms = objects + 1, rows + name.rows, size + name.size, max(newest_ms, name.max_time)
    return Archived(objects, rows, size, newest_ms)
