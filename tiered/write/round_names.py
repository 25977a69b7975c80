"""What has become of each name of a round, as a table, and which of them may be on their way. Pure.

    OPEN       named by the round's INTENT; nothing is done for it now
    UNDER_WAY  a worker has it: it may be in the store already
    UPLOADED   it is in the store whole, and no COMMIT says so yet
    COMMITTED  published: it counts
    FAILED     tried in vain. Its INTENT stays open, and the next round tries it under the same name
    LOST       there will be no object under this name
    CLOSED     an ABORT says so

Of a topic names are published in the log's order: one that is UPLOADED waits for those before it that are OPEN or
UNDER_WAY, so that who reads the bucket finds no hole that is filled later. Behind one that FAILED none waits: that may
take long.

Whatever ends the round leaves what is not COMMITTED or CLOSED open in the journal. A pair that the table marks None is
a fault of this program.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

from infra.state_table import next_state, row
from neve.archive.format.journal import CommittedObject, PlannedObject


class State(Enum):
    """See above."""

    OPEN = auto()
    UNDER_WAY = auto()
    UPLOADED = auto()
    COMMITTED = auto()
    FAILED = auto()
    LOST = auto()
    CLOSED = auto()


class Event(Enum):
    """What happens to a name."""

    BEGUN = auto()
    UPLOADED = auto()
    GIVEN_UP = auto()  # before its upload began
    FAILED = auto()
    LOST = auto()  # the log does not have its records, or an object of other content has its key
    COMMITTED = auto()
    CLOSED = auto()


TRANSITIONS: Mapping[State, Mapping[Event, State | None]] = {
    State.OPEN: row(Event, begun=State.UNDER_WAY, failed=State.FAILED, lost=State.LOST),
    State.UNDER_WAY: row(Event, uploaded=State.UPLOADED, given_up=State.OPEN, failed=State.FAILED, lost=State.LOST),
    State.UPLOADED: row(Event, committed=State.COMMITTED),
    State.COMMITTED: row(Event),
    State.FAILED: row(Event),
    State.LOST: row(Event, closed=State.CLOSED, failed=State.FAILED),
    State.CLOSED: row(Event),
}

_COMING = {State.OPEN, State.UNDER_WAY}


class Limits(NamedTuple):
    """Of what is on its way at the same time, and of what a COMMIT publishes."""

    group: int = 64  # small names that one request asks for
    names: int = 256  # under way: while some are uploaded others are encoded
    bytes: int = 256 << 20  # wire bytes under way; a name that is larger goes beside others that are less
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
        self._bytes = 0  # the sum of them
        self._ahead: dict[str, deque[PlannedObject]] = defaultdict(deque)  # topic -> from the first on that is _COMING
        for name in sorted(names, key=_start):
            self._ahead[name.topic].append(name)
        self._waiting: dict[str, list[tuple[CommittedObject, float]]] = {}  # topic -> in the store, behind such a one
        self._uploaded: list[CommittedObject] = []  # what may be published
        self._uploaded_at = 0.0  # when the oldest of them was
        self.lost: list[tuple[PlannedObject, str]] = []  # and why

    @property
    def is_under_way(self) -> bool:
        return bool(self._under_way)

    @property
    def is_left(self) -> bool:
        """Names that nobody has looked at yet."""
        return bool(self._left)

    def next(self) -> PlannedObject | None:
        """The name to read next; None: there is none, or no room for one."""
        has_room = len(self._under_way) < self._limits.names and self._bytes < self._limits.bytes
        return self._left.popleft() if self._left and has_room else None

    def begun(self, name: PlannedObject, wire_bytes: int) -> None:
        self._happens(name.key, Event.BEGUN)
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
        """What a COMMIT should publish now."""
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
        """What waited for a name that has come, or does not come any more."""
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
