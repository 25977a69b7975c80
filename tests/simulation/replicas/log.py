"""A member's disk: its log of records, in part only in memory; epochs, saved state, groups' offsets, what was cut.

The log's end may lie within a record: its first bytes came, the rest did not yet. Two records of one size at one place
pass every check but the one by epochs, as they do in a real log.

A master that goes on above the archive writes what is no message: a gap up to where the archive ends, which queues it
raised, and that it has settled.

A queue that is raised goes on higher by its files; a cut, or the start of a slave that was not stopped cleanly, makes
them anew from the log, and then it goes on so high only where the log has a record that says so. Which do is noted.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from broker.ha.epochs import EpochCache
from broker.ha.member_events import Saved


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """A message. Two are the same one if they are the same object: what is copied is not."""

    uid: int
    queue: int
    queue_offset: int
    size: int
    epoch: int  # in which it was written
    writer: int
    raises: tuple[int, ...] = ()  # of the metadata log: where each queue goes on
    settles: bool = False  # of the metadata log: its writer has settled the archive in its epoch

    def __repr__(self) -> str:
        return f"m{self.uid}(q{self.queue}:{self.queue_offset} e{self.epoch} by {self.writer})"


Piece = tuple[Record, int, int]  # of a record, from, how many bytes

QUEUES = 2
NO_QUEUE = -1  # of a record that is no message
BOOK_SIZE = 50


class Log:
    """Bytes from 0 on. Invariant: `_ends` ascends; `partial` is of a record that begins at the last of them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._ends: list[int] = []
        self.partial: tuple[Record, int] | None = None
        self.synced = 0
        # With where each ends; None: below where its queue was raised.
        self.queues: list[list[tuple[Record | None, int]]] = [[] for _ in range(QUEUES)]

    @property
    def whole_end(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def end(self) -> int:
        return self.whole_end + (self.partial[1] if self.partial is not None else 0)

    def end_of(self, record: Record) -> int | None:
        """Where it ends, if it is here."""
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
        if record.queue_offset < len(queue):  # given twice: the later one is found
            queue[record.queue_offset] = record, end
        else:
            queue += [(None, 0)] * (record.queue_offset - len(queue))
            queue.append((record, end))

    def read(self, offset: int, upto: int) -> list[Piece]:
        """The bytes from `offset` on, in pieces."""
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
        """What came from the master. False: it does not go with what is here (its CRC is wrong)."""
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
        """The whole records of a range that begins and ends where records do."""
        return tuple(self.records[bisect_left(self._ends, start + 1) : bisect_right(self._ends, end)])

    def record_start(self, position: int) -> int:
        """Of the record that holds it, or the position where one ends."""
        index = bisect_right(self._ends, position)
        return self._ends[index - 1] if index else 0

    def truncate(self, to: int) -> list[Record]:
        """To a record's start. What was cut."""
        self.partial = None
        keep = bisect_left(self._ends, to + 1)
        assert (self._ends[keep - 1] if keep else 0) == to, f"cut to {to}, within a record"
        gone = self.records[keep:]
        del self.records[keep:], self._ends[keep:]
        self.synced = min(self.synced, to)
        self._rebuild()
        return gone

    def lose_unsynced(self, dice: random.Random) -> list[Record]:
        """The power went: what was not synced is there or not. What was lost."""
        upto = dice.choice((self.synced, self.synced, dice.randint(self.synced, self.end)))
        self.partial = None
        gone = self.truncate(self.record_start(upto))
        self.synced = self.end
        return gone

    def _rebuild(self) -> None:
        self.queues = [[] for _ in range(QUEUES)]
        for record, end in zip(self.records, self._ends, strict=True):
            self._index(record, end)

    def copied(self) -> Log:
        other = Log()
        other.records, other._ends, other.synced = list(self.records), list(self._ends), self.whole_end
        other._rebuild()
        return other


@dataclass
class Raises:
    """Where queues go on above their last record."""

    goes_on: list[int] = field(default_factory=lambda: [0] * QUEUES)  # at least, by the queue's files
    noted: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)  # where a record ends that says so, and what

    def copied(self) -> Raises:
        return Raises(list(self.goes_on), list(self.noted))

    def go_on(self, ends: tuple[int, ...], said_at: int | None = None) -> None:
        """`said_at`: where the record ends by which a slave does so."""
        self.goes_on = [max(before, end) for before, end in zip(self.goes_on, ends, strict=True)]
        if said_at is not None:
            self.noted.append((said_at, ends))

    def came(self, record: Record) -> None:
        """From a master, whose word it is where its queue goes on."""
        if record.queue != NO_QUEUE and record.queue_offset < self.goes_on[record.queue]:
            self.goes_on[record.queue] = 0

    def lose(self, log_end: int) -> None:
        """What is said above is not said any more."""
        self.noted = [one for one in self.noted if one[0] <= log_end]

    def make_anew(self, log: Log) -> None:
        """Queues by what the log has: one without a record in it stays where it was to begin."""
        for queue in range(QUEUES):
            if log.queues[queue]:
                self.goes_on[queue] = max((ends[queue] for _, ends in self.noted), default=0)


@dataclass
class Disk:
    """A data directory. What is saved is synced at once; a log's bytes are where `Log` says."""

    log: Log = field(default_factory=Log)
    epochs: EpochCache = field(default_factory=EpochCache)
    saved: Saved = field(default_factory=Saved)
    followed_epoch: int = 0
    groups: dict[int, int] = field(default_factory=dict)  # queue -> offset of the one group
    diverged: list[Record] = field(default_factory=list)
    raises: Raises = field(default_factory=Raises)
    followed: int = 0  # what the log says of queues below this is done
    is_following: bool = False  # the log above the checkpoint may be a master's

    def copied(self) -> Disk:
        """Another directory with the same content: the same messages, not copies of them."""
        return Disk(
            self.log.copied(), EpochCache(self.epochs.entries()), self.saved, self.followed_epoch, dict(self.groups),
            list(self.diverged), self.raises.copied(), self.followed, self.is_following,
        )  # fmt: skip
