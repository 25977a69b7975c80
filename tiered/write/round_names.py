"""States of a round's names, and the selection of names to upload and to publish.

    OPEN       named by the round's INTENT; not in progress
    UNDER_WAY  being encoded or uploaded by a worker; may already be in the store
    UPLOADED   complete in the store, not in a COMMIT yet
    COMMITTED  published by a COMMIT, visible
    FAILED     its INTENT stays open, and the next round tries it again under the same name
    LOST       there will be no object under this name
    CLOSED     closed by an ABORT

The names of a topic are published in log order. An UPLOADED name waits for earlier ones that are OPEN or UNDER_WAY, so
that no reader of the bucket finds a hole that is filled later. It does not wait for a FAILED one, which may take long.

If a round ends early, names that are neither COMMITTED nor CLOSED stay open in the journal. A transition that the table
marks None is a defect of the program.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from infra.state_table import next_state, row
from neve.archive.format.journal import CommittedObject, PlannedObject


class State(Enum):
    """State of a name; the module docstring explains each."""

    OPEN = auto()
    UNDER_WAY = auto()
    UPLOADED = auto()
    COMMITTED = auto()
    FAILED = auto()
    LOST = auto()
    CLOSED = auto()


class Event(Enum):
    """Event of a name."""

    STARTED = auto()
    UPLOADED = auto()
    GIVEN_UP = auto()  # before its upload began
    FAILED = auto()
    LOST = auto()  # the log lacks its records, or an object with other content has its key
    COMMITTED = auto()
    CLOSED = auto()


TRANSITIONS: Mapping[State, Mapping[Event, State | None]] = {
    State.OPEN: row(Event, started=State.UNDER_WAY, failed=State.FAILED, lost=State.LOST),
    State.UNDER_WAY: row(Event, uploaded=State.UPLOADED, given_up=State.OPEN, failed=State.FAILED, lost=State.LOST),
    State.UPLOADED: row(Event, committed=State.COMMITTED),
    State.COMMITTED: row(Event),
    State.FAILED: row(Event),
    State.LOST: row(Event, closed=State.CLOSED, failed=State.FAILED),
    State.CLOSED: row(Event),
}

_COMING = {State.OPEN, State.UNDER_WAY}


class Limits(NamedTuple):
    """Limits of the work in progress and of a COMMIT."""

    group: int = 64  # small names in one request
    names: int = 256  # names in progress: some are encoded while others are uploaded
    bytes: int = 256 << 20  # wire bytes in progress; a name may exceed it if those before it do not reach it
    commit_names: int = 256
    commit_s: float = 10.0


LIMITS = Limits()


class RoundNames:
    """The names of one round."""

    def __init__(self, names: Sequence[PlannedObject], limits: Limits = LIMITS) -> None:
        self._limits = limits
        self.all = names  # in the order in which they are read
        self._states = {name.key: State.OPEN for name in names}
        self._left = deque(names)
        self._under_way: dict[str, int] = {}  # key -> wire bytes
        self._bytes = 0  # sum of `_under_way`
        self._ahead: dict[str, deque[PlannedObject]] = defaultdict(deque)  # topic -> from its first _COMING name on
        for name in sorted(names, key=_start):
            self._ahead[name.topic].append(name)
        self._waiting: dict[str, list[tuple[CommittedObject, float]]] = {}  # topic -> uploaded, behind a _COMING name
        self._uploaded: list[CommittedObject] = []  # ready to publish
        self._uploaded_at = 0.0  # upload time of the oldest of them
        self.lost: list[tuple[PlannedObject, str]] = []  # with the reason

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way)

    @property
    def is_left(self) -> bool:
        """Whether there are names that were not returned by `next` yet."""
        return bool(self._left)

    def next(self) -> PlannedObject | None:
        """Return the name to read next; None if there is none, or if the limits are reached."""
        has_room = len(self._under_way) < self._limits.names and self._bytes < self._limits.bytes
        return self._left.popleft() if self._left and has_room else None

    def started(self, name: PlannedObject, wire_bytes: int) -> None:
        self._happens(name.key, Event.STARTED)
        self._under_way[name.key] = wire_bytes
        self._bytes += wire_bytes

    def uploaded(self, name: CommittedObject, now: float) -> None:
        self._waiting.setdefault(name.topic, []).append((name, now))
        self._ended(name, Event.UPLOADED)

    def given_up(self, name: PlannedObject) -> None:
        self._ended(name, Event.GIVEN_UP)

    def failed(self, name: PlannedObject) -> None:
        self._ended(name, Event.FAILED)

    def is_lost(self, name: PlannedObject, why: str) -> None:
        self._ended(name, Event.LOST)
        self.lost.append((name, why))

    def closed(self, name: PlannedObject) -> None:
        self._happens(name.key, Event.CLOSED)

    def to_commit(self, now: float, *, at_end: bool) -> list[CommittedObject]:
        """Return the objects that a COMMIT should publish now."""
        due = at_end or len(self._uploaded) >= self._limits.commit_names
        return self._uploaded if due or now - self._uploaded_at >= self._limits.commit_s else []

    def committed(self, names: Sequence[CommittedObject]) -> None:
        for name in names:
            self._happens(name.key, Event.COMMITTED)
        self._uploaded = self._uploaded[len(names) :]

    def _ended(self, name: PlannedObject | CommittedObject, event: Event) -> None:
        self._happens(name.key, event)
        self._bytes -= self._under_way.pop(name.key, 0)
        self._release(name.topic)

    def _release(self, topic: str) -> None:
        """Release names that waited for one that is now uploaded, failed or lost."""
        ahead, waiting = self._ahead[topic], self._waiting.pop(topic, [])
        while ahead and self._states[ahead[0].key] not in _COMING:
            ahead.popleft()
        for name, at in sorted(waiting, key=_start_of_waiting):
            if ahead and ahead[0].start < name.start:
                self._waiting.setdefault(topic, []).append((name, at))
                continue
            self._uploaded_at = min(self._uploaded_at, at) if self._uploaded else at
            self._uploaded.append(name)

    def _happens(self, key: str, event: Event) -> None:
        self._states[key] = next_state(TRANSITIONS, self._states[key], event, owner=f"the name {key}")


def _start(name: PlannedObject | CommittedObject) -> int:
    return name.start


def _start_of_waiting(waiting: tuple[CommittedObject, float]) -> int:
    return waiting[0].start
