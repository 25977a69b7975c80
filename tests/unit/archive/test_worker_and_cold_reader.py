"""Tests of the path through the real worker process: log file, object in a directory store, cold read."""

import contextlib
import errno
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import msgspec
import pytest

import neve.archive
from infra.objects.open import open_store
from infra.objects.store import NotFound, StoreUnavailable
from infra.process.processor import ProcessorDemand
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import AnyEntry, Commit, CommittedObject, Gap, Intent, encode_entry
from neve.archive.format.keys import journal_key
from neve.record.properties import tags_code
from tests.kit.archive.cold_reads import read_cold
from tests.kit.archive.one_upload import upload_one
from tests.kit.archive.records import T0, TOPIC
from tests.kit.archive.rounds import Round, commit, make_round
from tests.kit.clock.waiting import wait_until
from tiered.read.cold_query import FoundRecords
from tiered.read.cold_reader import ColdReader, ColdUnavailable
from tiered.read.read_request import ReadRequest
from tiered.worker import frames
from tiered.worker.client import WorkerClient
from tiered.worker.failed import WorkerFailed
from tiered.worker.group_memory import MemoryPiece
from tiered.worker.patience import Patience
from tiered.write.uploader import ContentConflict, EncodeFailed

T = TypeVar("T")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"dir:{tmp_path / 'store'}"


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerClient]:
    client = WorkerClient(work_dir=tmp_path)
    yield client
    client.close()


def upload(worker: WorkerClient, url: str, made: Round) -> CommittedObject:
    return upload_one(worker, url, made.name, made.entries, made.files)


def read_all(reader: ColdReader, queue: int, offset: int, codes: frozenset[int] | None = None) -> tuple[bytes, int]:
    read = ReadRequest("", TOPIC, queue, offset, 32, 1 << 16, codes)
    collected = b""
    while (got := read_cold(reader, read)).status in {"FOUND", "NO_MATCHED_MESSAGE"}:
        assert got.next_offset > read.offset
        collected += b"".join(got.buffers)
        read.offset = got.next_offset
    return collected, read.offset


def test_cold_bytes_equal_sealed_bytes_over_objects_gaps_and_tags(
    tmp_path: Path, url: str, worker: WorkerClient
) -> None:
    first, second = make_round(tmp_path, 0, 0, {0: 90, 3: 50}), make_round(tmp_path, 1 << 20, 90, {0: 40})
    catalog = Catalog()
    commit(catalog, first, upload(worker, url, first))
    commit(catalog, second, upload(worker, url, second))
    catalog.apply(catalog.next_seq, Gap(topic=TOPIC, queue=3, first=50, last=59, reason="test"))
    reader = ColdReader(catalog, worker, url)
    expected = {**first.records, **second.records}
    got, end = read_all(reader, 0, 5)
    assert got == b"".join(expected[0, offset] for offset in range(5, 130)) and end == 130
    assert read_cold(reader, ReadRequest("", TOPIC, 3, 55, 32, 1 << 16)).status == "OFFSET_FOUND_NULL"
    assert read_cold(reader, ReadRequest("", TOPIC, 3, 55, 32, 1 << 16)).next_offset == 60
    tagged, _ = read_all(reader, 0, 0, codes=frozenset({tags_code("b")}))
    assert tagged == b"".join(expected[0, offset] for offset in range(0, 130, 3))
    assert read_cold(reader, ReadRequest("", TOPIC, 0, 0, 32, 1)).count == 1
    assert read_cold(reader, ReadRequest("", TOPIC, 0, 130, 32, 1)).status == "OFFSET_OVERFLOW_ONE"
    assert reader.offset_by_time(TOPIC, 0, T0 + 100, upper=False) == 100
    assert reader.offset_by_time(TOPIC, 0, T0 + 100, upper=True) == 100
    assert reader.offset_by_time(TOPIC, 0, 0, upper=False) == 0
    assert reader.offset_by_time(TOPIC, 0, T0 + 500, upper=False) is None
    reader.close()


def test_query_by_place_fetches_one_row_group(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 1 << 20, 0, dict.fromkeys(range(4), 1000))
    catalog, name = Catalog(), upload(worker, url, made)
    commit(catalog, made, name)
    assert len(name.row_groups) == 4
    reader = ColdReader(catalog, worker, url)
    places = made.entries[2].physical
    for offset in (0, 500, 999):
        assert reader.record_at(int(places[offset])) == FoundRecords([made.records[2, offset]])
    assert reader.record_at(int(places[500]) + 1) == FoundRecords([])
    assert (reader.counts.fetches, reader.counts.filters) == (4, 4)
    reader.close()


def test_repeated_upload_is_adopted_and_other_content_conflicts(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 0, 0, {0: 20})
    once = upload(worker, url, made)
    assert worker.written == (20, 3, 0), "every seventh has a time beyond its column"
    assert upload(worker, url, made) == once
    other = make_round(tmp_path, 0, 0, {0: 20}, body=199)
    with pytest.raises(ContentConflict):
        upload(worker, url, Round(made.name, other.entries, other.files, {}))


def test_worker_imports_the_packages_of_its_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    def refuse(*_: object, env: dict[str, str], **__: object) -> NoReturn:
        given.update(env)
        raise OSError("not started")

    monkeypatch.setattr("tiered.worker.client.subprocess.Popen", refuse)
    with pytest.raises(OSError, match="not started"):
        WorkerClient(work_dir=tmp_path)._start()
    first, *_ = given["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "tiered" / "worker" / "__main__.py").is_file()


def test_dead_worker_is_replaced_and_idle_worker_ends(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 0, 0, {0: 20})
    name = upload(worker, url, made)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    assert bytes(worker.read_group(url, name, 0).wire) == b"".join(made.records.values())
    assert worker.starts == 2
    brief = WorkerClient(work_dir=tmp_path, idle_seconds=0.05)
    brief.read_group(url, name, 0)
    wait_until(lambda: brief.pid is None)
    brief.read_group(url, name, 0)
    assert brief.starts >= 2
    brief.close()


class BusyWorker(WorkerClient):
    """A client whose first worker process copies objects into its directory and never completes."""

    def _command(self, descriptor: int) -> list[str]:
        copies = """if True:
            import sys, tempfile, time
            from pathlib import Path
            from tiered.worker.work_dir import own_prefix

            for what in ("compact", "offload"):
                directory = Path(tempfile.mkdtemp(prefix=own_prefix(what), dir=sys.argv[1]))
                (directory / "0.parquet").write_bytes(b"somebody's message")
            time.sleep(600)"""
        return [sys.executable, "-c", copies, self._work_dir] if not self.starts else super()._command(descriptor)


def test_files_of_a_dead_worker_are_gone_when_its_failure_is_reported(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated erasure reports where copies remain, so none may remain in an unchecked place."""
    of_another = tmp_path / f"neve-compact-{os.getpid()}-x"
    of_another.mkdir()
    busy, left = BusyWorker(work_dir=tmp_path), list[list[Path]]()
    wait_for = busy._wait_for

    def noted(*asked: Any) -> Any:
        try:
            return wait_for(*asked)
        except ConnectionError:
            left.append(sorted(tmp_path.glob("neve-*-*")))
            raise

    monkeypatch.setattr(busy, "_wait_for", noted)
    with ThreadPoolExecutor(1) as pool:
        removed = pool.submit(busy.remove_stale_uploads, url, "b")
        wait_until(lambda: len(list(tmp_path.glob("neve-*-*/0.parquet"))) == 2)
        assert busy.pid is not None
        os.kill(busy.pid, signal.SIGKILL)
        assert removed.result(60) == 0, "by the next process"
    assert left == [[of_another]]
    busy.close()


class HangingWorker(WorkerClient):
    """A client whose first worker process never answers, as with a store on an unavailable file server."""

    def _command(self, descriptor: int) -> list[str]:
        hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
        return hangs if not self.starts else super()._command(descriptor)


def test_hanging_worker_is_killed_and_replaced(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 0, 0, {0: 20})
    hanging = HangingWorker(work_dir=tmp_path, answer_seconds=0.2)
    with pytest.raises(StoreUnavailable, match="has not answered"):
        upload(hanging, url, made)
    hanging._patience.seconds = 60.0
    assert upload(hanging, url, made).rows == 20
    assert hanging.starts == 2
    hanging.close()


def test_hanging_read_times_out(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 0, 0, {0: 20})
    name = upload(worker, url, made)
    hanging = HangingWorker(work_dir=tmp_path, answer_seconds=0.2)
    with pytest.raises(WorkerFailed, match="has not answered"):
        hanging.read_group(url, name, 0)
    assert hanging.pid is None
    hanging.close()


class StarvedWorker(WorkerClient):
    """A client whose first worker process appears starved of processor time to periodic checks."""

    looks = 0

    def _command(self, descriptor: int) -> list[str]:
        command = super()._command(descriptor)
        return command if self.starts else [sys.executable, "-c", "while True: pass"]

    def _look(self) -> ProcessorDemand | None:
        seen = super()._look()
        if seen is None or self.starts > 1:
            return seen
        self.looks += 1
        if self.looks == 20:  # the backlog needs a faster worker
            self._patience.seconds = 60.0
            self.set_priority("normal")
        return seen._replace(cpu_s=0.0, wants_more=True)


def test_starved_worker_is_replaced_with_the_requested_priority(tmp_path: Path, url: str) -> None:
    made = make_round(tmp_path, 0, 0, {0: 20})
    starved = StarvedWorker(work_dir=tmp_path, priority="low")
    starved._patience = Patience(0.3, 2, starved._look, check_seconds=0.05)
    assert upload(starved, url, made).rows == 20
    assert (starved.starts, starved.looks) == (2, 20), "three times as long as it may be silent"
    assert starved.starved >= 19 * 0.05 - 1e-9
    starved.close()


def test_worker_runs_beside_thousands_of_open_files(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    """Each queue is an open file, and select() accepts no descriptor above 1023."""
    made = make_round(tmp_path, 0, 0, {0: 30})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    with contextlib.ExitStack() as files:
        while files.enter_context(Path(os.devnull).open("rb")).fileno() < 1100:
            pass
        name = upload(worker, url, made)
        assert len(worker.read_group(url, name, 0).wire) == name.wire_bytes
    assert worker.starts == 1


def _at_the_limit(action: Callable[[], T]) -> T:
    """Run an action while this process cannot open descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as files:
        highest = files.enter_context(Path(os.devnull).open("rb")).fileno()
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    files.enter_context(Path(os.devnull).open("rb"))
            return action()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _failure(action: Callable[[], object]) -> str:
    try:
        action()
    except (WorkerFailed, EncodeFailed) as error:
        return type(error).__name__
    return "none"


def test_waiting_request_fails_when_descriptors_run_out(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 0, 0, {0: 60})
    name = upload(worker, url, made)
    assert _at_the_limit(lambda: _failure(lambda: worker.read_group(url, name, 0))) == "WorkerFailed"
    assert _at_the_limit(lambda: _failure(lambda: upload(worker, url, made))) == "EncodeFailed"
    assert bytes(worker.read_group(url, name, 0).wire) == b"".join(made.records.values())
    assert worker.starts == 1, "the worker is not to blame"


def test_row_group_falls_back_to_plain_memory_without_descriptors(
    tmp_path: Path, url: str, worker: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = make_round(tmp_path, 0, 0, {0: 60}), make_round(tmp_path, 1 << 24, 60, {0: 60}, body=40_000)
    first, second = upload(worker, url, small), upload(worker, url, large)
    assert not worker.read_group(url, first, 0).is_mapped
    mapped = worker.read_group(url, second, 0)
    assert mapped.is_mapped

    class Refused(mmap.mmap):
        def __new__(cls, *_: object, **__: object) -> Self:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(mmap, "mmap", Refused)
    copied = worker.read_group(url, second, 0)
    assert not copied.is_mapped
    assert bytes(copied.wire) == bytes(mapped.wire)


def test_failed_row_group_copy_closes_its_descriptor(
    tmp_path: Path, url: str, worker: WorkerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_round(tmp_path, 0, 0, {0: 60})
    name = upload(worker, url, made)
    taken: list[int] = []

    def fail(piece: MemoryPiece, size: int) -> NoReturn:
        taken.append(piece.descriptor)
        raise MemoryError

    monkeypatch.setattr(MemoryPiece, "content", fail)
    with pytest.raises(MemoryError):
        worker.read_group(url, name, 0)
    (descriptor,) = taken
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_upload_waits_for_its_rate_until_the_limit_is_removed(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    first, second = make_round(tmp_path, 0, 0, {0: 20}), make_round(tmp_path, 1 << 20, 20, {0: 20})
    worker.set_upload_rate(1)  # one byte per second: the upload would take hours
    name = upload(worker, url, first)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(upload, worker, url, second)
        try:
            wait_until(lambda: any((tmp_path / "store" / ".upload").iterdir()))
            assert len(worker.read_group(url, name, 0).wire) == name.wire_bytes, "a read does not wait for an upload"
            assert not waiting.done()
        finally:
            worker.set_upload_rate(0)
        assert waiting.result().rows == 20
    assert worker.upload_waited > 0


def test_unexpected_worker_error_is_reported_at_once(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    name = upload(worker, url, make_round(tmp_path, 0, 0, {0: 20}))
    beyond = msgspec.structs.replace(name.row_groups[0], offset=2**63)  # raises an OverflowError, which no code expects
    with pytest.raises(WorkerFailed, match="WorkerDied"):
        worker.read_group(url, msgspec.structs.replace(name, row_groups=[beyond]), 0)
    assert len(worker.read_group(url, name, 0).wire) == name.wire_bytes


def test_damaged_and_missing_objects_are_never_skipped(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 0, 0, {0: 60})
    name = upload(worker, url, made)
    path = tmp_path / "store" / name.key
    raw = bytearray(path.read_bytes())
    for position in range(name.row_groups[0].offset, name.row_groups[0].offset + name.row_groups[0].length, 97):
        damaged = bytearray(raw)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        try:
            assert bytes(worker.read_group(url, name, 0).wire) == b"".join(made.records.values())
        except WorkerFailed as error:
            assert error.kind == "DamagedObject"
    path.unlink()
    catalog = Catalog()
    commit(catalog, made, name)
    reader = ColdReader(catalog, worker, url)
    with pytest.raises(ColdUnavailable, match="NotFound"):
        read_cold(reader, ReadRequest("", TOPIC, 0, 0, 32, 1 << 20))
    reader.close()


def test_disk_cache_survives_restarts_and_never_returns_damage(tmp_path: Path, url: str) -> None:
    cache_dir = tmp_path / "cache"

    def reading() -> WorkerClient:
        return WorkerClient(work_dir=tmp_path, cache_dir=cache_dir, cache_bytes=1 << 20)

    first = reading()
    made = make_round(tmp_path, 0, 0, {0: 60})
    name = upload(first, url, made)
    expected = b"".join(made.records.values())
    for _ in range(2):  # entries not to be kept are not written
        assert first.read_group(url, name, 0, keep=False).fetched >= name.row_groups[0].length
    assert len(list(cache_dir.iterdir())) == 1, "the footer"
    group = first.read_group(url, name, 0)
    assert (bytes(group.wire), group.fetched, group.cached) == (expected, name.row_groups[0].length, 0)
    first.close()
    object_path = tmp_path / "store" / name.key
    kept = object_path.read_bytes()
    object_path.unlink()
    second = reading()
    group = second.read_group(url, name, 0)
    assert (bytes(group.wire), group.fetched) == (expected, 0)
    assert group.cached == name.row_groups[0].length + name.footer
    for file in cache_dir.iterdir():
        raw = bytearray(file.read_bytes())
        raw[-9] ^= 4
        file.write_bytes(raw)
    with pytest.raises(WorkerFailed, match="NotFound"):
        second.read_group(url, name, 0)
    object_path.write_bytes(kept)
    group = second.read_group(url, name, 0)
    assert (bytes(group.wire), group.fetched) == (expected, name.row_groups[0].length)
    second.close()


@pytest.mark.parametrize("by_another", [False, True])
def test_forgotten_object_is_removed_from_all_caches(tmp_path: Path, url: str, by_another: bool) -> None:
    """With `by_another`, the process that forgets the object has loaded the cache from disk."""
    cache_dir = tmp_path / "cache"
    worker = WorkerClient(work_dir=tmp_path, cache_dir=cache_dir, cache_bytes=1 << 20)
    made, other = make_round(tmp_path, 0, 0, {0: 60}), make_round(tmp_path, 1 << 20, 60, {0: 60})
    name, kept = upload(worker, url, made), upload(worker, url, other)
    catalog = Catalog()
    commit(catalog, made, name)
    commit(catalog, other, kept)
    reader = ColdReader(catalog, worker, url)
    assert read_all(reader, 0, 0)[1] == 120
    for one in (name, kept):
        worker.read_group(url, one, 0)
        worker.may_hold(url, one, [0], b"a key")
    files, held = len(list(cache_dir.iterdir())), reader.cached_bytes
    reader.forget([name])
    another = WorkerClient(work_dir=tmp_path, cache_dir=cache_dir, cache_bytes=1 << 20)
    (another if by_another else worker).forget(url, [name])
    another.close()
    assert len(list(cache_dir.iterdir())) == files - 3, "a row group, its filters and the footer"
    assert 0 < reader.cached_bytes < held
    (tmp_path / "store" / name.key).unlink()
    with pytest.raises(ColdUnavailable, match="NotFound"):
        read_cold(reader, ReadRequest("", TOPIC, 0, 0, 32, 1 << 16))
    assert read_cold(reader, ReadRequest("", TOPIC, 0, 60, 32, 1 << 16)).status == "FOUND"
    reader.close()
    worker.close()


def test_batch_of_objects_is_forgotten_by_one_request(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_dir = tmp_path / "cache"
    worker = WorkerClient(work_dir=tmp_path, cache_dir=cache_dir, cache_bytes=1 << 20)
    names = [upload(worker, url, make_round(tmp_path, at << 20, 60 * at, {0: 60})) for at in range(3)]
    for name in names:
        worker.read_group(url, name, 0)
    before = worker._next_id
    worker.forget(url, names)
    assert (worker._next_id - before, list(cache_dir.iterdir())) == (1, [])
    worker.close()

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    without = WorkerClient(work_dir=tmp_path, cache_dir=cache_dir, cache_bytes=1 << 20)
    monkeypatch.setattr(without, "_start", refuse)
    with pytest.raises(WorkerFailed, match="no worker"):
        without.forget(url, names)


@pytest.mark.parametrize("damage", ["deleted", "truncated", "empty", "flipped"])
def test_damaged_object_stops_readers_until_it_is_repaired(
    tmp_path: Path, url: str, worker: WorkerClient, damage: str
) -> None:
    made = make_round(tmp_path, 0, 0, {0: 60})
    name = upload(worker, url, made)
    path = tmp_path / "store" / name.key
    whole = path.read_bytes()
    middle = name.row_groups[0].offset + name.row_groups[0].length // 2
    flipped = bytearray(whole)
    flipped[middle] ^= 1
    spoilt = {"truncated": whole[:middle], "empty": b"", "flipped": bytes(flipped)}
    if damage == "deleted":
        path.unlink()
    else:
        path.write_bytes(spoilt[damage])
    catalog = Catalog()
    commit(catalog, made, name)
    reader = ColdReader(catalog, worker, url)
    for _ in range(2):
        with pytest.raises(ColdUnavailable):
            read_cold(reader, ReadRequest("", TOPIC, 0, 7, 32, 1 << 20))
    assert reader.counts.failures >= 4
    path.write_bytes(whole)
    assert read_all(reader, 0, 7)[0] == b"".join(made.records[0, offset] for offset in range(7, 60))
    reader.close()


def test_program_reads_the_archive_without_a_broker(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 0, 0, {0: 30, 1: 4})
    name = upload(worker, url, made)
    store = open_store(url)
    entries: list[AnyEntry] = [Intent(round=1, names=[made.name]), Commit(round=1, names=[name])]
    for seq, entry in enumerate(entries):
        store.put(journal_key("", "b", seq), encode_entry(entry), if_absent=True)
    topic = neve.archive.open(store).topic(TOPIC)
    assert [bytes(record) for record in topic.read_raw(0, 7)] == [made.records[0, offset] for offset in range(7, 30)]
    assert [record.queue_offset for record in topic.read(1)] == [0, 1, 2, 3]
    with pytest.raises(NotFound):
        store.get("nothing")


def test_row_group_read_costs_one_get_after_the_footer(tmp_path: Path, url: str, worker: WorkerClient) -> None:
    made = make_round(tmp_path, 0, 0, {0: 30, 1: 20}, body=300_000)
    name = upload(worker, url, made)
    assert len(name.row_groups) > 3
    store = open_store(url)
    entries: list[AnyEntry] = [Intent(round=1, names=[made.name]), Commit(round=1, names=[name])]
    for seq, entry in enumerate(entries):
        store.put(journal_key("", "b", seq), encode_entry(entry), if_absent=True)
    asked: list[tuple[int, int]] = []

    class Counting:
        get = staticmethod(store.get)
        head = staticmethod(store.head)
        list_prefixes = staticmethod(store.list_prefixes)
        list = staticmethod(store.list)

        def get_range(self, key: str, start: int, length: int) -> bytes:
            asked.append((start, length))
            return store.get_range(key, start, length)

    topic = neve.archive.open(Counting()).topic(TOPIC)
    asked.clear()
    assert sum(1 for _ in topic.read_raw(0)) == 30
    groups = [group for group in name.row_groups if any(queue == 0 for queue, _, _ in group.runs)]
    assert asked == [(name.size - name.footer, name.footer), *((group.offset, group.length) for group in groups)]


def test_unexpected_descriptor_of_a_reply_is_closed() -> None:
    """No descriptor is expected there; a worker of another neve version might send one."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        with ours, theirs:
            frames.send(theirs, frames.Forgotten(7), writing)
            os.close(writing)
            assert frames.decode_reply.decode(frames.receive_reply(ours)) == frames.Forgotten(7)
            assert os.read(reading, 1) == b"", "nobody has the pipe's other end"
    finally:
        os.close(reading)
