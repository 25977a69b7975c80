"""The state machine of the archive's attachment: each transition is defined, and a broker follows it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from broker.archiving.attach import TRANSITIONS, Attachment, Event, State
from broker.archiving.offsets import log_resume_offset, queues_to_raise
from infra.state_table import ImpossibleTransition
from lifecycle.recorded_minimums import minimums_to_raise
from tests.kit.broker.in_process import running


@pytest.mark.parametrize(("state", "event"), itertools.product(State, Event))
def test_each_pair_of_state_and_event_has_a_transition_or_is_impossible(state: State, event: Event) -> None:
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


def test_each_state_is_reachable_and_all_but_the_last_can_be_left() -> None:
    begins = {State.OFF, State.DETACHED}
    reached = {following for row in TRANSITIONS.values() for following in row.values() if following is not None}
    assert reached | begins == set(State)
    assert [state for state, row in TRANSITIONS.items() if not any(row.values())] == [State.STOPPED]


def test_refused_archive_is_never_attached() -> None:
    assert {following for following in TRANSITIONS[State.REFUSED].values() if following} == {State.STOPPING}


@pytest.mark.parametrize("archived", [True, False])
async def test_running_broker_is_attached_or_off_and_stopped_afterwards(tmp_path: Path, archived: bool) -> None:
    settings = [f"storeUrl=dir:{tmp_path / 'store'}"] if archived else []
    async with running(tmp_path / "data", *settings) as (broker, _):
        states = [broker.archive.state]
    states.append(broker.archive.state)
    assert states == [State.ATTACHED if archived else State.OFF, State.STOPPED]


def test_log_resumes_higher_only_if_it_ends_below_the_archive() -> None:
    assert log_resume_offset(900, None) is None
    assert log_resume_offset(900, 1000) == 1000
    assert log_resume_offset(1000, 1000) is None


def test_queue_is_raised_only_if_it_would_assign_an_archived_offset_again() -> None:
    ends = {("a", 0): 5, ("a", 1): 9, ("b", 0): 0}
    following = {("a", 0): 7, ("a", 1): 9, ("b", 0): 3, ("b", 1): 1}
    raised = queues_to_raise(following, lambda topic, queue: ends.get((topic, queue), 0))
    assert raised == {("a", 0): 7, ("b", 0): 3, ("b", 1): 1}


def test_only_offsets_that_the_archive_recorded_as_expired_are_hidden() -> None:
    recorded, minimums = {("a", 0): 7, ("a", 1): 2, ("b", 0): 4}, {("a", 0): 5, ("a", 1): 2, ("b", 0): 6}
    queues = {"a": [0, 1], "b": [0], "nothing of it is recorded": [0, 1, 2, 3]}  # to ask the log is a turn of its loop
    rising = minimums_to_raise(queues, lambda *queue: recorded.get(queue, 0), lambda *queue: minimums[queue])
    assert rising == {"a": {0: 7}}
