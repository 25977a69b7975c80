"""Members of a broker set over one shared store, each with its own copy of the log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from lifecycle.lifecycle import ArchiveLifecycle, SharedLog
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import ClockMark, SafeClock
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import read_catalog
from tests.kit.store.memory_store import MemoryStore
from tests.unit.lifecycle.fakes import RECORD, FakeHot, FakeWorker
from tiered.journal.log_name import Proof
from tiered.journal.writer import JournalWriter
from tiered.write.entry_run import EntryRun

UUID = "the set's log"


class MemberHot(FakeHot):
    """A hot log with a confirmed offset for readers, and an archivable limit that all members have synced."""

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
        """Replace this log by the other one up to the physical offset `upto`."""
        self.records += [record for record in other.records if self.tail <= record[0] < upto]
        self.tail = max(self.tail, min(other.tail, upto))
        for _, topic, queue, offset, _ in self.records:
            self.next[topic, queue] = max(self.next.get((topic, queue), 0), offset + 1)


class ArchivingMember:
    """A member of the set. It starts as a slave without a known role."""

    def __init__(
        self, broker_set: ArchivingSet, directory: Path, *, log_uuid: str = UUID, proof: Proof | None = None
    ) -> None:
        self.set, self.directory, self.log_uuid, self.proof = broker_set, directory, log_uuid, proof
        self.hot = MemberHot(broker_set.clock)
        self.worker = FakeWorker(broker_set.store, self.hot)
        self.start()

    def start(self) -> None:
        """Start the process again on the directory of the previous one."""
        clock, disk = self.set.clock, RealDisk()
        self.journal = JournalWriter(
            self.set.store, "", "b", self.log_uuid, local=self.directory, disk=disk, clock=clock, proof=self.proof
        )
        self.journal.ownership.attach_following()
        self.lifecycle = ArchiveLifecycle(
            self.hot, self.journal, self.worker, lambda: self.set.policy, clock,
            SafeClock(clock, ClockMark(self.directory / "clock", disk)),
            shared=SharedLog(self.hot.is_settled),
        )  # fmt: skip

    def offload(self) -> None:
        self.lifecycle.offload.run(roll=True)


class ArchivingSet:
    """Members A and B. `elect` notifies only the elected one; a test demotes the other one explicitly."""

    def __init__(self, directory: Path) -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.policy = RetentionPolicy()
        self.directory, self.master_epoch = directory, 0
        self.a, self.b = ArchivingMember(self, directory / "a"), ArchivingMember(self, directory / "b")

    def elect(self, member: ArchivingMember) -> int:
        self.master_epoch += 1
        member.hot.promoted_at = member.hot.tail
        member.journal.ownership.become_master(self.master_epoch, member.hot.tail)
        return self.master_epoch

    def replicate(self) -> None:
        """Copy the log of A to B."""
        self.b.hot.copy(self.a.hot)

    @property
    def catalog(self) -> Catalog:
        """Return the catalog as a reader of the store sees it."""
        return read_catalog(self.store, "b")

    def check_tiles(self, topic: str, queue: int = 0) -> int:
        """Assert that each offset is in exactly one object and each object has a COMMIT; return the next offset."""
        catalog, following = self.catalog, 0
        for first, last in sorted((run.first, run.last) for run in catalog.queue(topic, queue).runs()):
            assert first == following, f"gap or overlap at {following}"
            following = last + 1
        assert not catalog.gaps()
        assert {name.key for name in catalog.objects()} <= set(self.store.objects)
        return following
