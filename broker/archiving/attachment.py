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

from infra.state_table import next_state, row


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


TRANSITIONS: Mapping[State, Mapping[Event, State | None]] = {
    State.OFF: row(Event, stop=State.STOPPING),
    State.DETACHED: row(Event, attach=State.ATTACHING, restore=State.RESTORING, stop=State.STOPPING),
    State.ATTACHING: row(Event, settled=State.ATTACHED, refused=State.REFUSED, stop=State.STOPPING),
    State.RESTORING: row(Event, settled=State.ATTACHED, refused=State.REFUSED, stop=State.STOPPING),
    State.ATTACHED: row(Event, stop=State.STOPPING),
    State.REFUSED: row(Event, stop=State.STOPPING),
    State.STOPPING: row(Event, ended=State.STOPPED),
    State.STOPPED: row(Event),
}


class Attachment:
    """The one state of a broker's archive."""

    def __init__(self, *, archived: bool) -> None:
        self.state = State.DETACHED if archived else State.OFF

    def happens(self, event: Event) -> None:
        self.state = next_state(TRANSITIONS, self.state, event, owner="an archive")
