"""The states of a journal writer, as a table of states, events and transitions. Nothing else decides the state.

    NEW        created; the store was not contacted
    ATTACHING  determining whose archive it is, before the first send
    RESTORING  taking an archive over into an empty data directory
    OFFLINE    attached by the local copy alone: the store has not answered since the start, so there is no EPOCH
    ONLINE     the newest EPOCH is ours: entries may be appended, objects deleted
    FOLLOWING  a slave, or a member without a role: it reads the master's entries and appends none
    DEPOSED    the master of a broker set has read the EPOCH of a later one: as FENCED, until its set assigns a role
    FENCED     another process has taken the archive over: nothing is archived, deleted or evicted here again
    REFUSED    this archive is not this broker's; the start ends

An unreachable store changes no state after the start: the caller gets the error and retries. A transition that the
table marks None is a defect of this program.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from infra.state_table import next_state, row


class State(Enum):
    """The state of a journal writer."""

    NEW = auto()
    ATTACHING = auto()
    RESTORING = auto()
    OFFLINE = auto()
    ONLINE = auto()
    FOLLOWING = auto()
    DEPOSED = auto()
    FENCED = auto()
    REFUSED = auto()


class Event(Enum):
    """An event of a journal writer."""

    ATTACH = auto()
    RESTORE = auto()
    FOLLOW = auto()  # the broker set made this member a slave, or gave it no role
    LEAD = auto()  # the broker set made it the master in a new epoch
    EPOCH_WON = auto()
    NO_ANSWER = auto()  # the store did not answer at the start
    SUPERSEDED = auto()
    DEPOSED = auto()
    REFUSED = auto()


TRANSITIONS: Mapping[State, Mapping[Event, State | None]] = {
    State.NEW: row(Event, attach=State.ATTACHING, restore=State.RESTORING, follow=State.FOLLOWING),
    State.ATTACHING: row(Event, epoch_won=State.ONLINE, no_answer=State.OFFLINE, refused=State.REFUSED),
    State.RESTORING: row(Event, epoch_won=State.ONLINE, refused=State.REFUSED),
    # After REFUSED the state stays: each job meets the same refusal until the store is corrected.
    State.OFFLINE: row(
        Event,
        epoch_won=State.ONLINE,
        refused=State.OFFLINE,
        deposed=State.DEPOSED,
        follow=State.FOLLOWING,
        lead=State.OFFLINE,
    ),
    # A further EPOCH of our own; a refusal leaves the current one valid.
    State.ONLINE: row(
        Event,
        epoch_won=State.ONLINE,
        superseded=State.FENCED,
        refused=State.ONLINE,
        deposed=State.DEPOSED,
        follow=State.FOLLOWING,
        lead=State.OFFLINE,
    ),
    State.FOLLOWING: row(Event, refused=State.FOLLOWING, follow=State.FOLLOWING, lead=State.OFFLINE),
    State.DEPOSED: row(Event, follow=State.FOLLOWING, lead=State.OFFLINE),
    State.FENCED: row(Event),
    State.REFUSED: row(Event),
}


class JournalState:
    """Holds the state of a journal writer."""

    def __init__(self) -> None:
        self.now = State.NEW

    def happens(self, event: Event) -> None:
        """Apply an event."""
        self.now = next_state(TRANSITIONS, self.now, event, owner="a journal")
