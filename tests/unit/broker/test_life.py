"""The broker's state machine: what it accepts in each state, and a transition for each event."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from broker.life import TRANSITIONS, BrokerLife, Event, State
from infra.clock import ManualClock
from infra.process.startup import EXIT_FAILED

_WHY = "the broker's disk is full, 96% used, mark 90%"


def _happen(life: BrokerLife, event: Event) -> None:
    happenings: dict[Event, Callable[[], None]] = {
        Event.STARTED: life.started,
        Event.DISK_FULL: lambda: life.disk_full(_WHY),
        Event.DISK_HAS_ROOM: life.disk_has_room,
        Event.STOP: life.stop,
        Event.SYNC_FAILED: lambda: life.sync_failed(OSError("EIO")),
    }
    happenings[event]()


_WAYS = {
    State.STARTING: (),
    State.SERVING: (Event.STARTED,),
    State.REFUSING: (Event.STARTED, Event.DISK_FULL),
    State.STOPPING: (Event.STARTED, Event.STOP),
    State.FAILED: (Event.STARTED, Event.SYNC_FAILED),
}


def _in(state: State) -> BrokerLife:
    life = BrokerLife(ManualClock())
    for event in _WAYS[state]:
        _happen(life, event)
    assert life.state is state
    return life


def test_every_pair_of_state_and_event_has_a_transition() -> None:
    assert {(state, event) for state, row in TRANSITIONS.items() for event in row} == set(
        itertools.product(State, Event)
    )


@pytest.mark.parametrize(("state", "event"), list(itertools.product(State, Event)))
def test_each_event_leads_to_the_state_of_the_table(state: State, event: Event) -> None:
    life, following = _in(state), TRANSITIONS[state][event]
    if following is None:
        with pytest.raises(AssertionError, match=event.name):
            _happen(life, event)
        following = state
    else:
        _happen(life, event)
    assert life.state is following
    assert life.accepting == (following in {State.SERVING, State.REFUSING})
    assert life.takes_sends == (following is State.SERVING)
    assert life.refusal == (_WHY if following is State.REFUSING else None)


def test_failed_sync_is_a_final_state() -> None:
    assert set(TRANSITIONS[State.FAILED].values()) == {State.FAILED}
    life = _in(State.FAILED)
    assert life.exit_code == EXIT_FAILED
    assert life.end_requested.is_set()


def test_failed_sync_during_the_start_persists_after_it() -> None:
    life = _in(State.STARTING)
    _happen(life, Event.SYNC_FAILED)
    _happen(life, Event.STARTED)
    assert not life.accepting


def test_requested_stop_changes_nothing_until_it_begins() -> None:
    life = _in(State.SERVING)
    life.ask_to_end()
    assert life.end_requested.is_set()
    assert life.takes_sends
    assert life.exit_code == 0


def test_full_disk_is_dated_from_its_first_detection() -> None:
    clock = ManualClock()
    life = BrokerLife(clock)
    life.started()
    life.disk_full(_WHY)
    since = life.refused_since
    clock.advance(5000)
    life.disk_full("fuller")
    assert (life.refused_since, life.refusal) == (since, "fuller")
