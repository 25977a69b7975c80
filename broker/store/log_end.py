"""End of the log: the position and the store time of the next record.

    CLOSED     nothing is appended: the store is not loaded, it is shut down, or its log is being truncated
    OPEN       records go to `file` at `position`, up to `limit`: the log of a master, or of a broker outside a set
    OWING      as OPEN, but one particular record must be stored first; all others wait for it
    FOLLOWING  the log of a slave: it accepts the bytes of its master, and no records of this broker
    FAILED     a write or a sync failed: nothing is appended any longer. Final; any thread may set it

Invariant: `appended` is the physical offset of the next record, and corresponds to `position` in `file`. `limit` is -1
in every state but OPEN, so that an append needs only one check: whether the record ends below it. So a change of role
takes effect at once, also for callers that still hold a queue.

If the clock steps back by STANDS_STILL_MS or less, store times stay constant (see `layout`).

A slave's file ends where its master's file ends. Until the master's next byte arrives, the log ends at the end of that
file.
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
    """State of the log end, as described in the module."""

    CLOSED = auto()
    OPEN = auto()
    OWING = auto()
    FOLLOWING = auto()
    FAILED = auto()


# Current state -> requested state -> new state; None marks a request that is a programming error.
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
        EndState.FOLLOWING: EndState.FOLLOWING,  # the new master finds the owed record in its own log
        EndState.FAILED: EndState.FAILED,
    },
    EndState.FOLLOWING: {
        EndState.CLOSED: EndState.CLOSED,
        EndState.OPEN: EndState.OPEN,
        EndState.OWING: None,
        EndState.FOLLOWING: None,
        EndState.FAILED: EndState.FAILED,
    },
    # Another thread may have failed meanwhile: the caller gets the error at its next append.
    EndState.FAILED: dict.fromkeys(EndState, EndState.FAILED),
}
assert MOVES.keys() == set(EndState)
assert all(row.keys() == set(EndState) for row in MOVES.values())


@lru_cache(256)
def _crc_entries(count: int) -> Struct:
    return Struct(CRC_ENTRY.format[:1] + CRC_ENTRY.format[1:] * count)


assert _crc_entries(3).size == 3 * CRC_ENTRY_SIZE


class LogEnd:
    """State machine and write position at the end of the log."""

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
        #: Sets the store time of the next records from the clock. On a slave it does nothing, because records bring
        #: their own.
        self.advance_time: Callable[[int], None] = self._advance_time
        # The newest record's store time, and the number of times that the clock was set back.
        self.last_time = self.steps_back = 0

    # -- states

    def adopt(self, file: LogFile | None, position: int, *, last_time: int, high_time: int) -> None:
        """Set the end that a start found."""
        assert self._state is EndState.CLOSED
        assert 0 <= position <= (0 if file is None else file.size)
        self.file, self.position = file, position
        self.appended = 0 if file is None else file.base + position
        self.last_time, self.high_time = last_time, high_time
        if file is not None and self.is_at_a_border:
            self._seal(file)

    def take_over(self, other: LogEnd) -> None:
        """Take the end of another object, whose files now belong to this log."""
        assert self._state is EndState.CLOSED
        self.file, self.position, self.appended = other.file, other.position, other.appended
        self.last_time = other.last_time

    def open(self) -> None:
        """Accept records of this broker."""
        self._move(EndState.OPEN)

    def follow(self) -> None:
        """Accept records of a master, and no others."""
        self._move(EndState.FOLLOWING)
        self._owed = None

    def close(self) -> None:
        """Reject all further records."""
        self._move(EndState.CLOSED)

    @property
    def is_open(self) -> bool:
        """Whether the store is loaded and not shut down."""
        return self._state is not EndState.CLOSED

    @property
    def is_following(self) -> bool:
        """Whether this is the log of a slave."""
        return self._state is EndState.FOLLOWING

    def fail(self, error: OSError) -> None:
        """Enter FAILED after a write or sync error; any thread. The kernel may have dropped the pages to be written."""
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
        if self._state is not EndState.OPEN:  # checked last, because another thread may fail at any moment
            self.limit = -1

    def check_writable(self) -> None:
        """Raise StoreNotWritable if records of this broker are not accepted. OWING passes: `make_room` handles it."""
        if self._state is EndState.FAILED:
            raise StoreNotWritable(f"the disk failed: {self.failure}")
        if self._state is EndState.CLOSED:
            raise StoreNotWritable("the store is not open")
        if self._state is EndState.FOLLOWING:
            raise StoreNotWritable("this broker is a slave: its log accepts only records of its master")

    def check_not_failed(self) -> None:
        """Raise StoreNotWritable after a failure."""
        if self._state is EndState.FAILED:
            self.check_writable()

    def check_usable(self) -> None:
        """Raise StoreNotWritable if the log is closed, or after a failure."""
        if self._state in {EndState.CLOSED, EndState.FAILED}:
            self.check_writable()

    def check_following(self) -> None:
        """Raise StoreNotWritable if records of a master are not accepted."""
        self.check_usable()
        if self._state is not EndState.FOLLOWING:
            raise StoreNotWritable("this broker is a master: its log accepts no records of another broker")

    def put_first(self, append: Callable[[], None]) -> None:
        """Store nothing else before `append` has succeeded; it may raise StoreFull or StoreNotWritable.

        If it fails, every later append first calls it again, and fails with the same error. Raises StoreNotWritable on
        a slave.
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
            log.warning("appends wait for unfinished work of the last stop: %s", error)

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
        """Advance the store time; it stays constant while the clock is slightly behind."""
        if now > self.last_time:
            self.last_time = now
        elif self.last_time - now > STANDS_STILL_MS:
            self._step_back(now)

    def _leave_time(self, now: int) -> None:
        """Do nothing: the clock does not affect the store times of a master's records."""

    def _step_back(self, now: int) -> None:
        """Step back, so that a delayed message stored with a time in the future does not hold up later ones as long."""
        log.warning("the clock is %.1f s behind the newest record: store times decrease", (self.last_time - now) / 1000)
        self.high_time, self.last_time = max(self.high_time, self.last_time), now
        self.steps_back += 1

    @property
    def high_time(self) -> int:
        """`LogFile.high_time` of the newest file."""
        return 0 if self.file is None else self.file.high_time

    @high_time.setter
    def high_time(self, store_time: int) -> None:
        if self.file is not None:
            self.file.high_time = store_time

    def reach_time(self, store_time: int) -> None:
        """Raise the newest store time, because records elsewhere have later ones."""
        self.last_time = max(self.last_time, store_time)

    # -- records

    def make_room(self, size: int, records: int = 1) -> None:
        """Ensure that the file has room for records of `size` bytes in total, or raise as a put does."""
        if self.position + size > self.limit:
            self._roll_for(size)
        file = self.file
        assert file is not None
        if file.crc_position + records * CRC_ENTRY_SIZE > file.crc_size:
            self._log.grow_crc(file)
        self._log.open_writer(file)

    def write(self, records: bytes | memoryview, marks: list[int] | bytes) -> None:
        """Write records for which there is room, and their CRC entries, given as fields or as encoded bytes.

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
        """Return the CRC entries of the records that were written last, all in the newest file."""
        file = self.file
        assert file is not None
        return file.crc_map[file.crc_position - count * CRC_ENTRY_SIZE : file.crc_position]

    # -- a master's records

    def make_followed_room(self) -> None:
        """Ensure room as `make_room` does, for a record of a master that ends inside the file. Raises StoreFull."""
        file = self.file
        assert file is not None
        if file.crc_position + CRC_ENTRY_SIZE > file.crc_size:
            self._log.grow_crc(file)
        self._log.open_writer(file)

    @property
    def is_at_a_border(self) -> bool:
        """Whether the file has ended and the next one has not begun."""
        return self.file is not None and self.position == self.file.size

    def finish_file(self) -> None:
        """End the file, because the master's file ends here."""
        file = self.file
        assert file is not None and self._state is EndState.FOLLOWING
        self._seal(file)
        self.position, self.appended = file.size, file.end

    def begin_to_lead(self) -> None:
        """Begin a file for records of this broker if the last one has ended. Raises StoreFull."""
        if self.is_at_a_border:
            assert self.file is not None
            self._start_file(self.file.end)

    def begin_file(self, base: int) -> None:
        """Begin a file at `base`, where the master's next file begins. Raises StoreFull."""
        if self.file is None or self.is_at_a_border:
            self._start_file(base)
            return
        assert self.position == 0 and base >= self.appended
        self._log.move_empty(self.file, base)  # it was created early, at the end of the file before it
        self.appended = base

    # -- files

    def roll(self) -> None:
        """End the file, so that it may be archived as a whole. Raises StoreFull."""
        self.check_writable()
        if self.file is not None and self.position:
            self._start_file(self.file.end)

    def base_above(self, physical_offset: int) -> int:
        """Return the base of the file in which `continue_at` continues."""
        return max(physical_offset, self.file.end if self.file is not None else 0)

    def continue_at(self, physical_offset: int) -> None:
        """Continue in a new file at or above an offset beyond the end, also on a slave. Raises StoreFull."""
        self.check_usable()
        self._start_file(self.base_above(physical_offset))

    def _roll_for(self, size: int) -> None:
        """Continue in the next file, because the record does not fit."""
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
        """Whether the next file should be allocated: from half of a file on, so that no send has to wait for it."""
        file = self.file
        return file is not None and not self._log.next_is_ready and self.appended - file.base >= file.size // 2

    # -- topic table of the file

    def topics(self) -> dict[str, tuple[int, int]]:
        """Return the topic table of the file: offset of each topic's last record, and its newest store time."""
        return self._tails.since(self.file.base, self.high_time) if self.file is not None else {}

    def table(self) -> tuple[dict[str, tuple[int, int]], int]:
        """Return the topic table and the newest store time of any record in the file; 0 if the file is empty."""
        topics = self.topics()
        return topics, max(self.last_time, self.high_time) if topics else 0
