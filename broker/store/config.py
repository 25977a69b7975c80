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
    """The code of an ordinary message's entry."""
    return tags_code(record.properties.get(PROPERTY_TAGS))


@dataclass(slots=True)
class StoreConfig:
    """What a store needs to know. Sizes in bytes, times in milliseconds."""

    root: Path
    commit_log_file_size: int = 1 << 30
    flush_disk_type: str = ASYNC_FLUSH
    store_host: tuple[str, int] = ("127.0.0.1", 10911)
    # The most that a broker can be set to let in. Its own limit is asked of clients, when they send: what is in the log
    # already (a delayed message, a half, a retry) is copied whatever that limit is by then.
    max_message_size: int = 15 << 20
    queue_file_size: int = 6_000_000
    queue_first_step: int = 64 << 10
    mapped_queue_files: int = 8192
    index_enabled: bool = True
    index_slots: int = 500_000
    index_entries: int = 2_000_000
    # recovery re-reads the log from the last checkpoint: these bound its work
    checkpoint_bytes: int = 256 << 20
    checkpoint_interval: int = 10_000
    # entries that one filtered read may look at
    scan_entries: int = 16_000
    # an entry's code made anew, where a power cut left the record of an unflushed send and not the code, and on a slave
    code_of: Callable[[MessageRecord], int] = code_of_tags
    # of a slave whose master is Apache's: a topic that is deleted and made again there has its offsets from 0 on
    queues_may_begin_again: bool = False
    # topics of which that is not the code of the tags alone
    coded_topics: frozenset[str] = frozenset()
