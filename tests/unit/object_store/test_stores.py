"""Tests of the object store contract, with the memory store and the directory store."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from infra.objects.directory import DirectoryStore
from infra.objects.open import open_store
from infra.objects.probe import probe
from infra.objects.s3 import S3Store
from infra.objects.store import (
    BadStoreUrl,
    NotFound,
    ObjectStore,
    Pace,
    ProbeFailed,
    PutOutcome,
    StoreUnavailable,
    UnknownOutcome,
    unpaced,
)
from neve.archive.read.topic_dataset import open_files
from neve.archive.store.source import open_source
from neve.archive.store.url import S3Url, parse_store_url
from neve.spark.builder import parse_store
from tests.kit.store.memory_store import MemoryStore
from tests.kit.store.races import winners_of_a_race


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return MemoryStore() if request.param == "memory" else DirectoryStore(tmp_path / "bucket")


def test_put_object_is_read_back(store: ObjectStore, tmp_path: Path) -> None:
    key = "topic=%25RETRY%25g/dt=2026-01-01/broker=b/x.parquet"
    outcome = store.put(key, b"0123456789", if_absent=True)
    assert store.get(key) == b"0123456789"
    assert store.get_range(key, 3, 4) == b"3456"
    assert store.get_range(key, 8, 100) == b"89"
    info = store.head(key)
    assert (info.key, info.size, info.etag) == (key, 10, outcome.etag)
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    store.put(key, source)
    assert store.get(key) == b"from a file"
    store.delete(key)
    store.delete(key)
    for call in (store.get, store.head):
        with pytest.raises(NotFound):
            call(key)
    with pytest.raises(FileNotFoundError):
        store.get_range(key, 0, 1)


def test_delete_many_ignores_missing_objects(store: ObjectStore) -> None:
    keys = [f"day={number % 2}/{number}" for number in range(6)]
    for key in keys:
        store.put(key, b"x")
    store.delete(keys[1])
    store.delete_many(keys[:5])
    assert [info.key for info in store.list("")] == [keys[5]]


def test_directory_store_syncs_each_folder_once_per_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DirectoryStore(tmp_path / "bucket")
    keys = [f"day={number % 2}/{number}" for number in range(20)]
    for key in keys:
        store.put(key, b"x")
    syncs: list[int] = []
    monkeypatch.setattr(os, "fsync", syncs.append)
    store.delete_many(keys)
    assert len(syncs) == 2
    assert list(store.list("")) == []


def test_bucket_without_bulk_delete_gets_single_deletes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def delete(_: object, paths: str | list[str]) -> None:
        asked.append(paths)
        if isinstance(paths, list) and len(asked) == 1:
            raise OSError("501 Not Implemented")

    monkeypatch.setattr("obstore.delete", delete)
    store = S3Store("s3://b", "b", endpoint="http://127.0.0.1:9")
    store.delete_many(["a", "b"])
    assert asked == [["a", "b"], "a", "b"]
    asked[:] = ["a first"]
    store.delete_many(["c", "d"])
    assert asked[1:] == [["c", "d"]]


def test_if_absent_has_one_winner_and_keeps_the_first(store: ObjectStore) -> None:
    (winner,) = winners_of_a_race(store, "k/one")
    assert store.get("k/one") == str(winner).encode()
    assert [info.key for info in store.list("")] == ["k/one"]


def test_listing_has_exactly_the_keys_below_a_prefix(store: ObjectStore) -> None:
    for key in ("a/1", "a/b/2", "a/c/3", "ab/4", "5"):
        store.put(key, b"x")
    assert [info.key for info in store.list("a/")] == ["a/1", "a/b/2", "a/c/3"]
    assert list(store.list_prefixes("")) == ["a/", "ab/"]
    assert list(store.list_prefixes("a/")) == ["a/b/", "a/c/"]
    assert list(store.list_prefixes("nothing/")) == []
    assert list(store.list("nothing/")) == []


@pytest.mark.parametrize("key", ["", "/x", "x/", "a//b", "a/../b", ".", "a\0b", "x" * 256])
def test_hostile_keys_are_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(BadStoreUrl):
        store.put(key, b"")


def test_probe_passes_and_leaves_nothing(store: ObjectStore) -> None:
    probe(store)
    assert list(store.list("")) == []


class IgnoresConditions(MemoryStore):
    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
        return super().put(key, data)


class RefusesConditions(MemoryStore):
    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False, pace: Pace = unpaced) -> PutOutcome:
        if if_absent:
            raise UnknownOutcome("501 Not Implemented")
        return super().put(key, data)


class KeepsDeleted(MemoryStore):
    def delete(self, key: str) -> None:
        """Answer success and do nothing."""


def test_probe_names_missing_capabilities() -> None:
    with pytest.raises(ProbeFailed, match=r"If-None-Match.*cannot fence"):
        probe(IgnoresConditions())
    with pytest.raises(ProbeFailed, match=r"(?s)PUT works.*501.*fencing=lease is not offered"):
        probe(refusing := RefusesConditions())
    assert not refusing.objects
    with pytest.raises(ProbeFailed, match="right to delete"):
        probe(KeepsDeleted())


def test_probe_of_an_unavailable_store_reports_its_error() -> None:
    store = MemoryStore()
    store.fail("put", UnknownOutcome("503"), times=20)
    with pytest.raises(UnknownOutcome, match="503"):
        probe(store)
    store.faults.clear()
    store.fail("put", UnknownOutcome("503"))
    with pytest.raises(UnknownOutcome, match="503"):
        probe(store)
    assert not store.objects


def test_directory_store_never_shows_a_partial_object(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    with pytest.raises(NotFound):
        store.put("a/b", tmp_path / "missing-source")
    assert list(store.list("")) == []
    assert list((tmp_path / ".upload").iterdir()) == []
    store.put("a/b", b"x")
    assert list(store.list_prefixes("")) == ["a/"]
    with pytest.raises(BadStoreUrl):
        store.get(".upload/anything")


def test_memory_store_faults_apply_before_or_after_the_effect() -> None:
    store = MemoryStore()
    store.fail("put", StoreUnavailable("down"))
    with pytest.raises(StoreUnavailable):
        store.put("k", b"1")
    assert "k" not in store.objects
    store.fail("put", UnknownOutcome("timeout"), after=True)
    with pytest.raises(UnknownOutcome):
        store.put("k", b"1")
    assert store.get("k") == b"1"
    assert store.requests["put"] == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket?multipartAbove=1k", "multipartAbove"),
        ("s3://bucket?multipartAbove=5242879", "multipartAbove"),
        ("s3://key:secret@bucket/p", "credentials"),
        ("s3://bucket/p?access_key_id=x", "access_key_id"),
        ("s3://bucket?endpoint=http://key:secret@host", "credentials"),
        ("s3:///p", "no bucket"),
        ("dir:", "path"),
        ("file:///x", "must be dir:PATH or s3://"),
        ("s3://bucket?endpoint=ftp://host", "endpoint"),
        ("s3://bucket?fencing=lease", "fencing=lease is not offered"),
        ("s3://bucket/team#1?endpoint=http://minio.local:9000&region=eu-west-1", "write %23 for a #"),
        ("s3://bucket#1", "write %23 for a #"),
        ("s3://bucket?endpoint=http://host#1", "write %23 for a #"),
        ("s3://bucket/a?endpoint=http://one&endpoint=http://two", "option endpoint is given 2 times"),
        ("s3://bucket/a?region=r&region=r", "option region is given 2 times"),
        ("s3://bucket/a?endpoint=", "option endpoint has no value"),
        ("s3://bucket/a?endpoint", "list of NAME=VALUE"),
        ("s3://bucket/a?region=eu%0a", "option region has a control character"),
        ("s3://bucket/a?region=eu/1", "option region"),
        ("s3://bucket/a?endpoint=http://host:99999", "endpoint must be"),
        ("s3://bucket/a?endpoint=http://host:secret", "endpoint must be"),
        ("s3://bucket/a?endpoint=secret@host", "credentials"),
        ("s3://bucket/a?endpoint=http://host%3Fregion=r", "without [?] and #"),
        ("s3://bucket/a?endpoint=http://host%231", "without [?] and #"),
        ("s3://bucket/a//b", "prefix has //"),
        ("s3://bucket//a", "prefix has //"),
        ("s3://bucket//", "prefix has //"),
        ("s3://bucket/a//", "prefix has //"),
        ("s3://bucket/a/./b", "prefix has '.'"),
        ("s3://bucket/a/../b", "prefix has '..'"),
        ("s3://bucket/%2e%2e", "prefix has '..'"),
        ("s3://bucket/a%09b", "prefix has a control character"),
        ("s3://bucket/a%ffb", "prefix is not UTF-8"),
        ("s3://bucket/a\tb", "control character"),
        ("s3://bucket/a\n", "control character"),
        ("s3://bucket:9000/a", "bucket's name"),
        ("s3://secret:secret/a", "bucket's name"),
        ("s3://buc%20ket/a", "bucket's name"),
        ("s3://[secret/a", "no URL"),
        ("dir:~/x", "home directory"),
        ("dir:/x\0", "control character"),
    ],
)
def test_bad_urls_are_refused(url: str, message: str) -> None:
    """Broker, readers, command line and Spark share this parser. Its errors contain no secret."""
    with pytest.raises(BadStoreUrl, match=message) as caught:
        open_store(url)
    assert "secret" not in str(caught.value).replace("AWS_SECRET_ACCESS_KEY", "")
    for opened in (open_source, open_files, parse_store):
        with pytest.raises(ValueError, match=message):
            opened(url)


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://bucket", "bucket", ""),
        ("s3://bucket/", "bucket", ""),
        ("s3://bucket/a/b/", "bucket", "a/b"),
        ("s3://bucket/team%231/%C3%A4", "bucket", "team#1/ä"),
        ("s3://my.old_bucket-1/a b?region=eu-west-1&endpoint=https://host:9000/", "my.old_bucket-1", "a b"),
    ],
)
def test_good_urls_name_bucket_and_prefix(url: str, bucket: str, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    where = parse_store_url(url)
    assert isinstance(where, S3Url)
    assert (where.bucket, where.prefix) == (bucket, prefix)
    assert where.uri == "/".join(filter(None, (f"s3://{bucket}", prefix)))
    assert open_store(url).url == url


def test_directory_url_may_contain_a_space(tmp_path: Path) -> None:
    store = open_store(f"dir:{tmp_path}/a b")
    store.put("x", b"1")
    assert (tmp_path / "a b" / "x").read_bytes() == b"1"
    assert parse_store_url(store.url).uri == f"file://{tmp_path}/a b"
    assert store.now_ms() is None


def test_stale_uploads_are_removed_after_a_day(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.put("a", b"1")
    for name, age in (("old", 25 * 3600), ("young", 60)):
        left = tmp_path / ".upload" / name
        left.write_bytes(b"half")
        os.utime(left, (time.time() - age, time.time() - age))
    assert store.remove_stale_uploads(lambda key: False) == 1
    assert [path.name for path in (tmp_path / ".upload").iterdir()] == ["young"]
