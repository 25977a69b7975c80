"""Events and actions of `member`'s state machine, as values.

An `Event` goes in, `Action`s come out. The caller does them in order, each completely before the next.
"""

from __future__ import annotations

import msgspec


class View(msgspec.Struct, frozen=True):
    """State of the set at a controller: from answers to 1001, 1002, 1003 and 1004, and from 1008."""

    master_epoch: int
    sync_state_set_epoch: int
    sync_state_set: frozenset[int]
    master: int | None = None  # None: no member could be elected, or none was yet
    master_address: str = ""

    @property
    def pair(self) -> tuple[int, int]:
        return self.master_epoch, self.sync_state_set_epoch


class Life(msgspec.Struct, frozen=True):
    """One life of a member. A later life may lack bytes that an earlier one acknowledged."""

    broker_id: int
    incarnation: str  # of the data directory: new after a start that may have lost acknowledged bytes
    starts: int  # number of starts of the data directory
    process: str  # random for each start: two copies of a directory have equal counts


class SavedMember(msgspec.Struct, frozen=True):
    """State that a member keeps on its disk, besides log and epochs."""

    broker_id: int = 0  # 0: none yet
    check_code: str = ""  # identifies the directory when it applies for an id; the same in all lives
    incarnation: str = ""
    starts: int = 0
    master_epoch: int = 0
    sync_state_set_epoch: int = 0
    # of that epoch: an operator needs the in-sync replicas if the controllers lost their state
    sync_state_set: tuple[int, ...] = ()
    confirm: int = 0
    clean: bool = True  # the last life ended with everything on the disk
    # It is not known to have all bytes that its set archived. It was elected in that state and has not settled since,
    # or is in sync with a master whose log does not record that it has settled.
    may_lack_archived: bool = False
    settled_in: int = 0  # epoch of the last master that has settled its archive according to this log


# -- events


class Tick(msgspec.Struct, frozen=True):
    """Progress of time, several times a second. Also sent when a slave outside the SSS has reported."""

    end: int  # end of the own log, whole records only


class NextBrokerId(msgspec.Struct, frozen=True):
    """Answer to 1012."""

    broker_id: int


class BrokerIdApplied(msgspec.Struct, frozen=True):
    """Answer to 1013: the id is this member's."""

    broker_id: int


class BrokerIdTaken(msgspec.Struct, frozen=True):
    """Answer 2014 to 1013: the id is another member's."""


class SetSeen(msgspec.Struct, frozen=True):
    """A view of the set arrived from a controller."""

    view: View
    ask: int = 0  # the number of the `AskReplicaInfo` that it answers; 0: none


class Registered(msgspec.Struct, frozen=True):
    """Answer to 1003: the controller has accepted this life of the member."""

    view: View | None  # None: no master is alive


class NotRegistered(msgspec.Struct, frozen=True):
    """Answers 2008 and 2010: the controller does not know the set, or the member."""


class BrokerIdLost(msgspec.Struct, frozen=True):
    """Answer 2014 to 1003: a controller whose state was reset gave this id to another directory."""

    broker_id: int


class Superseded(msgspec.Struct, frozen=True):
    """The controller knows a later life of this data directory: this one is a copy, or the original of a copy."""

    reason: str


class StockControllers(msgspec.Struct, frozen=True):
    """The controllers are Apache's, which can't distinguish two lives of a member."""


class AlterRefused(msgspec.Struct, frozen=True):
    """One try of a 1001 had no effect and never will have. A try without an answer may still take effect."""

    request_id: str
    has_moved: bool = False  # 2001, 2013: the set has changed, perhaps by an earlier try of this request


class RoleTaken(msgspec.Struct, frozen=True):
    """All actions of a change of role are done."""

    epoch: int
    end: int  # end of the own log at that time


class ConfirmReceived(msgspec.Struct, frozen=True):
    """Confirm offset of a T2 from the master, at most the end of the last whole record that is stored here."""

    offset: int


class TruncationRequested(msgspec.Struct, frozen=True):
    """The own log diverges from the master's."""

    to: int
    floor: int  # start of the record that contains the own confirm, or confirm itself if a record starts there


class Switchover(msgspec.Struct, frozen=True):
    """An operator requests a switchover."""

    target: int


class MetadataSynced(msgspec.Struct, frozen=True):
    """All tables of the master are in its log, or were sent to the target of the switchover."""


class MasterSettled(msgspec.Struct, frozen=True):
    """The log records that its master has settled its archive. The record is confirmed and on the disk."""

    epoch: int


class SettledArchive(msgspec.Struct, frozen=True):
    """As master of this epoch, the log continues above all offsets that the set's archive names."""

    epoch: int


Event = (
    Tick
    | NextBrokerId
    | BrokerIdApplied
    | BrokerIdTaken
    | SetSeen
    | Registered
    | NotRegistered
    | BrokerIdLost
    | Superseded
    | StockControllers
    | AlterRefused
    | RoleTaken
    | ConfirmReceived
    | TruncationRequested
    | Switchover
    | MetadataSynced
    | SettledArchive
    | MasterSettled
)

# -- actions: requests to a controller


class AskNextBrokerId(msgspec.Struct, frozen=True):
    """Request 1012."""


class ApplyBrokerId(msgspec.Struct, frozen=True):
    """Request 1013. The check code is the same for all tries, so that a try whose answer was lost is answered again."""

    broker_id: int
    check_code: str


class Register(msgspec.Struct, frozen=True):
    """Request 1003: this life begins."""

    life: Life
    check_code: str


class Heartbeat(msgspec.Struct, frozen=True):
    """Request 904, to every controller."""

    life: Life
    end: int
    confirm: int
    pair: tuple[int, int]


class Elect(msgspec.Struct, frozen=True):
    """Request 1002."""

    designate: int | None = None


class AskReplicaInfo(msgspec.Struct, frozen=True):
    """Request 1004."""

    ask: int


class Alter(msgspec.Struct, frozen=True):
    """Request 1001. A repeated one keeps its id."""

    request_id: str
    master_epoch: int
    sync_state_set_epoch: int
    members: tuple[int, ...]


# -- actions: local


class Withdraw(msgspec.Struct, frozen=True):
    """Close the connections to the controllers, so that they consider this life dead and elect again."""


class Save(msgspec.Struct, frozen=True):
    """Save the state durably before the next action."""

    saved: SavedMember


class StopAcknowledging(msgspec.Struct, frozen=True):
    """Answer all waiting appends with "stored, not confirmed". None is acknowledged after that."""


class DropSlaves(msgspec.Struct, frozen=True):
    """Close all connections of slaves."""


class StopFollowing(msgspec.Struct, frozen=True):
    """Close the connection to the master. Nothing is acknowledged to it after that."""


class TruncateTornTail(msgspec.Struct, frozen=True):
    """Truncate an incomplete record at the end of the log, and sync.

    All queues continue above the remaining records, confirmed or not.
    """


class BeginEpoch(msgspec.Struct, frozen=True):
    """Save the new epoch durably at the end of the log. Later appends belong to it."""

    epoch: int


class ClipGroups(msgspec.Struct, frozen=True):
    """Reset groups whose committed offsets are beyond the end of a queue."""


class Follow(msgspec.Struct, frozen=True):
    """Connect to the master of this epoch, until a later action ends that."""

    master: int
    address: str
    epoch: int


class Truncate(msgspec.Struct, frozen=True):
    """Save the bytes above `to` in `diverged/`, then truncate the log, and the epochs that start there."""

    to: int


class SyncMetadata(msgspec.Struct, frozen=True):
    """Reject appends from now on. Send `MetadataSynced` when all contents of the tables are in the log."""


class EndRoleChange(msgspec.Struct, frozen=True):
    """End a change of role: send `RoleTaken`, because all actions before this are done."""

    epoch: int


class NotifyOperator(msgspec.Struct, frozen=True):
    """Log a message for operators."""

    reason: str


Ask = AskNextBrokerId | ApplyBrokerId | Register | Heartbeat | Elect | AskReplicaInfo | Alter
Action = (
    Ask
    | Withdraw
    | Save
    | StopAcknowledging
    | DropSlaves
    | StopFollowing
    | TruncateTornTail
    | BeginEpoch
    | ClipGroups
    | Follow
    | EndRoleChange
    | Truncate
    | SyncMetadata
    | NotifyOperator
)
