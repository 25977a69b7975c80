"""Two stores, one of which copies the other."""

from __future__ import annotations

import random

from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from tests.kit.store.replicas import open_store
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one

TOPIC, QUEUES = "t", 3


class MasterAndSlave:
    """A master that recreates topics, and a slave that gets only its log."""

    def __init__(self, seed: int = 0, *, may: bool = True) -> None:
        self.dice, self.clock = random.Random(seed), ManualClock()
        self.master = open_store(SimDisk(seed=seed), self.clock)
        self.disk, self._may = SimDisk(seed=seed + 1), may
        self.slave = self._open()

    def _open(self) -> MessageStore:
        return open_store(self.disk, self.clock, following=True, queues_may_restart_at_zero=self._may)

    def put(self, queue: int, body: bytes = b"m", topic: str = TOPIC) -> None:
        put_one(self.master, topic, queue, body)

    def recreate(self) -> None:
        self.master.queue_changes.delete_topic(TOPIC, restart_at_zero=True)

    def pass_on(self, most: int = 1 << 30) -> None:
        while most > 0:
            start = self.slave.replica.next_offset if self.slave.reader.segments() else 0
            at, data = self.master.log_bytes(start, 1 << 62, min(most, self.dice.choice((50, 700, 1 << 20))))
            if not data:
                return
            self.slave.replica.append(data, at)
            most -= len(data)

    def kill(self) -> None:
        self.slave.abandon()
        self.slave = self._open()

    def power_cut(self) -> None:
        self.disk = self.disk.power_cut()
        self.slave = self._open()
