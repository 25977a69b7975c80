"""What clients did and saw on a broker set, and what the healed set holds: values only, one JSON line each in a file.

    Sent      a call of a producer, with its answer
    Seen      a message that was given to a consumer, or read by offset
    Stored    a message that the healed set holds, read by offset from its master
    Bounds    of a queue of the healed set
    TopicMade, TopicGone    administrative changes that were acknowledged, and Topics: those of the healed set
    Healed    when the last fault was over
    Switched  what became of it that somebody asked for another master
    Replaced  who went for ever, and came as a new member
    Stall     when the machine ran nobody
    Waited    when the machine let a server wait that had work to do
    Led       the master's epoch, when a round begins, when its groups are to rest, and at its end
    Serves    what of the set did its work again, and when
    Rested    when a group had nothing left to read
    LogPart   a stretch of a member's CommitLog, as a digest
    Archived  a row of the archive's tables
    Dropped   what a member has no more, because the archive has it
    Kept, Gap for `async`: what the new master lacked and lies elsewhere, and what the archive says is missing
    Unsettled what patience did not suffice for: what the checks miss may still come
    BrokenOff why a round had no proper end
    Told      a fault, for who reads a history, and of which kind, where it begins

Times are milliseconds since 1970 by one clock: brokers and clients share a machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec


class Outcome(StrEnum):
    """What a producer knows of a send."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"  # an answer that promises nothing: stored or not
    UNKNOWN = "unknown"


class Decision(StrEnum):
    """How a transaction ends, as its producer decided: END_TRANSACTION and every check say the same."""

    NONE = ""
    COMMIT = "commit"
    ROLLBACK = "rollback"


class Sent(msgspec.Struct, frozen=True, kw_only=True, tag="sent"):
    """One call of a producer. A sequential producer's next call begins when the one before has ended."""

    producer: str
    number: int  # of its calls, in their order
    key: str  # of the message; no two calls have the same
    topic: str
    began: int
    ended: int
    outcome: Outcome
    queue: int = -1
    offset: int = -1
    physical: int = -1  # where the record is in the CommitLog
    may_repeat: bool = False  # the client may have sent it more than once
    due: int = 0  # a delayed message: not before
    decision: Decision = Decision.NONE  # of a transaction: queue and offset are the half message's then


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag="seen"):
    """Given to `who`; in the order in which it was given."""

    who: str
    topic: str
    queue: int
    offset: int
    key: str
    at: int
    group: str = ""  # "": a reader by offset, which sees every offset once and in order
    in_order: bool = False  # a group that has one message of a queue in hand at a time
    again: bool = False  # out of the group's retry topic: queue and offset are not the message's


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """In the healed set."""

    topic: str
    queue: int
    offset: int
    key: str
    stored: int = 0  # store time


class Bounds(msgspec.Struct, frozen=True, kw_only=True, tag="bounds"):
    """A queue of the healed set: from `first` up to, without it, `end`."""

    topic: str
    queue: int
    first: int
    end: int


class TopicMade(msgspec.Struct, frozen=True, kw_only=True, tag="made"):
    """Acknowledged."""

    topic: str
    queues: int


class TopicGone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """Acknowledged, and not made again."""

    topic: str


class Topics(msgspec.Struct, frozen=True, kw_only=True, tag="topics"):
    """All of the healed set, with their number of queues."""

    queues: dict[str, int]


class Healed(msgspec.Struct, frozen=True, kw_only=True, tag="healed"):
    """From here on every member ran and every link was open."""

    at: int


class Switched(msgspec.Struct, frozen=True, kw_only=True, tag="switched"):
    """A change of master that was asked for: `to` has it, says the answer; "" without one, or where it was refused."""

    at: int
    by: str  # "" for the controller
    to: str
    why: str  # of a refusal
    epoch: int  # of the master, when it was asked for; −1: unknown
    then: int  # and when it was answered


class Replaced(msgspec.Struct, frozen=True, kw_only=True, tag="replaced"):
    """With an empty disk."""

    at: int
    member: str


class Stall(msgspec.Struct, frozen=True, kw_only=True, tag="stall"):
    """The machine was busy elsewhere: the clients stood still for `lasted` milliseconds, and servers may have."""

    at: int
    lasted: int


class Waited(msgspec.Struct, frozen=True, kw_only=True, tag="waited"):
    """For a processor, by the kernel's account: so many milliseconds of those before `at`."""

    at: int
    who: str
    lasted: int


class Led(msgspec.Struct, frozen=True, kw_only=True, tag="led"):
    """By the controller; −1: it could not be asked."""

    at: int
    epoch: int


class Serves(msgspec.Struct, frozen=True, kw_only=True, tag="serves"):
    """After the healing: all members are in sync, a producer is acknowledged. `at` is 0 if that did not happen."""

    what: str
    at: int
    asked: int = 0  # it could not come about before that


#: Of `Serves`: every offset that the set holds is in the archive.
ALL_IS_ARCHIVED = "all is archived"


class Rested(msgspec.Struct, frozen=True, kw_only=True, tag="rested"):
    """A group at rest: all that is stored was given to it, and its offsets say so. `at` is 0 if that did not happen."""

    group: str
    at: int
    lacks: str = ""  # where it did not
    is_past: bool = False  # where it did not: its offsets say that it was given all, it will be given no more


class LogPart(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """Of a member's CommitLog."""

    member: str
    start: int
    end: int
    digest: str


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """A message that a member has outside its log."""

    key: str
    where: str
    cut_from: str = ""  # the topic of the record that was cut off; "" where it went with the whole disk


class Gap(msgspec.Struct, frozen=True, kw_only=True, tag="gap"):
    """Offsets of a queue, from `first` to `last`, that the archive's journal says are nowhere."""

    topic: str
    queue: int
    first: int
    last: int


class Archived(msgspec.Struct, frozen=True, kw_only=True, tag="archived"):
    """As any reader of Parquet has it."""

    topic: str
    queue: int
    offset: int
    key: str


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """The member's log begins at `below`."""

    member: str
    below: int


class Unsettled(msgspec.Struct, frozen=True, kw_only=True, tag="unsettled"):
    """Waited for in vain."""

    what: str


class BrokenOff(msgspec.Struct, frozen=True, kw_only=True, tag="broken off"):
    """The rest of the round is not here."""

    why: str
    late: bool = False  # for want of an answer, or of something that did not come in time


class Told(msgspec.Struct, frozen=True, kw_only=True, tag="told"):
    """A step of the faults."""

    at: int
    what: str
    kind: str = ""  # of the fault that begins; "" else


Event = (
    Sent
    | Seen
    | Stored
    | Bounds
    | TopicMade
    | TopicGone
    | Topics
    | Healed
    | Switched
    | Replaced
    | Stall
    | Waited
    | Led
    | Serves
    | Rested
    | LogPart
    | Kept
    | Gap
    | Archived
    | Dropped
    | Unsettled
    | BrokenOff
    | Told
)

_DECODER = msgspec.json.Decoder(Event)


def write(path: Path, events: Iterable[Event]) -> None:
    """For whoever looks at it later."""
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def read(path: Path) -> list[Event]:
    """What `write` has written."""
    return [_DECODER.decode(line) for line in path.read_bytes().splitlines()]
