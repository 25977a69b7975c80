"""Requests of job threads to the store cause no fsync on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
from typing_extensions import override

from broker.archiving import hot_store
from broker.archiving.environment import AskLoop
from broker.archiving.hot_store import LoopHotStore
from broker.intake.flusher import Flusher
from broker.store.config import StoreConfig
from broker.store.consume_queue import ConsumeQueue
from broker.store.errors import StoreError, TruncationRunning
from broker.store.message_store import MessageStore
from broker.store.queue_table import QueueTable
from infra.clock import ManualClock
from infra.disk.filesystem import DiskFull
from infra.loop.in_steps import Steps, run_beside
from infra.loop.supervisor import Faults
from lifecycle.hot_store import Aged
from tests.kit.clock.calls_per_turn import CallsPerTurn
from tests.kit.store.sim_disk import SimDisk
from tiered.write.offload_plan import FoundEntries, TopicRange, TopicUnreadable

T = TypeVar("T")

QUEUES = 100


class NotingDisk(SimDisk):
    """Records which thread writes each table and removes each file."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, int]] = []
        self.gone: list[tuple[Path, int]] = []

    def rename(self, source: Path, target: Path) -> None:
        self.gone.append((source, threading.get_ident()))
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        self.gone.append((path, threading.get_ident()))
        super().remove(path)

    def write_atomic(self, path: Path, data: bytes) -> None:
        self.written.append((path.name, threading.get_ident()))
        super().write_atomic(path, data)


class Synced:
    """A flusher that has nothing to flush."""

    flushed_offset = 0

    async def flush_now(self) -> None: ...

    async def upkeep_now(self) -> None:
        raise AssertionError("nobody asks")


class SavedPins:
    """Pins whose tables are saved. There is no `reappend`, because it must not be called."""

    async def save(self) -> None:
        await asyncio.sleep(0)


def store_on(disk: SimDisk, clock: ManualClock) -> MessageStore:
    config = StoreConfig(Path("/store"), commit_log_file_size=1 << 20, index_slots=64, index_entries=100)
    store = MessageStore(config, disk, clock)
    store.load()
    return store


def put(store: MessageStore, queue_id: int) -> None:
    store.put("t", queue_id, b"m", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))


async def test_minimums_raised_by_a_ttl_are_one_write_outside_the_loop() -> None:
    disk, clock = NotingDisk(), ManualClock()
    store = store_on(disk, clock)
    for queue_id in range(QUEUES):
        put(store, queue_id)
    flusher = Flusher(store, clock, interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
    flushing = asyncio.create_task(flusher.run())
    ask = AskLoop(asyncio.get_running_loop())
    nothing_waits: Any = None
    hot = LoopHotStore(store, nothing_waits, ask, flusher, lambda: 0.1)
    disk.written.clear()
    before = dict.fromkeys(("t", "gone"), clock.now_ms() + 1)
    await asyncio.to_thread(hot.flush)
    await asyncio.to_thread(hot.expire_below, {"t": dict.fromkeys(range(QUEUES), 1), "gone": {0: 1}}, before)
    writers = [thread for name, thread in disk.written if name == "queue_state"]
    assert len(writers) == 1
    assert writers[0] != threading.get_ident()
    flushing.cancel()
    flusher.close()

    after = store_on(disk.power_cut(), clock)
    for queue_id in range(QUEUES):
        assert after.queues.min_offset("t", queue_id) == after.queues.max_offset("t", queue_id) == 1


async def test_evicted_file_is_removed_outside_the_loop() -> None:
    disk, clock = NotingDisk(), ManualClock()
    store = store_on(disk, clock)
    put(store, 0)
    store.end.roll()
    put(store, 0)
    flusher = Flusher(store, clock, interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
    flushing = asyncio.create_task(flusher.run())
    nothing_waits: Any = None
    hot = LoopHotStore(store, nothing_waits, AskLoop(asyncio.get_running_loop()), flusher, lambda: 0.1)
    (oldest, _) = store.reader.segments()
    await asyncio.to_thread(hot.flush)
    disk.gone.clear()
    await asyncio.to_thread(hot.evict, oldest.base)
    assert [segment.base for segment in store.reader.segments()] == [oldest.end]
    assert store.queues.min_offset("t", 0) == 1
    assert any(path.parent.name == "commitlog" for path, _ in disk.gone)
    assert threading.get_ident() not in {thread for _, thread in disk.gone}
    flushing.cancel()
    flusher.close()
    assert store_on(disk.power_cut(), clock).queues.min_offset("t", 0) == 1


async def test_eviction_writes_no_checkpoint_on_the_loop_if_an_older_one_is_due() -> None:
    disk, clock = NotingDisk(), ManualClock()
    store = store_on(disk, clock)
    put(store, 0)
    assert store.want_checkpoint(store.max_physical_offset)
    store.end.roll()
    put(store, 0)
    flusher = Flusher(store, clock, interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
    nothing_waits: Any = None
    hot = LoopHotStore(store, nothing_waits, AskLoop(asyncio.get_running_loop()), flusher, lambda: 0.1)
    (oldest, _) = store.reader.segments()
    await asyncio.to_thread(hot.flush)
    assert store.checkpoints.is_due
    disk.written.clear()
    await asyncio.to_thread(hot.evict, oldest.base)
    assert store.checkpoints.checkpointed >= oldest.end
    writers = [thread for name, thread in disk.written if name == "checkpoint"]
    assert len(writers) == 2
    assert threading.get_ident() not in writers
    flusher.close()


def counted(kind: type, name: str, monkeypatch: pytest.MonkeyPatch) -> CallsPerTurn:
    counter = CallsPerTurn(getattr(kind, name))

    def method(*args: Any) -> Any:
        return counter(*args)

    monkeypatch.setattr(kind, name, method)
    return counter


async def test_queues_of_a_topic_are_read_in_slices_even_if_they_are_empty(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, queues = ManualClock(), 500
    store = store_on(SimDisk(), clock)
    for queue_id in range(queues):
        put(store, queue_id)
    begin = store.max_physical_offset
    for queue_id in (3, 400):
        put(store, queue_id)
    looks = counted(ConsumeQueue, "first_at", monkeypatch)
    not_asked: Any = None
    hot = LoopHotStore(store, not_asked, AskLoop(asyncio.get_running_loop()), not_asked, lambda: 0.1)
    found = await asyncio.to_thread(hot.entries, "t", begin, store.max_physical_offset)
    assert found.keys() == {3, 400}
    assert looks.all >= 2 * queues
    assert looks.most <= 2 * 16

    minimums = counted(QueueTable, "minimum", monkeypatch)
    synced: Any = Synced()
    hot = LoopHotStore(store, not_asked, AskLoop(asyncio.get_running_loop()), synced, lambda: 0.1)
    rising = {"t": dict.fromkeys(range(queues), 1)}
    await asyncio.to_thread(hot.expire_below, rising, {"t": clock.now_ms() + 1})
    assert minimums.all >= queues
    assert minimums.most <= 2 * 16
    assert [store.queues.min_offset("t", queue_id) for queue_id in range(queues)] == [1] * queues


def test_older_image_of_the_queues_state_does_not_replace_a_newer_one() -> None:
    disk, clock = SimDisk(), ManualClock()
    store = store_on(disk, clock)
    put(store, 0)
    store.after_flush(store.visibility.flush())
    older = store.queue_changes.image()
    store.queue_changes.set_min_offset("t", 0, 1)
    store.queues.records.write(older)
    assert store_on(disk.power_cut(), clock).queues.min_offset("t", 0) == 1


async def test_dropped_names_are_written_outside_the_loop() -> None:
    disk = NotingDisk()
    store = store_on(disk, ManualClock())
    put(store, 0)
    store.queue_changes.delete_topic("t")
    store.end.roll()
    store.put("other", 0, b"m", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))
    store.after_flush(store.visibility.flush())
    store.upkeep()
    store.take_out(0)()
    not_asked: Any = None
    hot = LoopHotStore(store, not_asked, AskLoop(asyncio.get_running_loop()), not_asked, lambda: 0.1)
    disk.written.clear()
    assert await asyncio.to_thread(hot.forget_deleted, ["t", "none"]) == 1
    (writer,) = [thread for name, thread in disk.written if name == "queue_state"]
    assert writer != threading.get_ident()
    assert await asyncio.to_thread(hot.forget_deleted, ["t", "none"]) == 0
    assert len(disk.written) == 1, "nothing to write"


async def test_slaves_jobs_neither_seal_nor_empty_its_segments() -> None:
    clock = ManualClock()
    store = store_on(SimDisk(), clock)
    put(store, 0)
    store.follow()
    flusher = Flusher(store, clock, interval_ms=lambda: 60_000, on_failure=lambda error: None, faults=Faults())
    ask = AskLoop(asyncio.get_running_loop())
    saved: Any = SavedPins()
    hot = LoopHotStore(store, saved, ask, flusher, lambda: 0.1)
    assert not await asyncio.to_thread(hot.roll)
    await asyncio.to_thread(hot.reappend_waiting, store.max_physical_offset)
    assert [segment.sealed for segment in store.reader.segments()] == [False]


class CountingAsk(AskLoop):
    """Counts the calls to the event loop."""

    calls = 0

    @override
    def call(self, work: Callable[[], T]) -> T:
        self.calls += 1
        return super().call(work)


def ranges_of(store: MessageStore, topics: Iterable[str]) -> list[TopicRange]:
    return [TopicRange(topic, 0, store.max_physical_offset) for topic in topics]


async def test_many_topics_are_looked_up_per_call_and_a_damaged_one_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, topics = ManualClock(), [f"t{number}" for number in range(300)]
    store = store_on(SimDisk(), clock)
    for topic in topics:
        store.put(topic, 0, b"m", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))
    slices = store.reader.entry_slices

    def one_is_damaged(topic: str, *more: Any) -> Any:
        if topic == "t7":
            raise StoreError("a hole")
        return slices(topic, *more)

    monkeypatch.setattr(store.reader, "entry_slices", one_is_damaged)
    looks = counted(ConsumeQueue, "first_at", monkeypatch)
    not_asked: Any = None
    ask = CountingAsk(asyncio.get_running_loop())
    hot = LoopHotStore(store, not_asked, ask, not_asked, lambda: 0.1)
    wanted = ranges_of(store, topics)
    found = await asyncio.to_thread(lambda: list(hot.entries_of(wanted, timed=True)))
    for topic, one in zip(topics, found, strict=True):
        if topic == "t7":
            assert isinstance(one, TopicUnreadable)
        else:
            assert isinstance(one, FoundEntries)
            assert (len(one.runs[0].physical), one.oldest_ms) == (1, clock.now_ms())
    assert ask.calls <= len(topics) / 7
    assert looks.most <= 2 * 16


async def test_aged_offsets_are_read_in_slices_and_a_damaged_topic_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, queues = ManualClock(1_000), 40
    store = store_on(SimDisk(), clock)
    for queue_id in range(queues):
        put(store, queue_id)
    store.put("bad", 0, b"m", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))
    clock.advance(5_000)
    put(store, 3)
    store.put("new", 2, b"m", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))
    by_time = store.reader.offset_by_time

    def one_is_damaged(topic: str, *more: Any, **named: Any) -> Steps[int]:
        if topic == "bad":
            raise OSError("its file")
        return by_time(topic, *more, **named)

    monkeypatch.setattr(store.reader, "offset_by_time", one_is_damaged)
    looks = counted(QueueTable, "min_offset", monkeypatch)
    not_asked: Any = None
    hot = LoopHotStore(store, not_asked, AskLoop(asyncio.get_running_loop()), not_asked, lambda: 0.1)
    wanted = dict.fromkeys(("bad", "new", "none", "t"), 2_000)
    found = dict(await asyncio.to_thread(lambda: list(hot.aged(wanted))))
    assert isinstance(found.pop("bad"), TopicUnreadable)
    assert found.pop("new") == Aged({}, 6_000)
    assert found.pop("none") == Aged({}, 6_000), "what comes to it is no older than what is there"
    assert found == {"t": Aged(dict.fromkeys(range(queues), 1), -1)}
    assert (looks.all, looks.most <= 16) == (queues + 2, True)


async def test_entries_are_fetched_lazily_one_lookup_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hot_store, "_ENTRIES_AT_ONCE", 10)
    store = store_on(SimDisk(), ManualClock())
    topics = [f"t{number}" for number in range(6)]
    for topic in topics:
        for _ in range(8):
            store.put(topic, 0, b"m", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("10.1.2.3", 4000))
    not_asked: Any = None
    ask = CountingAsk(asyncio.get_running_loop())
    found = LoopHotStore(store, not_asked, ask, not_asked, lambda: 0.1).entries_of(ranges_of(store, topics))
    calls: list[int] = []
    for _ in topics:
        await asyncio.to_thread(next, found)
        calls.append(ask.calls)
    assert calls == [1, 2, 2, 3, 3, 4]


async def test_erased_rows_are_hidden_by_a_write_outside_the_loop_and_retried() -> None:
    disk, clock = NotingDisk(), ManualClock()
    store = store_on(disk, clock)
    for queue_id in range(QUEUES):
        put(store, queue_id)
        put(store, queue_id)
    store.after_flush(store.visibility.flush())
    flusher: Any = Synced()
    nothing_waits: Any = None
    hot = LoopHotStore(store, nothing_waits, AskLoop(asyncio.get_running_loop()), flusher, lambda: 0.1)
    looks = CallsPerTurn(store.erased_offsets.erasable)
    setattr(store.erased_offsets, "erasable", looks)  # noqa: B010 - for mypy a method is none to be set
    disk.written.clear()
    rows = [("t", queue_id, 1, 1) for queue_id in range(QUEUES)]
    room, disk.capacity = disk.capacity, 0
    with pytest.raises(DiskFull):
        await asyncio.to_thread(hot.hide_erased, rows)
    disk.capacity = room
    assert await asyncio.to_thread(hot.hide_erased, rows) == (0, {}), "they are hidden already"
    writers = [thread for name, thread in disk.written if name == "queue_state"]
    assert len(writers) == 2
    assert threading.get_ident() not in writers
    assert await asyncio.to_thread(hot.hide_erased, rows) == (0, {})
    assert len(disk.written) == 2, "nothing is new"
    assert 0 < looks.most <= 16, "a queue's file may have to be opened for each"
    assert await asyncio.to_thread(hot.erased, "t") == dict.fromkeys(range(QUEUES), ((1, 1),))

    after = store_on(disk.power_cut(), clock)
    for queue_id in range(QUEUES):
        assert after.reader.get("t", queue_id, 1, 1, 100).status == "NO_MATCHED_MESSAGE"


async def test_job_waits_for_the_end_of_a_truncation_before_it_reads_or_hides() -> None:
    clock = ManualClock()
    store = store_on(SimDisk(), clock)
    put(store, 0)
    to = store.max_physical_offset
    put(store, 0)
    store.follow()
    nothing_waits: Any = None
    ask = AskLoop(asyncio.get_running_loop())
    hot = LoopHotStore(store, nothing_waits, ask, cast("Flusher", Synced()), lambda: 0.1)
    jobs: list[asyncio.Task[Any]] = []

    async def run_part(part: Callable[[], object]) -> None:
        if not jobs and is_cut(store):
            jobs.append(asyncio.create_task(asyncio.to_thread(hot.entries, "t", 0, 1 << 20)))
            jobs.append(asyncio.create_task(asyncio.to_thread(hot.min_offset, "t", 0)))
            before = {"t": clock.now_ms() + 1}
            jobs.append(asyncio.create_task(asyncio.to_thread(hot.expire_below, {"t": {0: 2}}, before)))
            done, _ = await asyncio.wait(jobs, timeout=0.2)
            assert not done
        part()

    assert await run_beside(store.truncation(to, epoch=1, floor=to), run_part) is not None
    entries, minimum, failed = await asyncio.gather(*jobs)
    assert [len(run.sizes) for run in entries.values()] == [1]
    assert minimum in {0, 1}
    assert failed == {}
    assert store.queues.min_offset("t", 0) == store.queues.max_offset("t", 0) == 1


def is_cut(store: MessageStore) -> bool:
    try:
        store.truncations.check_whole()
    except TruncationRunning:
        return True
    return False
