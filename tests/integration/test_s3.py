"""The S3 store against two real servers that the tests start: MinIO and the Versity gateway."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest

from infra.objects import minio
from infra.objects.multipart import STALE_MS, MultipartUploads
from infra.objects.open import open_store
from infra.objects.probe import probe
from infra.objects.s3_server import S3Server, create_bucket
from infra.objects.store import AccessDenied, NotFound, ObjectStore, ObjectStoreError, PreconditionFailed
from tests.kit.server import versitygw
from tests.kit.store.races import winners_of_a_race

pytestmark = pytest.mark.servers
BUCKET = "archive"


@pytest.fixture(scope="module", params=[minio, versitygw], ids=["minio", "versitygw"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with request.param.running(tmp_path_factory.mktemp("server")) as instance:
        create_bucket(instance, BUCKET)
        yield instance


@pytest.fixture
def store(server: S3Server, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ObjectStore:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return open_store(server.url(BUCKET, f"run/{request.node.originalname}"))


def boto(server: S3Server) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
    )


def test_object_operations_use_literal_keys(store: ObjectStore, server: S3Server, tmp_path: Path) -> None:
    key = "topic=%25RETRY%25g%7Cx/dt=2026-01-01/broker=b/00-01-e1.parquet"
    outcome = store.put(key, b"0123456789", if_absent=True)
    assert store.get(key) == b"0123456789"
    assert store.get_range(key, 3, 4) == b"3456"
    assert (store.head(key).size, store.head(key).etag) == (10, outcome.etag)
    assert [info.key for info in store.list("topic=%25RETRY%25g%7Cx/")] == [key]
    assert list(store.list_prefixes("")) == ["topic=%25RETRY%25g%7Cx/"]
    listed = boto(server).list_objects_v2(Bucket=BUCKET, Prefix="run/test_object_operations")["Contents"]
    assert [entry["Key"].split("/", 2)[2] for entry in listed] == [key]  # Spark sees the key exactly as written.
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    store.put("file", source, if_absent=True)
    assert store.get("file") == b"from a file"
    with pytest.raises(PreconditionFailed):
        store.put(key, b"again", if_absent=True)
    store.delete(key)
    store.delete(key)
    with pytest.raises(NotFound):
        store.head(key)
    with pytest.raises(NotFound):
        store.get(key)


def test_conditional_put_has_one_winner(store: ObjectStore) -> None:
    probe(store)
    (winner,) = winners_of_a_race(store, "one")
    assert store.get("one") == str(winner).encode()


def test_wrong_credentials_are_reported(server: S3Server, store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("x", b"1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    stranger = open_store(server.url(BUCKET))
    with pytest.raises(AccessDenied):
        stranger.get("x")
    with pytest.raises(AccessDenied):
        stranger.put("x", b"2", if_absent=True)


def test_profile_supplies_credentials(
    server: S3Server, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "credentials"
    file.write_text(f"[archive]\naws_access_key_id={server.access_key}\naws_secret_access_key={server.secret_key}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "archive")
    by_profile = open_store(server.url(BUCKET, "profile"))
    by_profile.put("x", b"1", if_absent=True)
    assert by_profile.get("x") == b"1"


def test_store_returns_its_time(store: ObjectStore) -> None:
    store.put("x", b"1")
    now = store.now_ms()
    assert now is not None
    assert abs(now - store.head("x").modified_ms) < 60_000


def test_stopped_store_raises_an_error_instead_of_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with minio.running(tmp_path) as instance:
        create_bucket(instance, BUCKET)
        for name, value in instance.environment.items():
            monkeypatch.setenv(name, value)
        store = open_store(instance.url(BUCKET))
        store.put("x", b"1")
    with pytest.raises(ObjectStoreError):
        store.put("y", b"1", if_absent=True)
    with pytest.raises(ObjectStoreError):
        store.get("x")


# ---- multipart objects

PART = 5 << 20  # S3 accepts no smaller part except the last one.


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "large"
    path.write_bytes(random.Random(4).randbytes(2 * PART + 1000))
    return path


@pytest.fixture
def in_parts(store: ObjectStore) -> ObjectStore:
    return open_store(f"{store.url}&multipartAbove={PART}")


def unfinished(server: S3Server, key: str) -> int:
    return len(boto(server).list_multipart_uploads(Bucket=BUCKET, Prefix=key).get("Uploads", ()))


def test_large_object_is_uploaded_in_parts_and_only_once(
    server: S3Server, in_parts: ObjectStore, large: Path, tmp_path: Path
) -> None:
    paced: list[int] = []
    etag = in_parts.put("large", large, if_absent=True, pace=paced.append).etag
    assert sorted(paced) == [1000, PART, PART]
    assert in_parts.head("large").etag == etag
    assert etag.endswith("-3"), "an object in three parts"
    other = tmp_path / "other"
    other.write_bytes(bytes(2 * PART))
    with pytest.raises(PreconditionFailed):
        in_parts.put("large", other, if_absent=True)
    assert in_parts.get_range("large", 0, 3 * PART) == large.read_bytes()
    assert unfinished(server, f"{prefix_of(in_parts)}/large") == 0
    assert [info.key for info in in_parts.list("")] == ["large"], "the proof of the condition leaves nothing"


def prefix_of(store: ObjectStore) -> str:
    return urlsplit(store.url).path.strip("/")


def test_next_upload_removes_the_parts_of_a_dead_writer_of_that_key(
    server: S3Server, in_parts: ObjectStore, large: Path
) -> None:
    client, prefix = boto(server), prefix_of(in_parts)
    names = [f"{prefix}/{name}" for name in ("large", "large-too")]
    for name in names:
        begun = client.create_multipart_upload(Bucket=BUCKET, Key=name)["UploadId"]
        client.upload_part(Bucket=BUCKET, Key=name, UploadId=begun, PartNumber=1, Body=b"half")
    in_parts.put("large", large, if_absent=True)
    left = client.list_multipart_uploads(Bucket=BUCKET, Prefix=names[1])["Uploads"]
    assert [upload["Key"] for upload in left] == names[1:]


def test_sweep_removes_own_stale_uploads_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MinIO is excluded: it lists unfinished uploads by exact key only, and removes them after a day by itself."""
    with versitygw.running(tmp_path) as server:
        create_bucket(server, BUCKET)
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        for name in ("ours", "theirs"):
            boto(server).create_multipart_upload(Bucket=BUCKET, Key=f"run/{name}")
        store = open_store(server.url(BUCKET, "run"))
        uploads = MultipartUploads(BUCKET, "run", endpoint=server.endpoint, region="us-east-1")
        now = store.now_ms()
        assert now is not None
        assert store.remove_stale_uploads(lambda key: key == "ours") == 0, "it began just now"
        assert uploads.remove_stale(lambda key: key == "ours", now + STALE_MS + 60_000) == 1
        assert [unfinished(server, f"run/{name}") for name in ("ours", "theirs")] == [0, 1]
