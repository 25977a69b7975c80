"""Tests of descriptor shortage: acknowledged messages are durable, and other work is postponed."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from broker.store.config import SYNC_FLUSH
from broker.store.errors import StoreFull, StoreNotWritable
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.disk.filesystem import OutOfDescriptors
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import small_config
from tests.unit.store.batches import HOST, Open, body, queues, sends


def _nothing_opens(monkeypatch: pytest.MonkeyPatch, disk: SimDisk, *verbs: str) -> None:
    def refuse(path: Path, *_: object, **__: object) -> Any:
        raise OutOfDescriptors(errno.EMFILE, "too many open files", str(path))

    for verb in verbs:
        monkeypatch.setattr(disk, verb, refuse)


def _started(disk: SimDisk) -> MessageStore:
    store = MessageStore(small_config(), disk, ManualClock())
    store.load()
    return store


OPENING = ("fdatasync", "fsync_dir", "write_atomic", "writer", "map", "read", "append", "create_preallocated", "grow")


def test_flush_opens_no_file_and_checkpoint_is_postponed(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acknowledged messages are durable. The postponed checkpoint later covers everything that it promises."""
    store = open_store(flush_disk_type=SYNC_FLUSH)
    disk = store.disk
    assert isinstance(disk, SimDisk)
    store.append(sends(store, range(4)), HOST, 1000)
    checkpointed = store.checkpoints.checkpointed
    assert store.want_checkpoint(store.max_physical_offset)
    with monkeypatch.context() as patched:
        _nothing_opens(patched, disk, *OPENING)
        for _ in range(3):
            offset = store.visibility.flush()
            store.after_flush(offset)
            store.upkeep()
            assert offset == store.max_physical_offset
        assert store.end.failure is None
        assert queues(store) == [[body(0)], [body(1)], [body(2)], [body(3)]]
        assert (store.checkpoints.checkpointed, store.checkpoints.is_put_off) == (checkpointed, True)
    after = _started(disk.power_cut(1))
    assert queues(after) == [[body(0)], [body(1)], [body(2)], [body(3)]]


@pytest.mark.parametrize("fails_first", [True, False], ids=["the checkpoint before", "the checkpoint behind"])
def test_queue_is_raised_only_between_two_written_checkpoints(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, fails_first: bool
) -> None:
    """Recovery accepts a hole only below its checkpoint: above one, the next start would refuse the log."""
    store = open_store(flush_disk_type=SYNC_FLUSH)
    disk = store.disk
    assert isinstance(disk, SimDisk)
    store.append(sends(store, range(2)), HOST, 1000)
    checkpointed = store.checkpoints.checkpointed

    sync = disk.fsync_dir

    def sync_unless_refused(path: Path) -> None:
        if fails_first or store.queues.next_offset("t", 0) == 100:
            raise OutOfDescriptors(errno.EMFILE, "too many open files", str(path))
        sync(path)

    raised: Mapping[str, Mapping[int, int]] = {"t": {0: 100, 1: 0}}
    with monkeypatch.context() as patched:
        patched.setattr(disk, "fsync_dir", sync_unless_refused)
        for _ in range(2):
            with pytest.raises(StoreFull):
                store.queue_changes.create_queues_at(raised)
        assert store.checkpoints.is_put_off
        assert (store.checkpoints.checkpointed == checkpointed) == fails_first
        assert store.queues.next_offset("t", 0) == (1 if fails_first else 100)
    store.queue_changes.create_queues_at(raised)
    assert not store.checkpoints.is_put_off
    store.append(sends(store, range(1)), HOST, 1000)
    store.after_flush(store.visibility.flush())
    after = _started(disk.power_cut(1))
    assert after.queues.next_offset("t", 0) == 101


def test_postponed_checkpoint_syncs_queues_of_both_checkpoints(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    disk = store.disk
    assert isinstance(disk, SimDisk)
    store.append(sends(store, range(2)), HOST, 1000)
    store.want_checkpoint(store.max_physical_offset)
    with monkeypatch.context() as patched:
        _nothing_opens(patched, disk, "fdatasync", "fsync_dir")
        store.after_flush(store.visibility.flush())
        store.upkeep()
        store.append(sends(store, range(2, 4)), HOST, 1000)
        store.checkpoint()
    store.after_flush(store.visibility.flush())
    store.upkeep()
    store.checkpoint()
    assert (store.checkpoints.checkpointed, store.checkpoints.is_put_off) == (store.max_physical_offset, False)
    for seed in range(8):
        assert queues(_started(disk.power_cut(seed))) == [[body(0)], [body(1)], [body(2)], [body(3)]]


def test_other_sync_errors_stop_the_store(open_store: Open) -> None:
    store = open_store()
    assert isinstance(store.disk, SimDisk)
    store.append(sends(store, range(2)), HOST, 1000)
    store.disk.fail_sync = lambda path: path.parent.name == "commitlog"
    with pytest.raises(StoreNotWritable):
        store.visibility.flush()
    store.disk.fail_sync = lambda _: False
    with pytest.raises(StoreNotWritable):
        store.visibility.flush()


@pytest.mark.parametrize("verb", ["map", "create_preallocated", "grow"])
def test_queue_without_descriptor_refuses_and_accepts_later(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    store = open_store(queue_first_step=40, queue_file_size=80)
    disk = store.disk
    assert isinstance(disk, SimDisk)
    sent = [store.append(sends(store, range(1)), HOST, 1000)]
    for _ in range(6):  # crosses the growth of a file and a new file
        with monkeypatch.context() as patched:
            _nothing_opens(patched, disk, verb)
            while True:
                try:
                    sent.append(store.append(sends(store, range(1)), HOST, 1000))
                except StoreFull:
                    break
                if len(sent) > 20:
                    break
        sent.append(store.append(sends(store, range(1)), HOST, 1000))
    assert [place[2] for ((place),) in sent] == list(range(len(sent)))
    assert len(store.reader.entries("t", 0, store.max_physical_offset)[0].sizes) == len(sent)


def test_missing_descriptor_is_taken_from_the_least_used_queue(
    open_store: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    disk, held = store.disk, 4
    mapped: list[Path] = []
    real = disk.map

    def bounded(path: Path, size: int) -> Any:
        if store.queues.mapped_files >= held:
            raise OutOfDescriptors(errno.EMFILE, "too many open files", str(path))
        mapped.append(path)
        return real(path, size)

    monkeypatch.setattr(disk, "map", bounded)
    for number in range(12):
        store.append(sends(store, range(number, number + 1)), HOST, 1000)
    assert store.queues.mapped_files <= held
    assert sum(map(len, queues(store))) == 12
