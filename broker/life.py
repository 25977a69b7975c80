"""Life cycle of a broker: which requests it accepts, and how events change that.

           started   disk full  disk has room  stop      sync failed   accepts
STARTING   SERVING   STARTING   STARTING       STOPPING  FAILED        nothing yet
SERVING    -         REFUSING   SERVING        STOPPING  FAILED        everything
REFUSING   -         REFUSING   SERVING        STOPPING  FAILED        all but sends: the disk is above its limit
STOPPING   STOPPING  STOPPING   STOPPING       STOPPING  FAILED        nothing
FAILED     FAILED    FAILED     FAILED         FAILED    FAILED        nothing, and the process ends with an error

A stop or a failed sync may happen during a start. No event leaves FAILED: data that is not on the disk must not be
acknowledged. The disk is checked each second, so that a "disk full" during a start is repeated after it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum, auto

from infra.clock import Clock
from infra.process.startup import EXIT_FAILED
from infra.state_table import next_state


class State(Enum):
    """State of a broker: what it accepts."""

    STARTING = auto()
    SERVING = auto()
    REFUSING = auto()
    STOPPING = auto()
    FAILED = auto()


class Event(Enum):
    """Event that changes the state."""

    STARTED = auto()
    DISK_FULL = auto()
    DISK_HAS_ROOM = auto()
    STOP = auto()
    SYNC_FAILED = auto()


#: Next state by state and event. None: the event can't happen in that state.
TRANSITIONS: Mapping[State, Mapping[Event, State | None]] = {
    State.STARTING: {
        Event.STARTED: State.SERVING,
        Event.DISK_FULL: State.STARTING,
        Event.DISK_HAS_ROOM: State.STARTING,
        Event.STOP: State.STOPPING,
        Event.SYNC_FAILED: State.FAILED,
    },
    State.SERVING: {
        Event.STARTED: None,
        Event.DISK_FULL: State.REFUSING,
        Event.DISK_HAS_ROOM: State.SERVING,
        Event.STOP: State.STOPPING,
        Event.SYNC_FAILED: State.FAILED,
    },
    State.REFUSING: {
        Event.STARTED: None,
        Event.DISK_FULL: State.REFUSING,
        Event.DISK_HAS_ROOM: State.SERVING,
        Event.STOP: State.STOPPING,
        Event.SYNC_FAILED: State.FAILED,
    },
    State.STOPPING: {
        Event.STARTED: State.STOPPING,
        Event.DISK_FULL: State.STOPPING,
        Event.DISK_HAS_ROOM: State.STOPPING,
        Event.STOP: State.STOPPING,
        Event.SYNC_FAILED: State.FAILED,
    },
    State.FAILED: dict.fromkeys(Event, State.FAILED),
}


class BrokerLife:
    """Life cycle of one broker. All request handlers check `takes_sends` and `accepting` for each request."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.state = State.STARTING
        self.accepting = False  # whether any request is accepted
        self.takes_sends = False
        self.refusal: str | None = None  # why sends are refused, in REFUSING
        self.refused_since = 0.0  # monotonic time
        #: Set when the process has to end. The code that started the broker then shuts it down.
        self.end_requested = asyncio.Event()
        self.exit_code = 0

    def started(self) -> None:
        """Record that the start is complete."""
        self._follow(Event.STARTED)

    def disk_full(self, why: str) -> None:
        """Refuse sends with this reason, until `disk_has_room`."""
        if self.state is State.SERVING:
            self.refused_since = self._clock.monotonic()
        self._follow(Event.DISK_FULL)
        self.refusal = why if self.state is State.REFUSING else None

    def disk_has_room(self) -> None:
        """Record that the disk is below its limit."""
        self._follow(Event.DISK_HAS_ROOM)

    def ask_to_end(self) -> None:
        """Request a clean stop. Until it begins, everything is accepted as before."""
        self.end_requested.set()

    def stop(self) -> None:
        """Record that the stop begins."""
        self._follow(Event.STOP)

    def sync_failed(self, _: BaseException) -> None:
        """Accept nothing more and end the process, because written data may never reach the disk."""
        self._follow(Event.SYNC_FAILED)
        self.exit_code = EXIT_FAILED
        self.end_requested.set()

    def _follow(self, event: Event) -> None:
        self.state = next_state(TRANSITIONS, self.state, event, owner="a broker")
        self.accepting = self.state in {State.SERVING, State.REFUSING}
        self.takes_sends = self.state is State.SERVING
        if self.state is not State.REFUSING:
            self.refusal = None
