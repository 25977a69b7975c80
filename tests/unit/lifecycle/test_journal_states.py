"""Tests of the states of a journal writer and their transition table."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from infra.objects.store import StoreUnavailable
from infra.state_table import ImpossibleTransition
from neve.archive.format.journal import Topic
from tests.unit.lifecycle.fakes import Rig
from tiered.journal.errors import ArchiveRefused, Fenced, NotAttached
from tiered.journal.state import TRANSITIONS, Event, JournalState, State

DOWN = StoreUnavailable("503")


@pytest.mark.parametrize(("state", "event"), itertools.product(State, Event))
def test_every_state_and_event_has_a_transition(state: State, event: Event) -> None:
    following = TRANSITIONS[state][event]
    journal = JournalState()
    journal.now = state
    if following is None:
        with pytest.raises(ImpossibleTransition, match=f"{event.name} of a journal that is {state.name}"):
            journal.happens(event)
    else:
        journal.happens(event)
    assert journal.now is (following or state)


def test_fenced_and_refused_are_final_states() -> None:
    assert [state for state, row in TRANSITIONS.items() if not any(row.values())] == [State.FENCED, State.REFUSED]
    reached = {following for row in TRANSITIONS.values() for following in row.values() if following is not None}
    assert reached | {State.NEW} == set(State)


def test_superseded_writer_stays_fenced(rig: Rig, tmp_path: Path) -> None:
    states = [rig.new_journal(tmp_path / "none").ownership.state, rig.journal.ownership.state]
    again = rig.new_journal()
    again.ownership.attach(rig.hot.tail)
    with pytest.raises(Fenced):
        rig.journal.ownership.follow()
    states += [again.ownership.state, rig.journal.ownership.state]
    assert states == [State.NEW, State.ONLINE, State.ONLINE, State.FENCED]
    for act in (
        rig.journal.ownership.ensure_online,
        rig.journal.ownership.renew_epoch,
        lambda: rig.journal.append(Topic(topic="a")),
    ):
        with pytest.raises(Fenced):
            act()


def test_writer_is_offline_until_the_store_answers(rig: Rig) -> None:
    journal = rig.new_journal()
    rig.store.fail("get", DOWN)
    assert not journal.ownership.attach(rig.hot.tail).online
    states = [journal.ownership.state]
    with pytest.raises(NotAttached):
        journal.append(Topic(topic="a"))
    journal.ownership.ensure_online()
    states.append(journal.ownership.state)
    assert states == [State.OFFLINE, State.ONLINE]


def test_writer_of_another_log_stays_refused(rig: Rig, tmp_path: Path) -> None:
    other = rig.new_journal(tmp_path / "other", "another log")
    with pytest.raises(ArchiveRefused):
        other.ownership.attach(0)
    assert other.ownership.state is State.REFUSED
    with pytest.raises(ImpossibleTransition):
        other.ownership.attach(0)


def test_restore_takes_over_the_archive_of_another_log(rig: Rig, tmp_path: Path) -> None:
    other = rig.new_journal(tmp_path / "other", "another log")
    seen: list[State] = []
    other.ownership.attach_restoring(lambda: seen.append(other.ownership.state), take_over=True)
    assert [*seen, other.ownership.state] == [State.RESTORING, State.ONLINE]
