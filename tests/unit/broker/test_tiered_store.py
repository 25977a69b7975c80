"""Both tiers as the request processors use them, over a source of row groups that hangs and fails on demand."""

import asyncio
import mmap
import threading
from typing import Any

import numpy as np
import pytest

from broker.config import BrokerConfig
from broker.reading.sql92 import compile_sql
from broker.reading.tiered_store import PendingRead, TieredStore
from broker.requests.slave_pull import moves_on
from broker.store.reading import GetResult
from infra.loop.in_steps import Steps
from neve.archive.catalog.catalog import Catalog
from neve.archive.format.journal import Commit, CommittedObject, Gap, RowGroup
from neve.errors import BrokerError
from neve.remoting.codes import GetMessageStatus, ResponseCode
from tests.kit.clock.waiting import until
from tiered.read.cold_reader import ColdReader
from tiered.read.read_request import ReadRequest
from tiered.worker.client import DecodedGroup
from tiered.worker.failed import WorkerFailed
from tiered.worker.frames import MayHold

ROWS, SIZE, GROUPS = 10, 100, 8
ARCHIVED = ROWS * GROUPS
HOT = range(200, 300)


class Hot:
    """A local log that begins far above the archive's end, with its queues and its reader."""

    disk = None
    max_physical_offset = 0

    def __init__(self) -> None:
        self.queues, self.reader = self, self
        self.begin, self.ended = HOT.start, 0
        self.answer = GetResult(GetMessageStatus.FOUND, HOT.stop, HOT.start, HOT.stop)

    def get(self, *_: object, **__: object) -> GetResult:
        return self.answer

    def min_offset(self, topic: str, queue_id: int) -> int:
        return self.begin

    def ended_at(self, topic: str, queue_id: int) -> int:
        return self.ended

    def store_time(self, topic: str, queue_id: int, offset: int) -> int:
        return GROUPS

    def shown_time(self, topic: str, queue_id: int, offset: int) -> int:
        return GROUPS

    def max_offset(self, topic: str, queue_id: int) -> int:
        return HOT.stop


class GatedSource:
    def __init__(self) -> None:
        self.fails = False
        self.reads = 0
        self.gate = threading.Event()
        self.gate.set()

    def read_group(self, store_url: str, name: CommittedObject, index: int, *, keep: bool) -> DecodedGroup:
        self.reads += 1
        assert self.gate.wait(20)
        if self.fails:
            raise WorkerFailed("StoreUnavailable", "down")
        rows = np.arange(ROWS, dtype=np.int64)
        numbers = np.concatenate([np.arange(ROWS + 1) * SIZE, rows + index * ROWS, rows, rows]).astype(np.int64)
        mapped = mmap.mmap(-1, numbers.nbytes + ROWS * SIZE)
        mapped.write(numbers.tobytes() + bytes([index]) * ROWS * SIZE)
        return DecodedGroup(memoryview(mapped), ROWS, ROWS * SIZE)

    def may_hold(self, store_url: str, name: CommittedObject, groups: list[int], word: bytes) -> MayHold:
        raise AssertionError("nobody asks for keys here")

    def may_span(self, store_url: str, name: CommittedObject, groups: list[int], physical_offset: int) -> MayHold:
        raise AssertionError("nobody asks for ids here")


def catalog() -> Catalog:
    groups = [
        RowGroup(i * ROWS, ROWS, 0, 1, i, i, ROWS * SIZE, [(0, i * ROWS, i * ROWS + ROWS - 1)]) for i in range(GROUPS)
    ]
    name = CommittedObject(
        key="k", topic="t", day="", start=0, end=1, size=1, footer=1, etag="", checksum=("", ""), sha256="",
        rows=ARCHIVED, wire_bytes=1, min_time=0, max_time=1, queues={0: (0, ARCHIVED - 1, 0)}, row_groups=groups,
    )  # fmt: skip
    made = Catalog()
    made.apply(0, Commit(round=1, names=[name]))
    made.apply(1, Gap(topic="t", queue=0, first=ARCHIVED, last=HOT.start - 1, reason="test"))
    return made


@pytest.fixture
def source() -> GatedSource:
    return GatedSource()


def tiered_over(
    source: GatedSource, timeout_ms: int = 20_000, hot: Any = None, cold: ColdReader | None = None
) -> TieredStore:
    hot = hot or Hot()
    tiered = TieredStore(hot, BrokerConfig(cold_read_timeout=timeout_ms))
    tiered.attach(cold or ColdReader(catalog(), source, ""))
    return tiered


async def read(tiered: TieredStore, offset: int, group: str = "g", client: str | None = None) -> GetResult:
    answer = tiered.get_message(ReadRequest(group, "t", 0, offset, 4, 1 << 20, client=client))
    return await answer if isinstance(answer, PendingRead) else answer


async def test_reader_skips_a_gap_to_its_end_and_nothing_else(source: GatedSource) -> None:
    hot = Hot()
    tiered = tiered_over(source, hot=hot)
    got = await read(tiered, 3)
    assert (got.status, got.next_offset, got.count, got.min_offset, got.max_offset) == ("FOUND", 7, 4, 0, HOT.stop)
    for offset in (ARCHIVED, ARCHIVED + 50):
        moved = await read(tiered, offset)
        assert (moved.status, moved.next_offset, moved.count) == (GetMessageStatus.NO_MATCHED_MESSAGE, HOT.start, 0)
        assert moves_on(moved.status), "a slave's reader, too"
    hot.begin = HOT.stop
    asked = tiered.get_message(ReadRequest("g", "t", 0, HOT.start, 4, 1 << 20))
    hot.begin = HOT.start
    assert isinstance(asked, PendingRead)
    end = await asked
    assert (end.status, end.next_offset) == (GetMessageStatus.OFFSET_OVERFLOW_ONE, HOT.start)
    tiered.close()


async def test_messages_of_a_deleted_topic_stay_hidden_from_archive_reads(
    source: GatedSource,
) -> None:
    hot = Hot()
    tiered = tiered_over(source, hot=hot)
    hot.ended = 45  # above are messages of the topic that was created again
    assert tiered.min_offset("t", 0) == 45
    got = await read(tiered, 44)
    assert (got.status, got.next_offset, got.count) == (GetMessageStatus.OFFSET_TOO_SMALL, 45, 0)
    assert source.reads == 0
    assert (await read(tiered, 45)).count == 4
    assert await tiered.offset_by_time("t", 0, 0, upper=False) == 45
    hot.ended = HOT.start
    assert tiered.min_offset("t", 0) == HOT.start
    assert (await read(tiered, 79)).next_offset == HOT.start
    tiered.close()


async def test_search_by_time_finds_archived_messages_younger_than_local_ones(source: GatedSource) -> None:
    """After a step of the clock, the oldest local message may be older than archived ones."""

    class SetBack(Hot):
        def store_time(self, topic: str, queue_id: int, offset: int) -> int:
            return 1

        def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool) -> Steps[int]:
            yield
            return HOT.start

        def shown_near(self, topic: str, queue_id: int, offset: int, *, below: bool) -> int:
            return offset

    tiered = tiered_over(source, hot=SetBack())
    rows_of_time = {time: time * ROWS for time in range(GROUPS)}
    for time, first in rows_of_time.items():
        assert (await tiered.offset_by_time("t", 0, time, upper=False)) // ROWS * ROWS == first
    assert await tiered.offset_by_time("t", 0, GROUPS, upper=False) == HOT.start
    tiered.close()


async def test_search_by_time_begins_again_if_messages_were_evicted_meanwhile(source: GatedSource) -> None:
    """By then only the archive has them."""

    class Evicted(Hot):
        def store_time(self, topic: str, queue_id: int, offset: int) -> int:
            return 1

        def offset_by_time(self, topic: str, queue_id: int, timestamp: int, upper: bool) -> Steps[int]:
            searched_from.append(self.begin)
            self.begin = HOT.start + 10
            yield
            return self.begin

        def shown_near(self, topic: str, queue_id: int, offset: int, *, below: bool) -> int:
            return offset

    searched_from: list[int] = []
    tiered = tiered_over(source, hot=Evicted())
    assert await tiered.offset_by_time("t", 0, GROUPS, upper=False) == HOT.start + 10
    assert searched_from == [HOT.start, HOT.start + 10]
    tiered.close()


async def test_read_ahead_is_per_client_of_a_group(source: GatedSource) -> None:
    tiered = tiered_over(source)
    for step in range(2):
        for client, start in (("a", 0), ("b", 50)):
            await read(tiered, start + 4 * step, client=client)
    await until(lambda: source.reads == 4)
    tiered.close()


async def test_pulls_from_a_row_group_in_memory_do_not_wait(source: GatedSource) -> None:
    """They need neither a task nor a turn of the event loop, and return the same messages."""

    tiered = tiered_over(source)
    waited = [await read(tiered, offset, "a") for offset in range(0, ARCHIVED, 4)]
    assert source.reads == GROUPS
    at_once = [tiered.get_message(ReadRequest("b", "t", 0, offset, 4, 1 << 20)) for offset in range(0, ARCHIVED, 4)]
    assert at_once == waited
    assert all(isinstance(one, GetResult) and one.is_archived and one.min_offset == 0 for one in at_once)
    assert (source.reads, tiered.cold_reads, sum(tiered.cold_latency.counts)) == (GROUPS, 40, 40)
    tiered.close()


async def test_row_groups_in_memory_are_not_used_for_new_topics_and_filters(source: GatedSource) -> None:
    hot = Hot()
    tiered = tiered_over(source, hot=hot)
    assert (await read(tiered, 3)).count == 4
    assert isinstance(tiered.get_message(ReadRequest("g", "t", 0, 3, 4, 1 << 20)), GetResult)
    every = compile_sql("TRUE")
    assert isinstance(tiered.get_message(ReadRequest("g", "t", 0, 3, 4, 1 << 20), every), PendingRead)
    hot.ended = HOT.start
    assert isinstance(tiered.get_message(ReadRequest("g", "t", 0, 3, 4, 1 << 20)), PendingRead)
    tiered.close()


def test_local_result_is_returned_unchanged() -> None:
    hot: Any = Hot()
    tiered = TieredStore(hot, BrokerConfig())
    assert tiered.get_message(ReadRequest("g", "t", 0, HOT.start, 4, 1 << 20)) is hot.answer
    tiered.close()


def test_cold_read_that_is_not_awaited_does_not_access_the_archive(source: GatedSource) -> None:
    tiered = tiered_over(source)
    assert isinstance(tiered.get_message(ReadRequest("g", "t", 0, 3, 4, 1 << 20)), PendingRead)
    assert (tiered.cold_reads, tiered.cold_parked, source.reads) == (0, 0, 0)
    tiered.close()


async def test_failing_store_is_retried_once_and_the_client_gets_system_busy(source: GatedSource) -> None:
    tiered = tiered_over(source)
    source.fails = True
    with pytest.raises(BrokerError) as caught:
        await read(tiered, 3)
    assert (caught.value.code, source.reads, tiered.cold_failures) == (ResponseCode.SYSTEM_BUSY, 2, 1)
    source.fails = False
    assert (await read(tiered, 3)).count == 4
    tiered.close()


async def test_reads_of_a_hanging_store_use_no_threads_and_time_out(source: GatedSource) -> None:
    tiered = tiered_over(source, timeout_ms=200)
    source.gate.clear()
    before = threading.active_count()
    reads = [asyncio.create_task(read(tiered, n % ARCHIVED, f"g{n % 5}")) for n in range(500)]
    await asyncio.sleep(0)  # one turn suspends them all; no timeout can expire in between
    assert tiered.cold_parked == 500
    assert threading.active_count() - before <= 8
    last_cold, first_hot = (tiered.get_message(ReadRequest("g", "t", 0, HOT.start + step, 4, 1000)) for step in (-1, 0))
    assert isinstance(last_cold, PendingRead) and isinstance(first_hot, GetResult)
    answers = await asyncio.gather(*reads, return_exceptions=True)
    assert all(isinstance(answer, BrokerError) and answer.code == ResponseCode.SYSTEM_BUSY for answer in answers)
    assert tiered.cold_parked == 0
    assert sum(tiered.cold_latency.counts) == 500
    source.gate.set()
    assert (await read(tiered, 70)).count == 4
    tiered.close()


async def test_cold_read_of_a_closed_connection_leaves_the_queue(source: GatedSource) -> None:
    cold = ColdReader(catalog(), source, "")
    tiered = tiered_over(source, cold=cold)
    source.gate.clear()
    reads = [asyncio.create_task(read(tiered, n * ROWS)) for n in range(GROUPS)]
    await until(lambda: tiered.cold_parked == GROUPS and cold.waiting == 1)
    for task in reads:
        task.cancel()
    await asyncio.wait(reads)
    assert (tiered.cold_parked, cold.waiting) == (0, 0)
    source.gate.set()
    tiered.close()
