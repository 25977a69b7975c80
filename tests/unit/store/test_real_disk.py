"""Tests that the real disk behaves like the simulated one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.store.message_store import MessageStore
from infra.disk.filesystem import DiskLocked, RealDisk, Room

Open = Callable[..., MessageStore]
Put = Callable[..., Any]


def test_preallocated_file_has_its_blocks_and_is_created_once(tmp_path: Path) -> None:
    disk, path = RealDisk(), tmp_path / "file"
    disk.create_preallocated(path, 8192)
    assert path.stat().st_blocks * 512 >= 8192
    view = disk.map(path, 8192)
    view[0:2] = b"ab"
    disk.grow(path, 16384)
    disk.fdatasync(path)
    assert disk.read_at(path, 0, 3) == b"ab\0"
    assert disk.size(path) == 16384
    with pytest.raises(FileExistsError):
        disk.create_preallocated(path, 1)
    with pytest.raises(OSError, match="shorter"):
        disk.map(path, 1 << 20)


def test_atomic_write_append_and_names(tmp_path: Path) -> None:
    disk = RealDisk()
    disk.make_dirs(tmp_path / "a" / "b")
    disk.write_atomic(tmp_path / "x", b"one")
    disk.write_atomic(tmp_path / "x", b"two")
    disk.append(tmp_path / "x", b"+")
    assert disk.read(tmp_path / "x") == b"two+"
    disk.rename(tmp_path / "x", tmp_path / "y")
    assert disk.list_dir(tmp_path) == ["a", "y"]
    disk.remove(tmp_path / "y")
    assert not disk.exists(tmp_path / "y")


def test_disk_usage_ignores_reserved_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    # 1000 blocks: 300 free, 100 of them available to users
    reserved = os.statvfs_result((4096, 4096, 1000, 300, 100, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: reserved)
    room = RealDisk().room(Path("/data"))
    assert room == Room(700 * 4096, 100 * 4096)
    assert room.used_ratio == 0.875
    assert Room(0, 0).used_ratio == 0.0


def test_disk_lock_is_exclusive(tmp_path: Path) -> None:
    disk = RealDisk()
    release = disk.lock(tmp_path / "lock")
    with pytest.raises(DiskLocked):
        disk.lock(tmp_path / "lock")
    release()
    disk.lock(tmp_path / "lock")()


def test_store_with_real_threads_reads_back_after_unclean_stop(open_store: Open, put: Put, tmp_path: Path) -> None:
    store = open_store(RealDisk(), root=tmp_path, flush_disk_type="SYNC_FLUSH", checkpoint_bytes=4000)
    for _ in range(20):
        for _ in range(50):
            put(store, body=b"x" * 100)
        flushed: list[int] = []
        threads = [
            threading.Thread(target=lambda: flushed.append(store.visibility.flush())),  # noqa: B023 - joined in the round
            threading.Thread(target=store.upkeep),
            threading.Thread(target=store.prepare_next),
        ]
        for thread in threads:
            thread.start()
        for _ in range(50):
            put(store, body=b"y" * 100)
        for thread in threads:
            thread.join(30)
        store.after_flush(flushed[0])
    store.after_flush(store.visibility.flush())
    assert store.queues.max_offset("t", 0) == 2000
    for segment in store.reader.segments()[:3]:
        store.take_out(segment.base)()
    store.abandon()  # an unclean stop
    again = open_store(RealDisk(), root=tmp_path)
    assert again.queues.max_offset("t", 0) == 2000
    assert again.queues.min_offset("t", 0) > 0
    again.shutdown()
