"""A delayed message waits for its delay, whatever happens to the clock meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.intake.log_writer import LogWriter
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from broker.waiting.schedule_message import ScheduleMessage
from infra.clock import ManualClock
from infra.loop.supervisor import Faults
from neve.remoting.names import SCHEDULE_TOPIC
from tests.kit.broker.synced import nothing_to_sync
from tests.kit.store.sim_disk import SimDisk

DAY = 86_400_000
DELAY = 5_000


class Delays:
    def __init__(self) -> None:
        self.clock = ManualClock()
        disk, root = SimDisk(seed=1), Path("/store")
        small = StoreConfig(
            root, commit_log_file_size=1 << 16, index_slots=64, index_entries=100, queue_file_size=8000,
            queue_first_step=4096,
        )  # fmt: skip
        self.store = MessageStore(small, disk, self.clock)
        self.store.load()
        disk.make_dirs(root / "config")
        positions = root / "config" / "delayOffset.json"
        self.schedule = ScheduleMessage(
            self.store,
            LogWriter(self.store),
            self.clock,
            [DELAY],
            disk,
            positions,
            nothing_to_sync,
            Faults(),
            read_queues=lambda topic: 8,
        )
        self.schedule.load()

    def put(self, topic: str = SCHEDULE_TOPIC) -> None:
        self.store.put(
            topic, 0, b"m", b"REAL_TOPIC\x01orders\x02REAL_QID\x010\x02", flag=0, sys_flag=0, born_timestamp=0,
            born_host=("10.0.0.1", 1),
        )  # fmt: skip


@pytest.fixture
def delays() -> Iterator[Delays]:
    delays = Delays()
    yield delays
    delays.store.shutdown()


def test_delay_is_not_extended_by_a_clock_that_was_a_day_ahead(delays: Delays) -> None:
    right = delays.clock.now_ms()
    delays.clock.set_wall(right + DAY)
    delays.put("other")
    delays.clock.set_wall(right)
    delays.put()
    delays.clock.advance(DELAY - 1)
    assert delays.schedule.deliver_due() == 0
    delays.clock.advance(1)
    assert delays.schedule.deliver_due() == 1


def test_messages_stored_by_a_fast_clock_wait_one_delay_in_parallel(delays: Delays) -> None:
    right = delays.clock.now_ms()
    delays.clock.set_wall(right + DAY)
    for _ in range(3):
        delays.put()
    delays.clock.set_wall(right)
    delays.put()
    assert delays.schedule.deliver_due() == 0
    delays.clock.advance(DELAY - 1)
    assert delays.schedule.deliver_due() == 0, "not early: how much of the delay has passed is not known"
    delays.clock.advance(1)
    assert delays.schedule.deliver_due() == 4, "all of them together, not one delay after the other"


def test_second_clock_jump_is_handled_like_the_first(delays: Delays) -> None:
    right = delays.clock.now_ms()
    for _ in range(2):
        delays.clock.set_wall(delays.clock.now_ms() + DAY)
        delays.put()
        delays.clock.set_wall(right)
        assert delays.schedule.deliver_due() == 0
        delays.clock.advance(DELAY)
        assert delays.schedule.deliver_due() == 1
        right = delays.clock.now_ms()
