"""Writes of the key-value table that overlap, because who asked for the first one left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from infra.disk import RealDisk
from namesrv.kv_config_manager import KvConfigManager


class SlowDisk(RealDisk):
    """Its first write waits for `go`; two at a time are noticed."""

    def __init__(self) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.writing, self.overlapped = 0, False

    def write_atomic(self, path: Path, data: bytes) -> None:
        self.writing += 1
        self.overlapped |= self.writing > 1
        self.began.set()
        assert self.go.wait(20)
        super().write_atomic(path, data)
        self.writing -= 1


def test_a_write_whose_asker_left_neither_meets_nor_overwrites_the_next(tmp_path: Path) -> None:
    disk, path = SlowDisk(), tmp_path / "kv.json"

    async def main() -> None:
        manager = KvConfigManager(path, disk)
        first = asyncio.create_task(manager.put("n", "a", "1"))
        await asyncio.to_thread(disk.began.wait, 20)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.create_task(manager.put("n", "b", "2"))
        asyncio.get_running_loop().call_later(0.2, disk.go.set)
        await second

    asyncio.run(main())
    assert not disk.overlapped
    again = KvConfigManager(path, RealDisk())
    again.load()
    assert again.get("n", "b") == "2"
