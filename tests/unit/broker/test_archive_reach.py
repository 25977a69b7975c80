"""The archivable limit of a master in a broker set, over a real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.archiving.archivable_limit import ArchivableLimit
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from tests.kit.store.sim_disk import SimDisk


class OtherMembers:
    """The other members of the set."""

    def __init__(self) -> None:
        self.synced = 0

    def archivable(self, synced: int) -> int:
        return min(synced, self.synced)

    def appended(self) -> None:
        raise AssertionError("no job here does")

    def deposed(self) -> None:
        raise AssertionError("nobody is")


def put(store: MessageStore, count: int) -> list[int]:
    """Append messages and return the ends of their records."""
    ends = []
    for _ in range(count):
        found = store.put("t", 0, b"body", b"", flag=0, sys_flag=0, born_timestamp=0, born_host=("127.0.0.1", 1))
        ends.append(found.physical_offset + found.size)
    return ends


@pytest.fixture
def store() -> Iterator[MessageStore]:
    config = StoreConfig(Path("/store"), commit_log_file_size=1 << 20, index_slots=64, index_entries=100)
    made = MessageStore(config, SimDisk(), ManualClock())
    made.load(confirmed=0)
    yield made
    made.shutdown()


def synced(store: MessageStore) -> int:
    store.after_flush(store.visibility.flush())
    return store.visibility.flushed


def test_archivable_limit_of_a_standalone_broker_is_its_flushed_offset(store: MessageStore) -> None:
    put(store, 3)
    assert ArchivableLimit(store).within(synced(store)) == synced(store)
    assert ArchivableLimit(store).is_settled(0)


def test_archivable_limit_is_the_end_of_whole_fsynced_confirmed_records(store: MessageStore) -> None:
    members, ends = OtherMembers(), put(store, 5)
    limit = ArchivableLimit(store, members)
    store.visibility.confirm(ends[3])
    members.synced = ends[4]
    assert limit.within(synced(store)) == ends[3], "what is not confirmed is not seen by the round"
    members.synced = ends[1] + 7
    assert limit.within(synced(store)) == ends[1], "it would take the record whose tail only this disk has"
    assert (
        store.reader.entries("t", 0, ends[1])[0].first_offset + len(store.reader.entries("t", 0, ends[1])[0].sizes) == 2
    )
    members.synced = -1
    assert limit.within(synced(store)) == 0


def test_new_master_archives_nothing_until_the_set_has_its_promotion_log(store: MessageStore) -> None:
    members, ends = OtherMembers(), put(store, 3)
    limit = ArchivableLimit(store, members)
    limit.lead()
    members.synced = ends[2]
    store.visibility.confirm(ends[1])
    assert (limit.within(synced(store)), limit.is_settled(synced(store))) == (0, False)
    store.visibility.confirm(ends[2])
    members.synced = ends[1]
    assert (limit.within(synced(store)), limit.is_settled(synced(store))) == (0, False)
    members.synced = ends[2]
    assert (limit.within(synced(store)), limit.is_settled(synced(store))) == (ends[2], True)
