"""Sweep: objects of this broker that nothing vouches for, and uploads that nobody finished."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Protocol

from infra.objects.store import AccessDenied, ObjectInfo
from lifecycle.safe_clock import SafeClock
from lifecycle.turns import Turns
from neve.archive.format import keys
from neve.archive.policy.ttl import HOUR_MS
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)

ORPHAN_AGE_MS = 48 * HOUR_MS


class StaleUploads(Protocol):
    """Who forgets the unfinished uploads of a broker's dead workers; returns how many."""

    def remove_stale_uploads(self, store_url: str, broker: str) -> int: ...


def objects_of_nobody(journal: JournalWriter, folder: str) -> Iterator[ObjectInfo]:
    """This broker's objects there that its catalog does not know: nobody reads them, and nobody is making them."""
    for info in journal.store.list(folder):
        parts = keys.parse_data_key(info.key)
        if parts is not None and parts.broker == journal.broker and not journal.catalog.knows(info.key):
            yield info


class Sweep:
    """The job; what it finds is told first, and deleted only when a sweep before has told of it."""

    def __init__(self, journal: JournalWriter, uploads: StaleUploads, safe_clock: SafeClock, turns: Turns) -> None:
        self._journal, self._uploads, self._safe_clock, self._turns = journal, uploads, safe_clock, turns
        self._reported: dict[str, int] = {}  # orphan -> size, as the last sweep found them

    @property
    def orphan_count(self) -> int:
        """As the last sweep found them."""
        return len(self._reported)

    def run(self, repair: bool = False) -> list[str]:
        """Orphans older than 48 h. `repair` deletes those reported before.

        A turn for each topic: of ten thousand the listings take minutes.
        """
        journal = self._journal
        with self._turns:
            journal.ensure_online()
            journal.follow()
            now = self._safe_clock.now_ms(journal.store)
            self._remove_stale_uploads()
            folders = self._folders()
        found: dict[str, int] = {}
        for folder in folders:
            if self._turns.closed:
                return sorted(found)
            with self._turns:
                old = (one for one in objects_of_nobody(journal, folder) if one.modified_ms + ORPHAN_AGE_MS <= now)
                found |= {one.key: one.size for one in old}
        with self._turns:
            journal.follow()  # what came to stand meanwhile is somebody's
            found = {key: size for key, size in found.items() if not journal.catalog.knows(key)}
            for key, size in found.items():
                if repair and key in self._reported:
                    journal.store.delete(key)
                    log.warning("deleted the orphan %s of %d bytes", key, size)
                else:
                    log.warning("orphan: %s of %d bytes is in no catalog and no open intent", key, size)
            self._reported = found
            return sorted(found)

    def _remove_stale_uploads(self) -> None:
        """Costs room only, so a bucket that does not let us look stops nothing."""
        try:
            removed = self._uploads.remove_stale_uploads(self._journal.store.url, self._journal.broker)
        except AccessDenied as error:
            log.warning(
                "unfinished uploads stay: grant s3:ListBucketMultipartUploads, s3:AbortMultipartUpload: %s", error
            )
        else:
            if removed:
                log.warning("removed %d uploads that nobody finished for a day", removed)

    def _folders(self) -> list[str]:
        """One for each topic."""
        journal = self._journal
        top = f"{journal.prefix.strip('/')}/" if journal.prefix.strip("/") else ""
        return [one for one in journal.store.list_prefixes(top) if one.removeprefix(top).startswith("topic=")]
