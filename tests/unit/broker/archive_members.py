"""Two members of a broker set, each with a real log and an archive, over one shared object store.

The test replaces the replication stream: `replicate` copies the master's bytes to the other member and confirms them
on both. Everything runs inline.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from broker.archiving.archive import BrokerArchive, open_archive
from broker.archiving.local_side import LocalSide
from broker.archiving.restore import RestoredTables
from broker.config import BrokerConfig
from broker.intake.flusher import Flusher
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from broker.tables.consumer_offset_manager import ConsumerOffsetManager
from broker.tables.subscription_group_manager import SubscriptionGroupManager
from broker.tables.topic_config_manager import TopicConfig, TopicConfigManager
from infra.clock import ManualClock
from infra.loop.supervisor import Faults
from neve.archive.catalog.catalog import Catalog
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.format.journal import AnyEntry, decode_entry
from neve.archive.format.keys import journal_key
from neve.record.codec import iter_records
from tests.kit.archive.cold_reads import read_cold
from tests.kit.store.sim_disk import SimDisk
from tests.simulation.faulty_store import URL, FaultyStore
from tests.simulation.process import BROKER, InLine, drive, make_environment
from tests.simulation.workers import AnyWorker, InProcessWorker, SimulatedWorker
from tiered.read.read_request import ReadRequest

TOPIC = "orders"
FILE_SIZE = 32768
BODY = bytes(1500)
ROOT = Path("/store")

Row = tuple[int, int, bytes]


class Pins:
    """Pins whose lowest offset is set by the test."""

    def __init__(self) -> None:
        self.at: int | None = None

    def lowest(self) -> int | None:
        return self.at

    def undelivered_from(self) -> int | None:
        return self.at

    def reappend(self, below: int) -> bool:
        return False

    async def save(self) -> None:
        """Do nothing: these pins need no storage."""

    def counts(self) -> dict[str, int]:
        return {}


class ArchiveMember:
    """One member, on a disk of its own. It starts as a slave without a master."""

    def __init__(self, broker_set: ArchiveMembers, *, seed: int) -> None:
        self.set, self.disk = broker_set, SimDisk(seed=seed)
        self.pins, self.is_crowded, self.was_deposed = Pins(), False, 0
        self.log_name = ""  # announced by the master, as its own files store it
        self.live()

    def live(self) -> None:
        clock, disk, broker_set = self.set.clock, self.disk, self.set
        config = BrokerConfig(
            broker_name=BROKER, store_path_root_dir=str(ROOT), store_url=URL, mapped_file_size_commit_log=FILE_SIZE,
            archive_min_bytes=1, admin_port=-1, default_ttl_hours=broker_set.ttl_hours,
        )  # fmt: skip
        self.store = MessageStore(
            StoreConfig(
                ROOT, commit_log_file_size=FILE_SIZE, queue_first_step=4096, queue_file_size=8000, index_slots=64,
                index_entries=200,
            ),
            disk,
            clock,
        )  # fmt: skip
        self.store.load(following=True, confirmed=0)
        faults = Faults()
        flusher = Flusher(
            self.store, clock, interval_ms=lambda: 500, on_failure=_raise, faults=faults, threads=InLine()
        )
        topics = TopicConfigManager(disk, ROOT / "topics.json", clock, threads=InLine())
        for topic in (TOPIC, "other"):
            topics.update(TopicConfig(topic_name=topic, read_queue_nums=2, write_queue_nums=2))
        groups = SubscriptionGroupManager(disk, ROOT / "groups.json", clock, threads=InLine())
        offsets = ConsumerOffsetManager(disk, ROOT / "offsets.json", flusher.flush_now, InLine())
        machine = make_environment(lambda: broker_set.worker(disk), lambda: broker_set.bucket, lambda: self.is_crowded)
        local = LocalSide(
            config, self.store, flusher, RestoredTables(topics, groups, offsets), self.pins, clock, disk, machine,
            broker_set=self,
        )  # fmt: skip
        archive = drive(open_archive(local, None, cold_groups=16))
        assert isinstance(archive, BrokerArchive)
        self.archive = archive
        archive.was_same_log(self.log_name)

    # ---- the role that its archive asks for

    def archivable(self, synced: int) -> int:
        others = [one.store.visibility.flushed for one in self.set.in_sync if one is not self]
        return min([synced, *others])

    def appended(self) -> None:
        """Do nothing: the test replicates."""

    def deposed(self) -> None:
        self.was_deposed += 1

    # ---- its log

    @property
    def end(self) -> int:
        return self.store.max_physical_offset

    def flush(self) -> None:
        self.store.after_flush(self.store.visibility.flush())

    def put(self, count: int = 1, *, topic: str = TOPIC, queue: int = 0) -> None:
        for number in range(count):
            self.store.put(
                topic, queue, BODY + bytes([number % 256]), b"", flag=0, sys_flag=0,
                born_timestamp=self.set.clock.now_ms(), born_host=("127.0.0.1", 1),
            )  # fmt: skip
            self.set.clock.advance(1)
        self.flush()

    def damage(self, topic: str = TOPIC, *, index: int = -1) -> None:
        """Flip one bit of a record's body on the disk."""
        physical = self.store.reader.entries(topic, 0, 1 << 62)[0].physical.tolist()[index] + 100
        ((path, base, _),) = self.store.reader.files(physical, physical + 1)
        (byte,) = self.disk.read_at(Path(path), physical - base, 1)
        self.disk.writer(Path(path)).write(bytes([byte ^ 4]), physical - base)

    def rows(self, topic: str = TOPIC) -> list[Row]:
        """Return the rows of a topic in this log, queue by queue."""
        found: list[Row] = []
        for queue, run in sorted(self.store.reader.entries(topic, 0, 1 << 62).items()):
            for index, physical in enumerate(run.physical.tolist()):
                record = self.store.reader.record_at(physical)
                assert record is not None
                found.append((queue, run.first_offset + index, record))
        return found

    def offload(self, *, roll: bool = True) -> None:
        self.archive.lifecycle.offload.run(roll=roll)

    def evict(self) -> list[int]:
        self.is_crowded = True
        try:
            return self.archive.lifecycle.evict.run()
        finally:
            self.is_crowded = False

    def bodies(self, topic: str = TOPIC, queue: int = 0, first: int = 0) -> list[bytes]:
        """Return the bodies that a reader of this member gets: from the log where possible, else from the archive."""
        found: list[bytes] = []
        offset = first
        end = max(
            self.store.queues.max_offset(topic, queue), self.archive.journal.catalog.max_offset(topic, queue) or 0
        )
        while offset < end:
            hot = (
                self.store.reader.get(topic, queue, offset, 1, 1 << 20) if self._is_hot(topic, queue, offset) else None
            )
            result = hot or read_cold(self.archive.reader, ReadRequest("", topic, queue, offset, 1, 1 << 20))
            wire = b"".join(map(bytes, result.buffers))
            found += [bytes(record.body) for record in iter_records(wire)]
            offset = result.next_offset
        return found

    def _is_hot(self, topic: str, queue: int, offset: int) -> bool:
        return self.store.queues.min_offset(topic, queue) <= offset < self.store.queues.max_offset(topic, queue)


def _raise(error: BaseException) -> None:
    raise error


class ArchiveMembers:
    """Members A and B. The test decides which of them are in sync."""

    def __init__(self, *, parquet: bool = False, ttl_hours: int = 0) -> None:
        self.clock = ManualClock(1_700_000_000_000)
        self.bucket = FaultyStore(self.clock, 0)
        self.parquet, self.ttl_hours = parquet, ttl_hours
        self.master_epoch = 0
        self.name_is_told = True  # the master announces under which name the archive stores the log
        self.a, self.b = ArchiveMember(self, seed=1), ArchiveMember(self, seed=2)
        self.in_sync = [self.a, self.b]

    def worker(self, disk: SimDisk) -> AnyWorker:
        return InProcessWorker(disk, self.bucket) if self.parquet else SimulatedWorker(disk, self.bucket)

    def elect(self, member: ArchiveMember, *, in_sync: bool = True) -> None:
        """Make a member the master, with its whole log confirmed. With `in_sync`, it has all archived messages."""
        self.master_epoch += 1
        if not in_sync:
            self.in_sync = [member]
        member.flush()
        member.archive.lead(self.master_epoch)
        member.store.visibility.confirm(member.end)
        if not in_sync:
            assert drive(member.archive.settle())
        drive(member.archive.resume_log())
        member.store.lead()

    def depose(self, member: ArchiveMember) -> None:
        """Make a member the slave of the other one."""
        member.archive.follow()
        member.store.follow()

    def send(self, member: ArchiveMember, *, into_memory: bool = False) -> None:
        """Copy the part of a member's log that the other one lacks."""
        other = self.b if member is self.a else self.a
        while True:
            at, data = member.store.log_bytes(other.store.replica.next_offset, member.end, 4096)
            if not data:
                break
            if at != other.store.replica.next_offset:
                other.store.replica.continue_at(at)
            other.store.replica.append(bytes(data), at)
        if not into_memory:
            other.flush()

    def replicate(self, member: ArchiveMember) -> None:
        """Copy a member's log to the other and confirm it on both, unless the other believes to be the master."""
        other = self.b if member is self.a else self.a
        self.in_sync = [member]
        if other.store.end.is_following:
            self.send(member)
            if self.name_is_told:
                other.log_name = member.archive.log_uuid
                other.archive.is_same_log(other.log_name)
            self.in_sync = [self.a, self.b]
        end = min(one.end for one in self.in_sync)
        for one in self.in_sync:
            one.store.visibility.confirm(end)

    # ---- the bucket

    @property
    def catalog(self) -> Catalog:
        return read_catalog(self.bucket, BROKER)

    def entries(self) -> list[AnyEntry]:
        end = self.catalog.next_seq
        return [decode_entry(self.bucket.objects[journal_key("", BROKER, seq)][0]) for seq in range(end)]

    def archived(self, topic: str = TOPIC) -> list[Row]:
        """Return each row of each object, queue by queue. Rows of overlapping objects appear twice."""
        worker = self.worker(self.a.disk)
        return sorted(row for name in self.catalog.objects(topic) for row in worker.rows(name))

    def check_tiles(self, topic: str = TOPIC, queue: int = 0) -> tuple[int, list[tuple[int, int]]]:
        """Check that each offset is in exactly one object or gap. Return the next offset, and the gaps."""
        catalog, following = self.catalog, 0
        gaps = catalog.queue(topic, queue).gap_spans()
        for first, last in sorted([*((run.first, run.last) for run in catalog.queue(topic, queue).runs()), *gaps]):
            assert first == following, f"a hole or an overlap at {following}"
            following = last + 1
        return following, gaps

    def check_no_orphans(self) -> None:
        data = {key for key in self.bucket.objects if key.startswith("topic=")}
        assert data == {name.key for name in self.catalog.objects()}


Step = Callable[[str], None]


STEPS = [
    "journal.after_identity",
    "journal.before_put",
    "offload.before_intent",
    "offload.after_intent",
    "offload.after_encode",
    "offload.after_upload",
    "offload.before_commit",
    "offload.after_commit",
]
