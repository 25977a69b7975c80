"""Tests of concurrent writes of the key-value table."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest

from infra.disk.filesystem import RealDisk
from namesrv import kv_config_manager
from namesrv.kv_config_manager import KvConfigManager
from neve.errors import BrokerError
from tests.kit.store.gated_disk import GatedDisk


async def test_cancelled_write_does_not_overlap_or_overwrite_the_next(tmp_path: Path) -> None:
    disk, path = GatedDisk(is_open=False), tmp_path / "kv.json"

    manager = KvConfigManager(path, disk)
    first = asyncio.create_task(manager.put("n", "a", "1"))
    await asyncio.to_thread(disk.began.wait, 20)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(manager.put("n", "b", "2"))
    asyncio.get_running_loop().call_later(0.2, disk.go.set)
    await second
    assert not disk.overlapped
    again = KvConfigManager(path, RealDisk())
    again.load()
    assert again.get("n", "b") == "2"


async def test_pending_changes_share_one_write_of_their_namespaces(tmp_path: Path) -> None:
    disk, path = GatedDisk(is_open=False), tmp_path / "kv.json"

    manager = KvConfigManager(path, disk)
    first = asyncio.create_task(manager.put("other", "a", "1"))
    await asyncio.to_thread(disk.began.wait, 20)
    many = [asyncio.create_task(manager.put("n", f"k{number}", "v")) for number in range(500)]
    many.append(asyncio.create_task(manager.delete("n", "k7")))
    await asyncio.to_thread(len, b"")  # the tasks begin meanwhile
    assert manager.namespace("n") is None, "visible once it is durable"
    disk.go.set()
    await asyncio.gather(first, *many)
    assert disk.writes == 2
    untouched = manager.namespace("other")
    await manager.put("n", "last", "v")
    assert manager.namespace("other") is untouched
    assert len(manager.namespace("n") or {}) == 500
    again = KvConfigManager(path, RealDisk())
    again.load()
    assert again.get("n", "k7") is None
    assert again.get("n", "k499") == "v"


async def test_failed_write_raises_for_its_callers_and_the_next_succeeds(tmp_path: Path) -> None:
    disk, path = GatedDisk(), tmp_path / "kv.json"

    manager = KvConfigManager(path, disk)
    await manager.put("n", "a", "1")
    disk.fault = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space"):
        await manager.put("n", "b", "2")
    assert manager.get("n", "b") is None
    disk.fault = None
    await manager.put("n", "c", "3")
    assert dict(manager.namespace("n") or {}) == {"a": "1", "c": "3"}


async def test_table_is_bounded_in_entries_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_config_manager, "MAX_ENTRIES", 3)
    monkeypatch.setattr(kv_config_manager, "MAX_BYTES", 100)

    manager = KvConfigManager(tmp_path / "kv.json", RealDisk())
    for wrong in (("n" * 1025, "k", "v"), ("n", "k" * 1025, "v"), ("n", "k", "v" * 65537), ("n", "k", "v" * 99)):
        with pytest.raises(BrokerError):
            await manager.put(*wrong)
    for _ in range(5):
        await manager.put("n", "same", "v")  # replaced, not added
    await manager.put("n", "b", "v")
    await manager.put("n", "c", "v")
    with pytest.raises(BrokerError, match="full"):
        await manager.put("n", "d", "v")
    await manager.put("n", "c", "replaced")
    await manager.delete("n", "b")
    await manager.put("n", "d", "v")
