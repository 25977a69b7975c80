"""A broker resumes only its own archive, and never assigns an offset or object name twice."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any

import msgspec
import pytest

from infra.objects.minio import Minio, create_bucket, running
from neve.archive.format.journal import FORMAT_VERSION, Abort, Epoch, Gap
from neve.archive.format.keys import format_key
from neve.record.codec import iter_records
from neve.remoting.codes import RequestCode as Code
from tests.kit.clock.waiting import wait_until
from tests.kit.server.neve import NEVE
from tests.kit.server.requests import (
    GOES_ON,
    GROUP,
    SMALL,
    Up,
    ask,
    get,
    journal_of,
    offload,
    post,
    pull,
    read_all,
    refusal,
    send,
)
from tiered.journal.store_format import StoreFormat


def log_files(directory: Path) -> list[Path]:
    return sorted(path for path in (directory / "data/broker/commitlog").iterdir() if path.name.isdigit())


def test_empty_directory_does_not_take_over_an_archive(tmp_path: Path, neve_up: Up) -> None:
    store = tmp_path / "store"
    with neve_up(tmp_path, "--store", f"dir:{store}", *SMALL) as neve:
        send(neve, b"a", b"b")
        assert offload(neve)["objects"] == 1
    before = len(journal_of(store))
    shutil.rmtree(tmp_path / "data")
    for _ in range(2):  # The refused start leaves nothing behind that lets a second start succeed.
        said = refusal(tmp_path / "data", f"dir:{store}")
        assert re.search(
            r"archive of broker broker-a reaches \d+ .*data directory back, use --restore-from.*another brokerName",
            said,
        ), said
    assert len(journal_of(store)) == before
    with neve_up(tmp_path / "other", "--store", f"dir:{store}", "--set", "brokerName=broker-b", *SMALL) as neve:
        assert send(neve, b"c") == [0]


def test_log_older_than_its_archive_resumes_above_it(tmp_path: Path, neve_up: Up) -> None:
    """An older copy of the directory is restored; since then one round was committed and another was only announced."""
    store, data = tmp_path / "store", tmp_path / "data"
    arguments = ("--store", f"dir:{store}", *SMALL)
    with neve_up(tmp_path, *arguments) as neve:
        assert send(neve, b"0", b"1") == [0, 1]
        assert offload(neve)["objects"] == 1
        assert send(neve, b"2", b"3") == [2, 3]
    shutil.copytree(data, tmp_path / "copy")
    with neve_up(tmp_path, *arguments) as neve:
        send(neve, *(b"%d" % index for index in range(4, 10)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEVE_FAILPOINT", "offload.after_intent=crash")
        with neve_up(tmp_path, *arguments) as neve:
            with contextlib.suppress(OSError, HTTPException, ValueError, IndexError):
                offload(neve)
            assert neve.process.wait(20) == -signal.SIGKILL
    shutil.rmtree(data)
    (tmp_path / "copy").rename(data)
    with neve_up(tmp_path, *arguments) as neve:
        (new,) = send(neve, b"new")
        assert new >= 10
        moved = pull(neve, 5)
        assert (moved.code, moved.ext["nextBeginOffset"]) == (GOES_ON, str(new)), moved.remark
        kept = {0: b"0", 1: b"1", 2: b"2", 3: b"3", new: b"new"}
        assert read_all(neve) == kept
        assert get(neve, "/archive/status")["open_names"] == 0
        assert [item.get("event") for item in post(neve, "/archive/offload?roll=1&evict=1")][-1] == "done"
        assert read_all(neve) == kept
        assert post(neve, "/archive/verify?deep=true")[0]["findings"] == []
    log = (tmp_path / "neve.log").read_text()
    assert re.search(r"ERROR.* log resumes above the archive", log)
    assert re.search(r"ERROR.* queue 0: offsets 4-9 are lost", log)
    written = journal_of(store)
    assert [type(entry) for entry in written if isinstance(entry, Abort)] == [Abort]
    gaps = [(gap.first, gap.last) for gap in written if isinstance(gap, Gap)]
    assert gaps[0] == (4, 9)
    with neve_up(tmp_path, *arguments) as neve:  # The next start is an ordinary one.
        assert read_all(neve) == kept


def test_lost_newest_files_are_read_from_the_archive(tmp_path: Path, neve_up: Up) -> None:
    """The newest log files are lost. Everything had been archived, so consumers lose no message."""
    arguments = ("--store", f"dir:{tmp_path / 'store'}", "--set", "flushConsumerOffsetInterval=100", *SMALL)
    bodies = [b"%d" % index * 500 for index in range(10)]
    with neve_up(tmp_path, *arguments) as neve:
        assert send(neve, *bodies) == list(range(10))
        neve.kill()
    shutil.copytree(tmp_path / "data/broker/commitlog", tmp_path / "older")
    shutil.copy(tmp_path / "data/broker/checkpoint", tmp_path / "older-checkpoint")
    with neve_up(tmp_path, *arguments) as neve:
        more = [b"%d" % index * 5000 for index in range(10, 40)]
        send(neve, *more)
        offload(neve)
        pull(neve, 0)  # The first pull creates the group.
        ask(neve, (Code.UPDATE_CONSUMER_OFFSET, {**GROUP, "commitOffset": "35"}, b""))
        table = tmp_path / "data/broker/config/consumerOffset.json"
        wait_until(lambda: table.exists() and "35" in table.read_text())
        neve.kill()
    assert len(log_files(tmp_path)) > 1
    shutil.rmtree(tmp_path / "data/broker/commitlog")
    (tmp_path / "older").rename(tmp_path / "data/broker/commitlog")
    (tmp_path / "older-checkpoint").replace(tmp_path / "data/broker/checkpoint")
    with neve_up(tmp_path, *arguments) as neve:
        (position,) = ask(neve, (Code.QUERY_CONSUMER_OFFSET, GROUP, b""))
        assert position.ext["offset"] == "35"  # The group need not reread messages that only the log has lost.
        (new,) = send(neve, b"new")
        assert new >= 40
        assert read_all(neve) == {**dict(enumerate(bodies + more)), new: b"new"}


def test_broker_waits_for_a_missing_directory_store(tmp_path: Path, neve_up: Up) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    arguments = ("--store", f"dir:{store}", *SMALL)
    with neve_up(tmp_path, *arguments) as neve:
        send(neve, b"a")
        offload(neve)
    store.rename(away)
    store.write_text("not mounted")
    with neve_up(tmp_path, *arguments) as neve:
        unreachable(neve, first=1)
        store.unlink()
        away.rename(store)
        back(neve)
    assert sum(isinstance(entry, Epoch) for entry in journal_of(store)) == 2


def unreachable(neve: Any, first: int) -> None:
    """Check that hot traffic continues, jobs fail, and no local message is evicted."""
    assert send(neve, b"hot") == [first]
    assert [bytes(record.body) for record in iter_records(pull(neve, first).body)] == [b"hot"]
    segments = post(neve, "/archive/offload?roll=1&evict=1")
    assert "error" in segments[-1], segments
    for job in ("retention", "ttl"):
        post(neve, f"/jobs/{job}/run")
        wait_until(partial(lambda job: job in get(neve, "/archive/status")["errors"], job))
    status = get(neve, "/archive/status")
    assert (status["archive"], status["evicted_segments"], status["backlog_bytes"] > 0) == ("unreachable", 0, True)


def back(neve: Any) -> None:
    """Run the failed jobs now, because their errors are reported until then; check that the archive is online."""
    for job in ("offload", *get(neve, "/archive/status")["errors"]):
        post(neve, f"/jobs/{job}/run")
    wait_until(lambda: bool(get(neve, "/archive/status")["archive"] == "online"))
    assert offload(neve, "?roll=1&evict=1")["objects"] == 1
    assert get(neve, "/archive/status")["evicted_segments"] > 0
    assert list(read_all(neve).values()) == [b"a", b"hot"]


def test_empty_directory_in_place_of_the_store_is_rejected(tmp_path: Path, neve_up: Up) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    arguments = ("--store", f"dir:{store}", *SMALL)
    with neve_up(tmp_path, *arguments) as neve:
        send(neve, b"a")
        offload(neve)
    store.rename(away)
    store.write_text("not mounted")
    with neve_up(tmp_path, *arguments) as neve:
        store.unlink()
        store.mkdir()
        for _ in range(2):  # The second attempt is refused like the first.
            assert "has storeUrl changed" in offload(neve)["error"]
        assert list(store.iterdir()) == []
        assert send(neve, b"b") == [1]
    assert "has storeUrl changed, or was the bucket emptied?" in refusal(tmp_path / "data", f"dir:{store}")


def test_bucket_of_another_cluster_or_newer_format_is_rejected(tmp_path: Path, neve_up: Up) -> None:
    store = tmp_path / "store"
    with neve_up(tmp_path, "--store", f"dir:{store}", *SMALL) as neve:
        send(neve, b"a")
    said = refusal(tmp_path / "new", f"dir:{store}", "brokerName=broker-b", "brokerClusterName=Other")
    assert "holds the archive of cluster DefaultCluster, this broker is of Other" in said
    newer = StoreFormat(FORMAT_VERSION + 1, "DefaultCluster")
    (store / format_key("")).write_bytes(msgspec.msgpack.encode(newer))
    for data in (tmp_path / "data", tmp_path / "new"):
        said = refusal(data, f"dir:{store}")
        assert f"has archive format {FORMAT_VERSION + 1}; this program knows formats up to {FORMAT_VERSION}" in said


def test_older_of_two_brokers_with_one_name_is_fenced(tmp_path: Path, neve_up: Up) -> None:
    """A copied data directory was started: the archive has one writer, the newer broker."""
    store = tmp_path / "store"
    arguments = ("--store", f"dir:{store}", *SMALL)
    with neve_up(tmp_path / "one", *arguments) as old:
        send(old, b"a")
        offload(old)
    shutil.copytree(tmp_path / "one/data", tmp_path / "two/data")
    with neve_up(tmp_path / "one", *arguments) as old, neve_up(tmp_path / "two", *arguments) as young:
        assert send(old, b"of the old") == [1]
        before = len(journal_of(store))
        said = offload(old, "?roll=1&evict=1")["error"]
        assert "this broker no longer archives, deletes or evicts" in said
        post(old, "/jobs/retention/run")
        wait_until(lambda: "retention" in get(old, "/archive/status")["errors"])
        status = get(old, "/archive/status")
        assert (status["archive"], status["evicted_segments"]) == ("fenced", 0)
        assert len(journal_of(store)) == before
        assert send(old, b"and on") == [2]
        assert list(read_all(old).values()) == [b"a", b"of the old", b"and on"]
        assert send(young, b"of the young") == [1]
        assert offload(young)["objects"] == 1


@pytest.mark.servers
def test_broker_waits_for_a_stopped_minio(tmp_path: Path, neve_up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(tmp_path / "minio"))
        create_bucket(server, "archive")
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        arguments = ("--store", server.url("archive", "x"), *SMALL)
        with neve_up(tmp_path, *arguments) as neve:
            send(neve, b"a")
            offload(neve)
        stack.close()
        with neve_up(tmp_path, *arguments) as neve:
            unreachable(neve, first=1)
            refused = subprocess.run(
                [NEVE, "archive", "offload", "--admin", neve.admin], capture_output=True, check=False
            )
            assert (refused.returncode, b"Connection refused" in refused.stderr) == (1, True), refused.stderr
            with again(tmp_path / "minio", server):
                back(neve)
        assert "Traceback" not in neve.log()


@contextlib.contextmanager
def again(directory: Path, server: Minio) -> Iterator[None]:
    port = int(server.endpoint.rpartition(":")[2])
    with running(directory, port, (server.access_key, server.secret_key)):
        yield


def test_deep_verify_finds_a_flipped_byte(tmp_path: Path, neve_up: Up) -> None:
    """A flipped byte keeps the size. Only reading the object finds it, by the broker and from the store alone."""
    store = tmp_path / "store"
    with neve_up(tmp_path, "--store", f"dir:{store}", *SMALL) as neve:
        send(neve, b"a" * 1000)
        offload(neve)
        (path,) = store.rglob("*.parquet")
        status, content = path.stat(), bytearray(path.read_bytes())
        content[len(content) // 4] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        assert post(neve, "/archive/verify")[0] == {"objects": 1, "rows": 1, "findings": []}
        (found,) = post(neve, "/archive/verify?deep=true")[0]["findings"]
        assert path.name in found
        assert "the journal records" in found
        neve_cli = [NEVE, "archive", "verify", "--deep"]
        for where in (["--admin", neve.admin], ["--store", f"dir:{store}"]):
            ended = subprocess.run([*neve_cli, *where], capture_output=True, text=True, timeout=60, check=False)
            assert (ended.returncode, path.name in ended.stdout) == (1, True), ended.stderr
