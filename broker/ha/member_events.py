"""What happens to a member of a broker set, and what it has to do: the words of `member`, values only.

An `Event` goes in, `Action`s come out, to be carried out in their order, each one whole before the next.
"""

from __future__ import annotations

import msgspec


class View(msgspec.Struct, frozen=True):
    """What a controller says of the set: the answers of 1001, 1002, 1003 and 1004, and 1008."""

    master_epoch: int
    sync_state_set_epoch: int
    sync_state_set: frozenset[int]
    master: int | None = None  # nobody could be elected, or nobody was yet
    master_address: str = ""

    @property
    def pair(self) -> tuple[int, int]:
        return self.master_epoch, self.sync_state_set_epoch


class Life(msgspec.Struct, frozen=True):
    """One life of one member: what was acknowledged in another one may be lost in this one."""

    broker_id: int
    incarnation: str  # of the data directory: drawn anew by a start that may have lost what was acknowledged
    starts: int  # of the data directory
    process: str  # drawn by each start: two copies of a directory count alike


class Saved(msgspec.Struct, frozen=True):
    """What a member keeps on its disk about itself, beside log and epochs."""

    broker_id: int = 0  # 0: none yet
    check_code: str = ""  # with which ids are taken, the same in all lives: whose an id is is told by it
    incarnation: str = ""
    starts: int = 0
    master_epoch: int = 0
    sync_state_set_epoch: int = 0
    sync_state_set: tuple[int, ...] = ()  # of that epoch: where the register is lost, an operator asks who was in sync
    confirm: int = 0
    clean: bool = True  # the last life ended with everything on the disk
    # Nobody knows that it has what its set archived: elected so, and not settled since; or in sync with a master of
    # which its log does not say that it has settled.
    may_lack_archived: bool = False
    settled_in: int = 0  # the epoch of the last master whose log, and this one, says that it has


# ---- events


class Tick(msgspec.Struct, frozen=True):
    """Time went by, several times a second; also when a slave that is outside the SSS has reported."""

    end: int  # of the own log, whole records


class NextBrokerId(msgspec.Struct, frozen=True):
    """1012's answer."""

    broker_id: int


class BrokerIdApplied(msgspec.Struct, frozen=True):
    """1013's answer: the id is this member's."""

    broker_id: int


class BrokerIdTaken(msgspec.Struct, frozen=True):
    """1013's answer 2014: it is another's."""


class Seen(msgspec.Struct, frozen=True):
    """A controller told of the set."""

    view: View
    ask: int = 0  # the number of the `AskReplicaInfo` that it answers; 0: of none


class Registered(msgspec.Struct, frozen=True):
    """1003's answer: the controller knows this life of the member."""

    view: View | None  # none where no master lives


class NotRegistered(msgspec.Struct, frozen=True):
    """Answers 2008 and 2010: the controller knows no such set, or no such member."""


class BrokerIdLost(msgspec.Struct, frozen=True):
    """1003's answer 2014: a register that was set back gave this id to another directory."""

    broker_id: int


class Disowned(msgspec.Struct, frozen=True):
    """The controller knows a later life of this data directory: this one is a copy, or the copied."""

    reason: str


class StockControllers(msgspec.Struct, frozen=True):
    """Who elects is Apache's controller: it takes one life of a member for the next."""


class AlterRefused(msgspec.Struct, frozen=True):
    """One try of a 1001 had no effect and never will have. One that was not answered may have it, and later."""

    request_id: str
    has_moved: bool = False  # 2001, 2013: the set is another, and an earlier try of the same may be what moved it


class RoleTaken(msgspec.Struct, frozen=True):
    """All actions of a change of role are done."""

    epoch: int
    end: int  # of the own log then


class ConfirmHeard(msgspec.Struct, frozen=True):
    """What a T2 from the master says is confirmed, down to the end of the last whole record that is here."""

    offset: int


class CutWanted(msgspec.Struct, frozen=True):
    """The own log parts from the master's."""

    to: int
    floor: int  # the start of the record that holds the own confirm, or the confirm itself where it is a record's start


class HandOver(msgspec.Struct, frozen=True):
    """Somebody else shall be master."""

    target: int


class MetadataSynced(msgspec.Struct, frozen=True):
    """All tables of the master are in its log, or were told to the one that takes over."""


class MasterSettled(msgspec.Struct, frozen=True):
    """The log says so of its master, and this is confirmed, and on the disk."""

    epoch: int


class ArchiveSettled(msgspec.Struct, frozen=True):
    """As master of this epoch it leads, above all that the set's archive names."""

    epoch: int


Event = (
    Tick
    | NextBrokerId
    | BrokerIdApplied
    | BrokerIdTaken
    | Seen
    | Registered
    | NotRegistered
    | BrokerIdLost
    | Disowned
    | StockControllers
    | AlterRefused
    | RoleTaken
    | ConfirmHeard
    | CutWanted
    | HandOver
    | MetadataSynced
    | ArchiveSettled
    | MasterSettled
)

# ---- actions: to be asked of a controller


class AskNextBrokerId(msgspec.Struct, frozen=True):
    """1012."""


class ApplyBrokerId(msgspec.Struct, frozen=True):
    """1013, with a check code that stays the same for all tries: a try whose answer was lost is answered again."""

    broker_id: int
    check_code: str


class Register(msgspec.Struct, frozen=True):
    """1003: this life begins."""

    life: Life
    check_code: str


class Heartbeat(msgspec.Struct, frozen=True):
    """904, to every controller."""

    life: Life
    end: int
    confirm: int
    pair: tuple[int, int]


class Elect(msgspec.Struct, frozen=True):
    """1002."""

    designate: int | None = None


class AskReplicaInfo(msgspec.Struct, frozen=True):
    """1004."""

    ask: int


class Alter(msgspec.Struct, frozen=True):
    """1001. One that is asked again keeps its id."""

    request_id: str
    master_epoch: int
    sync_state_set_epoch: int
    members: tuple[int, ...]


# ---- actions: at home


class Withdraw(msgspec.Struct, frozen=True):
    """Close the connections to the controllers: they take this life for dead, and elect anew."""


class Save(msgspec.Struct, frozen=True):
    """To the disk, and synced, before the next action."""

    saved: Saved


class Answer(msgspec.Struct, frozen=True):
    """Who waits for an acknowledgement is told that it is stored and not safe; from here on never that it is."""


class DropSlaves(msgspec.Struct, frozen=True):
    """Close all connections of those that follow."""


class StopFollowing(msgspec.Struct, frozen=True):
    """Close the connection to the master: nothing is acknowledged to it any more."""


class CutTornTail(msgspec.Struct, frozen=True):
    """The log ends with a whole record and is synced. Each queue goes on above all of it, confirmed or not."""


class BeginEpoch(msgspec.Struct, frozen=True):
    """What is appended from here on is of this epoch: written down at the end of the log, and synced."""

    epoch: int


class ClipGroups(msgspec.Struct, frozen=True):
    """No group is beyond the end of a queue."""


class Follow(msgspec.Struct, frozen=True):
    """Connect to the master of this epoch, for as long as nothing else is said."""

    master: int
    address: str
    epoch: int


class Cut(msgspec.Struct, frozen=True):
    """Keep what is above in `diverged/`, then cut it off, with the epochs that start there."""

    to: int


class SyncMetadata(msgspec.Struct, frozen=True):
    """No append is taken any more; say `MetadataSynced` when all that the tables know is in the log."""


class EndTurn(msgspec.Struct, frozen=True):
    """Everything before this is done: say `RoleTaken`."""

    epoch: int


class Tell(msgspec.Struct, frozen=True):
    """To the operator."""

    reason: str


Ask = AskNextBrokerId | ApplyBrokerId | Register | Heartbeat | Elect | AskReplicaInfo | Alter
Action = (
    Ask
    | Withdraw
    | Save
    | Answer
    | DropSlaves
    | StopFollowing
    | CutTornTail
    | BeginEpoch
    | ClipGroups
    | Follow
    | EndTurn
    | Cut
    | SyncMetadata
    | Tell
)
