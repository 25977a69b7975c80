"""Tests of ColdReader over a source that counts reads and fails on demand."""

import mmap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from neve.archive.catalog.catalog import Catalog, Location
from neve.archive.format.journal import Commit, CommittedObject, Expire, RowGroup
from tests.kit.archive.cold_reads import read_cold
from tests.kit.clock.waiting import wait_until
from tiered.read import cold_reader, group_fetches
from tiered.read.cold_cache import GroupCache
from tiered.read.cold_reader import ColdReader, ColdUnavailable, Located
from tiered.read.fetch_queue import LINE_MAX
from tiered.read.read_ahead import ReadAhead
from tiered.read.read_request import ReadRequest
from tiered.worker.client import DecodedGroup
from tiered.worker.failed import WorkerFailed
from tiered.worker.frames import MayHold

ROWS = 10
SIZE = 1000


def group_of(index: int) -> DecodedGroup:
    rows = np.arange(ROWS, dtype=np.int64)
    numbers = np.concatenate([np.arange(ROWS + 1) * SIZE, rows + index * ROWS, rows % 2, rows + index * ROWS]).astype(
        np.int64
    )
    mapped = mmap.mmap(-1, numbers.nbytes + ROWS * SIZE)
    mapped.write(numbers.tobytes() + bytes([index % 256]) * ROWS * SIZE)
    return DecodedGroup(memoryview(mapped), ROWS, ROWS * SIZE)


class RecordingSource:
    def __init__(self) -> None:
        self.reads: list[int] = []
        self.kept: list[int] = []
        self.failures = 0
        self.gate = threading.Event()
        self.gate.set()

    def read_group(self, store_url: str, name: CommittedObject, index: int, *, keep: bool) -> DecodedGroup:
        self.reads.append(index)
        self.kept += [index] if keep else []
        assert self.gate.wait(20)
        if self.failures:
            self.failures -= 1
            raise WorkerFailed("StoreUnavailable", "down")
        return group_of(index)

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> MayHold:
        raise AssertionError("nobody asks for keys here")

    def may_span(self, store_url: str, name: CommittedObject, groups: list[int], physical_offset: int) -> MayHold:
        raise AssertionError("nobody asks for ids here")


def catalog_of(groups: int) -> Catalog:
    row_groups = [
        RowGroup(i * ROWS, ROWS, 0, 1, i * ROWS + 9, i * ROWS, ROWS * SIZE, [(0, i * ROWS, i * ROWS + 9)])
        for i in range(groups)
    ]
    name = CommittedObject(
        key="k", topic="t", day="", start=0, end=1, size=1, footer=1, etag="", checksum=("", ""), sha256="",
        rows=groups * ROWS, wire_bytes=1, min_time=0, max_time=1, queues={0: (0, groups * ROWS - 1, 0)},
        row_groups=row_groups,
    )  # fmt: skip
    catalog = Catalog()
    catalog.apply(0, Commit(round=1, names=[name]))
    return catalog


def test_concurrent_equal_reads_share_one_fetch() -> None:
    source = RecordingSource()
    source.gate.clear()
    reader = ColdReader(catalog_of(1), source, "")
    with ThreadPoolExecutor(8) as pool:
        reads = [pool.submit(read_cold, reader, ReadRequest("", "t", 0, 3, 4, 1 << 20)) for _ in range(8)]
        source.gate.set()
        results = [read.result(20) for read in reads]
    assert source.reads == [0]
    assert all((got.status, got.count, got.next_offset) == ("FOUND", 4, 7) for got in results)
    reader.close()


def test_fetch_of_a_forgotten_object_is_returned_but_not_cached() -> None:
    source, catalog = RecordingSource(), catalog_of(1)
    source.gate.clear()
    reader = ColdReader(catalog, source, "")
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(read_cold, reader, ReadRequest("", "t", 0, 3, 4, 1 << 20))
        wait_until(lambda: source.reads == [0])
        reader.forget(catalog.objects("t"))
        source.gate.set()
        assert read.result(20).count == 4
    assert reader.cached_bytes == 0
    assert read_cold(reader, ReadRequest("", "t", 0, 3, 4, 1 << 20)).count == 4
    assert source.reads == [0, 0] and reader.cached_bytes > 0, "what is fetched later is kept as ever"
    reader.close()


def test_cold_read_retries_one_failure_and_raises_after_two() -> None:
    source = RecordingSource()
    reader = ColdReader(catalog_of(1), source, "")
    source.failures = 2
    with pytest.raises(ColdUnavailable):
        read_cold(reader, ReadRequest("", "t", 0, 0, 4, 1 << 20))
    source.failures = 1
    assert read_cold(reader, ReadRequest("", "t", 0, 0, 4, 1 << 20)).status == "FOUND"
    reader.close()


def test_read_ahead_serves_sequential_but_not_random_reads() -> None:
    source = RecordingSource()
    reader = ColdReader(catalog_of(40), source, "")
    for offset in (350, 200, 5):
        read_cold(reader, ReadRequest("", "t", 0, offset, 1, 1 << 20))
    assert sorted(source.reads) == [0, 20, 35]
    read_cold(reader, ReadRequest("", "t", 0, 6, 10, 1 << 20))
    read_cold(reader, ReadRequest("", "t", 0, 10, 10, 1 << 20))
    wait_until(lambda: 2 in source.reads)
    read_cold(reader, ReadRequest("", "t", 0, 20, 10, 1 << 20))
    wait_until(lambda: {3, 4} <= set(source.reads))
    reader.close()


def test_next_location_is_looked_up_once_not_at_each_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    source, catalog, asked = RecordingSource(), catalog_of(40), list[int]()
    following = catalog.next_location

    def counted(location: Location) -> Location | None:
        asked.append(location.row_group)
        return following(location)

    monkeypatch.setattr(catalog, "next_location", counted)
    reader = ColdReader(catalog, source, "")
    for offset in range(400):
        result = read_cold(reader, ReadRequest("", "t", 0, offset, 1, 1 << 20))
        assert (result.next_offset, bytes(result.buffers[0])) == (offset + 1, bytes([offset // ROWS]) * SIZE)
    assert sorted(source.reads) == list(range(40))
    assert [group for group in asked if group < 39] == list(range(39))
    assert len(asked) < 39 + 40, "the archive's end is not asked for at each pull"
    reader.close()


def test_read_ahead_without_room_is_retried() -> None:
    catalog = catalog_of(8)
    one, rooms = catalog.find("t", 0, 0), [False] * 3 + [True] * 9
    assert isinstance(one, Location)
    known, asked = ReadAhead().note(("g", "t", 0, None), one, 0), list[int]()

    def fetch(location: Location) -> bool:
        asked.append(location.row_group)
        return rooms.pop(0)

    known.window = 2 * one.group.wire_bytes
    for _ in range(60):
        known.fetch_ahead(one, catalog.next_location, fetch)
    assert asked == [1, 1, 1, 1, 2], "three times in vain, then once for each"


def test_disk_cache_keeps_refetched_groups_not_replayed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_fetches, "_REMEMBERED", 4)
    source = RecordingSource()
    reader = ColdReader(catalog_of(9), source, "", 1)  # too small to keep anything in memory
    for index in (0, 1, 2, 3):
        read_cold(reader, ReadRequest("", "t", 0, index * ROWS, 1, 1 << 20))
    assert source.kept == []
    read_cold(reader, ReadRequest("another", "t", 0, 0, 1, 1 << 20))
    assert source.kept == [0]
    for index in (4, 5, 6, 0, 3):
        read_cold(reader, ReadRequest("", "t", 0, index * ROWS, 1, 1 << 20))
    assert source.kept == [0, 0], "of four row groups it is known that they were fetched"
    source.failures = 1
    read_cold(reader, ReadRequest("", "t", 0, 0, 1, 1 << 20))
    assert source.kept == [0, 0, 0, 0], "a second try is the same fetch"
    source.failures = 1
    read_cold(reader, ReadRequest("", "t", 0, 8 * ROWS, 1, 1 << 20))
    assert source.kept == [0, 0, 0, 0]
    reader.close()


def test_cache_is_bounded_and_resists_scans() -> None:
    one = group_of(0)
    cache = GroupCache(4 * one.nbytes)
    cache.put(("hot", 0), one, ahead=False)
    for offset in (9, 0):
        assert cache.get(("hot", 0), 0, offset) is one
    for index in range(50):
        cache.put(("scan", index), group_of(0), ahead=False)
        for queue in (0, 1, 2, 0, 1, 2):
            assert cache.get(("scan", index), queue, queue) is not None
        assert cache.nbytes <= cache.capacity
    assert ("hot", 0) in cache and ("scan", 0) not in cache


def test_prefetched_groups_outlive_read_ones_and_expire_unused() -> None:
    one = group_of(0)
    cache = GroupCache(8 * one.nbytes)
    for index in range(2):
        cache.put(("ahead", index), group_of(index), ahead=True)
    for index in range(13):
        cache.put(("done", index), group_of(0), ahead=False)
        assert cache.get(("done", index), 0, 0) is not None
        assert cache.nbytes <= cache.capacity
    assert ("ahead", 0) in cache and ("done", 7) in cache and ("done", 6) not in cache
    assert cache.get(("ahead", 0), 0, 0) is not None
    assert cache.ahead_bytes == one.nbytes
    for index in range(13, 20):
        cache.put(("done", index), group_of(0), ahead=False)
    assert ("ahead", 0) in cache, "reached, it is like any other"
    assert (("ahead", 1) in cache, cache.ahead_bytes) == (False, 0)
    assert cache.nbytes == cache.capacity and cache.mapped == 8


def test_read_ahead_stops_before_it_evicts_its_own_work() -> None:
    source = RecordingSource()
    reader = ColdReader(catalog_of(400), source, "", 64 * group_of(0).nbytes)
    for offset in range(0, 160, 5):
        read_cold(reader, ReadRequest("a", "t", 0, offset, 5, 1 << 20))
    wait_until(lambda: len(source.reads) >= 16 + 8)
    assert len(source.reads) == len(set(source.reads))
    assert max(source.reads) <= 16 + 64 // 4
    reader.close()


def test_groups_on_one_queue_have_independent_read_ahead() -> None:
    source = RecordingSource()
    reader = ColdReader(catalog_of(40), source, "")
    for step in range(2):
        read_cold(reader, ReadRequest("a", "t", 0, 5 + step, 1, 1 << 20))
        read_cold(reader, ReadRequest("b", "t", 0, 300 - 50 * step, 1, 1 << 20))
    wait_until(lambda: 1 in source.reads)
    assert sorted(source.reads) == [0, 1, 25, 30]
    reader.close()


def test_broadcast_clients_have_independent_read_ahead() -> None:
    source = RecordingSource()
    reader = ColdReader(catalog_of(40), source, "")
    for step in range(2):
        read_cold(reader, ReadRequest("g", "t", 0, 5 + step, 1, 1 << 20, client=("10.0.0.1", 1)))
        read_cold(reader, ReadRequest("g", "t", 0, 300 + step, 1, 1 << 20, client=("10.0.0.2", 1)))
    wait_until(lambda: {1, 31} <= set(source.reads))
    assert sorted(source.reads) == [0, 1, 30, 31]
    reader.close()


def test_replay_of_one_group_does_not_delay_another_group() -> None:
    source = RecordingSource()
    source.gate.clear()
    reader = ColdReader(catalog_of(400), source, "")
    flood = [reader.locate(ReadRequest("replay", "t", 0, index * ROWS, 1, 1)) for index in range(300)]
    single = reader.locate(ReadRequest("other", "t", 0, 350 * ROWS, 1, 1))
    assert isinstance(single, Located)
    source.gate.set()
    single.decoded.result(20)
    assert source.reads.index(350) <= 8
    for located in flood:
        assert isinstance(located, Located)
        located.decoded.result(20)
    reader.close()


def test_cancelled_fetch_leaves_the_bounded_queue() -> None:
    source = RecordingSource()
    source.gate.clear()
    reader = ColdReader(catalog_of(LINE_MAX + 50), source, "")
    located = []
    with pytest.raises(ColdUnavailable, match="are queued already"):
        for index in range(LINE_MAX + 50):
            located.append(reader.locate(ReadRequest("a", "t", 0, index * ROWS, 1, 1)))
    assert LINE_MAX <= reader.waiting < LINE_MAX + 10
    twice = reader.locate(ReadRequest("b", "t", 0, 500 * ROWS, 1, 1))
    for one in located:
        assert isinstance(one, Located)
        one.decoded.cancel()
    assert reader.waiting <= 1
    assert isinstance(twice, Located)
    source.gate.set()
    assert int(twice.decoded.result(20).offsets[0]) == 500 * ROWS
    assert set(source.reads) <= {*range(10), 500}
    reader.close()


def test_read_from_a_hanging_store_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_reader, "_QUESTION_SECONDS", 0.05)
    source = RecordingSource()
    source.gate.clear()
    reader = ColdReader(catalog_of(1), source, "")
    questions: list[Callable[[], object]] = [
        lambda: reader.store_time("t", 0, 3),
        lambda: reader.offset_by_time("t", 0, 3, upper=False),
    ]
    for question in questions:
        with pytest.raises(ColdUnavailable, match="no answer"):
            question()
    source.gate.set()
    assert reader.store_time("t", 0, 3) == 3
    reader.close()


def test_object_that_expires_during_its_read_is_no_failure() -> None:
    class Vanishing(RecordingSource):
        def read_group(self, store_url: str, name: CommittedObject, index: int, *, keep: bool) -> DecodedGroup:
            if catalog.next_seq == 1:
                catalog.apply(1, Expire(keys=["k"], delete_after_ms=0, minimums={"t": {0: 10}}))
            raise WorkerFailed("NotFound", name.key)

    catalog = catalog_of(1)
    reader = ColdReader(catalog, Vanishing(), "")
    got = read_cold(reader, ReadRequest("", "t", 0, 3, 4, 1 << 20))
    assert (got.status, got.next_offset) == ("OFFSET_TOO_SMALL", 10)
    reader.close()


def test_offline_catalog_never_reports_unknown_offsets_as_lost() -> None:
    current = [False]
    reader = ColdReader(catalog_of(1), RecordingSource(), "", is_current=lambda: current[0])
    for queue in (0, 1):
        with pytest.raises(ColdUnavailable, match="unknown at present"):
            read_cold(reader, ReadRequest("", "t", queue, 50, 4, 1 << 20))
    assert read_cold(reader, ReadRequest("", "t", 0, 3, 4, 1 << 20)).status == "FOUND"
    current[0] = True
    assert read_cold(reader, ReadRequest("", "t", 0, 50, 4, 1 << 20)).status == "OFFSET_OVERFLOW_ONE"
    reader.close()


def test_tags_and_time_find_rows_across_row_groups() -> None:
    reader = ColdReader(catalog_of(3), RecordingSource(), "")
    got = read_cold(reader, ReadRequest("", "t", 0, 0, 3, 1 << 20, codes=frozenset({1})))
    assert (got.count, got.next_offset, len(got.buffers)) == (3, 6, 3)
    assert (
        read_cold(reader, ReadRequest("", "t", 0, 0, 3, 1 << 20, codes=frozenset({7}))).status == "NO_MATCHED_MESSAGE"
    )
    assert reader.offset_by_time("t", 0, 15) == 15
    assert reader.offset_by_time("t", 0, 15, upper=True) == 15
    assert reader.offset_by_time("t", 0, 99) is None
    assert reader.offset_by_time("t", 0, 99, upper=True) == 29
    reader.close()


def test_cache_bounds_its_number_of_mappings() -> None:
    cache = GroupCache(1 << 30, mapped_max=3)
    for index in range(10):
        cache.put(("k", index), group_of(index), ahead=False)
        assert cache.mapped <= 3
    assert [index for index in range(10) if ("k", index) in cache] == [7, 8, 9]
    assert cache.nbytes == 3 * group_of(0).nbytes
