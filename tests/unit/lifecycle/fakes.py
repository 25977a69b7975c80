"""Fakes for lifecycle tests: a hot log in memory, and a worker that stores a description instead of Parquet."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.objects.store import PreconditionFailed
from lifecycle.hot_store import Aged, Hidden
from lifecycle.lifecycle import ArchiveLifecycle
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import ClockMark, SafeClock
from neve.archive.format.journal import CommittedObject, PlannedObject, RowGroup
from neve.record.codec import decode_record
from tests.kit.archive.deferred_uploads import DeferredUploads
from tests.kit.archive.one_by_one import OneByOne
from tests.kit.store.memory_store import MemoryStore
from tiered.journal.writer import JournalWriter
from tiered.worker.client import DecodedGroup
from tiered.worker.failed import WorkerFailed
from tiered.worker.frames import MayHold
from tiered.write.entry_run import EntryRun
from tiered.write.merge import Merge
from tiered.write.offload_plan import TopicUnreadable
from tiered.write.uploader import ContentConflict, EncodeFailed, RowCounts

RECORD = 100
SEGMENT = 1000


@dataclass
class FakeRun:
    first_offset: int
    physical: np.ndarray
    sizes: np.ndarray
    tags: np.ndarray


@dataclass
class FakeSegment:
    base: int
    end: int
    sealed: bool
    newest_store_time: int = -1
    topics: dict[str, tuple[int, int]] = field(default_factory=dict)


class FakeHot(OneByOne):
    """Records of 100 bytes in segments of 1000."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.records: list[tuple[int, str, int, int, int]] = []  # physical, topic, queue, offset, time
        self.tail = self.synced = 0
        self.first_segment = 0
        self.rolled: dict[int, int] = {}
        self.minimums: dict[tuple[str, int], int] = {}
        self.minimum_writes = 0
        self.hidden: dict[tuple[str, int], set[int]] = {}  # erased offsets, returned to no reader
        self.unreadable: set[str] = set()  # topics whose rows cannot be hidden
        self.former: dict[str, int] = {}
        self.raw: list[bytes] = []  # records of deleted topics and delayed records
        self.log_takes_nothing = False
        self.logged: list[tuple[str, int, int, int]] = []  # rows that the log has recorded as erased
        self.quarantine: dict[str, bytes] = {}
        self.is_quarantine_locked = False
        self.is_log_unreadable = False
        self.next: dict[tuple[str, int], int] = {}
        self.deleted: dict[str, dict[int, int]] = {}
        self.pinned: int | None = None
        self.disk = 0.1
        self.evicted: list[int] = []
        self.cut_short = 0  # number of the eviction that finds the log truncated, counted down
        self.timer: int | None = None  # physical offset of the oldest pending timer
        self.carried: list[int] = []

    def put(self, topic: str, queue: int = 0, count: int = 1) -> None:
        for _ in range(count):
            offset = self.next.get((topic, queue), 0)
            self.records.append((self.tail, topic, queue, offset, self.clock.now_ms()))
            self.next[topic, queue] = offset + 1
            self.tail += RECORD

    def delete_topic(self, topic: str) -> None:
        """Remove the queues of a topic; if it is created again, its offsets start at 0."""
        self.records = [record for record in self.records if record[1] != topic]
        self.next = {place: offset for place, offset in self.next.items() if place[0] != topic}
        self.minimums = {place: offset for place, offset in self.minimums.items() if place[0] != topic}

    def lose_above(self, physical: int) -> None:
        """Drop all records above `physical`, as a power cut under ASYNC_FLUSH does."""
        self.records = [record for record in self.records if record[0] < physical]
        self.tail = physical
        self.next = {}
        for _, topic, queue, offset, _ in self.records:
            self.next[topic, queue] = offset + 1

    def restart_at(self, physical: int, queue_next: Mapping[tuple[str, int], int]) -> None:
        self.tail = -(-physical // SEGMENT) * SEGMENT
        self.next |= {place: max(self.next.get(place, 0), offset) for place, offset in queue_next.items()}

    def deleted_topics(self) -> Sequence[str]:
        return sorted(self.deleted)

    def forget_deleted(self, topics: Collection[str]) -> int:
        gone = self.deleted.keys() & set(topics)
        self.deleted = {topic: ends for topic, ends in self.deleted.items() if topic not in gone}
        return len(gone)

    def deleted_below(self) -> Mapping[str, Mapping[int, int]]:
        return self.deleted

    def segments(self) -> Sequence[FakeSegment]:
        found = []
        for base in range(self.first_segment, self.tail + 1, SEGMENT):
            inside = [record for record in self.records if base <= record[0] < base + SEGMENT]
            topics: dict[str, tuple[int, int]] = {}
            for physical, topic, _, _, time in inside:
                topics[topic] = (physical, time)
            sealed = base + SEGMENT <= self.tail
            newest = max((record[4] for record in inside), default=-1)
            found.append(FakeSegment(base, base + SEGMENT if sealed else self.tail, sealed, newest, topics))
        return found

    def flush(self) -> int:
        self.synced = self.tail
        return self.tail

    def confirmed_range(self) -> tuple[int, int]:
        return self.first_segment, self.tail

    def roll(self) -> bool:
        self.tail = -(-self.tail // SEGMENT) * SEGMENT
        return True

    def evict(self, base: int) -> bool:
        assert base == self.first_segment, "the log is evicted from its lower end"
        self.cut_short -= 1
        if self.cut_short == 0:
            return False
        self.evicted.append(base)
        self.first_segment = base + SEGMENT
        self.records = [record for record in self.records if record[0] >= self.first_segment]
        return True

    def topics(self) -> Sequence[str]:
        return sorted({topic for topic, _ in self.next})

    def queues_of(self, topic: str) -> Sequence[int]:
        return sorted(queue for name, queue in self.next if name == topic)

    def first_offsets(self, topic: str, start: int) -> Mapping[int, int]:
        ends = {queue: self.next[topic, queue] for queue in self.queues_of(topic)}
        for physical, name, queue, offset, _ in reversed(self.records):
            if name == topic and physical >= start:
                ends[queue] = offset
        return ends

    def min_offset(self, topic: str, queue: int) -> int:
        return self.minimums.get((topic, queue), 0)

    def expire_below(
        self, rising: Mapping[str, Mapping[int, int]], before: Mapping[str, int]
    ) -> Mapping[str, TopicUnreadable]:
        self.minimum_writes += 1
        for topic, offsets in rising.items():
            for queue, offset in offsets.items():
                expired = min(offset, self.offset_by_time(topic, queue, before[topic], False))
                self.minimums[topic, queue] = max(self.min_offset(topic, queue), expired)
        return {}

    def hide_erased(self, rows: Iterable[tuple[str, int, int, int]]) -> Hidden:
        new = 0
        failed = {row[:2]: "it can't be read" for row in rows if row[0] in self.unreadable}
        for topic, queue, first, last in rows:
            if (topic, queue) in failed:
                continue
            here = {record[3] for record in self.records if record[1:3] == (topic, queue)}
            wanted = here & set(range(first, last + 1)) - self.hidden.get((topic, queue), set())
            if wanted:
                self.hidden.setdefault((topic, queue), set()).update(wanted)
                new += 1
        return Hidden(new, failed)

    def log_erased(self, rows: Sequence[tuple[str, int, int, int]]) -> None:
        if self.log_takes_nothing:
            raise OSError(errno.EAGAIN, "the log accepts no record")
        self.logged += rows

    def former_ends(self, topics: Collection[str]) -> Mapping[str, int]:
        return {topic: self.former[topic] for topic in topics if topic in self.former}

    def quarantined(self, text: bytes) -> Iterator[tuple[str, bytes]]:
        yield from [(name, raw) for name, raw in self.quarantine.items() if text in raw]

    def remove_quarantined(self, name: str) -> None:
        if self.is_quarantine_locked:
            raise OSError(errno.EACCES, "permission denied", name)
        del self.quarantine[name]

    def search_log(self, ranges: Mapping[str, tuple[int, int]], text: bytes) -> Iterator[bytes | None]:
        if self.is_log_unreadable:
            raise TopicUnreadable("the log can't be read")
        for raw in self.raw:
            record = decode_record(raw)
            start, end = ranges.get(record.topic, (0, 0))
            if text in raw and start <= record.physical_offset < end:
                yield raw
            yield None

    def erased(self, topic: str) -> Mapping[int, Sequence[tuple[int, int]]]:
        of_topic = {queue: sorted(held) for (name, queue), held in self.hidden.items() if name == topic}
        return {queue: [(at, at) for at in offsets] for queue, offsets in of_topic.items()}

    def show_from(self, topic: str, queue: int, offset: int) -> int:
        there = [record[3] for record in self.records if record[1:3] == (topic, queue)]
        before = self.min_offset(topic, queue)
        self.minimums[topic, queue] = min(before, max(offset, min(there))) if there else before
        return self.minimums[topic, queue]

    def offset_by_time(self, topic: str, queue: int, time_ms: int, upper: bool) -> int:
        mine = [record for record in self.records if record[1:3] == (topic, queue)]
        return min((record[3] for record in mine if record[4] >= time_ms), default=self.next.get((topic, queue), 0))

    def aged(self, before: Mapping[str, int]) -> Iterator[tuple[str, Aged | TopicUnreadable]]:
        newest = max((one.newest_store_time for one in self.segments()), default=-1)
        for topic, time_ms in before.items():
            ends = {queue: self.offset_by_time(topic, queue, time_ms, False) for queue in self.queues_of(topic)}
            risen = {queue: end for queue, end in ends.items() if end > self.min_offset(topic, queue)}
            mine = [record for record in self.records if record[1] == topic]
            times = [record[4] for record in mine if record[3] >= self.min_offset(topic, record[2])]
            yield topic, Aged(risen, min([newest, *times]))

    def pinned_from(self) -> int | None:
        return self.pinned

    def undelivered_from(self) -> int | None:
        return self.pinned

    def reappend_waiting(self, below: int) -> None:
        self.carried.append(below)
        if self.timer is not None and self.timer < below:
            self.timer, self.pinned = self.tail, self.tail

    def disk_ratio(self) -> float:
        return self.disk

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]:
        runs: dict[int, EntryRun] = {}
        for queue in self.queues_of(topic):
            mine = [r for r in self.records if r[1:3] == (topic, queue) and start <= r[0] < end]
            if mine:
                offsets = [record[3] for record in mine]
                assert offsets == list(range(offsets[0], offsets[0] + len(offsets))), "a run is dense"
                physical = np.array([record[0] for record in mine], np.int64)
                sizes = np.full(len(mine), RECORD, np.int32)
                runs[queue] = FakeRun(offsets[0], physical, sizes, np.zeros(len(mine), np.int64))
        return runs

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]:
        return [("log", start, end - start)]

    def store_time(self, topic: str, queue: int, offset: int) -> int:
        return next(r[4] for r in self.records if r[1:4] == (topic, queue, offset))


class FakeWorker:
    def __init__(self, store: MemoryStore, hot: FakeHot) -> None:
        self.store, self.hot = store, hot
        self.unknown_times = False
        self.upload_waited = self.starved = 0.0
        self.written = RowCounts()
        self.rates: list[int] = []
        self.priority = "normal"

    def uploads(self, store_url: str, metadata: Mapping[str, str]) -> DeferredUploads:
        return DeferredUploads(lambda one, files: self.encode_upload(one.name, one.entries))

    def encode_upload(self, name: PlannedObject, entries: Mapping[int, EntryRun]) -> CommittedObject:
        row, runs, queues, times = 0, [], {}, []
        for queue, run in sorted(entries.items()):
            last = run.first_offset + len(run.physical) - 1
            runs.append((queue, run.first_offset, last))
            queues[queue] = (run.first_offset, last, row)
            row += len(run.physical)
            times += [self.hot.store_time(name.topic, queue, offset) for offset in range(run.first_offset, last + 1)]
        oldest, newest = (-1, -1) if self.unknown_times else (min(times), max(times))
        group = RowGroup(0, row, 4, 100, newest, oldest, row * RECORD, runs)
        content = msgspec.json.encode(runs)
        try:
            etag = self.store.put(name.key, content, if_absent=True).etag
        except PreconditionFailed:
            if self.store.get(name.key) != content:
                raise ContentConflict(f"{name.key} holds other rows") from None
            etag = self.store.head(name.key).etag
        return CommittedObject(
            key=name.key, topic=name.topic, day=name.day, start=name.start, end=name.end, size=len(content), footer=8,
            etag=etag, checksum=("crc32", "0"), sha256=hashlib.sha256(content).hexdigest(), rows=row,
            wire_bytes=row * RECORD, min_time=oldest, max_time=newest, queues=queues, row_groups=[group],
        )  # fmt: skip

    def compact(
        self, store_url: str, name: PlannedObject, merge: Merge, metadata: Mapping[str, str]
    ) -> CommittedObject:
        raise EncodeFailed("of these objects none is made")

    def give_up_compaction(self) -> None:
        """Do nothing: no compaction is in progress."""

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> MayHold:
        raise WorkerFailed("DamagedObject", "of these objects none is read")

    def read_group(self, store_url: str, name: CommittedObject, index: int) -> DecodedGroup:
        raise WorkerFailed("DamagedObject", "of these objects none is read")

    def set_priority(self, priority: str) -> None:
        self.priority = priority

    def set_upload_rate(self, bytes_per_second: int) -> None:
        self.rates.append(bytes_per_second)

    def remove_stale_uploads(self, store_url: str, broker: str) -> int:
        return 0


class Rig:
    """The lifecycle of one broker over a shared store. `restart()` starts it again after a crash."""

    def __init__(self, directory: Path, policy: RetentionPolicy | None = None, log_uuid: str = "log-1") -> None:
        self.clock = ManualClock()
        self.store = MemoryStore(self.clock)
        self.hot = FakeHot(self.clock)
        self.worker = FakeWorker(self.store, self.hot)
        self.directory, self.log_uuid = directory, log_uuid
        self.policy = policy or RetentionPolicy()
        self.restart()

    def new_journal(self, directory: Path | None = None, log_uuid: str | None = None) -> JournalWriter:
        return JournalWriter(
            self.store, "", "b", log_uuid or self.log_uuid,
            local=directory or self.directory, disk=RealDisk(), clock=self.clock,
        )  # fmt: skip

    def restart(self) -> None:
        self.journal = self.new_journal()
        self.attachment = self.journal.ownership.attach(self.hot.tail)
        if self.attachment.resume_at is not None:
            self.hot.restart_at(self.attachment.resume_at, self.attachment.queue_next)
        mark = ClockMark(self.directory / "clock", RealDisk())
        safe_clock = SafeClock(self.clock, mark)
        policy = lambda: self.policy  # noqa: E731
        self.lifecycle = ArchiveLifecycle(self.hot, self.journal, self.worker, policy, self.clock, safe_clock)

    def offload(self, evict: bool = False) -> None:
        self.lifecycle.offload.run(roll=True, evict=evict)

    def check_tiles(self, topic: str, queue: int = 0) -> int:
        """Assert that every offset from 0 is in exactly one object or GAP, and return the next offset."""
        catalog = self.journal.catalog
        spans = [(run.first, run.last) for run in catalog.queue(topic, queue).runs()]
        spans += [(gap.first, gap.last) for gap in catalog.gaps() if (gap.topic, gap.queue) == (topic, queue)]
        following = 0
        for first, last in sorted(spans):
            assert first == following, f"{sorted(spans)}: gap or overlap at {following}"
            following = last + 1
        for name in catalog.objects(topic):
            assert name.key in self.store.objects
        return following


def rounds(rig: Rig, count: int) -> None:
    for _ in range(count):
        rig.hot.put("t", count=3)
        rig.offload()
        rig.lifecycle.checkpoint.run()


STEPS = [
    "journal.before_put",
    "journal.after_identity",
    "offload.before_intent",
    "offload.after_intent",
    "offload.after_upload",
    "offload.before_commit",
    "offload.after_commit",
    "offload.before_evict",
    "offload.after_evict",
]
