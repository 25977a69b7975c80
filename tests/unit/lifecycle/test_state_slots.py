"""Tests of the broker state in the bucket: two alternating slots, written only by the owner of the epoch."""

from __future__ import annotations

import functools

import msgspec
import pytest

from infra import failpoint
from infra.failpoint import FailpointError
from infra.objects.store import StoreUnavailable, UnknownOutcome
from lifecycle import state_keeper
from lifecycle.state_keeper import StateKeeper
from neve.archive.format import broker_state as slots
from neve.archive.format.broker_state import BrokerState, StateTooLarge, encode_state, read_slots, read_state
from neve.archive.format.envelope import seal
from neve.archive.format.journal import NewerFormat
from neve.archive.format.keys import state_key
from tests.unit.lifecycle.fakes import Rig
from tiered.journal.errors import Fenced


def at(offset: int) -> BrokerState:
    return BrokerState(
        broker="b", log_uuid="log-1", log_end=offset * 100, topics=[{"topicName": "t", "writeQueueNums": 2}],
        groups=[{"groupName": "g"}], forbidden={"g": ["u"]}, offsets={"t@g": {0: offset}},
        queues={"t": {0: offset, 1: 3}}, pending={"timers": 1},
    )  # fmt: skip


def keep(keeper: StateKeeper, offset: int) -> bool:
    return keeper.run(functools.partial(at, offset))


def newest(rig: Rig) -> int:
    state = read_state(rig.store, "b")
    assert state is not None
    return state.queues["t"][0]


def test_two_slots_alternate_and_all_fields_round_trip(rig: Rig) -> None:
    keeper = StateKeeper(rig.journal, rig.clock)
    for offset in range(5):
        assert keep(keeper, offset)
        assert newest(rig) == offset
    numbers = sorted(state.number for state in read_slots(rig.store, "b").values())
    assert numbers == [4, 5]
    found = read_state(rig.store, "b")
    stamp = {"number": 5, "epoch": 1, "time_ms": rig.clock.now_ms(), "next_seq": 1}
    assert found == msgspec.structs.replace(at(4), **stamp)


def test_unchanged_state_is_written_only_after_the_refresh_time(rig: Rig) -> None:
    keeper = StateKeeper(rig.journal, rig.clock)
    assert keep(keeper, 1)
    assert not keep(keeper, 1)
    rig.clock.advance(state_keeper.REFRESH_MS)
    assert keep(keeper, 1)


def test_stop_marks_its_state_even_if_unchanged(rig: Rig) -> None:
    keeper = StateKeeper(rig.journal, rig.clock)
    keep(keeper, 1)
    assert keeper.run_last(at(1))
    found = read_state(rig.store, "b")
    assert found is not None and found.clean
    rig.restart()
    assert keep(StateKeeper(rig.journal, rig.clock), 1)
    found = read_state(rig.store, "b")
    assert found is not None and (found.clean, found.epoch, found.number) == (False, 2, 3)


@pytest.mark.parametrize("harm", [b"", b"\x81", None])
def test_damaged_slot_is_ignored_and_written_next(rig: Rig, harm: bytes | None) -> None:
    keeper = StateKeeper(rig.journal, rig.clock)
    for offset in (1, 2):
        keep(keeper, offset)
    (slot,) = (slot for slot, state in read_slots(rig.store, "b").items() if state.number == 2)
    key = state_key("", "b", slot)
    whole = rig.store.objects[key][0]
    rig.store.put(key, whole[:-3] + b"abc" if harm is None else harm)
    assert newest(rig) == 1
    rig.restart()
    keep(StateKeeper(rig.journal, rig.clock), 3)
    assert newest(rig) == 3
    assert len(read_slots(rig.store, "b")) == 2


@pytest.mark.parametrize("after", [False, True])
def test_failed_put_never_damages_the_newest_state(rig: Rig, after: bool) -> None:
    keeper = StateKeeper(rig.journal, rig.clock)
    keep(keeper, 1)
    before = dict(rig.store.objects)
    for offset in (2, 3, 4):
        rig.store.fail("put", UnknownOutcome("timeout"), after=after, match="state/")
        with pytest.raises(UnknownOutcome):
            keep(keeper, offset)
    changed = [key for key, value in rig.store.objects.items() if before.get(key) != value]
    assert len(changed) <= 1, "the other slot was left alone"
    keep(keeper, 5)
    assert newest(rig) == 5


def test_fenced_broker_writes_no_state(rig: Rig) -> None:
    zombie = StateKeeper(rig.journal, rig.clock)
    keep(zombie, 1)
    rig.restart()
    before = dict(rig.store.objects)
    with pytest.raises(Fenced):
        keep(zombie, 9)
    with pytest.raises(Fenced):
        zombie.run_last(at(9))
    assert rig.store.objects == before


def test_late_state_of_a_superseded_broker_does_not_count(rig: Rig) -> None:
    """The broker checks the journal and is suspended. Its successor writes, then its own PUT arrives."""
    old = StateKeeper(rig.journal, rig.clock)
    for offset in (1, 2, 3):
        keep(old, offset)

    def meanwhile(_: str) -> None:
        failpoint.disarm()
        rig.restart()
        young = StateKeeper(rig.journal, rig.clock)
        for offset in (50, 51):
            keep(young, offset)

    with failpoint.armed("state.before_put", meanwhile):
        keep(old, 4)
    assert newest(rig) in {50, 51}
    assert len(read_slots(rig.store, "b")) == 2
    keep(StateKeeper(rig.journal, rig.clock), 52)
    assert newest(rig) == 52


def test_crash_before_or_after_the_put_leaves_a_state(rig: Rig) -> None:
    keep(StateKeeper(rig.journal, rig.clock), 1)
    for place, expected in (("state.before_put", 1), ("state.after_put", 2)):
        with failpoint.armed(place), pytest.raises(FailpointError):
            keep(StateKeeper(rig.journal, rig.clock), 2)
        assert newest(rig) == expected


def test_unavailable_store_raises_and_writes_no_state(rig: Rig) -> None:
    rig.store.fail("*", StoreUnavailable("down"), times=100)
    with pytest.raises(StoreUnavailable):
        keep(StateKeeper(rig.journal, rig.clock), 1)
    rig.store.faults.clear()
    assert read_state(rig.store, "b") is None


def test_too_large_and_newer_states_are_refused(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = StateKeeper(rig.journal, rig.clock)
    keep(keeper, 1)
    monkeypatch.setattr(slots, "CONTENT_MAX", 50)
    with pytest.raises(StateTooLarge, match="bytes"):
        keep(keeper, 2)
    monkeypatch.undo()
    assert newest(rig) == 1
    rig.store.put(state_key("", "b", 1), seal(slots.KIND, 99, b""))
    with pytest.raises(NewerFormat, match="99"):
        read_state(rig.store, "b")
    rig.store.put(state_key("", "b", 1), encode_state(BrokerState(broker="c", epoch=9)))
    assert newest(rig) == 1
