"""The archive for parts that are created before the start opens it."""

from __future__ import annotations

from collections.abc import Mapping

from broker.archiving.archive import AnyArchive
from broker.archiving.deletion import Tombstones
from neve.archive.catalog.catalog import Catalog


class OpenedArchive:
    """The archive, once the start has opened it. No part asks for it earlier."""

    def __init__(self) -> None:
        self._archive: AnyArchive | None = None

    def opened(self, archive: AnyArchive) -> None:
        """Take the archive, after recovery of the log."""
        self._archive = archive

    def get(self) -> AnyArchive:
        assert self._archive is not None, "the start opens the archive before any part uses it"
        return self._archive

    def tombstones(self) -> Tombstones:
        return self.get().tombstones

    def trusted_ms(self) -> int:
        """Return the time (ms since 1970) by which messages expire."""
        return self.get().safe_clock.now_ms()

    async def resume_log(self) -> Mapping[str, Mapping[int, int]]:
        """Continue log and queues above the archive. Return the raised queues with their ends."""
        return await self.get().resume_log()

    def catalog(self) -> Catalog | None:
        """Return the catalog; None: there is no archive."""
        journal = self.get().journal
        return None if journal is None else journal.catalog
