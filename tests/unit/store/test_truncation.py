"""Tests of truncation of a slave's log: atomic over crashes, with the diverged tail kept in a file."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.store.errors import LogMismatch, StoreError, StoreFull, StoreNotWritable, TruncationRefused
from broker.store.layout import end_record
from broker.store.log_records import is_record_start, records_ending_above
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from neve.record.codec import decode_record
from tests.kit.store.replicas import LogLink, RandomMaster, log_of, open_store, told
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import small_config
from tests.unit.store.short_records import SIZE, record, short

DIVERGED = Path("/store/diverged")


def starts(store: MessageStore, above: int) -> list[int]:
    """Return the starts of records above an offset, and the log end."""
    places = [place for place, _, _ in records_ending_above(store.log, above)]
    return [*(place for place in places if place >= above), store.max_physical_offset]


def tail_of(store: MessageStore, above: int) -> bytes:
    return b"".join(data[max(above - at, 0) :] for at, data in log_of(store) if at + len(data) > above)


def slave_of(master: RandomMaster, disk: SimDisk, **changes: Any) -> MessageStore:
    store = open_store(disk, ManualClock(), following=True, **changes)
    LogLink(master, store, 7).run()
    return store


def same(one: MessageStore, other: MessageStore | dict[str, Any]) -> None:
    mine, its = told(one), other if isinstance(other, dict) else told(other)
    for what in ("log", "bounds", "entries", "keys", "tables"):
        assert mine[what] == its[what], what


@pytest.mark.parametrize("seed", range(3))
def test_record_start_finds_the_truncatable_offset_below(seed: int) -> None:
    master = RandomMaster(seed)
    master.run(80)
    store = slave_of(master, SimDisk(seed=seed))
    log, low = store.log, store.min_physical_offset
    known = low
    for offset in range(low, store.max_physical_offset + 1):
        if is_record_start(log, offset):
            known = offset
        found = store.reader.record_start(offset)
        assert found == known or (log.at(offset) is None and log.ending_at(found) is not None)
        assert is_record_start(log, found)


@pytest.mark.parametrize("checkpointed", ["below", "above", "between"])
@pytest.mark.parametrize("seed", range(3))
def test_truncated_slave_follows_the_next_master(seed: int, checkpointed: str) -> None:
    dice, first = random.Random(seed), RandomMaster(seed)
    first.run(100)
    common = first.store.max_physical_offset
    disk = SimDisk(seed=seed)
    slave = slave_of(first, disk)
    if checkpointed != "above":
        slave.checkpoint()
    for term in range(3):
        first.deletes = False
        first.run(100)
        LogLink(first, slave, seed).run()
        if checkpointed == "above":
            slave.checkpoint()
        to = dice.choice(starts(first.store, common))
        second = RandomMaster.over(first, to, seed + 100 * (term + 1))
        if checkpointed == "between" and to < slave.max_physical_offset:
            slave.truncate(dice.choice(starts(slave, to)), epoch=term, floor=to)
        cut = tail_of(slave, to)
        kept = slave.truncate(to, epoch=term, floor=to)
        assert slave.max_physical_offset == slave.replica.next_offset == to
        assert (b"" if kept is None else disk.read(kept)) == cut
        same(slave, second.store)
        second.deletes = True
        second.run(100)
        LogLink(second, slave, seed).run()
        same(slave, second.store)
        assert told(slave)["following"] == told(second.store)["following"]
        if dice.random() < 0.5:
            disk.kill()
            slave = open_store(disk, ManualClock(), following=True)
            same(slave, second.store)
        first, common = second, second.store.max_physical_offset


class Died(Exception):
    """The simulated process has crashed."""


CALLS = (
    "create_preallocated", "grow", "write_atomic", "append", "sync_file", "fsync_dir", "rename", "remove", "remove_dir",
)  # fmt: skip


def mortal(disk: SimDisk, calls: int) -> None:
    """Make the process crash within the next changing disk call after this number of them."""
    left = calls

    def dying(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Died
            return work(*args, **options)

        return call

    for name in CALLS:
        setattr(disk, name, dying(getattr(disk, name)))


@pytest.fixture(scope="module")
def diverged() -> tuple[RandomMaster, int]:
    """Return a master, and an offset in its log two files below the end."""
    master = RandomMaster(5)
    master.run(60)
    master.deletes = False
    master.run(40)
    end = master.store.max_physical_offset
    return master, min(place for place in starts(master.store, 0) if place > end - 40_000 and place % 16_384)


def outcomes(master: RandomMaster, to: int, prepare: Callable[[MessageStore], None]) -> Iterator[tuple[int, SimDisk]]:
    """Yield call counts and the disks of slaves that crashed after them, until a truncation completes."""
    for calls in range(1000):
        disk = SimDisk(seed=calls)
        slave = slave_of(master, disk)
        prepare(slave)
        mortal(disk, calls)
        try:
            slave.truncate(to, epoch=3, floor=to)
        except Died:
            yield calls, disk
        else:
            return
    raise AssertionError("it never ends")


@pytest.mark.parametrize("checkpointed", [True, False])
def test_crash_at_any_step_of_truncation_keeps_old_or_new_log_end(
    diverged: tuple[RandomMaster, int], checkpointed: bool
) -> None:
    master, to = diverged
    old = slave_of(master, SimDisk())
    new = open_store(SimDisk(), ManualClock(), following=True)
    LogLink(master, new, 7).run(until=to)
    old_end, old_tail, as_old, as_new = old.max_physical_offset, tail_of(old, to), told(old), told(new)
    is_kept = is_decided = False  # by the calls of the previous iteration
    for calls, disk in outcomes(master, to, MessageStore.checkpoint if checkpointed else lambda _: None):
        for seed in (1, 2):
            cut = disk.power_cut(calls * 10 + seed)
            again = open_store(cut, ManualClock(), following=True)
            end = again.max_physical_offset
            assert end == to or not is_decided
            if end == to:
                same(again, as_new)
            elif end == old_end:
                same(again, as_old)
            else:  # the log was not synced yet, as at any power cut
                assert not checkpointed and not is_kept
            if is_decided:
                (name,) = cut.list_dir(DIVERGED)
                assert cut.read(DIVERGED / name) == old_tail
            if calls % 4 == 0:
                LogLink(master, again, calls).run()
                same(again, as_old)
        is_kept = is_decided or disk.exists(DIVERGED)  # and the log below is synced
        is_decided = is_decided or disk.exists(Path("/store/truncation"))
    assert calls > 20 and is_decided


def test_crashed_recovery_of_a_truncation_is_completed_by_the_next(diverged: tuple[RandomMaster, int]) -> None:
    master, to = diverged
    new = open_store(SimDisk(), ManualClock(), following=True)
    LogLink(master, new, 7).run(until=to)
    as_new = told(new)
    decided = [
        disk for _, disk in outcomes(master, to, MessageStore.checkpoint) if disk.exists(Path("/store/truncation"))
    ][1]  # in the first one, it crashed while it wrote that file
    for calls in range(200):
        disk = decided.power_cut(calls)
        mortal(disk, calls)
        try:
            open_store(disk, ManualClock(), following=True)
        except Died:
            again = open_store(disk.power_cut(calls), ManualClock(), following=True)
            assert again.max_physical_offset == to
            same(again, as_new)
        else:
            break
    assert calls > 10


# -- concurrent evictions


def with_an_evictable_file(disk: SimDisk, **options: Any) -> tuple[MessageStore, int, Path]:
    """Return a slave with two full files, a truncation offset in the last one, and the path of the first."""
    master = RandomMaster(5)
    master.deletes = False
    master.run(300)
    store = MessageStore(small_config(), disk, ManualClock(), **options)
    store.load(following=True)
    LogLink(master, store, 7).run()
    store.after_flush(store.visibility.flush())
    store.checkpoint()
    oldest, *_, newest = store.log.files
    assert oldest.end < newest.base
    return store, min(place for place in starts(store, newest.base) if place > newest.base), oldest.path


def test_pending_eviction_is_cancelled_by_a_truncation(disk: SimDisk) -> None:
    store, to, path = with_an_evictable_file(disk)
    (first, *_) = store.reader.segments()
    remove = store.take_out(first.base)
    store.truncate(to, epoch=1, floor=to)
    assert not remove()
    assert (store.min_physical_offset, disk.exists(path)) == (first.base, True)
    assert store.reader.record_at(first.base) is not None
    assert store.take_out(first.base)()
    assert (store.min_physical_offset, disk.exists(path)) == (first.end, False)


class NotedLock:
    """A lock that records that a thread waits for it."""

    def __init__(self, waited_for: threading.Event) -> None:
        self._lock, self._waited_for = threading.Lock(), waited_for

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self._waited_for.set()
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


@pytest.mark.parametrize("call", ["rename", "remove"])
def test_truncation_waits_for_a_file_removal(disk: SimDisk, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Otherwise, the truncation opens or lists a file during its removal and stops the store."""
    cut_waits, is_leaving, may_leave = threading.Event(), threading.Event(), threading.Event()
    store, to, path = with_an_evictable_file(disk, new_lock=lambda: NotedLock(cut_waits))
    change = getattr(disk, call)

    def held(place: Path, *rest: Path) -> None:
        if place.name.startswith(path.name) and threading.current_thread() is leaving:
            is_leaving.set()
            assert may_leave.wait(30)
        change(place, *rest)

    monkeypatch.setattr(disk, call, held)
    first, second, *_ = store.reader.segments()
    leaving = threading.Thread(target=store.take_out(first.base))
    leaving.start()
    assert is_leaving.wait(30)
    cut_waits.clear()

    def let_it_go() -> None:
        assert cut_waits.wait(30)
        may_leave.set()

    letting = threading.Thread(target=let_it_go)
    letting.start()
    try:
        store.truncate(to, epoch=1, floor=to)
        assert may_leave.is_set(), "it has waited"
    finally:
        cut_waits.set()
        letting.join()
        leaving.join()
    assert (store.min_physical_offset, store.max_physical_offset) == (second.base, to)
    assert all(disk.exists(file.path) for file in store.log.files)


# -- refused truncations


def test_truncation_below_the_confirmed_offset_needs_an_operator(disk: SimDisk) -> None:
    store = short(disk, 5)
    with pytest.raises(TruncationRefused, match=f"below the confirmed offset {2 * SIZE}"):
        store.truncate(SIZE, epoch=1, floor=2 * SIZE)
    assert (store.queues.max_offset("t", 0), disk.exists(DIVERGED)) == (5, False)
    assert store.truncate(SIZE, epoch=1, floor=2 * SIZE, by_operator=True) == DIVERGED / f"1-{SIZE}-{5 * SIZE}.log"
    assert store.queues.max_offset("t", 0) == 1


@pytest.mark.parametrize("to", [1, SIZE - 1, SIZE + 1, 3 * SIZE + 8, 5 * SIZE + 1, 16_384, 1 << 40, -1])
def test_truncation_inside_a_record_is_refused(disk: SimDisk, to: int) -> None:
    store = short(disk, 5)
    with pytest.raises((LogMismatch, TruncationRefused)):
        store.truncate(to, epoch=1, floor=0)
    assert (store.queues.max_offset("t", 0), store.end.is_following) == (5, True)


def test_next_lower_truncation_offset_is_found(disk: SimDisk) -> None:
    store = short(disk, 5)
    last = 5 * SIZE
    assert [store.reader.record_start(at) for at in (0, 1, SIZE - 1, SIZE, SIZE + 1)] == [0, 0, 0, SIZE, SIZE]
    assert [store.reader.record_start(at) for at in (last - 1, last, last + 1, 1 << 40)] == [
        last - SIZE,
        last,
        last,
        last,
    ]
    store.replica.append(end_record(16_384 - last), last)
    assert [store.reader.record_start(at) for at in (last, last + 7, 16_383)] == [last] * 3
    assert [store.reader.record_start(at) for at in (16_384, 20_000)] == [16_384] * 2
    store.replica.continue_at(30_000)
    assert [store.reader.record_start(at) for at in (16_383, 16_384, 29_999)] == [last, 16_384, 16_384]
    assert [store.reader.record_start(at) for at in (30_000, 30_001)] == [30_000] * 2
    store.truncate(16_384, epoch=1, floor=0)
    assert (store.max_physical_offset, store.queues.max_offset("t", 0)) == (16_384, 5)
    store.replica.append(record(16_384, 5), 16_384)
    store.truncate(last, epoch=1, floor=0)
    store.replica.append(record(last, 5), last)
    assert (store.max_physical_offset, store.queues.max_offset("t", 0)) == (6 * SIZE, 6)


def test_master_refuses_truncation(open_store: Callable[..., MessageStore], put: Callable[..., Any]) -> None:
    store = open_store()
    put(store)
    with pytest.raises(StoreNotWritable, match="is a master"):
        store.truncate(0, epoch=1, floor=0)
    assert store.queues.max_offset("t", 0) == 1


def test_truncation_works_on_a_real_disk(tmp_path: Path) -> None:
    store = MessageStore(small_config(root=tmp_path), RealDisk(), ManualClock())
    store.load(following=True)
    data = b"".join(record(SIZE * number, number) for number in range(5))
    store.replica.append(data, 0)
    kept = store.truncate(2 * SIZE, epoch=1, floor=0)
    assert kept is not None and kept.read_bytes() == data[2 * SIZE :]
    store.replica.append(record(2 * SIZE, 2, body=b"BODY"), 2 * SIZE)
    store.shutdown()
    again = MessageStore(small_config(root=tmp_path), RealDisk(), ManualClock())
    assert again.load(following=True).clean
    assert (again.queues.max_offset("t", 0), again.max_physical_offset) == (3, 3 * SIZE)
    again.shutdown()


def test_two_truncations_at_one_offset_keep_both_tails(disk: SimDisk) -> None:
    store = short(disk, 2)
    store.replica.append(record(2 * SIZE, 2), 2 * SIZE)
    store.truncate(2 * SIZE, epoch=1, floor=0)
    store.replica.append(record(2 * SIZE, 2, body=b"BODY"), 2 * SIZE)
    store.truncate(2 * SIZE, epoch=1, floor=0)
    kept = [decode_record(disk.read(DIVERGED / name)).body for name in disk.list_dir(DIVERGED)]
    assert sorted(kept) == [b"BODY", b"body"]
    assert store.truncate(2 * SIZE, epoch=1, floor=0) is None


def test_log_is_not_truncated_if_its_tail_cannot_be_kept(disk: SimDisk) -> None:
    store, append = short(disk, 5), disk.append

    def full(path: Path, data: bytes) -> None:
        if data:
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        append(path, data)

    disk.append = full  # type: ignore[method-assign]
    with pytest.raises(StoreFull, match="can't be kept"):
        store.truncate(SIZE, epoch=1, floor=0)
    assert (store.queues.max_offset("t", 0), disk.list_dir(DIVERGED)) == (5, [])
    store.replica.append(record(5 * SIZE, 5), 5 * SIZE)
    disk.append = append  # type: ignore[method-assign]
    store.truncate(SIZE, epoch=1, floor=0)
    assert store.queues.max_offset("t", 0) == 1


def test_failed_truncation_stops_the_store_until_restart_completes_it(disk: SimDisk) -> None:
    store = short(disk, 5)
    disk.fail_sync = lambda path: "commitlog" in str(path) and disk.exists(Path("/store/truncation"))
    with pytest.raises(StoreNotWritable, match="could not be truncated"):
        store.truncate(SIZE, epoch=1, floor=0)
    for ask in (store.visibility.flush, store.lead, lambda: store.replica.append(b"", SIZE)):
        with pytest.raises(StoreError):
            ask()
    store.abandon()
    disk.fail_sync = lambda _path: False
    assert open_store(disk, ManualClock(), following=True).max_physical_offset == SIZE


def test_start_after_truncation_needs_space_for_its_checkpoint(disk: SimDisk) -> None:
    """Without the checkpoint, the next start would truncate again and lose newer records."""
    store = short(disk, 5)
    store.checkpoint()
    write, refused = disk.write_atomic, True

    def full(path: Path, data: bytes) -> None:
        if refused and path.name == "checkpoint":
            raise OSError(errno.ENOSPC, "no space left on device", str(path))
        write(path, data)

    disk.write_atomic = full  # type: ignore[method-assign]
    with pytest.raises(StoreNotWritable, match="no room for a checkpoint"):
        store.truncate(SIZE, epoch=1, floor=0)
    store.abandon()
    with pytest.raises(StoreFull, match="no room for a checkpoint"):
        open_store(disk, ManualClock(), following=True)
    refused = False
    again = open_store(disk, ManualClock(), following=True)
    again.replica.append(record(SIZE, 1, body=b"BODY"), SIZE)
    disk.kill()
    assert open_store(disk, ManualClock(), following=True).queues.max_offset("t", 0) == 2


# -- syncs and readers


def test_sync_from_before_a_truncation_covers_no_later_record(disk: SimDisk) -> None:
    store = short(disk, 5)
    late = store.visibility.flush()
    store.truncate(SIZE, epoch=1, floor=0)
    for number in range(1, 5):
        store.replica.append(record(SIZE * number, number, body=b"BODY"), SIZE * number)
    store.after_flush(late)
    assert store.visibility.flushed == SIZE
    store.after_flush(store.visibility.flush())
    assert store.visibility.flushed == 5 * SIZE


@pytest.mark.parametrize("confirmed", [0, SIZE, SIZE + 3, 2 * SIZE, 4 * SIZE])
def test_readers_see_confirmed_messages_after_truncation_and_restart(disk: SimDisk, confirmed: int) -> None:
    heard: list[int] = []
    store = open_store(disk, ManualClock(), following=True, confirmed=0)
    store.replica.append(b"".join(record(SIZE * number, number) for number in range(5)), 0)
    store.visibility.confirm(confirmed)
    store.truncate(4 * SIZE, epoch=1, floor=0)
    for _ in range(2):
        assert store.queues.max_offset("t", 0) == confirmed // SIZE
        assert (store.queues.next_offset("t", 0), store.visibility.confirmed) == (4, confirmed)
        disk.kill()
        store = open_store(disk, ManualClock(), following=True, confirmed=confirmed)
    store.visibility.subscribe(lambda shown: heard.extend(offset for _, offset, _ in shown))
    store.visibility.confirm(4 * SIZE)
    assert heard == list(range(confirmed // SIZE, 4))
    assert store.queues.max_offset("t", 0) == 4


class OrderedLocks:
    """Locks that record which one was held while another was acquired."""

    def __init__(self) -> None:
        self.made = 0
        self.held: list[int] = []
        self.pairs: set[tuple[int, int]] = set()

    def new(self) -> Any:
        self.made += 1
        return _OrderedLock(self, self.made)


class _OrderedLock:
    def __init__(self, locks: OrderedLocks, number: int) -> None:
        self._locks, self._number = locks, number

    def __enter__(self) -> bool:
        assert self._number not in self._locks.held, "it would wait for itself"
        self._locks.pairs.update((held, self._number) for held in self._locks.held)
        self._locks.held.append(self._number)
        return True

    def __exit__(self, *_: object) -> None:
        self._locks.held.remove(self._number)


def test_truncation_and_store_threads_do_not_deadlock(disk: SimDisk) -> None:
    """No two locks are ever acquired in both orders."""
    locks = OrderedLocks()
    store = MessageStore(small_config(), disk, ManualClock(), locks.new)
    store.load(following=True)
    store.replica.append(b"".join(record(SIZE * number, number) for number in range(5)), 0)
    assert store.want_checkpoint(5 * SIZE)
    store.upkeep()  # upkeep must sync the log first
    store.prepare_next()
    store.truncate(SIZE, epoch=1, floor=0)
    assert locks.pairs and not {(second, first) for first, second in locks.pairs} & locks.pairs
