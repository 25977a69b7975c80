"""A store with files so small that a few messages roll them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore, PutResult

OpenStore = Callable[..., MessageStore]
PutOne = Callable[..., PutResult]


def small_config(**changes: Any) -> StoreConfig:
    values: dict[str, Any] = {
        "root": Path("/store"),
        "commit_log_file_size": 16384,
        "queue_first_step": 4096,
        "queue_file_size": 8000,
        "index_slots": 64,
        "index_entries": 256,
    }
    return StoreConfig(**(values | changes))


def put_one(
    store: MessageStore, topic: str = "t", queue_id: int = 0, body: bytes = b"body", **changes: Any
) -> PutResult:
    values: dict[str, Any] = {
        "flag": 0,
        "sys_flag": 0,
        "born_timestamp": 1,
        "born_host": ("10.1.2.3", 4000),
    }
    properties = changes.pop("properties", b"")
    if changes.get("keys") and not properties:
        properties = b"KEYS\x01" + changes["keys"].encode() + b"\x02"
    if changes.get("unique_key") and b"UNIQ_KEY" not in properties:
        properties += b"UNIQ_KEY\x01" + changes["unique_key"].encode() + b"\x02"
    return store.put(topic, queue_id, body, properties, **(values | changes))
