"""Members of a broker set over one shared store, each with a hot log of its own that is a copy of the other's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from lifecycle.lifecycle import ArchiveLifecycle
from lifecycle.retention import Policy
from lifecycle.safe_clock import ClockMark, SafeClock
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import read_catalog
from tests.doubles.memory_store import MemoryStore
from tests.unit.lifecycle.fakes import RECORD, FakeHot, FakeWorker
from tiered.journal.log_name import Proof
from tiered.journal.writer import JournalWriter
from tiered.write.entry_run import EntryRun

UUID = "the set's log"


class MemberHot(FakeHot):
    """Readers, and so rounds, see what is confirmed; a round reaches what the whole set has synced."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock)
        self.confirmed = self.archivable = 1 << 62
        self.promoted_at = 0

    def flush(self) -> int:
        reach = min(super().flush(), self.confirmed, self.archivable)
        return reach if reach >= self.promoted_at else 0

    def confirmed_range(self) -> tuple[int, int]:
        return self.first_segment, min(self.tail, self.confirmed)

    def is_settled(self) -> bool:
        return self.flush() >= self.promoted_at

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]:
        return super().entries(topic, start, min(end, self.confirmed // RECORD * RECORD))

    def copy(self, other: FakeHot, upto: int = 1 << 62) -> None:
        """The other's log up to there."""
        self.records += [record for record in other.records if self.tail <= record[0] < upto]
        self.tail = max(self.tail, min(other.tail, upto))
        for _, topic, queue, offset, _ in self.records:
            self.next[topic, queue] = max(self.next.get((topic, queue), 0), offset + 1)


class Member:
    """One of them; a slave that has no role yet."""

    def __init__(
        self, broker_set: BrokerSet, directory: Path, *, log_uuid: str = UUID, proof: Proof | None = None
    ) -> None:
        self.set, self.directory, self.log_uuid, self.proof = broker_set, directory, log_uuid, proof
        self.hot = MemberHot(broker_set.clock)
        self.worker = FakeWorker(broker_set.store, self.hot)
        self.start()

    def start(self) -> None:
        """A life; the directory is that of the last."""
        clock, disk = self.set.clock, RealDisk()
        self.journal = JournalWriter(
            self.set.store, "", "b", self.log_uuid, local=self.directory, disk=disk, clock=clock, proof=self.proof
        )
        self.journal.attach_following()
        self.lifecycle = ArchiveLifecycle(
            self.hot, self.journal, self.worker, lambda: self.set.policy, clock,
            SafeClock(clock, ClockMark(self.directory / "clock", disk)), settled=self.hot.is_settled,
        )  # fmt: skip

    def offload(self) -> None:
        self.lifecycle.offload.run(roll=True)


class BrokerSet:
    """A and B; `elect` tells the one who is elected, as its set would. The other hears of it when it is told."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.policy = Policy()
        self.directory, self.master_epoch = directory, 0
        self.a, self.b = Member(self, directory / "a"), Member(self, directory / "b")

    def elect(self, member: Member) -> int:
        self.master_epoch += 1
        member.hot.promoted_at = member.hot.tail
        member.journal.become_master(self.master_epoch, member.hot.tail)
        return self.master_epoch

    def replicate(self) -> None:
        """B has what A has."""
        self.b.hot.copy(self.a.hot)

    @property
    def catalog(self) -> Catalog:
        """As anybody reads it."""
        return read_catalog(self.store, "b")

    def check_tiles(self, topic: str, queue: int = 0) -> int:
        """Every offset from 0 is in exactly one object, and no object is without a COMMIT; returns the next offset."""
        catalog, following = self.catalog, 0
        for first, last in sorted((run.first, run.last) for run in catalog.queue(topic, queue).runs()):
            assert first == following, f"gap or overlap at {following}"
            following = last + 1
        assert not catalog.gaps()
        assert {name.key for name in catalog.objects()} <= set(self.store.objects)
        return following
