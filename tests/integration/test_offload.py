"""The real store, the real worker and real object stores: offload, evict, and the same bytes again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import SystemClock
from infra.disk import RealDisk
from infra.failpoint import FailpointError
from infra.minio import Minio, create_bucket, running
from infra.object_store import open_store
from lifecycle.archiver import Lifecycle
from lifecycle.hot_store import Segment
from lifecycle.retention import Policy
from neve.archive.catalog import Location
from tiered.journal import JournalWriter
from tiered.offload_plan import EntryRun
from tiered.worker_client import WorkerClient

pytestmark = pytest.mark.servers
HOST = ("127.0.0.1", 10911)


class StoreAdapter:
    """What a broker passes to the lifecycle, without the hop to its loop."""

    def __init__(self, store: MessageStore) -> None:
        self.store = store

    def segments(self) -> Sequence[Segment]:
        return self.store.segments()

    def flush(self) -> int:
        self.store.after_flush(self.store.flush())
        return min(self.store.flushed_offset, self.store.confirmed_offset)

    def roll(self) -> None:
        self.store.roll()

    def evict(self, base: int) -> None:
        self.store.evict(base)

    def queues(self) -> Mapping[str, Sequence[int]]:
        return self.store.queues()

    def min_offset(self, topic: str, queue: int) -> int:
        return self.store.min_offset(topic, queue)

    def set_min_offset(self, topic: str, queue: int, offset: int) -> None:
        self.store.set_min_offset(topic, queue, offset)

    def offset_by_time(self, topic: str, queue: int, time_ms: int, upper: bool) -> int:
        return self.store.offset_by_time(topic, queue, time_ms, upper)

    def store_time(self, topic: str, queue: int, offset: int) -> int:
        return self.store.store_time(topic, queue, offset)

    def entries(self, topic: str, start: int, end: int) -> Mapping[int, EntryRun]:
        return self.store.entries(topic, start, end)

    def files(self, start: int, end: int) -> Sequence[tuple[str, int, int]]:
        return self.store.files(start, end)

    def pinned_from(self) -> int | None:
        return None

    def disk_ratio(self) -> float:
        return 0.1


@pytest.fixture(scope="module")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minio]:
    with running(tmp_path_factory.mktemp("minio")) as instance:
        create_bucket(instance, "archive")
        yield instance


@pytest.fixture(params=["directory", "s3"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "directory":
        return f"dir:{tmp_path}/archive"
    minio: Minio = request.getfixturevalue("minio")
    for name, value in minio.environment.items():
        monkeypatch.setenv(name, value)
    return minio.url("archive", f"run/{request.node.name}")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerClient]:
    client = WorkerClient(work_dir=tmp_path)
    yield client
    client.close()


def put(store: MessageStore, topic: str, queue: int, count: int) -> None:
    for number in range(count):
        body = f"{topic}-{queue}-{number}-".encode() * (number % 50)
        store.put(
            topic,
            queue,
            body,
            b"KEYS\x01k%d\x02TAGS\x01a\x02" % number,
            flag=0,
            sys_flag=0,
            born_timestamp=1,
            born_host=HOST,
        )


def hot_bytes(store: MessageStore, topic: str, queue: int) -> bytes:
    first, end = store.min_offset(topic, queue), store.max_offset(topic, queue)
    parts = []
    while first < end:
        result = store.get(topic, queue, first, 100, 1 << 20)
        parts += [bytes(buffer) for buffer in result.buffers]
        first = result.next_offset
    return b"".join(parts)


def cold_bytes(journal: JournalWriter, worker: WorkerClient, topic: str, queue: int) -> bytes:
    parts = []
    location: Location
    for location in journal.catalog.runs(topic, queue):
        group = worker.read_group(journal.store.url, location.name, location.row_group)
        runs = location.group.runs
        row = 0
        for number, first, last in runs:
            count = last - first + 1
            if number == queue:
                parts.append(bytes(group.wire[int(group.positions[row]) : int(group.positions[row + count])]))
            row += count
    return b"".join(parts)


@pytest.mark.parametrize("step", [None, "offload.after_intent", "offload.after_upload", "offload.before_commit"])
def test_offload_evict_and_read_back(tmp_path: Path, store_url: str, worker: WorkerClient, step: str | None) -> None:
    store = MessageStore(StoreConfig(tmp_path / "store", commit_log_file_size=1 << 18), RealDisk(), SystemClock())
    store.load()
    for _ in range(3):
        put(store, "orders", 0, 150)
        put(store, "orders", 1, 40)
        put(store, "%RETRY%g", 0, 20)
    hot = StoreAdapter(store)
    hot.flush()
    places = [("orders", 0), ("orders", 1), ("%RETRY%g", 0)]
    before = {place: hot_bytes(store, *place) for place in places}

    def start() -> tuple[JournalWriter, Lifecycle]:
        journal = JournalWriter(
            open_store(store_url),
            "",
            "b",
            store.log_uuid,
            local=tmp_path / "tier",
            disk=RealDisk(),
            clock=SystemClock(),
        )
        assert journal.attach(store.max_physical_offset).resume_at is None
        return journal, Lifecycle(hot, journal, worker, Policy(), SystemClock())

    journal, lifecycle = start()
    if step is not None:
        with failpoint.armed(step), pytest.raises(FailpointError):
            lifecycle.run_offload(roll=True, evict=True)
        journal, lifecycle = start()
    lifecycle.run_offload(roll=True, evict=True)
    assert [segment.topics for segment in store.segments() if segment.sealed] == []
    for place in places:
        assert cold_bytes(journal, worker, *place) == before[place]
        assert journal.catalog.max_offset(*place) == store.max_offset(*place)
    assert lifecycle.missing_objects() == []
    listed = {info.key for info in journal.store.list("") if info.key.startswith("topic=")}
    assert listed == {name.key for name in journal.catalog.objects()}
    store.shutdown()
