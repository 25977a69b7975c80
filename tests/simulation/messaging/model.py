"""The guarantees that clients have from the broker's answers. This model does not know how the broker works.

A message is *promised* once its send was answered with success. A promise is void only if a power cut under ASYNC_FLUSH
took a message that no flush had covered. The log position at the time of an answer also promises everything before it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

PLAIN, DELAY, TIMER, HALF = "plain", "delay", "timer", "half"
Place = tuple[str, int, int]  # topic, queue, offset


class Copy(NamedTuple):
    """A record in a queue."""

    topic: str
    queue: int
    offset: int
    body: bytes


@dataclass(slots=True, eq=False)
class SentMessage:
    """One message, from its send on."""

    name: str
    kind: str
    topic: str
    queue: int
    body: bytes
    sent_ms: int  # By the wall clock.
    sent_at: float  # By the monotonic clock.
    wait_ms: int = 0  # The delay of a delayed message.
    level: int = 0
    #: The promise in the answer; None: no answer yet, or one that promises nothing.
    offset: int | None = None
    physical: int = -1
    reached: int = -1  # The log end when the answer arrived.
    answered_at: float = 0.0
    refused: bool = False
    #: The number of process ends since then: each may deliver a delayed message once more.
    ends: int = 0
    #: Transactions: the producer's decision, and whether it was answered with success.
    asked_for: set[str] = field(default_factory=set)
    outcome: str = ""
    outcome_reached: int = -1
    #: Timers: a recall was sent, and was answered with success before the delivery time.
    recall_sent: bool = False
    recalled: bool = False
    recall_reached: int = -1
    seen: int = 0  # Copies in the target topic.

    @property
    def promised(self) -> bool:
        return self.offset is not None


@dataclass(slots=True)
class Return:
    """A consumer sent a message back, to be redelivered after a delay level; below 0 it becomes a dead letter."""

    sent: SentMessage
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

    sent: SentMessage
    place: Place
    pop_time: int
    invisible_ms: int
    reached: int
    handle: str
    retry: str
    sure: bool = True  # Nothing has happened since that could have ended it.


@dataclass(slots=True)
class PopDeliveries:
    """The deliveries of one copy of a message to a pop group."""

    flight: Flight
    ack_sent: bool = False
    acked: bool = False  # In time, and answered.
    acked_reached: int = -1


class Offsets:
    """The offsets that a consumer group committed, in order; those before `reached` must be on the disk."""

    def __init__(self) -> None:
        self.history: dict[tuple[str, str, int], list[tuple[float, int]]] = {}

    def committed(self, group: str, topic: str, queue: int, offset: int, now: float) -> None:
        self.history.setdefault((group, topic, queue), []).append((now, offset))

    def current(self) -> dict[tuple[str, str, int], int]:
        return {key: told[-1][1] for key, told in self.history.items()}

    def since(self, key: tuple[str, str, int], moment: float) -> set[int]:
        """Return the committed offset at that time, and all later ones."""
        told = self.history[key]
        before = [offset for at, offset in told if at <= moment]
        return {*before[-1:], *(offset for at, offset in told if at > moment)}

    def found(self, key: tuple[str, str, int], offset: int, now: float) -> None:
        """Record the offset found after a crash, from which the group resumes."""
        self.history[key] = [(now, offset)]


class MessageModel:
    def __init__(self) -> None:
        self.sent: dict[str, SentMessage] = {}
        self.returns: dict[str, Return] = {}  # By the message's name: each is sent back at most once.
        self.popped: dict[Place, PopDeliveries] = {}
        self.owed: set[Place] = set()  # The pop group was reset before this message, so it is (re)delivered.
        self.setting_back: list[set[Place]] = []  # Not answered yet.
        self.set_backs = 0  # The requested ones.
        self.offsets = Offsets()
        self.counts: Counter[str] = Counter()

    def of(self, *kinds: str) -> list[SentMessage]:
        return [sent for sent in self.sent.values() if sent.kind in kinds]

    def taken(self, popped: PopDeliveries) -> None:
        place = popped.flight.place
        self.popped[place] = popped
        for places in (self.owed, *self.setting_back):
            places.discard(place)

    def pops_of(self, sent: SentMessage) -> list[PopDeliveries]:
        return [popped for popped in self.popped.values() if popped.flight.sent is sent]

    def process_ended(self) -> None:
        """Record the end of the process: an answer that has not arrived yet never will."""
        self.setting_back.clear()
        for sent in self.sent.values():
            sent.ends += 1
        for returned in self.returns.values():
            returned.ends += 1

    def power_ended(self, flushed: int) -> None:
        """Record a power cut: messages above this position are no longer promised."""
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
