"""The broker's life: what it takes now, and what each event makes of that.

           started   disk full  disk has room  stop      sync failed   takes
STARTING   SERVING   STARTING   STARTING       STOPPING  FAILED        nothing yet
SERVING    -         REFUSING   SERVING        STOPPING  FAILED        everything
REFUSING   -         REFUSING   SERVING        STOPPING  FAILED        all but sends: the disk is above its mark
STOPPING   STOPPING  STOPPING   STOPPING       STOPPING  FAILED        nothing more
FAILED     FAILED    FAILED     FAILED         FAILED    FAILED        nothing more, and the process ends in error

A start may be overtaken by a stop or a failed sync; nothing leads out of FAILED: what is not on the disk is not
acknowledged any more. The disk is looked at each second, so a full one that is seen too early is seen again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from enum import Enum, auto

from infra.clock import Clock
from infra.process.startup import EXIT_FAILED
from infra.state_table import next_state


class State(Enum):
    """What the broker takes now."""

    STARTING = auto()
    SERVING = auto()
    REFUSING = auto()
    STOPPING = auto()
    FAILED = auto()


class Event(Enum):
    """What changes that."""

    STARTED = auto()
    DISK_FULL = auto()
    DISK_HAS_ROOM = auto()
    STOP = auto()
    SYNC_FAILED = auto()


#: None: it can't happen there.
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
    """One for each broker; whoever takes requests asks it, `takes_sends` and `accepting` for each of them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.state = State.STARTING
        self.accepting = False  # anything at all
        self.takes_sends = False
        self.refusal: str | None = None  # why sends are refused now, in REFUSING
        self.refused_since = 0.0  # by the monotonic clock
        #: Set when the process is to end; whoever started the broker shuts it down then.
        self.end_wanted = asyncio.Event()
        self.exit_code = 0

    def started(self) -> None:
        """Everything stands."""
        self._follow(Event.STARTED)

    def disk_full(self, why: str) -> None:
        """Sends are refused with these words, until `disk_has_room`."""
        if self.state is State.SERVING:
            self.refused_since = self._clock.monotonic()
        self._follow(Event.DISK_FULL)
        self.refusal = why if self.state is State.REFUSING else None

    def disk_has_room(self) -> None:
        """Below its mark."""
        self._follow(Event.DISK_HAS_ROOM)

    def ask_to_end(self) -> None:
        """A clean stop is wanted; until it begins, everything is taken as before."""
        self.end_wanted.set()

    def stop(self) -> None:
        """The stop begins."""
        self._follow(Event.STOP)

    def sync_failed(self, _: BaseException) -> None:
        """What was written may never reach the disk: nothing is taken any more, and the process ends."""
        self._follow(Event.SYNC_FAILED)
        self.exit_code = EXIT_FAILED
        self.end_wanted.set()

    def _follow(self, event: Event) -> None:
        self.state = next_state(TRANSITIONS, self.state, event, owner="a broker")
        self.accepting = self.state in {State.SERVING, State.REFUSING}
        self.takes_sends = self.state is State.SERVING
        if self.state is not State.REFUSING:
            self.refusal = None
