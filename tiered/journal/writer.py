"""The writer of a broker's journal: it decides which entries may be appended, and `ownership` whether any may."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

from infra import failpoint
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.objects.store import ObjectStore, ObjectStoreError, UnknownOutcome
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import AnyEntry, EntriesDeleted, Erase, Expire, Forget, Intent
from tiered.journal.checkpoints import CHECKPOINT_ENTRIES, Checkpoints
from tiered.journal.errors import WouldLoseRows
from tiered.journal.identity import IdentityFile
from tiered.journal.known_archive import KnownArchive
from tiered.journal.local_journal import LocalJournal
from tiered.journal.log_name import LogName, Proof
from tiered.journal.ownership import WAY_OUT, Ownership
from tiered.journal.shortening import Shortening
from tiered.journal.tail import JournalTail

log = logging.getLogger(__name__)


class JournalWriter:
    """The writer of one journal. Thread-safe; one request at a time."""

    def __init__(
        self,
        store: ObjectStore,
        prefix: str,
        broker: str,
        log_uuid: str,
        *,
        local: Path,
        disk: Disk,
        clock: Clock,
        cluster: str = "DefaultCluster",
        checkpoint_entries: int = CHECKPOINT_ENTRIES,
        proof: Proof | None = None,
        way_out: str = WAY_OUT,
    ) -> None:
        """Make a writer.

        `proof` compares the logs of a broker set's member; `way_out` is the remedy in a refusal.
        """
        self.store, self.prefix, self.broker = store, prefix, broker
        copy = LocalJournal(local, disk)
        self._tail = JournalTail(store, prefix, broker, copy, clock)
        self._known = KnownArchive(IdentityFile(local, disk), self._tail.catalog, broker, log_uuid)
        self._checkpoints = Checkpoints(self._tail, checkpoint_entries)
        self._shortening = Shortening(self._tail, checkpoint_entries)
        self.named = self._known.named  # its marks precede plans: see `append`
        self.log_name = LogName(self._known, proof)
        # The number of a put with unknown outcome: its entry may still appear until another one has that number.
        self._open_at = -1
        self.ownership = Ownership(
            self._tail,
            self._known,
            self.log_name,
            cluster=cluster,
            catch_up_entries=checkpoint_entries // 2,
            way_out=way_out,
        )
        self._lock = self.ownership.lock

    @property
    def log_uuid(self) -> str:
        """The log's name in the archive, as far as this member knows it."""
        return self.log_name.uuid

    @property
    def catalog(self) -> Catalog:
        """The catalog after the last known entry."""
        return self._tail.catalog

    @property
    def writer(self) -> str:
        """The identifier of this process in its entries."""
        return self._tail.writer

    @property
    def aborted(self) -> set[str]:
        """The keys that an ABORT closed, which must not be planned again."""
        return self._tail.aborted

    # ---- append

    def append(self, entry: AnyEntry, *, plan: int | None = None, master_epoch: int | None = None) -> int:
        """Append an entry, and return its number.

        Args:
            entry: the entry.
            plan: the mark (`named.mark()`) at which an INTENT, or the minimums of an EXPIRE, were planned.
            master_epoch: the master epoch in which the entry was planned; it must be the current one.

        Raises:
            StalePlan: a topic of the plan was deleted after the mark.
            Fenced: another process owns the archive.
            NotAttached: there is no EPOCH, or the master epoch has changed.
            WouldLoseRows: the entry would lose rows.
            UnknownOutcome: the entry may be in the journal or not.
        """
        with self._lock:
            self.ownership.require(master_epoch)
            if _names_offsets(entry) or (isinstance(entry, Expire) and plan is not None):
                # The offsets are durable locally before the entry can be in the journal, so no start can miss them.
                self._known.remember(entry, plan, self.ownership.epoch)
                failpoint.hit("journal.after_identity")
            self.check_rows(entry)
            try:
                is_ours = self._tail.put_next(entry, self.ownership.epoch)
            except EntriesDeleted as error:
                self.ownership.follow()  # another process has deleted entries, so it has taken the archive over
                raise UnknownOutcome(f"archive of {self.broker}: {error}") from error
            except ObjectStoreError:
                self._open_at = self.catalog.next_seq
                raise
            if not is_ours:
                self.ownership.fence()
            return self.catalog.next_seq - 1

    def check_rows(self, entry: AnyEntry) -> None:
        """Check that an entry loses no rows, before entries that precede it are written. Raises WouldLoseRows."""
        if isinstance(entry, Erase) and (lost := self.catalog.lost_by(entry)):
            raise WouldLoseRows(f"archive of {self.broker}: rows of {', '.join(lost)} would be lost")

    def checkpoint_if_due(self) -> bool:
        """Write a checkpoint if it is due; return whether it was written."""
        with self._lock:
            return self.ownership.online and self._checkpoints.is_due() and self._checkpoints.write(self.append)

    # ---- forgotten topics

    def forget(self, topics: Sequence[str]) -> list[str]:
        """Forget those of these deleted topics of which the archive has nothing left, and return them.

        The caller has checked that its log has nothing of them, and that no plan is in progress.
        """
        with self._lock:
            self.ownership.follow()
            left = {tombstone.topic for tombstone in self.catalog.forgettable()}
            forgotten = [topic for topic in topics if topic in left]
            if forgotten:
                self.append(Forget(topics=forgotten))
            is_new = self.catalog.next_seq > self._open_at and self.named.forget_pending()
            if forgotten or is_new:  # `is_new` after an interrupted run
                self._known.save(self.ownership.epoch)
            return forgotten

    # ---- shortening

    def entries_to_delete(self, now_ms: int, retention_ms: int) -> list[int]:
        """Return the numbers of entries that may be deleted, lowest first."""
        with self._lock:
            if not self.ownership.online:
                return []
            return self._shortening.due(now_ms, retention_ms)

    def delete_entries(self, numbers: Sequence[int]) -> None:
        """Delete entries in this order. Raises the store's error; the remaining ones are due again."""
        self._shortening.delete(numbers)

    # ---- restarted topics

    def restart_at_zero(self, topic: str) -> bool:
        """Let a deleted topic restart at offset 0; return False if the archive may know one of its offsets.

        The caller removes the topic's queues before anything else; a plan made with them is refused.
        """
        return not self.ownership.fenced and self.named.restart_at_zero(topic)


def _names_offsets(entry: AnyEntry) -> TypeGuard[Intent]:
    """Whether an entry names new offsets; the rows of a rewrite were named by a round."""
    return isinstance(entry, Intent) and not entry.kind
