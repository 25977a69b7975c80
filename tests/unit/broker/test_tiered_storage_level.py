"""`tieredStorageLevel` decides which tier answers for messages that both tiers have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from broker.config import BrokerConfig
from broker.reading.tiered_store import PendingRead, TieredStore
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from broker.store.reading import GetResult
from infra.clock import SystemClock
from infra.config.properties import ConfigError, load
from infra.disk.filesystem import RealDisk
from neve.remoting.codes import GetMessageStatus
from tiered.read.cold_reader import ColdResult, ColdUnavailable
from tiered.read.read_request import ReadRequest

ARCHIVED, ROLLED_AT, COUNT = 30, 20, 40


class FullArchive:
    """Has offsets 0 to 29 of each queue, and returns recognizable results."""

    def __init__(self) -> None:
        self.down = False

    def has(self, topic: str, queue_id: int, offset: int) -> bool:
        return 0 <= offset < ARCHIVED

    def min_offset(self, topic: str, queue_id: int) -> int:
        return 0

    def at_hand(self, *asked: object) -> None:
        """Return nothing: no object is in memory."""

    def locate(self, read: ReadRequest) -> ColdResult:
        if self.down:
            raise ColdUnavailable("no answer")
        return ColdResult(GetMessageStatus.FOUND, read.offset + 1, [memoryview(b"cold")], 1)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    store = MessageStore(StoreConfig(tmp_path / "s", commit_log_file_size=1 << 16), RealDisk(), SystemClock())
    store.load()
    for number in range(COUNT):
        if number == ROLLED_AT:
            store.end.roll()
        store.put("T", 0, b"hot", b"", flag=0, sys_flag=0, born_timestamp=1, born_host=("127.0.0.1", 1))
    store.after_flush(store.visibility.flush())
    yield store
    store.shutdown()


def tiered(store: MessageStore, level: str | None) -> TieredStore:
    found = TieredStore(store, load(BrokerConfig, None, [] if level is None else [f"tieredStorageLevel={level}"]))
    archive: Any = FullArchive()
    found.attach(archive)
    return found


def answered_hot(both: TieredStore) -> list[int]:
    return [offset for offset in range(COUNT + 1) if is_hot(both, offset)]


def is_hot(both: TieredStore, offset: int) -> bool:
    """Return whether the local log answers from memory, without a wait."""
    return isinstance(both.get_message(ReadRequest("g", "T", 0, offset, 1, 1000)), GetResult)


@pytest.mark.parametrize(
    ("level", "hot_from", "hot_from_once_evicted"),
    [
        ("DISABLE", 0, 0),
        ("NOT_IN_DISK", 0, ROLLED_AT),
        (None, 0, ROLLED_AT),
        ("NOT_IN_MEM", ROLLED_AT, ROLLED_AT),
        ("FORCE", ARCHIVED, ARCHIVED),
    ],
)
def test_level_decides_which_tier_answers(
    store: MessageStore, level: str | None, hot_from: int, hot_from_once_evicted: int
) -> None:
    both = tiered(store, level)
    assert answered_hot(both) == list(range(hot_from, COUNT + 1))
    store.take_out(0)()
    assert store.queues.min_offset("T", 0) == ROLLED_AT
    assert answered_hot(both) == list(range(hot_from_once_evicted, COUNT + 1))
    assert both.min_offset("T", 0) == (ROLLED_AT if level == "DISABLE" else 0)


def test_level_changes_on_a_running_broker(store: MessageStore) -> None:
    config = load(BrokerConfig, None, ["tieredStorageLevel=FORCE"])
    both = TieredStore(store, config)
    archive: Any = FullArchive()
    both.attach(archive)
    assert not is_hot(both, 0)
    config.tiered_storage_level = "NOT_IN_DISK"
    assert is_hot(both, 0)


def test_forced_read_falls_back_to_the_local_log_when_the_archive_is_down(store: MessageStore) -> None:
    archive: Any = FullArchive()
    both = TieredStore(store, load(BrokerConfig, None, ["tieredStorageLevel=FORCE"]))
    both.attach(archive)

    async def read() -> GetResult:
        answer = both.get_message(ReadRequest("g", "T", 0, 3, 1, 1000))
        assert isinstance(answer, PendingRead)
        return await answer

    first = asyncio.run(read())
    assert bytes(first.buffers[0]) == b"cold"
    archive.down = True
    second = asyncio.run(read())
    assert (second.status, second.next_offset) == (GetMessageStatus.FOUND, 4)
    assert b"hot" in bytes(second.buffers[0])
    both.close()


def test_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="NOT_IN_DISK"):
        load(BrokerConfig, None, ["tieredStorageLevel=ALWAYS"])
