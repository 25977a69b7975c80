"""Job that finds this broker's orphan objects and unfinished uploads."""

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
    """Removes unfinished uploads of a broker's dead workers; returns how many."""

    def remove_stale_uploads(self, store_url: str, broker: str) -> int: ...


def orphan_objects(journal: JournalWriter, folder: str) -> Iterator[ObjectInfo]:
    """Yield this broker's orphan objects in a folder: no catalog entry and no open intent names them."""
    for info in journal.store.list(folder):
        parts = keys.parse_data_key(info.key)
        if parts is not None and parts.broker == journal.broker and not journal.catalog.knows(info.key):
            yield info


class Sweep:
    """The job. It first reports an orphan, and deletes it only if an earlier sweep reported it, too."""

    def __init__(self, journal: JournalWriter, uploads: StaleUploads, safe_clock: SafeClock, turns: Turns) -> None:
        self._journal, self._uploads, self._safe_clock, self._turns = journal, uploads, safe_clock, turns
        self._reported: dict[str, int] = {}  # orphan -> size in bytes, as of the last sweep

    @property
    def orphan_count(self) -> int:
        """The number of orphans in the last sweep."""
        return len(self._reported)

    def run(self, repair: bool = False) -> list[str]:
        """Return orphans older than 48 hours. With `repair`, delete those that an earlier sweep reported.

        Each topic has its own turn, because the listings of ten thousand topics take minutes.
        """
        journal = self._journal
        with self._turns:
            journal.ownership.confirm()
            now = self._safe_clock.now_ms(journal.store)
            self._remove_stale_uploads()
            folders = self._folders()
        found: dict[str, int] = {}
        for folder in folders:
            if self._turns.closed:
                return sorted(found)
            with self._turns:
                old = (one for one in orphan_objects(journal, folder) if one.modified_ms + ORPHAN_AGE_MS <= now)
                found |= {one.key: one.size for one in old}
        with self._turns:
            journal.ownership.follow()  # an object that was published meanwhile is not an orphan
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
        """Remove unfinished uploads. They only cost space, so a missing permission is logged and stops nothing."""
        try:
            removed = self._uploads.remove_stale_uploads(self._journal.store.url, self._journal.broker)
        except AccessDenied as error:
            log.warning(
                "unfinished uploads stay: grant s3:ListBucketMultipartUploads, s3:AbortMultipartUpload: %s", error
            )
        else:
            if removed:
                log.warning("removed %d uploads that were unfinished for a day", removed)

    def _folders(self) -> list[str]:
        """Return the folder of each topic."""
        journal = self._journal
        top = f"{journal.prefix.strip('/')}/" if journal.prefix.strip("/") else ""
        return [one for one in journal.store.list_prefixes(top) if one.removeprefix(top).startswith("topic=")]
