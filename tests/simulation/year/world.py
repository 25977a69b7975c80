"""A broker and its bucket over months: what each day leaves behind, and whether it is removed again.

The real parts are those of the storage simulation: the broker's start, store, tables and topic deletion, journal,
catalog, checkpoints, state slots, rounds, TTL, eviction, compaction's planner and REPLACE, the sweep. The disk is a
directory in memory. Replaced are the bucket (`bucket.py`), the worker (an object is a list of its records, not Parquet)
and the clock. Jobs run at fixed times of a day (`_day`), far less often than a broker's own, with more work each.

Traffic follows Zipf's law over the existing topics. Topics are deleted each day; half of them are created again under
their name, at once or weeks later, the others make room for new topics. Each week has a restart, alternating between a
clean stop and a kill; sometimes the disk is lost, and the broker is restored from its bucket. After each restart, and
at the end, every message that is neither expired nor deleted must be readable.
"""

from __future__ import annotations

import logging
import random
import shutil
import tempfile
from bisect import bisect
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from pathlib import Path

from broker.config import BrokerConfig
from broker.tables.topic_config_manager import TopicConfig
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from neve.archive.catalog.catalog import Location
from neve.archive.catalog.journal_reader import read_catalog
from neve.archive.read.verify import VerifyReport, verify
from tests.simulation.faulty_store import URL
from tests.simulation.process import BROKER, Process, make_environment
from tests.simulation.workers import SimulatedWorker
from tests.simulation.year.bucket import CHECKPOINT, DATA, JOURNAL, STATE, BilledBucket
from tests.simulation.year.figures import DayFigures, memory_of

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
QUEUES = 4
#: Hours that a topic's messages are kept, by the topic's number.
TTL_HOURS = (48, 72, 120, 168)
_HOST = ("10.0.0.1", 1)


@dataclass(frozen=True)
class Size:
    """The size of a life: its duration, the number of topics, and the rates of change."""

    days: int
    topics: int
    messages: int  # Per day.
    deletions: int  # Topics per day.
    ttl_scale: int = 1  # Index into TTL_HOURS.
    restore_days: int = 45  # Days between two losses of the disk; each quarter has the same number.
    measured_each: int = 7  # Days after which the catalog's memory and the data directory are measured.
    rounds: int = 2  # Per day.
    segment: int = 1 << 20
    checkpoint_entries: int = 256

    @property
    def slack(self) -> dict[str, int]:
        """Return by how many bytes figures may differ between quarters without growing for ever.

        A log grows by segments. Each restore makes the offsets in the state longer, by the digits of their margin: a
        few bytes per topic, until a number has its maximum length.
        """
        return {"log_bytes": self.segment, "state_bytes": 5 * self.topics}


SMALL = Size(
    days=56,
    topics=200,
    messages=400,
    deletions=4,
    restore_days=14,
    measured_each=1,
    rounds=3,
    segment=1 << 16,
    checkpoint_entries=64,
)
YEAR = Size(days=364, topics=10_000, messages=5_000, deletions=40, ttl_scale=6, checkpoint_entries=1024)


class _Disk(RealDisk):
    """A disk in memory; a dead process has no locks."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: dict[Path, Callable[[], None]] = {}

    def lock(self, path: Path) -> Callable[[], None]:
        release = super().lock(path)
        self._locks[path] = release

        def unlock() -> None:
            if self._locks.pop(path, None) is not None:
                release()

        return unlock

    def kill(self) -> None:
        while self._locks:
            _, release = self._locks.popitem()
            release()


class YearWorld:
    """One life; `run` yields the figures of each day."""

    def __init__(self, size: Size, seed: int = 1) -> None:
        self.size, self._random = size, random.Random(seed)
        self.clock = ManualClock(1_767_225_600_000)
        self.bucket = BilledBucket(self.clock, seed)
        self._root = Path(tempfile.mkdtemp(prefix="neve-year-", dir="/dev/shm"))
        self._disk = _Disk()
        self._config = BrokerConfig(
            broker_name=BROKER, broker_ip1="127.0.0.1", bind_address="127.0.0.1", admin_port=-1, store_url=URL,
            store_path_root_dir=str(self._root / "0"), mapped_file_size_commit_log=size.segment,
            archive_max_age=HOUR_MS, file_reserved_time=24, expire_grace=12 * HOUR_MS, archive_compaction_enable=True,
            archive_compaction_bytes_per_second=0, journal_checkpoint_entries=size.checkpoint_entries,
        )  # fmt: skip
        self._machine = make_environment(self._make_worker, lambda: self.bucket, lambda: False)
        self._numbers = 0
        self.topics: list[str] = []  # By rank.
        self._gone: deque[str] = deque()  # Names that are used again.
        self._lives: Counter[str] = Counter()
        self._ttl_ms: dict[str, int] = {}
        # (time, topic, life of the topic, queue, offset) of each message that may not have expired yet.
        self._sent: deque[tuple[int, str, int, int, int]] = deque()
        shares = list(accumulate(1 / (rank + 1) for rank in range(size.topics)))
        self._shares = [share / shares[-1] for share in shares]
        self.messages = 0
        self._entries = 0  # At the end of the previous day, including removed ones.
        # The catalog's memory and the result of `_local_files`, when last measured.
        self._memory, self._files = 0, (0, 0)
        self._process: Process

    def close(self) -> None:
        self._disk.kill()
        shutil.rmtree(self._root, ignore_errors=True)

    def _make_worker(self) -> SimulatedWorker:
        return SimulatedWorker(self._disk, self.bucket)  # type: ignore[arg-type]

    # ---- days

    def run(self) -> Iterator[DayFigures]:
        logging.disable(logging.CRITICAL)
        try:
            self._start()
            for _ in range(self.size.topics):
                self._new_topic()
            for day in range(1, self.size.days + 1):
                before, self.messages = self.bucket.billed.copy(), 0
                self._day(day)
                yield self._figures(day, {kind: n - before[kind] for kind, n in self.bucket.billed.items()})
            self._settle()
        finally:
            logging.disable(logging.NOTSET)

    def _day(self, day: int) -> None:
        lifecycle = self._process.lifecycle
        for turn in range(self.size.rounds):
            self._traffic(self.size.messages // self.size.rounds, DAY_MS // self.size.rounds)
            if turn == day % self.size.rounds:
                self._come_and_go()
            self._process.flush()
            self._process.broker.topics.file.save_now()
            lifecycle.offload.run()
            lifecycle.evict.run()
            lifecycle.expire.run()
            lifecycle.checkpoint.run()
            self._process.write_state()
        lifecycle.compact.run()
        lifecycle.checkpoint.run()
        lifecycle.shorten.run()
        lifecycle.forget.run()
        if day % 2 == 0:
            lifecycle.sweep.run(repair=True)
        if day % self.size.restore_days == 0:
            self._restore()
        elif day % 7 == 0:
            self._restart(clean=day % 14 == 0)
        else:
            return
        assert (lost := self.lost()) == [], f"day {day}: lost after a start: {lost[:10]}"

    def _traffic(self, messages: int, milliseconds: int) -> None:
        """Send in order of time, at equal intervals, so that the day of a message is certain."""
        put, step = self._process.store.put, max(1, messages // 50)
        for number in range(messages):
            if number % step == 0:
                self.clock.advance(milliseconds * step // messages)
            topic = self.topics[bisect(self._shares, self._random.random())]
            queue = self._random.randrange(QUEUES)
            stored = put(
                topic, queue, b"%d" % number, b"", flag=0, sys_flag=0,
                born_timestamp=self.clock.now_ms(), born_host=_HOST,
            )  # fmt: skip
            self._sent.append((stored.store_timestamp, topic, self._lives[topic], queue, stored.queue_offset))
        self.messages += messages

    def _come_and_go(self) -> None:
        for _ in range(self.size.deletions):
            rank = self._random.randrange(len(self.topics))
            gone = self.topics[rank]
            self._process.drop_topic(gone)
            self._lives[gone] += 1
            if self._random.random() < 0.5:
                self._gone.append(gone)
            if len(self._gone) > 8 * self.size.deletions or (self._gone and self._random.random() < 0.5):
                self._make_topic(self._gone.popleft(), rank)
            else:
                self._new_topic(rank)

    def _new_topic(self, rank: int | None = None) -> None:
        self._numbers += 1
        self._make_topic(f"topic-{self._numbers:06d}", rank)

    def _make_topic(self, name: str, rank: int | None) -> None:
        hours = TTL_HOURS[self._random.randrange(len(TTL_HOURS))] * self.size.ttl_scale
        config = TopicConfig(
            topic_name=name, read_queue_nums=QUEUES, write_queue_nums=QUEUES, attributes={"reserve.time": str(hours)}
        )
        self._process.broker.topics.update(config)
        self._ttl_ms[name] = hours * HOUR_MS
        if rank is None:
            self.topics.append(name)
        else:
            self.topics[rank] = name

    # ---- ends and starts

    def _start(self, *, restore: bool = False) -> None:
        self._process = Process(self._disk, self.clock, self._config, self._machine, restore=restore)  # type: ignore[arg-type]
        self._process.start(lambda: None)

    def _restart(self, *, clean: bool) -> None:
        if clean:
            self._process.stop()
        self._disk.kill()
        self._start()

    def _restore(self) -> None:
        """Restore on another machine with an empty disk."""
        old = self._config.root
        self._process.lifecycle.offload.run(roll=True)
        self._process.stop()
        self._disk.kill()
        self._config.store_path_root_dir = str(self._root / str(int(old.name) + 1))
        shutil.rmtree(old)
        self._start(restore=True)

    def _settle(self) -> None:
        """Complete all pending work."""
        lifecycle = self._process.lifecycle
        lifecycle.offload.run(roll=True, evict=True)
        lifecycle.expire.run()
        self.clock.advance(13 * HOUR_MS)
        lifecycle.expire.run()

    def verify(self) -> VerifyReport:
        """Verify the archive like an independent reader."""
        return verify(read_catalog(self.bucket, BROKER), self.bucket)

    def lost(self) -> list[str]:
        """Return messages that are neither expired nor deleted, and are in no tier."""
        catalog, store, now = self._process.journal.catalog, self._process.store, self.clock.now_ms()
        while self._sent and self._sent[0][0] + max(TTL_HOURS) * self.size.ttl_scale * HOUR_MS <= now:
            self._sent.popleft()
        return [
            f"{topic}, queue {queue}: {offset}"
            # One block at a time.
            for stored, topic, life, queue, offset in sorted(self._sent, key=itemgetter(1, 3, 4))
            if life == self._lives[topic]
            and stored + self._ttl_ms[topic] > now
            and not isinstance(catalog.find(topic, queue, offset), Location)
            and not store.queues.min_offset(topic, queue) <= offset < store.queues.max_offset(topic, queue)
        ]

    def orphans(self) -> list[str]:
        """Return orphan objects of any age."""
        catalog = read_catalog(self.bucket, BROKER)
        return [key for key in self.bucket.objects if key.startswith("topic=") and not catalog.knows(key)]

    # ---- figures

    def _figures(self, day: int, requests: dict[str, int]) -> DayFigures:
        catalog = self._process.journal.catalog
        if day % self.size.measured_each == 0 or not self._memory:
            self._memory, self._files = memory_of(catalog), self._local_files()
        counts, sizes = self.bucket.objects.counts, self.bucket.objects.sizes
        journal = counts[JOURNAL], sizes[JOURNAL]
        found = DayFigures(
            day=day, topics=len(self.topics), names=self._numbers, messages=self.messages,
            journal_entries=journal[0], journal_bytes=journal[1],
            entries=catalog.next_seq - self._entries,
            checkpoint_bytes=sizes[CHECKPOINT],
            state_bytes=sizes[STATE],
            catalog_memory=self._memory, catalog_topics=len(catalog.named_topics()), live=catalog.object_count,
            waiting=counts[DATA] - catalog.object_count, data_objects=counts[DATA], data_bytes=sizes[DATA],
            local_bytes=self._files[0], log_bytes=self._files[1],
            requests=requests,
        )  # fmt: skip
        self._entries = catalog.next_seq
        return found

    def _local_files(self) -> tuple[int, int]:
        """Return the bytes of the log, after those of all other files."""
        files = [path for path in self._config.root.rglob("*") if path.is_file()]
        log = sum(path.stat().st_blocks * 512 for path in files if path.parent.name == "commitlog")
        return sum(path.stat().st_size for path in files if path.parent.name != "commitlog"), log
