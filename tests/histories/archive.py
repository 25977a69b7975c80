"""The set's archive, read like any reader of Parquet does."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

import pyarrow.parquet as pq

from infra.objects.open import open_store
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import catalogs
from tests.histories.clients import key_of
from tests.histories.history import Archived, Event, Gap
from tests.kit.server.members import NAME

_COLUMNS = ["queue_id", "queue_offset", "body"]


class ArchiveReader:
    """Reads the archive at `url`; each call uses the journal as it is then."""

    def __init__(self, url: str) -> None:
        self._store = open_store(url)

    def _catalog(self) -> Catalog | None:
        try:
            return catalogs(self._store).get(NAME)
        except FileNotFoundError:
            return None  # The first master may not have run its first archiving round yet.

    def has_all(self, ends: Mapping[tuple[str, int], int]) -> bool:
        """Return whether the archive reaches these offsets of queues."""
        catalog = self._catalog()
        if catalog is None:
            return False
        return all((catalog.max_offset(*queue) or 0) >= end for queue, end in ends.items())

    def rows(self, topics: Iterable[str]) -> list[Event]:
        """Return all rows of these topics, and their recorded gaps."""
        catalog = self._catalog()
        if catalog is None:
            return []
        found: list[Event] = []
        for topic in topics:
            for name in catalog.objects(topic):
                table = pq.read_table(io.BytesIO(self._store.get(name.key)), columns=_COLUMNS)
                columns = (table.column(column).to_pylist() for column in _COLUMNS)
                for queue, offset, body in zip(*columns, strict=True):
                    found.append(Archived(topic=topic, queue=queue, offset=offset, key=key_of(body)))
            for gap in catalog.gaps(topic):
                ranges = [(gap.topic, gap.queue, gap.first, gap.last), *gap.more]
                for of, queue, first, last in ranges:
                    if of == topic:
                        found.append(Gap(topic=topic, queue=queue, first=first, last=last))
        return found
