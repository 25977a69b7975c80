"""State of a followed Apache master whose log is archived here: how far it is durable, and whether it diverged.

The slave that follows the master (`broker.ha.plain_slave`) updates it. All calls are on the event loop.
"""

from __future__ import annotations

import logging

from msgspec.structs import replace

from broker.archiving.outside import InThread
from broker.archiving.overtaken import Overtaken, OvertakenFile
from broker.config import BrokerConfig
from broker.ha.stock_reach import UNKNOWN, Look, StockReach
from infra.clock import Clock
from lifecycle.evict import EVERYTHING
from tiered.journal.writer import JournalWriter

log = logging.getLogger(__name__)


class FollowedMaster:
    """Archivable limit of a followed Apache master's log."""

    def __init__(self, config: BrokerConfig, clock: Clock, file: OvertakenFile) -> None:
        self._clock, self._file = clock, file
        self._reach = StockReach(config.mapped_file_size_commit_log)
        #: Why archiving has stopped for good; None while it continues.
        self.overtaken: Overtaken | None = None
        self._written: Overtaken | None = None
        #: Highest archivable limit that was ever returned: rounds may have archived up to it.
        self.given = 0

    def load(self) -> None:
        """Load the mark of an earlier process. Raises StartupError if it is unreadable."""
        self.overtaken = self._written = self._file.load()

    @property
    def safe_below(self) -> int:
        """Offset below which the master's log is durable.

        UNKNOWN before the first report, and after a restart of the master.
        """
        return UNKNOWN if self.overtaken is not None else self._reach.offset

    def archivable(self, synced: int) -> int:
        """Return the archivable limit of the log, given the local fsynced offset."""
        offset = min(synced, self.safe_below)
        self.given = max(self.given, offset)
        return offset

    def settled_below(self) -> int:
        """Return the offset above which the archive holds messages of a diverged log."""
        return EVERYTHING if self.overtaken is None else self.overtaken.at

    def attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """Note the process of the master that the slave follows."""
        self._reach.attached(boot_ms, end_at_start, flush_takes_s, self._clock.monotonic())

    def heard(self, look: Look) -> None:
        """Process a report of that process."""
        self._reach.heard(look, self._clock.monotonic())

    async def log_ends_at(self, offset: int, why: str, journal: JournalWriter, in_thread: InThread) -> None:
        """Handle that the log's tail above `offset` is lost at the master, or may be.

        If the archive may hold some of that tail, archiving stops immediately. The mark is on disk when this returns.
        """
        reaches, before = max(journal.reaches, self.given), self.overtaken
        self._reach.forget()
        if reaches <= offset:
            return
        if before is None or offset < before.at:
            told = Overtaken(offset, reaches, self._clock.now_ms(), why)
            self.overtaken = told if before is None else replace(before, at=offset)
            journal.become_slave(self.overtaken.text)
            log.error("nothing is archived any more: %s", self.overtaken.text)
        if self._written != self.overtaken:  # written again after a disk error
            writing = self.overtaken
            await in_thread(self._file.save, writing)
            self._written = writing
