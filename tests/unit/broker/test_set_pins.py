"""A member of a set keeps all segments that it would need if its unconfirmed tail were truncated."""

from __future__ import annotations

from broker.archiving.pins import SetPins
from broker.store.message_store import MessageStore
from infra.clock import ManualClock
from tests.kit.store.replicas import open_store
from tests.kit.store.sim_disk import SimDisk
from tests.kit.store.small_store import put_one
from tests.unit.broker.archive_members import Pins


def member(*, following: bool = False) -> tuple[MessageStore, Pins, SetPins]:
    store, pins = open_store(SimDisk(), ManualClock(), following=following, confirmed=0), Pins()
    return store, pins, SetPins(store, pins)


def test_pin_is_released_only_once_the_delivery_is_confirmed() -> None:
    store, waiting, pins = member()
    put_one(store, "t", 0, b"a timer, say")
    first_end = store.max_physical_offset
    waiting.at = 0
    store.visibility.confirm(first_end)
    assert pins.lowest() == 0
    put_one(store, "t", 0, b"its delivery, which no slave has yet")
    waiting.at = None
    assert pins.lowest() == 0, "was the delivery cut off, it would wait again"
    store.visibility.confirm(store.max_physical_offset)
    assert pins.lowest() == store.max_physical_offset


def test_eviction_frontier_advances_although_the_newest_is_unconfirmed() -> None:
    store, waiting, pins = member()
    seen = []
    for _ in range(5):
        before = store.max_physical_offset
        put_one(store, "t", 0, b"x")
        waiting.at = before
        seen.append(pins.lowest())
        store.visibility.confirm(before)  # always one message behind
    assert seen == sorted(seen)  # type: ignore[type-var]
    assert pins.lowest() != seen[0]


def test_slaves_pin_is_the_lower_of_its_masters_and_its_own() -> None:
    _, waiting, pins = member(following=True)
    assert pins.lowest() == 0, "no frontier is known yet"
    pins.set_frontier(500)
    assert pins.lowest() == 500
    waiting.at = 200
    assert pins.lowest() == 200
