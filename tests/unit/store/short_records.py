"""Short records of equal size."""

from __future__ import annotations

from typing import Any

from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from neve.record.codec import encode_record
from tests.kit.store.replicas import open_store
from tests.kit.store.sim_disk import SimDisk


def record(at: int, offset: int, **changes: Any) -> bytes:
    values: dict[str, Any] = {
        "topic": b"t", "body": b"body", "properties": b"KEYS\x01k\x02", "queue_id": 0, "flag": 0,
        "queue_offset": offset, "physical_offset": at, "sys_flag": 0, "born_timestamp": 1, "born_host": ("10.0.0.1", 1),
        "store_timestamp": 10 + offset, "store_host": ("10.0.0.2", 1),
    }  # fmt: skip
    return encode_record(**(values | changes))


SIZE = len(record(0, 0))


def short(disk: SimDisk, count: int, **changes: Any) -> MessageStore:
    store = open_store(disk, ManualClock(), following=True, **changes)
    for number in range(count):
        store.replica.append(record(SIZE * number, number), SIZE * number)
    return store
