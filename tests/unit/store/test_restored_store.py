"""An empty store that goes on where another ended: no offset below is ever given, whenever the power goes."""

from __future__ import annotations

import pytest

from broker.store.data_directory import clear_store
from broker.store.errors import StoreNotWritable
from broker.store.message_store import MessageStore
from infra import failpoint
from infra.clock import ManualClock
from infra.failpoint import FailpointError
from tests.doubles.sim_disk import SimDisk
from tests.unit.store.conftest import put_one, small_config

ROOT = small_config().root
LOG_START = 1 << 41
FOLLOWING = {"t": {0: 10_000_008, 3: 10_000_000}, "u": {1: 10_000_400}}  # 400 * 20 = 8000: where a queue file would end
ENDED = {"gone": {0: 77}}


def opened(disk: SimDisk) -> MessageStore:
    store = MessageStore(small_config(), disk, ManualClock())
    store.load()
    return store


def restore(store: MessageStore) -> None:
    if store.max_physical_offset < LOG_START:
        store.restart_log_at(LOG_START)
    store.restore_queues(FOLLOWING, ENDED)


def check(store: MessageStore) -> None:
    for topic, ends in FOLLOWING.items():
        for queue_id, end in ends.items():
            assert store.following_offsets()[topic][queue_id] >= end
            assert store.min_offset(topic, queue_id) >= end, "nothing below is local: it is read cold"
            stored = put_one(store, topic, queue_id)
            assert stored.queue_offset >= end
            assert stored.physical_offset >= LOG_START
    assert put_one(store, "gone", 0).queue_offset >= 77


def test_a_restored_store_goes_on_above_and_starts_again() -> None:
    disk = SimDisk()
    store = opened(disk)
    restore(store)
    assert store.following_offsets() == {**FOLLOWING, **ENDED}
    restore(store)  # a second time changes nothing
    assert store.following_offsets() == {**FOLLOWING, **ENDED}
    check(store)
    store.shutdown()
    again = opened(disk)
    assert again.following_offsets()["t"][0] == 10_000_009
    check(again)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("place", ["store.roll", "store.checkpoint", "none"])
def test_a_power_cut_in_the_middle_of_a_restore_is_made_good_by_the_next_try(place: str, seed: int) -> None:
    for nth in range(1, 4):
        disk = SimDisk(seed=seed)
        store = opened(disk)
        try:
            with failpoint.armed(place, nth=nth):
                restore(store)
        except (FailpointError, StoreNotWritable):
            disk = disk.power_cut()
            clear_store(ROOT, disk)
            disk = disk.power_cut()
            clear_store(ROOT, disk)  # which the power may have cut as well
            store = opened(disk)
            restore(store)
        disk = disk.power_cut()  # the restore had ended: what it made is on the disk
        store = opened(disk)
        check(store)
        store.after_flush(store.flush())
        again = opened(disk.power_cut())
        check(again)
