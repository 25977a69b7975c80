"""What a broker's journal writer is now, as a table: states, events, and which follows which. Nothing else decides it.

    NEW        made; nothing has been asked of the store
    ATTACHING  whose archive it is is being settled, before the first send
    RESTORING  an archive is being taken over into an empty data directory
    OFFLINE    attached by the local copy alone: the store has not answered since the start, so there is no EPOCH
    ONLINE     the EPOCH that stands last is ours: entries may be appended, objects deleted
    FOLLOWING  a slave's, or of a member that has no role yet: what its master appends is read, nothing is appended
    DEPOSED    the master of a set has met the EPOCH of a later one: as FENCED, until its set says what it is now
    FENCED     another process has taken the archive over: nothing is archived, deleted or evicted here again
    REFUSED    this archive is not this broker's; the start ends

A store that is away changes nothing after the start: who asked is told, and asks again. A pair that the table marks
None is a fault of this program.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from infra.state_table import next_state, row


class State(Enum):
    """See above."""

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
    """What happens to a journal."""

    ATTACH = auto()
    RESTORE = auto()
    FOLLOW = auto()  # what its set says of this member: it is a slave, or has no role
    LEAD = auto()  # it is the master, in an epoch that was nobody's before
    EPOCH_WON = auto()
    NO_ANSWER = auto()  # of the store, at the start
    SUPERSEDED = auto()
    DEPOSED = auto()
    REFUSED = auto()


TRANSITIONS: Mapping[State, Mapping[Event, State | None]] = {
    State.NEW: row(Event, attach=State.ATTACHING, restore=State.RESTORING, follow=State.FOLLOWING),
    State.ATTACHING: row(Event, epoch_won=State.ONLINE, no_answer=State.OFFLINE, refused=State.REFUSED),
    State.RESTORING: row(Event, epoch_won=State.ONLINE, refused=State.REFUSED),
    # A job that comes again meets the same refusal: the store may be set right meanwhile.
    State.OFFLINE: row(
        Event,
        epoch_won=State.ONLINE,
        refused=State.OFFLINE,
        deposed=State.DEPOSED,
        follow=State.FOLLOWING,
        lead=State.OFFLINE,
    ),
    # A further EPOCH of our own; what speaks against one then leaves the one that stands.
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
    """The one state of a journal writer."""

    def __init__(self) -> None:
        self.now = State.NEW

    def happens(self, event: Event) -> None:
        self.now = next_state(TRANSITIONS, self.now, event, owner="a journal")
