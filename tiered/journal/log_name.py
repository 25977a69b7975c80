"""The name of the local log in its archive, and the proof that the archive is of this log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from neve.archive.catalog.catalog import Catalog
from tiered.journal.known_archive import KnownArchive

log = logging.getLogger(__name__)

# Compares the local log with an archive; None if they have no message in common.
Proof = Callable[[Catalog], bool | None]


class LogName:
    """The members of a broker set have copies of one log, which the archive knows by the first master's name.

    The setters are callable from any thread; the other methods are for the journal's thread.
    """

    def __init__(self, known: KnownArchive, proof: Proof | None) -> None:
        self._known, self._proof = known, proof
        self._from_master = ""  # the name that the master sent, until the journal's thread takes it
        self._lock = threading.Lock()  # guards the name; never held during a request
        self._proved: tuple[int | None, str] | None = None  # (role, name) of the last proof

    @property
    def uuid(self) -> str:
        """The name, as far as this member knows it."""
        with self._lock:
            return self._from_master or self._known.log_uuid

    def set_by_master(self, uuid: str) -> None:
        """Set the name of the master's log; it is stored at the next read of the journal, and before an EPOCH."""
        with self._lock:
            self._from_master = uuid

    def set_by_earlier_process(self, uuid: str) -> None:
        """Set the name that an earlier process learned; a name stored since takes precedence."""
        if self._known.log_uuid == self._known.own_uuid:
            self.set_by_master(uuid)

    def take(self, catalog: Catalog) -> bool:
        """Take the master's name, and return whether it is new; the archive's own name takes precedence."""
        known, name = self._known, catalog.log_uuid
        with self._lock:
            sent, self._from_master = self._from_master, ""
            is_new = sent not in {"", known.log_uuid} and (not name or name != known.log_uuid)
            if is_new:
                known.log_uuid = sent
            return is_new

    def is_of(self, catalog: Catalog, role: int | None) -> bool:
        """Return whether an archive is of the local log, by its name or, in a broker set, its content.

        `role` is the master epoch: 0 outside a broker set, None for a follower.
        """
        known = self._known
        has_name = not catalog.log_uuid or catalog.log_uuid == known.log_uuid
        if role == 0 or self._proof is None or (has_name and role is None):
            return has_name
        if has_name and self._proved == (role, catalog.log_uuid):
            return True  # a master's log only grows
        found = self._proof(catalog)
        if found is None or not found:
            return has_name and found is None
        if not has_name:
            log.warning("log renamed as in its archive: broker=%s log_uuid=%s", known.broker, catalog.log_uuid)
            known.log_uuid = catalog.log_uuid
        self._proved = role, catalog.log_uuid
        return True
