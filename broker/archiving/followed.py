"""The Apache master whose log is archived here: how far that log is safe, and whether it went on below its archive.

Told by the slave that follows it (`broker.ha.plain_slave`). On the loop.
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
    """See the module."""

    def __init__(self, config: BrokerConfig, clock: Clock, file: OvertakenFile) -> None:
        self._clock, self._file = clock, file
        self._reach = StockReach(config.mapped_file_size_commit_log)
        #: Why nothing is archived any more.
        self.overtaken: Overtaken | None = None
        self._written: Overtaken | None = None
        #: The highest that a round may have gone by.
        self.given = 0

    def load(self) -> None:
        """What an earlier start has written down. StartupError for what can't be read."""
        self.overtaken = self._written = self._file.load()

    @property
    def safe_below(self) -> int:
        """UNKNOWN: the master has not said, or what it has said is of a life that is over."""
        return UNKNOWN if self.overtaken is not None else self._reach.offset

    def archivable(self, synced: int) -> int:
        """Below this the log may be archived, the own disk having `synced`."""
        offset = min(synced, self.safe_below)
        self.given = max(self.given, offset)
        return offset

    def settled_below(self) -> int:
        """What an archive names above this is another log's."""
        return EVERYTHING if self.overtaken is None else self.overtaken.at

    def attached(self, boot_ms: int, end_at_start: int, flush_takes_s: float | None) -> None:
        """The slave follows this life of the master."""
        self._reach.attached(boot_ms, end_at_start, flush_takes_s, self._clock.monotonic())

    def heard(self, look: Look) -> None:
        """Of that life."""
        self._reach.heard(look, self._clock.monotonic())

    async def log_ends_at(self, offset: int, why: str, journal: JournalWriter, in_thread: InThread) -> None:
        """What was above is not the log's any more, or is not known to be.

        If the archive may have some of it nothing is archived from this instant on; on the disk when this returns.
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
        if self._written != self.overtaken:  # a disk that failed is asked again
            writing = self.overtaken
            await in_thread(self._file.save, writing)
            self._written = writing
