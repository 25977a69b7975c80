"""A topic that a send creates is on disk before the send can be acknowledged; an older image never replaces a newer."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from broker.state_file import StateFile
from broker.topic_config_manager import TopicConfigManager, system_topics
from infra.clock import ManualClock
from infra.disk import RealDisk


def manager(path: Path) -> TopicConfigManager:
    return TopicConfigManager(RealDisk(), path, ManualClock(1))


def test_a_created_topic_is_there_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "topics.json"
    topics = manager(path)
    topics.ensure_system(system_topics("b", "c", auto_create=True, queues=8, trace=False))
    assert topics.create_in_send("orders", "TBW102", 4, enabled=True) is not None
    topics.create_plain("%RETRY%g", 1)

    after_kill = manager(path)
    after_kill.load()
    orders, retry = after_kill.select("orders"), after_kill.select("%RETRY%g")
    assert orders is not None
    assert orders.write_queue_nums == 4
    assert retry is not None


class SlowDisk(RealDisk):
    """Its first write waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go = threading.Event(), threading.Event()
        self._first = True

    def write_atomic(self, path: Path, data: bytes) -> None:
        if self._first:
            self._first = False
            self.begun.set()
            assert self.go.wait(10)
        super().write_atomic(path, data)


def test_a_slow_write_under_way_does_not_replace_what_came_after_it(tmp_path: Path) -> None:
    disk, table = SlowDisk(), {"n": 1}
    file = StateFile(disk, tmp_path / "state.json", lambda: dict(table))

    async def run() -> None:
        file.touch()
        slow = asyncio.create_task(file.save())
        assert await asyncio.to_thread(disk.begun.wait, 10)
        table["n"] = 2
        file.touch()
        now = asyncio.create_task(asyncio.to_thread(file.save_now))
        disk.go.set()
        await asyncio.gather(slow, now)

    asyncio.run(run())
    assert file.load()["n"] == 2
    assert not file.dirty
