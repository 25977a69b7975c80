"""The newest own record of a queue of an internal topic, behind records that no neve broker wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from broker.intake.internal_records import WRITTEN_BY_NEVE, InternalRecords
from broker.store import message_store
from broker.store.config import StoreConfig
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.loop.in_steps import Steps
from neve.record.codec import MessageRecord

TOPIC, QUEUE = "rmq_sys_neve", 1
DAMAGED = b"damaged"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[MessageStore]:
    opened = MessageStore(StoreConfig(tmp_path, store_host=("127.0.0.1", 1)), RealDisk(), ManualClock())
    opened.load()
    yield opened
    opened.shutdown()


def put(store: MessageStore, body: bytes, *, own: bool) -> None:
    proof = WRITTEN_BY_NEVE if own else 0
    store.put(TOPIC, QUEUE, body, b"", flag=0, sys_flag=0, born_timestamp=0, born_host=("127.0.0.1", 1),
              prepared_transaction_offset=proof)  # fmt: skip


def put_foreign(store: MessageStore, count: int) -> None:
    for _ in range(count):
        put(store, b"x", own=False)


def body_of(record: MessageRecord) -> bytes | None:
    return None if record.body == DAMAGED else record.body


def last(records: InternalRecords) -> bytes | None:
    return records.last(TOPIC, QUEUE, body_of)


def turns(steps: Steps[bytes | None]) -> tuple[int, bytes | None]:
    """Return the number of yields of the steps, and their result."""
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


def test_newest_own_record_is_found_before_foreign_ones_in_bounded_turns(store: MessageStore) -> None:
    put(store, b"own", own=True)
    put_foreign(store, 1500)
    count, found = turns(InternalRecords(store).last_steps(TOPIC, QUEUE, body_of))
    assert found == b"own"
    assert count == 4, "one record, then at most 512 in each turn"


def test_foreign_records_are_read_once(store: MessageStore) -> None:
    records = InternalRecords(store)
    assert last(records) is None
    put(store, b"own", own=True)
    put_foreign(store, 700)
    assert [last(records) for _ in range(3)] == [b"own"] * 3
    assert records.ignored[TOPIC] == 700
    put_foreign(store, 2)
    assert last(records) == b"own"
    assert records.ignored[TOPIC] == 702
    put(store, b"newer", own=True)
    put_foreign(store, 1)
    assert last(records) == b"newer"


def test_damaged_own_record_is_ignored_and_the_one_before_it_counts(store: MessageStore) -> None:
    records = InternalRecords(store)
    put(store, b"own", own=True)
    put(store, DAMAGED, own=True)
    assert last(records) == b"own"
    assert records.ignored[TOPIC] == 1


def test_truncated_record_is_not_the_newest(store: MessageStore) -> None:
    records = InternalRecords(store)
    put(store, b"stays", own=True)
    border = store.max_physical_offset
    put(store, b"is cut", own=True)
    assert last(records) == b"is cut"
    store.follow()
    store.truncate(border, epoch=1, floor=border)
    store.lead()
    put_foreign(store, 1)
    assert last(records) == b"stays"


def test_record_read_during_a_truncation_is_not_cached(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The queues of a truncation are hidden in several turns. A search between two of them finds truncated records."""
    monkeypatch.setattr(message_store, "_QUEUES_AT_ONCE", 1)
    records = InternalRecords(store)
    put(store, b"stays", own=True)
    border = store.max_physical_offset
    store.put("other", 0, b"", b"", flag=0, sys_flag=0, born_timestamp=0, born_host=("127.0.0.1", 1))
    put(store, b"is cut", own=True)
    store.follow()
    found = []
    for part in store.truncation(border, epoch=1, floor=border):
        part()
        if store.queues.max_offset(TOPIC, QUEUE) == 2:
            found.append((store.truncations.count, last(records)))
    assert len({cuts for cuts, _ in found}) == 2, "before the cut, and amid it"
    store.lead()
    put_foreign(store, 3)
    assert last(records) == b"stays"
