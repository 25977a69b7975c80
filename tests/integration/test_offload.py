"""Offload, evict and read back the same bytes with the real message store, the real worker and real object stores."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import boto3
import pytest

from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.failpoint import FailpointError
from infra.objects import minio
from infra.objects.s3_server import S3Server, create_bucket
from neve.archive.catalog.catalog import Location
from tests.kit.archive.hot_log import HOST, StoreAdapter, put, start
from tests.kit.server import versitygw
from tiered.journal.writer import JournalWriter
from tiered.worker.client import WorkerClient

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module", params=[minio, versitygw], ids=["minio", "versitygw"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with request.param.running(tmp_path_factory.mktemp("server")) as instance:
        create_bucket(instance, "archive")
        yield instance


@pytest.fixture
def s3_url(server: S3Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server.url("archive", f"run/{uuid.uuid4().hex}")


@pytest.fixture
def directory_url(tmp_path: Path) -> str:
    return f"dir:{tmp_path}/archive"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerClient]:
    client = WorkerClient(work_dir=tmp_path)
    yield client
    client.close()


def hot_bytes(store: MessageStore, topic: str, queue: int) -> bytes:
    first, end = store.queues.min_offset(topic, queue), store.queues.max_offset(topic, queue)
    parts = []
    while first < end:
        result = store.reader.get(topic, queue, first, 100, 1 << 20)
        parts += [bytes(buffer) for buffer in result.buffers]
        first = result.next_offset
    return b"".join(parts)


def cold_bytes(journal: JournalWriter, worker: WorkerClient, topic: str, queue: int) -> bytes:
    parts = []
    location: Location
    for location in journal.catalog.queue(topic, queue).runs():
        group = worker.read_group(journal.store.url, location.name, location.row_group)
        runs = location.group.runs
        row = 0
        for number, first, last in runs:
            count = last - first + 1
            if number == queue:
                parts.append(bytes(group.wire[int(group.positions[row]) : int(group.positions[row + count])]))
            row += count
    return b"".join(parts)


STEPS = [None, "offload.after_intent", "offload.after_upload", "offload.before_commit"]


@pytest.mark.parametrize("step", STEPS)
def test_offload_evict_and_read_back(
    tmp_path: Path, directory_url: str, worker: WorkerClient, step: str | None
) -> None:
    offload_evict_and_read_back(tmp_path, directory_url, worker, step)


@pytest.mark.parametrize("step", [None, "offload.after_upload"])
def test_offload_evict_and_read_back_over_s3(
    tmp_path: Path, s3_url: str, worker: WorkerClient, step: str | None
) -> None:
    offload_evict_and_read_back(tmp_path, s3_url, worker, step)


def offload_evict_and_read_back(tmp_path: Path, store_url: str, worker: WorkerClient, step: str | None) -> None:
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
    journal, lifecycle = start(tmp_path, store_url, hot, worker)
    if step is not None:
        with failpoint.armed(step), pytest.raises(FailpointError):
            lifecycle.offload.run(roll=True, evict=True)
        journal, lifecycle = start(tmp_path, store_url, hot, worker)
    lifecycle.offload.run(roll=True, evict=True)
    assert [segment.topics for segment in store.reader.segments() if segment.sealed] == []
    for place in places:
        assert cold_bytes(journal, worker, *place) == before[place]
        assert journal.catalog.max_offset(*place) == store.queues.max_offset(*place)
    assert lifecycle.verify().ok
    listed = {info.key for info in journal.store.list("") if info.key.startswith("topic=")}
    assert listed == {name.key for name in journal.catalog.objects()}
    store.shutdown()


@pytest.mark.parametrize(
    ("server", "place", "at_once"),
    [
        (minio, "object_store.mid_put=crash", False),  # Each worker dies in the middle of its parts.
        (versitygw, "object_store.mid_put=crash", False),
        # Unknown outcome and the object exists: it is read back and adopted.
        (minio, "object_store.after_complete=error", True),
        (versitygw, "object_store.before_complete=error", True),  # Unknown outcome and no object: it is uploaded again.
    ],
    indirect=["server"],
)
def test_multipart_upload_survives_failures_between_its_parts(
    tmp_path: Path, server: S3Server, s3_url: str, monkeypatch: pytest.MonkeyPatch, place: str, at_once: bool
) -> None:
    store = MessageStore(StoreConfig(tmp_path / "store", commit_log_file_size=1 << 24), RealDisk(), SystemClock())
    store.load()
    for _ in range(3):
        body = os.urandom(3 << 20)
        store.put("large", 0, body, b"", flag=0, sys_flag=0, born_timestamp=1, born_host=HOST)
    hot, url = StoreAdapter(store), f"{s3_url}&multipartAbove={5 << 20}"
    hot.flush()
    before = hot_bytes(store, "large", 0)
    with monkeypatch.context() as patch, closing(WorkerClient(work_dir=tmp_path)) as doomed:
        patch.setenv(failpoint.ENVIRONMENT, place)
        _, lifecycle = start(tmp_path, url, hot, doomed)
        reports = lifecycle.offload.run(roll=True)
        assert [len(report.committed) for report in reports] == [int(at_once)]
        assert (doomed.starts > 1) is not at_once
    with closing(WorkerClient(work_dir=tmp_path)) as worker:
        journal, lifecycle = start(tmp_path, url, hot, worker)
        lifecycle.offload.run(roll=True, evict=True)
        assert cold_bytes(journal, worker, "large", 0) == before
        (name,) = journal.catalog.objects("large")
        assert journal.store.head(name.key).etag == name.etag
        assert name.etag.endswith("-2"), "an object in two parts"
    client = boto3.Session().client("s3", endpoint_url=server.endpoint, region_name="us-east-1")
    key = f"{urlsplit(s3_url).path.strip('/')}/{name.key}"
    assert "Uploads" not in client.list_multipart_uploads(Bucket="archive", Prefix=key), "its parts are still there"
    store.shutdown()
