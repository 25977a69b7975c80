"""Whose archive this is, as a table: states, events, and which follows which. Nothing else decides it.

    OFF         no storeUrl: nothing is archived; only local retention and the TTL run
    DETACHED    there is a storeUrl, and nothing has been asked of the store
    ATTACHING   whose archive it is and where the local log may go on is being settled
    RESTORING   the archive is taken over, an empty data directory filled from it
    ATTACHED    settled: the broker may give offsets out, jobs may run. Whether the store answers and whether another
                broker took the archive over later is the journal's state (`tiered/journal/state`)
    REFUSED     the start ends; its message says what to do
    STOPPING    jobs begin no further step
    STOPPED     the workers are gone

A pair that the table marks None is a fault of this program: who comes to it has called out of order.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto


class State(Enum):
    """See above."""

    OFF = auto()
    DETACHED = auto()
    ATTACHING = auto()
    RESTORING = auto()
    ATTACHED = auto()
    REFUSED = auto()
    STOPPING = auto()
    STOPPED = auto()


class Event(Enum):
    """What happens to an attachment."""

    ATTACH = auto()
    RESTORE = auto()
    SETTLED = auto()
    REFUSED = auto()
    STOP = auto()
    ENDED = auto()


def _row(**cells: State) -> Mapping[Event, State | None]:
    row: dict[Event, State | None] = dict.fromkeys(Event)
    row.update({Event[name.upper()]: state for name, state in cells.items()})
    return row


TRANSITIONS: Mapping[State, Mapping[Event, State | None]] = {
    State.OFF: _row(stop=State.STOPPING),
    State.DETACHED: _row(attach=State.ATTACHING, restore=State.RESTORING, stop=State.STOPPING),
    State.ATTACHING: _row(settled=State.ATTACHED, refused=State.REFUSED, stop=State.STOPPING),
    State.RESTORING: _row(settled=State.ATTACHED, refused=State.REFUSED, stop=State.STOPPING),
    State.ATTACHED: _row(stop=State.STOPPING),
    State.REFUSED: _row(stop=State.STOPPING),
    State.STOPPING: _row(ended=State.STOPPED),
    State.STOPPED: _row(),
}


class OutOfOrder(AssertionError):
    """The archive was asked for what its state does not know: a fault of this program."""


class Attachment:
    """The one state of a broker's archive."""

    def __init__(self, *, archived: bool) -> None:
        self.state = State.DETACHED if archived else State.OFF

    def happens(self, event: Event) -> None:
        following = TRANSITIONS[self.state][event]
        if following is None:
            raise OutOfOrder(f"{event.name} of an archive that is {self.state.name}")
        self.state = following
