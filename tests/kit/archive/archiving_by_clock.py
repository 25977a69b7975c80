"""A broker's log and its archive's jobs in this process, with a clock that the test advances by months."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.objects.open import open_store
from lifecycle.lifecycle import ArchiveLifecycle
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import SafeClock
from neve.archive.catalog.journal_reader import entries
from neve.archive.format.journal import Commit
from neve.archive.policy.ttl import HOUR_MS
from tests.kit.archive.hot_log import HOST, StoreAdapter
from tiered.journal.writer import JournalWriter
from tiered.worker.client import WorkerClient

GRACE_HOURS = 24
_CHECKPOINT_ENTRIES = 20


class ArchivingByClock:
    """One broker that archives into a directory of objects; jobs run one after the other like a broker's.

    `ttl_hours` are the TTLs of single topics; others never expire.
    """

    def __init__(
        self, home: Path, store_url: str, broker: str, clock: ManualClock, ttl_hours: Mapping[str, int]
    ) -> None:
        self.broker, self.store_url, self._clock = broker, store_url, clock
        self._stack = ExitStack()
        config = StoreConfig(home / "store", commit_log_file_size=1 << 20)
        self._hot = MessageStore(config, RealDisk(), clock)
        self._hot.load()
        self._stack.callback(self._hot.shutdown)
        worker = self._stack.enter_context(closing(WorkerClient(work_dir=home)))
        store = open_store(store_url)
        self.journal = JournalWriter(
            store, "", broker, self._hot.log_uuid, local=home / "tier", disk=RealDisk(), clock=clock,
            checkpoint_entries=_CHECKPOINT_ENTRIES,
        )  # fmt: skip
        self.journal.ownership.attach(self._hot.max_physical_offset)
        grace_ms = GRACE_HOURS * HOUR_MS
        policy = RetentionPolicy(ttl_hours=ttl_hours.get, grace_ms=grace_ms, replaced_grace_ms=grace_ms)
        self.jobs = ArchiveLifecycle(
            StoreAdapter(self._hot), self.journal, worker, lambda: policy, clock, SafeClock(clock)
        )
        self.ends: Counter[tuple[str, int]] = Counter()  # (topic, queue) -> number of sent messages
        self.kinds: Counter[str] = Counter()  # The number of the journal's entries.
        self.brought_by = -1  # The newest entry that added rows.

    def send(self, topic: str, queue: int, count: int) -> None:
        """Send messages; each body names its topic, queue and offset."""
        for offset in range(self.ends[topic, queue], self.ends[topic, queue] + count):
            body = f"{self.broker}/{topic}/{queue}/{offset}".encode()
            now = self._clock.now_ms()
            self._hot.put(topic, queue, body, b"", flag=0, sys_flag=0, born_timestamp=now, born_host=HOST)
        self.ends[topic, queue] += count

    def archive(self, *, compacts: bool, checkpoints: bool) -> None:
        """Run each job once: archive all messages, expire old ones, delete replaced objects."""
        before = self.journal.catalog.next_seq
        self.jobs.offload.run(roll=True, evict=True)
        if compacts:
            self.jobs.compact.now()
        self.jobs.expire.run()
        if checkpoints:
            self.jobs.checkpoint.run()
        for seq, entry in entries(self.journal.store, self.broker, first=before):
            self.kinds[type(entry).__name__] += 1
            if isinstance(entry, Commit):
                self.brought_by = seq

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
