"""Tests that the log of a slave refuses every local write with a reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from broker.store.errors import StoreFull, StoreNotWritable
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from tests.kit.store.sim_disk import SimDisk

Open = Callable[..., MessageStore]
Put = Callable[..., Any]
HOST = ("10.0.0.1", 7)


def owed_of(store: MessageStore) -> Callable[[], None]:
    queue = store.queue_for("t", 0)

    def append() -> None:
        store.append([(queue, b"", b"", 0, "", 0, 0, 1, 0, 0)], HOST, 1)

    return append


def both(store: MessageStore, put: Put) -> None:
    put(store, beside=(store.queue_for("t", 0), b"", b"", 0, "", 0, 0, 1, 0, 0))


DOORS: dict[str, Callable[[MessageStore, Put], object]] = {
    "put": lambda store, put: put(store),
    "put to a new queue": lambda store, put: put(store, topic="new"),
    "append": lambda store, _: owed_of(store)(),
    "append_both": both,
    "put_first": lambda store, _: store.end.put_first(owed_of(store)),
    "roll": lambda store, _: store.end.roll(),
    "go on after what was lost": lambda store, _: store.restart_log_at(store.max_physical_offset + 1),
    "a queue that goes on higher": lambda store, _: store.queue_changes.create_queue_at("t", 0, 100),
    "another's queues": lambda store, _: store.queue_changes.restore_queues({"t": {0: 100}}, {}),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("was_master", [True, False])
def test_slave_refuses_all_local_writes(
    open_store: Open, put: Put, disk: SimDisk, clock: ManualClock, door: str, was_master: bool
) -> None:
    store = open_store()
    put(store)
    if was_master:
        store.follow()
    else:
        store.shutdown()
        store = MessageStore(store.config, disk, clock)
        store.load(following=True)
    clock.advance(60_000)
    before = (
        store.max_physical_offset, store.reader.segments(), store.queues.following(), store.end.last_time,
        disk.list_dir(Path("/store/commitlog")),
    )  # fmt: skip
    for _ in range(2):
        with pytest.raises(StoreNotWritable, match="slave: its log accepts only records of its master"):
            DOORS[door](store, put)
    assert before == (
        store.max_physical_offset, store.reader.segments(), store.queues.following(), store.end.last_time,
        disk.list_dir(Path("/store/commitlog")),
    )  # fmt: skip
    store.lead()
    assert put(store).queue_offset == 1


def test_pending_first_record_is_dropped_on_demotion(open_store: Open, put: Put, clock: ManualClock) -> None:
    """The new master may have stored the pending record already."""
    store = open_store()
    put(store)

    def no_room() -> None:
        raise StoreFull("no room")

    store.end.put_first(no_room)
    with pytest.raises(StoreFull):
        put(store)
    store.follow()
    store.lead()
    assert put(store).queue_offset == 1


def test_refused_put_does_not_change_store_times(open_store: Open, put: Put, clock: ManualClock) -> None:
    store = open_store()
    newest = put(store).store_timestamp
    store.follow()
    for hours in (1, -1):
        clock.set_wall(newest + hours * 3_600_000)
        with pytest.raises(StoreNotWritable):
            put(store)
    assert (store.end.last_time, store.end.steps_back) == (newest, 0)


def test_slave_with_failed_disk_reports_the_failure(open_store: Open, put: Put, disk: SimDisk) -> None:
    store = open_store()
    put(store)
    store.follow()
    disk.fail_sync = lambda _path: True
    with pytest.raises(StoreNotWritable, match="sync to the disk failed"):
        store.visibility.flush()
    for ask in (store.lead, lambda: store.replica.append(b"", store.max_physical_offset), lambda: put(store)):
        with pytest.raises(StoreNotWritable, match="the disk failed"):
            ask()
