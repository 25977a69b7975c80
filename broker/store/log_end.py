"""The end of the log: where the next record goes, and the time that it gets.

CLOSED     nothing is appended: the store is not loaded, or shut down, or its log is being cut
OPEN       records go to `file` at `position`, up to `limit`: a master's log, or that of a broker that stands alone
OWING      as OPEN, for one that must come first; all others wait until it is stored
FOLLOWING  a slave's log: it takes the bytes that its master laid out, and not one of this broker's own
FAILED     a write or a sync failed: nothing is appended any more, and nothing leaves this state (any thread may enter)

Invariant: the next record's physical offset is `appended`, and that is where `position` lies in `file`. `limit` is -1
in every state but OPEN, so that an append asks one thing only: whether the record ends below it. So a change of role is
one move, and who still holds a queue, or comes late, is refused.

Store times never run backwards by STANDS_STILL_MS or less (see `layout`).

A slave's file ends where its master's does; until the master's next byte the end of the log is the end of that file.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum, auto
from functools import lru_cache
from struct import Struct

from broker.store.commit_log import CommitLog, LogFile
from broker.store.config import StoreConfig
from broker.store.errors import MessageIllegal, StoreFull, StoreNotWritable
from broker.store.layout import CRC_ENTRY, CRC_ENTRY_SIZE, END_SIZE, STANDS_STILL_MS
from broker.store.topic_tails import TopicTails
from infra import failpoint
from infra.loop.locks import NewLock, new_lock

log = logging.getLogger(__name__)


class EndState(Enum):
    """See the module."""

    CLOSED = auto()
    OPEN = auto()
    OWING = auto()
    FOLLOWING = auto()
    FAILED = auto()


# What becomes of each state where another is asked for; None: nobody may ask.
MOVES: dict[EndState, dict[EndState, EndState | None]] = {
    EndState.CLOSED: {
        EndState.CLOSED: EndState.CLOSED,
        EndState.OPEN: EndState.OPEN,
        EndState.OWING: None,
        EndState.FOLLOWING: EndState.FOLLOWING,
        EndState.FAILED: EndState.FAILED,
    },
    EndState.OPEN: {
        EndState.CLOSED: EndState.CLOSED,
        EndState.OPEN: None,
        EndState.OWING: EndState.OWING,
        EndState.FOLLOWING: EndState.FOLLOWING,
        EndState.FAILED: EndState.FAILED,
    },
    EndState.OWING: {
        EndState.CLOSED: EndState.CLOSED,
        EndState.OPEN: EndState.OPEN,
        EndState.OWING: None,
        EndState.FOLLOWING: EndState.FOLLOWING,  # what it owed, the new master finds in its own log
        EndState.FAILED: EndState.FAILED,
    },
    EndState.FOLLOWING: {
        EndState.CLOSED: EndState.CLOSED,
        EndState.OPEN: EndState.OPEN,
        EndState.OWING: None,
        EndState.FOLLOWING: None,
        EndState.FAILED: EndState.FAILED,
    },
    # Another thread may have failed meanwhile: whoever goes on finds out when it appends.
    EndState.FAILED: dict.fromkeys(EndState, EndState.FAILED),
}
assert MOVES.keys() == set(EndState)
assert all(row.keys() == set(EndState) for row in MOVES.values())


@lru_cache(256)
def _crc_entries(count: int) -> Struct:
    return Struct(CRC_ENTRY.format[:1] + CRC_ENTRY.format[1:] * count)


assert _crc_entries(3).size == 3 * CRC_ENTRY_SIZE


class LogEnd:
    """See the module."""

    def __init__(self, config: StoreConfig, log: CommitLog, tails: TopicTails, new_lock: NewLock = new_lock) -> None:
        self._log, self._tails = log, tails
        self._file_size = config.commit_log_file_size
        self._state = EndState.CLOSED
        self._moving = new_lock()
        self._owed: Callable[[], None] | None = None
        self.file: LogFile | None = None
        self.position = 0
        self.limit = -1
        self.appended = 0
        self.failure: OSError | None = None
        #: The time of the records that come next, as the clock says it. A slave's bring their own.
        self.advance_time: Callable[[int], None] = self._advance_time
        # The newest record's store time, and how often the clock was set back.
        self.last_time = self.steps_back = 0

    # -- states

    def adopt(self, file: LogFile | None, position: int, *, last_time: int, high_time: int) -> None:
        """Where a start found the end."""
        assert self._state is EndState.CLOSED
        assert 0 <= position <= (0 if file is None else file.size)
        self.file, self.position = file, position
        self.appended = 0 if file is None else file.base + position
        self.last_time, self.high_time = last_time, high_time
        if file is not None and self.is_at_a_border:
            self._seal(file)

    def take_over(self, other: LogEnd) -> None:
        """Be where another one ends, whose files are this one's from here on."""
        assert self._state is EndState.CLOSED
        self.file, self.position, self.appended = other.file, other.position, other.appended
        self.last_time = other.last_time

    def open(self) -> None:
        """Records may come."""
        self._move(EndState.OPEN)

    def follow(self) -> None:
        """Those of a master may come, and no other."""
        self._move(EndState.FOLLOWING)
        self._owed = None

    def close(self) -> None:
        """None comes any more."""
        self._move(EndState.CLOSED)

    @property
    def is_open(self) -> bool:
        """Loaded, and not shut down."""
        return self._state is not EndState.CLOSED

    @property
    def is_following(self) -> bool:
        """A slave's."""
        return self._state is EndState.FOLLOWING

    def fail(self, error: OSError) -> None:
        """A write or a sync failed: the kernel may have dropped what it was to bring to the disk. On any thread."""
        self.failure = self.failure or error
        self._move(EndState.FAILED)

    def _move(self, wanted: EndState) -> None:
        with self._moving:
            state = MOVES[self._state][wanted]
            assert state is not None, f"{wanted} in {self._state}"
            self._state = state
        self._set_limit()
        self.advance_time = self._leave_time if state is EndState.FOLLOWING else self._advance_time

    def _set_limit(self) -> None:
        self.limit = self.file.size - END_SIZE if self.file is not None else -1
        if self._state is not EndState.OPEN:  # asked last: another thread may fail at any moment
            self.limit = -1

    def check_writable(self) -> None:
        """Raises `StoreNotWritable`; not for what must come first: `make_room` sees to that."""
        if self._state is EndState.FAILED:
            raise StoreNotWritable(f"the disk failed: {self.failure}")
        if self._state is EndState.CLOSED:
            raise StoreNotWritable("the store is not open")
        if self._state is EndState.FOLLOWING:
            raise StoreNotWritable("this broker is a slave: its log takes only what its master wrote")

    def check_not_failed(self) -> None:
        """Raises `StoreNotWritable`."""
        if self._state is EndState.FAILED:
            self.check_writable()

    def check_following(self) -> None:
        """Raises `StoreNotWritable`."""
        if self._state in {EndState.CLOSED, EndState.FAILED}:
            self.check_writable()
        if self._state is not EndState.FOLLOWING:
            raise StoreNotWritable("this broker is a master: nobody lays out its log but itself")

    def put_first(self, append: Callable[[], None]) -> None:
        """Store nothing else before this has: it appends, and raises StoreFull or StoreNotWritable where it can't now.

        Then every later append tries it again, and is refused as it was. A slave owes nothing: StoreNotWritable.
        """
        assert self._owed is None
        if self._state is EndState.FOLLOWING:
            self.check_writable()
        try:
            self.check_writable()
            self._owed = append
            self._move(EndState.OWING)
            self._settle()
        except (StoreFull, StoreNotWritable) as error:
            log.warning("nothing is stored before what the last stop left to be done: %s", error)

    def _settle(self) -> None:
        append = self._owed
        assert append is not None
        self._move(EndState.OPEN)
        try:
            append()
        except BaseException:
            self._move(EndState.OWING)
            raise
        self._owed = None

    # -- time

    def _advance_time(self, now: int) -> None:
        """It stands still while the clock is a little behind it."""
        if now > self.last_time:
            self.last_time = now
        elif self.last_time - now > STANDS_STILL_MS:
            self._step_back(now)

    def _leave_time(self, now: int) -> None:
        """A refused put says nothing about a master's records."""

    def _step_back(self, now: int) -> None:
        """A delay that was stored ahead of its time must not hold up those stored after it for as long."""
        log.warning("the clock is %.1f s behind the newest record: store times go back", (self.last_time - now) / 1000)
        self.high_time, self.last_time = max(self.high_time, self.last_time), now
        self.steps_back += 1

    @property
    def high_time(self) -> int:
        """See `LogFile.high_time`, of the file at the end."""
        return 0 if self.file is None else self.file.high_time

    @high_time.setter
    def high_time(self, store_time: int) -> None:
        if self.file is not None:
            self.file.high_time = store_time

    def reach_time(self, store_time: int) -> None:
        """Records with later times than any here are known of."""
        self.last_time = max(self.last_time, store_time)

    # -- records

    def make_room(self, size: int, records: int = 1) -> None:
        """See to it that records of so many bytes have a place here, or raise as a put does."""
        if self.position + size > self.limit:
            self._roll_for(size)
        file = self.file
        assert file is not None
        if file.crc_position + records * CRC_ENTRY_SIZE > file.crc_size:
            self._log.grow_crc(file)
        self._log.open_writer(file)

    def write(self, records: bytes | memoryview, marks: list[int] | bytes) -> None:
        """Store whole records that have room, and their CRC entries: field by field, or as they are.

        Raises StoreNotWritable.
        """
        file = self.file
        assert file is not None and file.writer is not None and self.position + len(records) <= file.size - END_SIZE
        try:
            file.writer.write(records, self.position)
        except OSError as error:
            self.fail(error)
            raise StoreNotWritable(f"a write to the log failed: {error}") from error
        begin = file.crc_position
        if isinstance(marks, bytes):
            file.crc_position += len(marks)
            file.crc_map[begin : file.crc_position] = marks
        else:
            count = len(marks) // 3
            _crc_entries(count).pack_into(file.crc_map, begin, *marks)
            file.crc_position += count * CRC_ENTRY_SIZE
        self.position += len(records)
        self.appended += len(records)

    def newest_crc_entries(self, count: int) -> bytes:
        """Of the records that were stored last, in the newest file."""
        file = self.file
        assert file is not None
        return file.crc_map[file.crc_position - count * CRC_ENTRY_SIZE : file.crc_position]

    # -- a master's records

    def make_followed_room(self) -> None:
        """As `make_room`, of a record that ends inside the file. Raises `StoreFull`."""
        file = self.file
        assert file is not None
        if file.crc_position + CRC_ENTRY_SIZE > file.crc_size:
            self._log.grow_crc(file)
        self._log.open_writer(file)

    @property
    def is_at_a_border(self) -> bool:
        """Whether the file has ended, and the next not begun."""
        return self.file is not None and self.position == self.file.size

    def finish_file(self) -> None:
        """Its master's file ends here."""
        file = self.file
        assert file is not None and self._state is EndState.FOLLOWING
        self._seal(file)
        self.position, self.appended = file.size, file.end

    def begin_to_lead(self) -> None:
        """A log of one's own goes on inside a file. Raises `StoreFull`."""
        if self.is_at_a_border:
            assert self.file is not None
            self._start_file(self.file.end)

    def begin_file(self, base: int) -> None:
        """Its master's next file begins here. Raises `StoreFull`."""
        if self.file is None or self.is_at_a_border:
            self._start_file(base)
            return
        assert self.position == 0 and base >= self.appended
        self._log.move_empty(self.file, base)  # it was made ahead of its time, at the end of the file before it
        self.appended = base

    # -- files

    def roll(self) -> None:
        """End the file, so that it may be archived whole. Raises `StoreFull`."""
        self.check_writable()
        if self.file is not None and self.position:
            self._start_file(self.file.end)

    def go_on_at(self, physical_offset: int) -> None:
        """Go on in a new file at or above an offset above the end. Raises `StoreFull`."""
        self.check_writable()
        self._start_file(max(physical_offset, self.file.end if self.file is not None else 0))

    def _roll_for(self, size: int) -> None:
        """Go on in the next file."""
        self.check_writable()
        if self._state is EndState.OWING:
            self._settle()
            if self.position + size <= self.limit:
                return
        if size + END_SIZE > self._file_size:
            raise MessageIllegal(f"a record of {size} bytes does not fit into a CommitLog file")
        self._start_file(self.file.end if self.file is not None else 0)

    def _start_file(self, base: int) -> None:
        assert base >= self.appended
        previous = self.file
        file = self._log.allocate(base)
        if previous is not None and not previous.sealed:
            self._seal(previous)
        self.file, self.position, self.appended = file, 0, base
        self._set_limit()
        failpoint.hit("store.roll")

    def _seal(self, file: LogFile) -> None:
        file.topics, file.newest_store_time = self.table()
        self._log.seal(file, self.position)

    @property
    def wants_next(self) -> bool:
        """From the second half of a file on: the send that rolls then waits for nothing."""
        file = self.file
        return file is not None and not self._log.next_is_ready and self.appended - file.base >= file.size // 2

    # -- what the file holds so far

    def topics(self) -> dict[str, tuple[int, int]]:
        """The topic table of the file: the last record of each, its newest store time."""
        return self._tails.since(self.file.base, self.high_time) if self.file is not None else {}

    def table(self) -> tuple[dict[str, tuple[int, int]], int]:
        """The same, and the newest store time of any record in the file; 0: it has none."""
        topics = self.topics()
        return topics, max(self.last_time, self.high_time) if topics else 0
