"""The S3 store against a MinIO that this test starts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from infra.minio import Minio, create_bucket, running
from infra.object_store import (
    AccessDenied,
    NotFound,
    ObjectStore,
    ObjectStoreError,
    PreconditionFailed,
    open_store,
    probe,
)

pytestmark = pytest.mark.servers
BUCKET = "archive"


@pytest.fixture(scope="module")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minio]:
    with running(tmp_path_factory.mktemp("minio")) as instance:
        create_bucket(instance, BUCKET)
        yield instance


@pytest.fixture
def store(minio: Minio, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ObjectStore:
    for name, value in minio.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(minio.url(BUCKET, f"run/{request.node.name}"))


def test_round_trip_and_literal_keys(store: ObjectStore, minio: Minio, tmp_path: Path) -> None:
    key = "topic=%25RETRY%25g%7Cx/dt=2026-01-01/broker=b/00-01-e1.parquet"
    outcome = store.put(key, b"0123456789", if_absent=True)
    assert store.get(key) == b"0123456789"
    assert store.get_range(key, 3, 4) == b"3456"
    assert (store.head(key).size, store.head(key).etag) == (10, outcome.etag)
    assert [info.key for info in store.list("topic=%25RETRY%25g%7Cx/")] == [key]
    assert list(store.list_prefixes("")) == ["topic=%25RETRY%25g%7Cx/"]
    client = boto3.client(
        "s3",
        endpoint_url=minio.endpoint,
        region_name="us-east-1",
        aws_access_key_id=minio.access_key,
        aws_secret_access_key=minio.secret_key,
    )
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix="run/test_round_trip")["Contents"]
    assert [entry["Key"].split("/", 2)[2] for entry in listed] == [key]  # Spark sees the name that we wrote
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    store.put("file", source, if_absent=True)
    assert store.get("file") == b"from a file"
    store.delete(key)
    store.delete(key)
    with pytest.raises(NotFound):
        store.head(key)
    with pytest.raises(NotFound):
        store.get(key)


def test_conditional_put_has_one_winner(store: ObjectStore) -> None:
    probe(store)
    won: list[int] = []
    barrier = threading.Barrier(8)

    def race(number: int) -> None:
        barrier.wait()
        try:
            store.put("one", str(number).encode(), if_absent=True)
        except PreconditionFailed:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("one") == str(won[0]).encode()


def test_wrong_credentials_are_named(minio: Minio, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("x", b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = open_store(minio.url(BUCKET))
    with pytest.raises(AccessDenied):
        stranger.get("x")
    with pytest.raises(AccessDenied):
        stranger.put("x", b"2", if_absent=True)


def test_profile_supplies_credentials(
    minio: Minio, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[archive]\naws_access_key_id={minio.access_key}\naws_secret_access_key={minio.secret_key}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "archive")
    by_profile = open_store(minio.url(BUCKET, "profile"))
    by_profile.put("x", b"1", if_absent=True)
    assert by_profile.get("x") == b"1"


def test_store_tells_its_time(store: ObjectStore) -> None:
    store.put("x", b"1")
    now = store.now_ms()
    assert now is not None
    assert abs(now - store.head("x").modified_ms) < 60_000


def test_stopped_store_is_an_error_not_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as instance:
        create_bucket(instance, BUCKET)
        for name, value in instance.environment.items():
            monkeypatch.setenv(name, value)
        store = open_store(instance.url(BUCKET))
        store.put("x", b"1")
    with pytest.raises(ObjectStoreError):
        store.put("y", b"1", if_absent=True)
    with pytest.raises(ObjectStoreError):
        store.get("x")
