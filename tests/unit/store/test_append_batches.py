"""Tests of batch appends: one write, and the same store as after single appends."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.store.errors import MessageIllegal, NotThisTurn, StoreFull, StoreNotWritable
from infra.disk.filesystem import DiskFull, FileWriter
from tests.kit.store.by_key import by_key
from tests.kit.store.sim_disk import SimDisk
from tests.unit.store.batches import COUNT, HOST, Open, body, queues, sends


def test_batch_append_equals_single_appends(open_store: Open, disk: SimDisk) -> None:
    """Batches cross the borders of log, queue and CRC files, and recovery restores the same store."""
    kept = []
    for size in (1, 7, COUNT):
        changes: dict[str, Any] = {"root": Path(f"/store{size}"), "commit_log_file_size": 1 << 13}
        changes |= {"queue_first_step": 100, "queue_file_size": 2000}
        store = open_store(**changes)
        places = []
        for start in range(0, COUNT, size):
            places += store.append(sends(store, range(start, min(start + size, COUNT))), HOST, 1000)
        assert len(places) == COUNT
        assert len(store.reader.segments()) > 4
        found = [by_key(store, "t", f"key{number}", 1, 0, 1 << 50) for number in (0, 7, COUNT - 1)]
        kept.append((places, queues(store), found))
        disk.kill()
        assert queues(open_store(**changes)) == queues(store)
    assert [sum(map(len, bodies)) for _, bodies, _ in kept[:1]] == [COUNT]
    assert kept[0] == kept[1] == kept[2]


def test_append_stops_at_its_budget_of_queue_files(
    open_store: Open, disk: SimDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(mapped_queue_files=1)
    mapped: list[Path] = []
    real = disk.map

    def counted(path: Path, size: int) -> Any:
        mapped.append(path)
        return real(path, size)

    batch = sends(store, range(12))
    for number in range(4):
        store.append(batch[number : number + 1], HOST, 1000)  # all but the last lose their mapping
    monkeypatch.setattr(disk, "map", counted)
    done = 4
    while done < len(batch):
        mapped.clear()
        store.queues.file_budget.left = 2
        places = store.append(batch[done:], HOST, 1000)
        assert places
        assert len(mapped) <= 2
        done += len(places)
    assert queues(store) == [[body(number) for number in range(queue, 12, 4)] for queue in range(4)]
    store.queues.file_budget.left = 0
    with pytest.raises(NotThisTurn):
        store.queue_for("t", 4)
    assert store.queues.names_of("t") == [0, 1, 2, 3]
    store.queues.file_budget.left = None
    store.queue_for("t", 4)


def test_batch_is_stored_up_to_the_first_unstorable_message(open_store: Open) -> None:
    store = open_store()
    batch = sends(store, range(5))
    too_large = (batch[3][0], bytes(store.config.max_message_size + (1 << 17)), *batch[3][2:])
    assert len(store.append([*batch[:3], too_large, batch[4]], HOST, 1000)) == 3
    assert [store.queues.max_offset("t", queue) for queue in range(4)] == [1, 1, 1, 0]
    with pytest.raises(MessageIllegal):
        store.append([too_large, batch[4]], HOST, 1000)
    assert len(store.append(batch[3:], HOST, 1000)) == 2


def test_failed_batch_write_stores_nothing_and_stops_the_store(open_store: Open, disk: SimDisk) -> None:
    store = open_store()
    store.append(sends(store, range(8)), HOST, 1000)
    store.after_flush(store.visibility.flush())
    end = store.max_physical_offset
    disk.fail_write = lambda _path: True
    with pytest.raises(StoreNotWritable):
        store.append(sends(store, range(8, 20)), HOST, 1000)
    disk.fail_write = lambda _path: False
    with pytest.raises(StoreNotWritable):
        store.append(sends(store, range(8, 9)), HOST, 1000)
    assert store.visibility.is_dirty, "the flusher hears of it and stops the broker"
    with pytest.raises(StoreNotWritable):
        store.visibility.flush()
    assert queues(store) == [[body(queue), body(queue + 4)] for queue in range(4)]
    assert store.max_physical_offset == end
    assert by_key(store, "t", "key9", 1, 0, 1 << 50) == []
    disk.kill()
    after = queues(open_store())
    # Recovery may restore a prefix of the records: no sender got an answer about them.
    assert 8 <= sum(map(len, after)) < 20
    assert after == [[body(number) for number in range(queue, sum(map(len, after)), 4)] for queue in range(4)]


def test_append_retries_to_open_a_log_file(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()

    def refuse(path: Path) -> FileWriter:
        raise OSError(errno.EMFILE, "too many open files", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(store.disk, "writer", refuse)
        with pytest.raises(StoreFull):
            store.append(sends(store, range(2)), HOST, 1000)
    assert len(store.append(sends(store, range(2)), HOST, 1000)) == 2
    assert queues(store)[:2] == [[body(0)], [body(1)]]


@pytest.mark.parametrize(
    ("short_of", "log_file", "step"),
    [("commitlog/", 1 << 13, 4000), ("commitlogcrc/", 1 << 17, 8000), ("consumequeue/t/1/", 1 << 17, 40)],
)
def test_paired_messages_are_stored_both_or_not_at_all(
    open_store: Open, disk: SimDisk, monkeypatch: pytest.MonkeyPatch, short_of: str, log_file: int, step: int
) -> None:
    """For each pair, the disk is first full and then has space."""
    store = open_store(commit_log_file_size=log_file, queue_first_step=step, queue_file_size=8000)
    refused, is_full = 0, False

    def unless_full(call: Callable[..., None]) -> Callable[..., None]:
        def checked(path: Path, *rest: Any, **options: Any) -> None:
            if is_full and short_of in str(path):
                raise DiskFull(errno.ENOSPC, "no space left on device", str(path))
            call(path, *rest, **options)

        return checked

    def put_pair() -> None:
        _, second = sends(store, range(2))
        store.put("t", 0, b"", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=HOST, beside=second)

    monkeypatch.setattr(disk, "create_preallocated", unless_full(disk.create_preallocated))
    monkeypatch.setattr(disk, "grow", unless_full(disk.grow))
    put_pair()
    for pairs in range(1, 301):
        is_full = True
        try:
            put_pair()
        except StoreFull:
            refused += 1
            assert [store.queues.max_offset("t", queue) for queue in range(2)] == [pairs, pairs]
            is_full = False
            put_pair()
        assert [store.queues.max_offset("t", queue) for queue in range(2)] == [pairs + 1, pairs + 1]
    assert refused
    disk.kill()
    again = open_store(commit_log_file_size=log_file, queue_first_step=step, queue_file_size=8000)
    assert [again.queues.max_offset("t", queue) for queue in range(2)] == [301, 301]
