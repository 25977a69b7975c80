"""The TTL of a topic on a real object store: messages expire by row group, and objects are deleted later."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import neve.archive
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import ManualClock, SystemClock
from infra.disk.filesystem import RealDisk
from infra.failpoint import FailpointError
from infra.objects import minio
from infra.objects.open import open_store
from infra.objects.store import NotFound, ObjectStore
from lifecycle.lifecycle import ArchiveLifecycle
from lifecycle.retention import RetentionPolicy
from lifecycle.safe_clock import TOLERANCE_MS, ClocksDisagree, SafeClock
from neve.archive.catalog.journal_reader import catalogs
from neve.archive.format.journal import Deleted, Expire, decode_entry
from neve.archive.format.keys import journal_key
from neve.archive.policy.ttl import HOUR_MS
from tests.kit.archive.catalog_state import expiring_keys
from tests.kit.archive.hot_log import HOST, StoreAdapter
from tiered.journal.writer import JournalWriter
from tiered.worker.client import WorkerClient

pytestmark = pytest.mark.servers
HALF_HOUR = HOUR_MS // 2
GRACE = 24 * HOUR_MS
ROWS = 5


class MovedClock:
    """The real store, except that its clock is the test's clock minus `behind_ms`."""

    def __init__(self, store: ObjectStore, clock: ManualClock) -> None:
        self._store, self._clock = store, clock
        self.behind_ms = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def now_ms(self) -> int:
        return self._clock.now_ms() - self.behind_ms


@dataclass
class Life:
    clock: ManualClock
    hot: MessageStore
    store: MovedClock
    journal: JournalWriter
    lifecycle: ArchiveLifecycle

    def put(self, queue: int) -> None:
        for _ in range(ROWS):
            self.hot.put("brief", queue, os.urandom(80_000), b"", flag=0, sys_flag=0, born_timestamp=1, born_host=HOST)

    def rows(self) -> list[int]:
        """Return per queue what a program reads without a broker."""
        topic = neve.archive.open(self.store).topic("brief")
        return [sum(1 for _ in topic.read(queue)) for queue in (0, 1)]

    def entries(self, kind: type) -> list[Any]:
        end = self.journal.catalog.next_seq
        read = [decode_entry(self.store.get(journal_key("", "b", seq))) for seq in range(end)]
        return [entry for entry in read if isinstance(entry, kind)]


@pytest.fixture
def life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    """Create one object of two row groups of different queues, half an hour apart; none of it is local any longer."""
    clock = ManualClock(SystemClock().now_ms() - 3 * HOUR_MS)
    hot = MessageStore(StoreConfig(tmp_path / "store", commit_log_file_size=1 << 20), RealDisk(), clock)
    hot.load()
    with minio.running(tmp_path / "minio") as server, closing(WorkerClient(work_dir=tmp_path)) as worker:
        minio.create_bucket(server, "archive")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        store = MovedClock(open_store(server.url("archive", "run")), clock)
        journal = JournalWriter(store, "", "b", hot.log_uuid, local=tmp_path / "tier", disk=RealDisk(), clock=clock)
        journal.ownership.attach(hot.max_physical_offset)
        policy = RetentionPolicy(ttl_hours=lambda topic: 1, grace_ms=GRACE)
        life = Life(
            clock,
            hot,
            store,
            journal,
            ArchiveLifecycle(StoreAdapter(hot), journal, worker, lambda: policy, clock, SafeClock(clock)),
        )
        life.put(0)
        clock.advance(HALF_HOUR)
        life.put(1)
        life.lifecycle.offload.run(roll=True, evict=True)
        yield life
    hot.shutdown()


def test_row_groups_expire_and_the_object_is_deleted_after_the_grace(life: Life) -> None:
    catalog, run = life.journal.catalog, life.lifecycle.expire.run
    (name,) = catalog.objects("brief")
    assert len(name.row_groups) == 2
    life.clock.advance(HALF_HOUR - 1)
    assert run()["expired"] == 0
    assert (life.rows(), life.entries(Expire)) == ([ROWS, ROWS], [])

    life.clock.advance(1)  # The TTL of the first row group has passed.
    with failpoint.armed("ttl.after_expire"), pytest.raises(FailpointError):
        run()
    assert life.entries(Expire)[0].minimums == {"brief": {0: ROWS}}, "recorded, before a broker tells it"
    assert life.rows() == [0, ROWS]
    run()
    run()
    assert len(life.entries(Expire)) == 1, "nothing new has expired"
    assert (catalog.recorded_minimum("brief", 0), catalog.min_offset("brief", 1)) == (ROWS, 0)

    life.clock.advance(HALF_HOUR)
    assert run() == {"expired": 1, "deleted": 0, "raised": 0}
    assert (life.rows(), catalog.objects("brief")) == ([0, 0], [])
    life.clock.advance(GRACE - 1)
    run()
    assert life.store.head(name.key).size == name.size, "a running analysis may still read it"
    life.clock.advance(1)
    assert run()["deleted"] == 1
    with pytest.raises(NotFound):
        life.store.head(name.key)
    assert life.entries(Deleted)[0].keys == [name.key]
    (followed,) = catalogs(life.store).values()
    assert [followed.recorded_minimum("brief", queue) for queue in (0, 1)] == [ROWS, ROWS]


def test_clock_difference_of_the_store_stops_expiry_and_deletion(life: Life) -> None:
    """The store's Date header is three hours ahead of the machine's clock."""
    life.clock.advance(HALF_HOUR)
    life.store.behind_ms = 60_000
    life.lifecycle.expire.run()
    assert life.entries(Expire) == [], "the earlier clock counts"
    life.store.behind_ms = 0
    life.clock.advance(HALF_HOUR)
    assert life.lifecycle.expire.run()["expired"] == 1
    (key,) = expiring_keys(life.journal.catalog)
    life.clock.advance(GRACE)
    for behind in (TOLERANCE_MS + 1, -TOLERANCE_MS - 1):
        life.store.behind_ms = behind
        with pytest.raises(ClocksDisagree):
            life.lifecycle.expire.run()
    real = open_store(life.store.url)
    life.journal.store = real
    with pytest.raises(ClocksDisagree):
        life.lifecycle.expire.run()
    assert real.head(key).key == key
    life.clock.set_wall(SystemClock().now_ms())
    assert life.lifecycle.expire.run()["deleted"] == 0, "by the store's own clock the grace has hardly begun"
