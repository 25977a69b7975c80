"""Archivable limit of a log that other brokers hold as well, and the mark that archiving has stopped for good.

In a broker set, a message is archived when it is confirmed, and fsynced on all members of the SyncStateSet:

    archived <= lowest fsynced end in the SyncStateSet <= confirmed offset

Every electable member then has all archived messages, even after a power failure of all members. Until the set has
all that a master had at its promotion, that master reports neither messages nor gaps. Readers and rounds can't see
those messages yet, and a GAP would be recorded over existing ones.

For the copy of an Apache master's log, the limit is how far that master's log is durable
(`broker.ha.stock_archivable_limit`). If such a master has lost its log's tail, it assigns those offsets again, and the
slave that archives its log follows it. Then offsets would be in the archive twice. Therefore archiving, expiry and
eviction of archived segments stop until an operator starts another archive. The mark:

    archive/overtaken.json    JSON: `Divergence`; deleted together with the journal's local copy beside it
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec.structs import replace

from broker.archiving.environment import InThread
from broker.config import BrokerConfig
from broker.ha.stock_archivable_limit import UNKNOWN, Observation, StockArchivableLimit
from broker.store.message_store import MessageStore
from infra.clock import Clock
from infra.disk.filesystem import Disk
from infra.disk.versioned_file import VersionedFile
from infra.process.startup import EXIT_FAILED, StartupError
from lifecycle.evict import EVERYTHING
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)
NAME = "overtaken.json"
#: Instruction for operators to start another archive.
ANOTHER_ARCHIVE = "give storeUrl another prefix, and move the directory `archive` in storePathRootDir away"


class Others(Protocol):
    """Other holders of the same log that may continue it. Called on the event loop."""

    def archivable(self, synced: int) -> int:
        """Return the offset below which all of them keep the log, given the local fsynced offset; -1 if unknown."""
        ...


class ArchivedSet(Others, Protocol):
    """Interface of the broker set to the archive of a member. Called on the event loop.

    Archivable messages are on the disks of the whole SyncStateSet. Members without them can't join it afterwards.
    """

    def appended(self) -> None:
        """Note that the log has grown and has to be replicated."""
        ...

    def deposed(self) -> None:
        """Note that the archive has the EPOCH of a later master, which a controller can name."""
        ...


class ArchivableLimit:
    """Archivable limit of a broker; without others, its own fsynced offset. Called on the event loop."""

    def __init__(self, store: MessageStore, others: Others | None = None) -> None:
        self._store, self._set = store, others
        self._promoted_at = 0

    def lead(self) -> None:
        """Note the end of the log at a promotion, before the first append."""
        self._promoted_at = self._store.max_physical_offset

    def within(self, synced: int) -> int:
        """Return the archivable limit, given the local fsynced offset; 0 before the set is settled."""
        if self._set is None:
            return synced
        limit = min(self._set.archivable(synced), self._store.visibility.confirmed)
        return self._store.reader.record_start(limit) if limit >= self._promoted_at else 0

    def is_settled(self, synced: int) -> bool:
        """Return whether the whole set has what this member had at its promotion."""
        return self._set is None or self.within(synced) >= self._promoted_at


class Divergence(msgspec.Struct, frozen=True):
    """Divergence of a log: it resumed at offset `at`, while the archive may reach up to offset `reaches`."""

    at: int
    reaches: int
    since_ms: int
    why: str

    @property
    def text(self) -> str:
        """Return the cause and the remedy for operators."""
        return (
            f"{self.why}, and the archive reaches {self.reaches}: above {self.at} it has another log. To archive the "
            f"present log, begin another archive: {ANOTHER_ARCHIVE}"
        )


class DivergenceFile:
    """File of the mark that archiving has stopped for good."""

    def __init__(self, disk: Disk, archive_files: Path) -> None:
        self._disk, self._directory = disk, archive_files
        self._file = VersionedFile(disk, archive_files / NAME, Divergence, partial(StartupError, exit_code=EXIT_FAILED))

    def load(self) -> Divergence | None:
        """Return the mark, or None. Raises StartupError if the file is unreadable."""
        return self._file.read()

    def save(self, divergence: Divergence) -> None:
        """Write the mark; it is on disk when this returns."""
        self._disk.make_dirs(self._directory)
        self._file.write(divergence)


class FollowedMaster:
    """Archivable limit of a followed Apache master's log."""

    def __init__(self, config: BrokerConfig, clock: Clock, file: DivergenceFile) -> None:
        self._clock, self._file = clock, file
        self._stock_limit = StockArchivableLimit(config.mapped_file_size_commit_log)
        #: Why archiving has stopped for good; None while it continues.
        self.divergence: Divergence | None = None
        self._written: Divergence | None = None
        #: Highest archivable limit that was ever returned: rounds may have archived up to it.
        self.given = 0

    def load(self) -> None:
        """Load the mark of an earlier process. Raises StartupError if it is unreadable."""
        self.divergence = self._written = self._file.load()

    @property
    def safe_below(self) -> int:
        """Offset below which the master's log is durable.

        UNKNOWN before the first report, and after a restart of the master.
        """
        return UNKNOWN if self.divergence is not None else self._stock_limit.offset

    def archivable(self, synced: int) -> int:
        """Return the archivable limit of the log, given the local fsynced offset."""
        offset = min(synced, self.safe_below)
        self.given = max(self.given, offset)
        return offset

    def settled_below(self) -> int:
        """Return the offset above which the archive holds messages of a diverged log."""
        return EVERYTHING if self.divergence is None else self.divergence.at

    def attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """Note the process of the master that the slave follows."""
        self._stock_limit.attached(boot_ms, end_at_start, flush_takes_s, self._clock.monotonic())

    def observe(self, observation: Observation) -> None:
        """Process a report of that process."""
        self._stock_limit.observe(observation, self._clock.monotonic())

    async def log_ends_at(self, offset: int, why: str, journal: JournalWriter, in_thread: InThread) -> None:
        """Handle that the log's tail above `offset` is lost at the master, or may be.

        If the archive may hold some of that tail, archiving stops immediately. The mark is on disk when this returns.
        """
        reaches, before = max(journal.ownership.reaches, self.given), self.divergence
        self._stock_limit.forget()
        if reaches <= offset:
            return
        if before is None or offset < before.at:
            found = Divergence(offset, reaches, self._clock.now_ms(), why)
            self.divergence = found if before is None else replace(before, at=offset)
            journal.ownership.become_slave(self.divergence.text)
            log.error("archiving has stopped: %s", self.divergence.text)
        if self._written != self.divergence:  # written again after a disk error
            writing = self.divergence
            await in_thread(self._file.save, writing)
            self._written = writing
