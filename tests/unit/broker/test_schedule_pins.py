"""Delay levels pin the log segments of pending messages, whatever the saved delivery progress is."""

from __future__ import annotations

import json
from pathlib import Path

from broker.intake.log_writer import LogWriter
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from broker.waiting.schedule_message import ScheduleMessage
from infra.clock import SystemClock
from infra.disk.filesystem import RealDisk
from infra.loop.supervisor import Faults
from neve.remoting.names import SCHEDULE_TOPIC
from tests.kit.broker.synced import nothing_to_sync


def test_pending_messages_are_pinned_if_the_progress_is_below_the_log(tmp_path: Path) -> None:
    """The progress is saved periodically. After a kill it may refer to delivered and evicted messages."""
    store = MessageStore(StoreConfig(tmp_path / "store", commit_log_file_size=1 << 16), RealDisk(), SystemClock())
    store.load()
    places = []
    for number in range(5):
        if number == 3:
            store.end.roll()
        put = store.put(SCHEDULE_TOPIC, 0, b"m", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("127.0.0.1", 1))
        places.append(put.physical_offset)
    store.after_flush(store.visibility.flush())
    store.take_out(0)()
    positions = tmp_path / "delayOffset.json"
    positions.write_text(json.dumps({"offsetTable": {"1": 1}}))
    schedule = ScheduleMessage(
        store,
        LogWriter(store),
        SystemClock(),
        [60_000],
        RealDisk(),
        positions,
        nothing_to_sync,
        Faults(),
        read_queues=lambda topic: 8,
    )
    schedule.load()
    assert schedule.oldest_pending_physical() == places[3]
    store.shutdown()
