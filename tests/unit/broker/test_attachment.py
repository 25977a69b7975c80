"""The state machine of the archive's attachment: each transition is defined, and a broker follows it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from broker.archiving.attachment import TRANSITIONS, Attachment, Event, State
from broker.archiving.offsets import log_goes_on_at, queues_to_raise
from infra.state_table import ImpossibleTransition
from lifecycle.recorded_minimums import minimums_to_raise
from tests.broker_in_process import running


@pytest.mark.parametrize(("state", "event"), itertools.product(State, Event))
def test_each_pair_of_state_and_event_is_decided(state: State, event: Event) -> None:
    following = TRANSITIONS[state][event]
    attachment = Attachment(archived=True)
    attachment.state = state
    if following is None:
        with pytest.raises(ImpossibleTransition, match=f"{event.name} of an archive that is {state.name}"):
            attachment.happens(event)
        assert attachment.state is state
    else:
        attachment.happens(event)
        assert attachment.state is following


def test_each_state_is_reached_and_all_but_the_last_are_left() -> None:
    begins = {State.OFF, State.DETACHED}
    reached = {following for row in TRANSITIONS.values() for following in row.values() if following is not None}
    assert reached | begins == set(State)
    assert [state for state, row in TRANSITIONS.items() if not any(row.values())] == [State.STOPPED]


def test_what_was_refused_is_never_attached() -> None:
    assert {following for following in TRANSITIONS[State.REFUSED].values() if following} == {State.STOPPING}


@pytest.mark.parametrize("archived", [True, False])
async def test_a_broker_that_serves_is_attached_or_has_none_and_ends_stopped(tmp_path: Path, archived: bool) -> None:
    settings = [f"storeUrl=dir:{tmp_path / 'store'}"] if archived else []
    async with running(tmp_path / "data", *settings) as (broker, _):
        states = [broker.archive.state]
    states.append(broker.archive.state)
    assert states == [State.ATTACHED if archived else State.OFF, State.STOPPED]


def test_the_log_begins_anew_only_below_what_the_archive_named() -> None:
    assert log_goes_on_at(900, None) is None
    assert log_goes_on_at(900, 1000) == 1000
    assert log_goes_on_at(1000, 1000) is None


def test_a_queue_is_raised_only_where_it_would_give_an_offset_again() -> None:
    ends = {("a", 0): 5, ("a", 1): 9, ("b", 0): 0}
    following = {("a", 0): 7, ("a", 1): 9, ("b", 0): 3, ("b", 1): 1}
    raised = queues_to_raise(following, lambda topic, queue: ends.get((topic, queue), 0))
    assert raised == {("a", 0): 7, ("b", 0): 3, ("b", 1): 1}


def test_what_the_archive_recorded_as_gone_is_hidden_and_nothing_else() -> None:
    recorded, minimums = {("a", 0): 7, ("a", 1): 2, ("b", 0): 4}, {("a", 0): 5, ("a", 1): 2, ("b", 0): 6}
    queues = {"a": [0, 1], "b": [0], "nothing of it is recorded": [0, 1, 2, 3]}  # to ask the log is a turn of its loop
    rising = minimums_to_raise(queues, lambda *queue: recorded.get(queue, 0), lambda *queue: minimums[queue])
    assert rising == {"a": {0: 7}}
