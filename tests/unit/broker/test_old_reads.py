"""Local records outside the page cache: the same bytes as by the memory map, read in a thread only if necessary."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.config import BrokerConfig
from broker.reading.old_reads import pieces_of
from broker.reading.tiered_store import Answer, PendingRead, TieredStore
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from broker.store.reading import GetResult
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from neve.remoting.codes import GetMessageStatus
from tests.kit.clock.waiting import until
from tiered.read.read_request import ReadRequest

COUNT = 90
FILE = 1 << 13


class UncachedDisk(RealDisk):
    """Has nothing in the page cache, and reads only once the gate is open."""

    __slots__ = ("cached", "gate", "threads")

    def __init__(self) -> None:
        self.cached = False
        self.gate = threading.Event()
        self.gate.set()
        self.threads: list[str] = []

    def is_resident(self, mapped: mmap.mmap, offset: int, size: int) -> bool:
        self.threads.append(threading.current_thread().name)
        return self.cached and super().is_resident(mapped, offset, size)

    def read_at(self, path: Path, offset: int, size: int) -> bytes:
        self.threads.append(threading.current_thread().name)
        assert self.gate.wait(20)
        return super().read_at(path, offset, size)


@pytest.fixture
def disk() -> UncachedDisk:
    return UncachedDisk()


@pytest.fixture
def store(tmp_path: Path, disk: UncachedDisk) -> Iterator[MessageStore]:
    """A store with two queues whose records alternate in several files."""
    store = MessageStore(StoreConfig(tmp_path / "s", commit_log_file_size=FILE), disk, SystemClock())
    store.load()
    for number in range(2 * COUNT):
        queue = number % 2 if number < 2 * COUNT - 20 else number // 10 % 2
        body = b"%d" % number * (1 + number % 70)
        store.put("T", queue, body, b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("127.0.0.1", 1))
    store.after_flush(store.visibility.flush())
    assert len(store.reader.segments()) > 3
    disk.threads.clear()
    yield store
    store.shutdown()


def ask(tiered: TieredStore, queue: int, offset: int, count: int, room: int) -> Answer:
    return tiered.get_message(ReadRequest("g", "T", queue, offset, count, room))


def at_once(answer: Answer) -> GetResult:
    assert isinstance(answer, GetResult)
    return answer


async def awaited(answer: Answer) -> GetResult:
    return await answer if isinstance(answer, PendingRead) else answer


def wire(result: GetResult) -> tuple[str, int, int, bytes]:
    return (result.status, result.next_offset, result.count, b"".join(bytes(part) for part in result.buffers))


def both(store: MessageStore) -> tuple[TieredStore, TieredStore]:
    return TieredStore(store, BrokerConfig(hot_bytes=0)), TieredStore(store, BrokerConfig())


@pytest.mark.parametrize("cached", [True, False])
def test_bytes_read_from_the_file_equal_those_of_the_mapping(
    store: MessageStore, disk: UncachedDisk, cached: bool
) -> None:
    disk.cached = cached
    old, mapped = both(store)

    async def main() -> None:
        for queue in (0, 1):
            for offset in range(COUNT + 1):
                for count, room in ((1, 1), (7, 1 << 20), (32, 3000), (200, 1 << 20)):
                    expected = at_once(ask(mapped, queue, offset, count, room))
                    got = await awaited(ask(old, queue, offset, count, room))
                    assert wire(got) == wire(expected)

    asyncio.run(main())
    assert mapped.old_reads.count == 0
    assert (old.old_reads.waited == 0) is cached
    old.close()


def test_only_records_below_hot_bytes_are_read_outside_the_mapping(store: MessageStore, disk: UncachedDisk) -> None:
    config = BrokerConfig(hot_bytes=5000)
    tiered = TieredStore(store, config)
    edge = store.max_physical_offset - 5000
    for offset in range(COUNT):
        entry = store.reader.entry("T", 0, offset)
        assert entry is not None
        assert isinstance(ask(tiered, 0, offset, 1, 1000), PendingRead) == (entry[0] < edge)
    config.hot_bytes = 0
    assert isinstance(ask(tiered, 0, COUNT - 1, 1, 1000), PendingRead)
    assert set(disk.threads) <= {threading.current_thread().name}
    tiered.close()


def test_adjacent_records_are_one_read(store: MessageStore) -> None:
    runs = store.reader.get("T", 0, 0, 10, 1 << 20, old_below=1).runs
    assert len(runs) == 10 and all(start < end for start, end in runs)
    (piece,) = pieces_of(store.log.at, runs)
    assert (piece.position, len(piece.parts)) == (runs[0][0], 10)
    everything = store.reader.get("T", 0, 0, COUNT, 1 << 20, old_below=1).runs
    assert store.reader.get("T", 0, 0, 10, 1 << 20).runs == []
    assert len(pieces_of(store.log.at, everything)) == len({start // FILE for start, _ in everything})


@pytest.mark.parametrize("when", ["before", "during"])
def test_segment_can_be_evicted_while_it_is_read(store: MessageStore, disk: UncachedDisk, when: str) -> None:
    old, mapped = both(store)

    async def main() -> None:
        expected = wire(at_once(ask(mapped, 0, 0, 200, 1 << 20)))
        planned = ask(old, 0, 0, 200, 1 << 20)
        if when == "during":
            disk.gate.clear()
        reading = asyncio.create_task(awaited(planned))
        if when == "during":
            await until(lambda: bool(disk.threads) and not disk.threads[-1].startswith("Main"))
        while store.reader.segments()[0].sealed:
            store.take_out(store.reader.segments()[0].base)()
        disk.gate.set()
        assert wire(await reading) == expected

    asyncio.run(main())
    old.close()


def test_hanging_disk_delays_only_its_readers(store: MessageStore, disk: UncachedDisk) -> None:
    tiered = TieredStore(store, BrokerConfig(hot_bytes=2000))

    async def main() -> None:
        disk.gate.clear()
        reads = [asyncio.create_task(awaited(ask(tiered, 0, 0, 5, 1000))) for _ in range(100)]
        await until(lambda: tiered.old_reads.waiting >= 100)
        hot = at_once(ask(tiered, 1, COUNT - 1, 5, 1000))
        assert (hot.status, hot.count) == (GetMessageStatus.FOUND, 1)
        for task in reads[:50]:
            task.cancel()
        disk.gate.set()
        answers = await asyncio.gather(*reads, return_exceptions=True)
        assert sum(isinstance(answer, GetResult) for answer in answers) == 50
        assert tiered.old_reads.waiting == 0

    asyncio.run(main())
    tiered.close()


def test_page_residency_of_a_mapping_is_the_kernels_answer(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 4 << 20
    path.write_bytes(b"x" * size)
    real = RealDisk()
    mapped = real.map(path, size)
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        said = real.is_resident(mapped, 0, size)
        assert said == _read_without_waiting(descriptor, size)
        os.pread(descriptor, size, 0)
        assert real.is_resident(mapped, 0, size)
        assert real.is_resident(mapped, size - 1, 1)
    finally:
        os.close(descriptor)


def _read_without_waiting(descriptor: int, size: int) -> bool:
    """Return whether a read would not block, or whether the kernel cannot tell without a block device."""
    try:
        return os.preadv(descriptor, [bytearray(size)], 0, os.RWF_NOWAIT) == size
    except OSError as error:
        assert error.errno in {errno.EAGAIN, errno.EOPNOTSUPP}
        return error.errno == errno.EOPNOTSUPP
