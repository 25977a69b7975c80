"""A member's disk: its partly unsynced log of records, epochs, saved state, groups' offsets and truncated tails.

The log may end within a record whose first bytes arrived. As in a real log, two different records of the same size at
the same position can only be distinguished by their epochs.

A master that resumes above the archive appends records that are not messages: a gap up to the archive's end, the queues
that it raised, and a settlement record.

A raised queue continues at a higher offset because of its files. A truncation, or the start of a slave after an unclean
stop, rebuilds the files from the log; then the raise survives only if the log has a record of it. The disk tracks this.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from broker.ha.epochs import EpochCache
from broker.ha.member_events import SavedMember


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A message. Two records are equal only if they are the same object: a copy is not equal."""

    uid: int
    queue: int
    queue_offset: int
    size: int
    epoch: int  # The epoch in which it was written.
    writer: int
    raises: tuple[int, ...] = ()  # In the metadata log: the offset at which each queue resumes.
    settles: bool = False  # In the metadata log: its writer has settled the archive in its epoch.

    def __repr__(self) -> str:
        return f"m{self.uid}(q{self.queue}:{self.queue_offset} e{self.epoch} by {self.writer})"


Piece = tuple[Record, int, int]  # A piece of a record: start and number of bytes.

QUEUES = 2
NO_QUEUE = -1  # Its record is not a message.
BOOK_SIZE = 50


class ReplicatedLog:
    """Bytes from 0 on. Invariant: `_ends` ascends; `partial` is of a record that begins at the last of them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._ends: list[int] = []
        self.partial: tuple[Record, int] | None = None
        self.synced = 0
        # With the end of each; None: below the offset to which its queue was raised.
        self.queues: list[list[tuple[Record | None, int]]] = [[] for _ in range(QUEUES)]

    @property
    def whole_end(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def end(self) -> int:
        return self.whole_end + (self.partial[1] if self.partial is not None else 0)

    def end_of(self, record: Record) -> int | None:
        """Return the end of the record, if it is here."""
        if record.queue == NO_QUEUE:
            return None
        queue = self.queues[record.queue]
        if record.queue_offset >= len(queue) or queue[record.queue_offset][0] is not record:
            return None
        return queue[record.queue_offset][1]

    def has(self, record: Record) -> bool:
        return self.end_of(record) is not None

    def append(self, record: Record) -> int:
        assert self.partial is None
        end = self.whole_end + record.size
        self.records.append(record)
        self._ends.append(end)
        self._index(record, end)
        return end

    def _index(self, record: Record, end: int) -> None:
        if record.queue == NO_QUEUE:
            return
        queue = self.queues[record.queue]
        if record.queue_offset < len(queue):  # Assigned twice: the later one is found.
            queue[record.queue_offset] = record, end
        else:
            queue += [(None, 0)] * (record.queue_offset - len(queue))
            queue.append((record, end))

    def read(self, offset: int, upto: int) -> list[Piece]:
        """Return the bytes from `offset` on, in pieces."""
        pieces: list[Piece] = []
        index = bisect_right(self._ends, offset)
        while offset < upto and index < len(self.records):
            record, end = self.records[index], self._ends[index]
            skip = offset - (end - record.size)
            take = min(end, upto) - offset
            pieces.append((record, skip, take))
            offset += take
            index += 1
        return pieces

    def append_piece(self, piece: Piece) -> bool:
        """Append a piece from the master; return False if it does not fit the log (its CRC is wrong)."""
        record, skip, take = piece
        if self.partial is not None:
            held, there = self.partial
            if held is not record or skip != there:
                return False
        elif skip:
            return False
        self.partial = None
        if skip + take == record.size:
            self.append(record)
        else:
            self.partial = record, skip + take
        return True

    def cut_torn_tail(self) -> None:
        self.partial = None
        self.synced = min(self.synced, self.end)

    def between(self, start: int, end: int) -> tuple[Record, ...]:
        """Return the whole records of a range that begins and ends at record boundaries."""
        return tuple(self.records[bisect_left(self._ends, start + 1) : bisect_right(self._ends, end)])

    def record_start(self, position: int) -> int:
        """Return the start of the record at this position, or the position if it is a boundary."""
        index = bisect_right(self._ends, position)
        return self._ends[index - 1] if index else 0

    def truncate(self, to: int) -> list[Record]:
        """Truncate to the start of a record; return the truncated records."""
        self.partial = None
        keep = bisect_left(self._ends, to + 1)
        assert (self._ends[keep - 1] if keep else 0) == to, f"cut to {to}, within a record"
        gone = self.records[keep:]
        del self.records[keep:], self._ends[keep:]
        self.synced = min(self.synced, to)
        self._rebuild()
        return gone

    def lose_unsynced(self, dice: random.Random) -> list[Record]:
        """Simulate a power cut, after which unsynced records may or may not exist; return the lost ones."""
        upto = dice.choice((self.synced, self.synced, dice.randint(self.synced, self.end)))
        self.partial = None
        gone = self.truncate(self.record_start(upto))
        self.synced = self.end
        return gone

    def _rebuild(self) -> None:
        self.queues = [[] for _ in range(QUEUES)]
        for record, end in zip(self.records, self._ends, strict=True):
            self._index(record, end)

    def copied(self) -> ReplicatedLog:
        other = ReplicatedLog()
        other.records, other._ends, other.synced = list(self.records), list(self._ends), self.whole_end
        other._rebuild()
        return other


@dataclass
class Raises:
    """Queues that resume above their last record."""

    goes_on: list[int] = field(default_factory=lambda: [0] * QUEUES)  # At least, by the queue's files.
    # The end of the log record of the raise, and its value.
    noted: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def copied(self) -> Raises:
        return Raises(list(self.goes_on), list(self.noted))

    def resume_log(self, ends: tuple[int, ...], record_end: int | None = None) -> None:
        """Raise a queue; `record_end` is the end of the record because of which a slave does so."""
        self.goes_on = [max(before, end) for before, end in zip(self.goes_on, ends, strict=True)]
        if record_end is not None:
            self.noted.append((record_end, ends))

    def arrived(self, record: Record) -> None:
        """Apply a record of the master, which determines the next offset of its queue."""
        if record.queue != NO_QUEUE and record.queue_offset < self.goes_on[record.queue]:
            self.goes_on[record.queue] = 0

    def lose(self, log_end: int) -> None:
        """Forget the raises recorded above this position."""
        self.noted = [one for one in self.noted if one[0] <= log_end]

    def make_anew(self, log: ReplicatedLog) -> None:
        """Rebuild queues from the log; one without a record of a raise resumes at its original offset."""
        for queue in range(QUEUES):
            if log.queues[queue]:
                self.goes_on[queue] = max((ends[queue] for _, ends in self.noted), default=0)


@dataclass
class Disk:
    """A data directory. Saved state is synced at once; the bytes of a log are as `Log` describes."""

    log: ReplicatedLog = field(default_factory=ReplicatedLog)
    epochs: EpochCache = field(default_factory=EpochCache)
    saved: SavedMember = field(default_factory=SavedMember)
    followed_epoch: int = 0
    groups: dict[int, int] = field(default_factory=dict)  # queue -> offset of the one group
    diverged: list[Record] = field(default_factory=list)
    raises: Raises = field(default_factory=Raises)
    followed: int = 0  # Queue records of the log below this position are applied.
    is_following: bool = False  # The log above the checkpoint may be from a master.

    def copied(self) -> Disk:
        """Return another directory with the same content, sharing the message objects."""
        return Disk(
            self.log.copied(), EpochCache(self.epochs.entries()), self.saved, self.followed_epoch, dict(self.groups),
            list(self.diverged), self.raises.copied(), self.followed, self.is_following,
        )  # fmt: skip
