"""Actions and observations of clients on a broker set, and the content of the healed set: values, one JSON line each.

    Sent      a call of a producer, with its answer
    Seen      a message that was delivered to a consumer, or read by offset
    Stored    a message that the healed set holds, read by offset from its master
    Bounds    of a queue of the healed set
    TopicMade, TopicGone    administrative changes that were acknowledged, and Topics: those of the healed set
    Healed    when the last fault was over
    Switched  the outcome of a requested change of master
    Replaced  a member that was removed for good and replaced by a new one
    Stall     a period in which the machine ran no client
    Waited    a period in which a server that had work waited for a processor
    Led       the master's epoch, when a round begins, when its groups are to rest, and at its end
    Serves    which function of the set was restored, and when
    Rested    when a group had consumed everything
    LogPart   a range of a member's CommitLog, as a digest
    Archived  a row of the archive's tables
    Dropped   the messages that a member evicted because the archive has them
    Kept, Gap for `async`: messages that the new master lacked and that are stored elsewhere, and recorded gaps
    Unsettled a wait that timed out: a message that the checks miss may still appear
    BrokenOff why a round was aborted
    Told      a fault, for readers of a history, with its kind at its begin

Times are milliseconds since 1970 by one clock: brokers and clients share a machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path

import msgspec


class Outcome(StrEnum):
    """The outcome of a send, as its producer knows it."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"  # An answer that promises nothing: the message may be stored or not.
    UNKNOWN = "unknown"


class Decision(StrEnum):
    """The producer's decision on a transaction, which END_TRANSACTION and every check-back return alike."""

    NONE = ""
    COMMIT = "commit"
    ROLLBACK = "rollback"


class Sent(msgspec.Struct, frozen=True, kw_only=True, tag="sent"):
    """One call of a producer. A sequential producer begins its next call after the end of the previous one."""

    producer: str
    number: int  # The number of the call, in order.
    key: str  # The message's key; no two calls share one.
    topic: str
    began: int
    ended: int
    outcome: Outcome
    queue: int = -1
    offset: int = -1
    physical: int = -1  # The physical offset of the record.
    may_repeat: bool = False  # The client may have sent it more than once.
    due: int = 0  # For a delayed message: the earliest delivery.
    decision: Decision = Decision.NONE  # For a transaction: queue and offset are those of the half message.


class Seen(msgspec.Struct, frozen=True, kw_only=True, tag="seen"):
    """A delivery to `who`, in order of delivery."""

    who: str
    topic: str
    queue: int
    offset: int
    key: str
    at: int
    group: str = ""  # "": a reader by offset, which sees every offset once and in order.
    in_order: bool = False  # A group that has at most one message of a queue in flight.
    again: bool = False  # From the group's retry topic: queue and offset are not the message's own.


class Stored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """A message in the healed set."""

    topic: str
    queue: int
    offset: int
    key: str
    stored: int = 0  # The store time.


class Bounds(msgspec.Struct, frozen=True, kw_only=True, tag="bounds"):
    """A queue of the healed set: from `first` to `end`, exclusive."""

    topic: str
    queue: int
    first: int
    end: int


class TopicMade(msgspec.Struct, frozen=True, kw_only=True, tag="made"):
    """An acknowledged creation."""

    topic: str
    queues: int


class TopicDeleted(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """An acknowledged deletion; the topic was not created again."""

    topic: str


class Topics(msgspec.Struct, frozen=True, kw_only=True, tag="topics"):
    """All topics of the healed set, with their number of queues."""

    queues: dict[str, int]


class Healed(msgspec.Struct, frozen=True, kw_only=True, tag="healed"):
    """From here on every member ran and every link was open."""

    at: int


class Switched(msgspec.Struct, frozen=True, kw_only=True, tag="switched"):
    """A requested change of master: `to` is the new master of the answer; "" without one, or if it was refused."""

    at: int
    by: str  # "" for the controller.
    to: str
    why: str  # The reason of a refusal.
    epoch: int  # The master's epoch at the request; −1: unknown.
    then: int  # The time of the answer.


class Replaced(msgspec.Struct, frozen=True, kw_only=True, tag="replaced"):
    """A member replaced by one with an empty disk."""

    at: int
    member: str


class Stall(msgspec.Struct, frozen=True, kw_only=True, tag="stall"):
    """The machine was busy: the clients stalled for `lasted` milliseconds, and servers may have stalled as well."""

    at: int
    lasted: int


class Waited(msgspec.Struct, frozen=True, kw_only=True, tag="waited"):
    """Milliseconds before `at` in which a server waited for a processor, by the kernel's account."""

    at: int
    who: str
    lasted: int


class Led(msgspec.Struct, frozen=True, kw_only=True, tag="led"):
    """The epoch at the controller; −1: it could not be asked."""

    at: int
    epoch: int


class Serves(msgspec.Struct, frozen=True, kw_only=True, tag="serves"):
    """A restored function: all members are in sync, or a producer is acknowledged. `at` is 0 if it was not restored."""

    what: str
    at: int
    asked: int = 0  # It could not have been restored earlier.


#: For `Serves`: every offset of the set is in the archive.
ALL_IS_ARCHIVED = "all is archived"


class Rested(msgspec.Struct, frozen=True, kw_only=True, tag="rested"):
    """A group that received all stored messages and committed its offsets. `at` is 0 if that did not happen."""

    group: str
    at: int
    lacks: str = ""  # The missing part otherwise.
    is_past: bool = False  # If it did not rest: its offsets are at the end, so it will receive no further messages.


class LogPart(msgspec.Struct, frozen=True, kw_only=True, tag="log"):
    """A range of a member's CommitLog."""

    member: str
    start: int
    end: int
    digest: str


class Kept(msgspec.Struct, frozen=True, kw_only=True, tag="kept"):
    """A message that a member has outside its log."""

    key: str
    where: str
    cut_from: str = ""  # The topic of the truncated record; "" if it was lost with the whole disk.


class Gap(msgspec.Struct, frozen=True, kw_only=True, tag="gap"):
    """Offsets of a queue, from `first` to `last`, that the archive's journal records as lost."""

    topic: str
    queue: int
    first: int
    last: int


class Archived(msgspec.Struct, frozen=True, kw_only=True, tag="archived"):
    """A row, as any reader of Parquet reads it."""

    topic: str
    queue: int
    offset: int
    key: str


class Dropped(msgspec.Struct, frozen=True, kw_only=True, tag="dropped"):
    """The member's log begins at `below`."""

    member: str
    below: int


class Unsettled(msgspec.Struct, frozen=True, kw_only=True, tag="unsettled"):
    """A wait that timed out."""

    what: str


class BrokenOff(msgspec.Struct, frozen=True, kw_only=True, tag="broken off"):
    """The round was aborted, and its further events are missing."""

    why: str
    late: bool = False  # Because an answer or an event did not arrive in time.


class ReportedStep(msgspec.Struct, frozen=True, kw_only=True, tag="told"):
    """A step of the faults."""

    at: int
    what: str
    kind: str = ""  # The kind of the fault that begins; "" otherwise.


Event = (
    Sent
    | Seen
    | Stored
    | Bounds
    | TopicMade
    | TopicDeleted
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
    | ReportedStep
)

_DECODER = msgspec.json.Decoder(Event)


def write(path: Path, events: Iterable[Event]) -> None:
    """Write a history for later inspection."""
    path.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))


def read(path: Path) -> list[Event]:
    """Read a history that `write` has written."""
    return [_DECODER.decode(line) for line in path.read_bytes().splitlines()]
