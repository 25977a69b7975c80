"""State machine of a broker's archive attachment. No other code decides these transitions.

    OFF         no storeUrl: nothing is archived; only local retention and the TTL run
    DETACHED    a storeUrl is set; the store has not been accessed
    ATTACHING   the owner of the archive and the offset where the local log resumes are being determined
    RESTORING   the archive is taken over and an empty data directory restored from it
    ATTACHED    the broker may assign offsets, jobs may run. Whether the store is reachable and whether another broker
                took the archive over later is the journal's state (`tiered/journal/state`)
    REFUSED     the start fails; the error message names the remedy
    STOPPING    jobs begin no further step
    STOPPED     the worker processes have ended

A pair that the table maps to None is a programming error: the caller raised events out of order.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from infra.state_table import next_state, row


class State(Enum):
    """State of an attachment; the module's docstring explains each."""

    OFF = auto()
    DETACHED = auto()
    ATTACHING = auto()
    RESTORING = auto()
    ATTACHED = auto()
    REFUSED = auto()
    STOPPING = auto()
    STOPPED = auto()


class Event(Enum):
    """Event of an attachment."""

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
    """Current state of a broker's archive attachment."""

    def __init__(self, *, archived: bool) -> None:
        self.state = State.DETACHED if archived else State.OFF

    def happens(self, event: Event) -> None:
        """Change the state by an event."""
        self.state = next_state(TRANSITIONS, self.state, event, owner="an archive")
