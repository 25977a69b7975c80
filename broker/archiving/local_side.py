"""Local side of an archive: the store, tables and files that are archived."""

from __future__ import annotations

import functools

from broker.archiving.followed import FollowedMaster
from broker.archiving.hot_store import LoopHotStore
from broker.archiving.outside import Outside
from broker.archiving.overtaken import OvertakenFile
from broker.archiving.pins import Pins
from broker.archiving.policy import ConfiguredPolicy
from broker.archiving.reach import BrokerSet, Reach
from broker.archiving.state import StateCapture, Tables
from broker.config import BrokerConfig
from broker.intake.flusher import Flusher
from broker.store.message_store import MessageStore
from broker.tables.journal import NO_JOURNAL, Journal
from infra.clock import Clock
from infra.disk.filesystem import Disk
from lifecycle.safe_clock import ClockMark, SafeClock


class LocalSide:
    """Parts of a broker that its archive uses, with `storeUrl` or without."""

    def __init__(  # noqa: PLR0917
        self,
        config: BrokerConfig,
        store: MessageStore,
        flusher: Flusher,
        tables: Tables,
        pins: Pins,
        clock: Clock,
        disk: Disk,
        outside: Outside | None = None,
        broker_set: BrokerSet | None = None,
        *,
        follows: bool = False,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        """Create the parts.

        `broker_set` is the set of which the broker is a member. `follows`: the log is the copy of an Apache master's
        log.
        """
        self._journal = journal
        self.config, self.store, self.tables, self.clock, self.disk = config, store, tables, clock, disk
        self.outside = outside or Outside()
        self.root = config.root
        self.archive_files = config.root / "archive"  # the journal's local copy, and objects being encoded
        self.policy = ConfiguredPolicy(config, tables.topics, store)
        self.capture = StateCapture(config.broker_name, store, tables, pins)
        self.overtaken = OvertakenFile(disk, self.archive_files)
        self.followed = FollowedMaster(config, clock, self.overtaken) if follows else None
        self.broker_set, self.reach = broker_set, Reach(store, broker_set or self.followed)
        self._flusher, self._pins = flusher, pins

    def hot_store(self) -> LoopHotStore:
        """Create a hot store for job threads. Call on the event loop."""
        ratio = functools.partial(self.outside.disk_ratio, self.disk, self.root)
        grown = None if self.broker_set is None else self.broker_set.appended
        ask = self.outside.ask_loop()
        return LoopHotStore(self.store, self._pins, ask, self._flusher, ratio, self.reach, grown, self._journal)

    def safe_clock(self) -> SafeClock:
        """Create the clock after the log's recovery: the newest store time is a lower bound of the current time."""
        mark = ClockMark(self.root / "clock", self.disk)
        return SafeClock(self.clock, mark, self.store.newest_store_time)
