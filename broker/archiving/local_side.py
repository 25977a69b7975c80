"""The broker as its archive meets it: the store and tables that are archived, and the machine they live on."""

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
    """Named parts, the same with an archive and without."""

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
        """`broker_set`: of which the broker is a member. `follows`: its log is the copy of an Apache master's."""
        self._journal = journal
        self.config, self.store, self.tables, self.clock, self.disk = config, store, tables, clock, disk
        self.outside = outside or Outside()
        self.root = config.root
        self.archive_files = config.root / "archive"  # the journal's local copy and what is being encoded
        self.policy = ConfiguredPolicy(config, tables.topics, store)
        self.capture = StateCapture(config.broker_name, store, tables, pins)
        self.overtaken = OvertakenFile(disk, self.archive_files)
        self.followed = FollowedMaster(config, clock, self.overtaken) if follows else None
        self.broker_set, self.reach = broker_set, Reach(store, broker_set or self.followed)
        self._flusher, self._pins = flusher, pins

    def hot_store(self) -> LoopHotStore:
        """For job threads. On the loop."""
        ratio = functools.partial(self.outside.disk_ratio, self.disk, self.root)
        grown = None if self.broker_set is None else self.broker_set.appended
        ask = self.outside.ask_loop()
        return LoopHotStore(self.store, self._pins, ask, self._flusher, ratio, self.reach, grown, self._journal)

    def safe_clock(self) -> SafeClock:
        """Once the log is recovered: it says how late it is at least."""
        mark = ClockMark(self.root / "clock", self.disk)
        return SafeClock(self.clock, mark, self.store.newest_store_time)
