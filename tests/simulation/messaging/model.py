"""What clients were told, and so may rely on. Nothing here knows how the broker does it.

A message is *promised* once its send was answered with success, unless something took the promise back rightly: under
ASYNC_FLUSH a power cut, of what no flush had covered. A position of the log that was reached when an answer came stands
for everything before the answer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

PLAIN, DELAY, TIMER, HALF = "plain", "delay", "timer", "half"
Place = tuple[str, int, int]  # topic, queue, offset


class Copy(NamedTuple):
    """A record that lies in a queue."""

    topic: str
    queue: int
    offset: int
    body: bytes


@dataclass(slots=True, eq=False)
class Sent:
    """One message, from its send on."""

    name: str
    kind: str
    topic: str
    queue: int
    body: bytes
    sent_ms: int  # by the wall
    sent_at: float  # by the monotonic clock
    wait_ms: int = 0  # of a delayed one
    level: int = 0
    #: What the answer said; None: no answer yet, or none that promises anything.
    offset: int | None = None
    physical: int = -1
    reached: int = -1  # where the log ended when the answer came
    answered_at: float = 0.0
    refused: bool = False
    #: How often power or process ended since: each may show a delayed message once more.
    ends: int = 0
    #: Transactions: what the producer asked for, and whether that was answered with success.
    asked_for: set[str] = field(default_factory=set)
    outcome: str = ""
    outcome_reached: int = -1
    #: Timers: a recall was sent; it was answered with success before the time.
    recall_sent: bool = False
    recalled: bool = False
    recall_reached: int = -1
    seen: int = 0  # copies in the target topic

    @property
    def promised(self) -> bool:
        return self.offset is not None


@dataclass(slots=True)
class Return:
    """A consumer sent a message back: to come again after a delay level, or below 0 as a dead letter."""

    sent: Sent
    level: int
    wait_ms: int
    sent_ms: int
    sent_at: float
    promised: bool = False
    reached: int = -1
    answered_at: float = 0.0
    ends: int = 0


@dataclass(slots=True)
class Flight:
    """A popped message, as the client has it."""

    sent: Sent
    place: Place
    pop_time: int
    invisible_ms: int
    reached: int
    handle: str
    retry: str
    sure: bool = True  # nothing has happened since that could have ended it


@dataclass(slots=True)
class Popped:
    """What a pop group has seen of one copy of a message."""

    flight: Flight
    ack_sent: bool = False
    acked: bool = False  # in time, and answered
    acked_reached: int = -1


class Offsets:
    """What a consumer group committed, in its order; `reached` says which of it must be on the disk."""

    def __init__(self) -> None:
        self.history: dict[tuple[str, str, int], list[tuple[float, int]]] = {}

    def committed(self, group: str, topic: str, queue: int, offset: int, now: float) -> None:
        self.history.setdefault((group, topic, queue), []).append((now, offset))

    def current(self) -> dict[tuple[str, str, int], int]:
        return {key: told[-1][1] for key, told in self.history.items()}

    def since(self, key: tuple[str, str, int], moment: float) -> set[int]:
        """Where the group stood then, and all that it committed later."""
        told = self.history[key]
        before = [offset for at, offset in told if at <= moment]
        return {*before[-1:], *(offset for at, offset in told if at > moment)}

    def found(self, key: tuple[str, str, int], offset: int, now: float) -> None:
        """After a crash the group stands here: that is what it goes on from."""
        self.history[key] = [(now, offset)]


class Model:
    def __init__(self) -> None:
        self.sent: dict[str, Sent] = {}
        self.returns: dict[str, Return] = {}  # by the message's name: each is sent back once at most
        self.popped: dict[Place, Popped] = {}
        self.owed: set[Place] = set()  # the pop group was set back before it: it comes (again)
        self.setting_back: list[set[Place]] = []  # not answered yet
        self.set_backs = 0  # that were asked for
        self.offsets = Offsets()
        self.counts: Counter[str] = Counter()

    def of(self, *kinds: str) -> list[Sent]:
        return [sent for sent in self.sent.values() if sent.kind in kinds]

    def taken(self, popped: Popped) -> None:
        place = popped.flight.place
        self.popped[place] = popped
        for places in (self.owed, *self.setting_back):
            places.discard(place)

    def pops_of(self, sent: Sent) -> list[Popped]:
        return [popped for popped in self.popped.values() if popped.flight.sent is sent]

    def process_ended(self) -> None:
        """The process is gone: an answer that had not come is none any more."""
        self.setting_back.clear()
        for sent in self.sent.values():
            sent.ends += 1
        for returned in self.returns.values():
            returned.ends += 1

    def power_ended(self, flushed: int) -> None:
        """Nothing that lies above is promised."""
        for sent in self.sent.values():
            if sent.promised and sent.reached > flushed:
                sent.offset = None
            if sent.outcome and sent.outcome_reached > flushed:
                sent.outcome = ""
            if sent.recalled and sent.recall_reached > flushed:
                sent.recalled = False
        for back in self.returns.values():
            back.promised &= back.reached <= flushed
        for popped in self.popped.values():
            popped.flight.sure &= popped.flight.reached <= flushed
            if popped.acked and popped.acked_reached > flushed:
                popped.acked = False
