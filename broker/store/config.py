"""Settings of the local store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from neve.record.codec import MessageRecord
from neve.record.properties import PROPERTY_TAGS, tags_code

ASYNC_FLUSH = "ASYNC_FLUSH"
SYNC_FLUSH = "SYNC_FLUSH"


def code_of_tags(record: MessageRecord) -> int:
    """Return the tags code of an ordinary message's consume queue entry."""
    return tags_code(record.properties.get(PROPERTY_TAGS))


@dataclass(slots=True)
class StoreConfig:
    """Settings of the store. Sizes are in bytes, times in milliseconds."""

    root: Path
    commit_log_file_size: int = 1 << 30
    flush_disk_type: str = ASYNC_FLUSH
    store_host: tuple[str, int] = ("127.0.0.1", 10911)
    # The highest limit that a broker can be configured with. The broker's own limit applies only to sends of clients.
    # Messages in the log (delayed, half, retry) are copied even if they exceed a limit that was lowered since.
    max_message_size: int = 15 << 20
    queue_file_size: int = 6_000_000
    queue_first_step: int = 64 << 10
    mapped_queue_files: int = 8192
    index_enabled: bool = True
    index_slots: int = 500_000
    index_entries: int = 2_000_000
    # these limit the work of recovery, which reads the log from the last checkpoint
    checkpoint_bytes: int = 256 << 20
    checkpoint_interval: int = 10_000
    # entries that one filtered read may examine
    scan_entries: int = 16_000
    # computes the tags code of an entry again: on a slave, and after a power cut that kept an unflushed record but lost
    # its code
    code_of: Callable[[MessageRecord], int] = code_of_tags
    # on a slave of an Apache master, where a topic that is deleted and created again restarts at offset 0
    queues_may_restart_at_zero: bool = False
    # topics whose code is not the hash of the tags alone
    coded_topics: frozenset[str] = frozenset()
