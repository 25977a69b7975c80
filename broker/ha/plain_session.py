"""A slave's side of one connection to an Apache master without a controller (RocketMQ's DefaultHAClient). Pure.

slave to master    end of the slave's log i64
master to slave    offset i64 | size i32 | bytes of the log from `offset` on; none: a heartbeat

state       waits for     then
GREETING    `told`        what the master says of itself, asked once the connection stands: it is compared with the log
                          that is here: `Cut`, and PARTING until that is done; else at once as after it
PARTING     `parted`      `Attached`, and ATTACHING until it is kept which life of which master is followed
ATTACHING   `attached`    where the own log's last record begins asks for that and what comes next
FOLLOWING   bytes         that record has to be the own one; then `Append`; then `stored` says what there is, and that
                          is acknowledged
ENDED

There are no epochs and no checks in this stream: a master that lost its tail goes on from wherever its slave asks, and
the two logs differ from there on, unseen. So each of its lives is told from the one before, and where a new one began
below the end of what is here, that is cut off first. Of a life that came and went meanwhile nobody tells: so the last
record that is here has to be the master's, too. Who asks for 0 gets the newest file: an empty log asks from 1 on, and
the byte before it is 0x00, the highest of the first record's size.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct

import msgspec

from broker.ha.frames import BODY_MAX, Hello, ReceivedBytes
from broker.ha.greeting import Reason, refusal
from broker.ha.overlap import AnotherLog, LastRecord, Overlap
from broker.ha.slave_session import (
    SILENCE_S,
    STOCK_HEARTBEAT_S,
    Append,
    Attached,
    Confirmed,
    Cut,
    End,
    Local,
    Send,
    SlaveState,
)
from broker.ha.stock_master import Life, StockMaster, unlike_stock
from neve.errors import ProtocolError

_REPORT = Struct(">q")
_HEAD = Struct(">qi")
assert (_REPORT.size, _HEAD.size) == (8, 12)
_FIRST_BYTE = b"\x00"


class AskMaster(msgspec.Struct, frozen=True):
    """Ask the master what it says of itself, then call `told`. Not before: it may be another life of it by then."""


Action = Send | AskMaster | Cut | Attached | Append | Confirmed | End


class PlainTransfer(msgspec.Struct, frozen=True):
    """`body` is a view of what was received: good until the next call of the reader."""

    offset: int
    body: memoryview


class PlainFrames:
    """What such a master sends. Raises ProtocolError; then the connection is of no more use."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = ReceivedBytes(_measure)

    @property
    def held(self) -> int:
        """Bytes that wait for the rest of their frame."""
        return self._bytes.held

    def receive_data(self, data: bytes) -> Iterator[PlainTransfer]:
        """The frames that these bytes end, one at a time: those before a fault are whole."""
        self._bytes.receive(data)
        while (frame := self._bytes.next()) is not None:
            yield PlainTransfer(_HEAD.unpack_from(frame)[0], frame[_HEAD.size :])


def _measure(buffer: bytes, position: int, available: int) -> int:
    if available < _HEAD.size:
        return 0
    offset, size = _HEAD.unpack_from(buffer, position)
    if offset < 0 or not 0 <= size <= BODY_MAX:
        raise ProtocolError(f"{size} bytes of a log at {offset}: {BODY_MAX} are the most")
    return _HEAD.size + int(size)


class PlainSession:
    """See the module."""

    def __init__(self, local: Local, own: Hello, last_record: LastRecord) -> None:
        self.state = SlaveState.GREETING
        self._last_record = last_record
        self._overlap: Overlap | None = None  # what has to come again first
        self._master_begins_at = 0
        self.received = 0  # bytes of the log
        self._local, self._own = local, own
        self._next = -1  # where the next byte of the log belongs
        self._lacks_first_byte = False
        self._end_of_log = local.end
        self._frames = PlainFrames()
        self._heard = self._spoke = 0.0

    def start(self, now: float) -> list[Action]:
        """The connection stands."""
        self._heard = self._spoke = now
        return [AskMaster()]

    @property
    def is_ended(self) -> bool:
        """Nothing comes out any more."""
        return self.state is SlaveState.ENDED

    @property
    def wake_at(self) -> float:
        """When `tick` has something to do."""
        silent_at = self._heard + SILENCE_S
        return min(self._spoke + STOCK_HEARTBEAT_S, silent_at) if self.state is SlaveState.FOLLOWING else silent_at

    def tick(self, now: float, synced: int = -1) -> list[Action]:
        """Time went by. What is on the disk a plain master is not told."""
        if self.is_ended:
            return []
        if now - self._heard >= SILENCE_S:
            return [self._end(f"the master is silent for {SILENCE_S:.0f} s")]
        if self.state is SlaveState.FOLLOWING and now - self._spoke >= STOCK_HEARTBEAT_S:
            return [self._report(now)]
        return []

    # -- before the first byte of the log

    def told(self, master: StockMaster, followed: Life | None, now: float) -> list[Action]:
        """What the master says of itself; `followed`: whose log this is, in which life of it, as was kept last."""
        if self.state is not SlaveState.GREETING:
            return []
        self._heard = now
        local, fault = self._local, unlike_stock(self._own, master)
        self._master_begins_at = master.begin
        if fault is not None:
            self.state = SlaveState.ENDED
            return [End(f"this master is not followed: {fault.text}", fault)]
        if local.end == 0:
            self._next = master.begin
            return [self._attach()]
        self._next = local.end
        if followed is None:
            text = f"the log ends at {local.end} and nobody knows whose it is: begin with an empty directory"
            return [self._end(text, Reason.NO_EPOCHS)]
        if local.end < master.begin:
            text = f"the log ends at {local.end}, the master's begins at {master.begin}: begin with an empty directory"
            return [self._end(text, Reason.GONE)]
        if master.life == followed:
            if local.end > master.end:
                text = f"the log ends at {local.end}, above the {master.end} of the master that it was copied from"
                return [self._end(text, Reason.AHEAD)]
            return [self._attach()]
        if local.end <= master.end_at_start:
            return [self._attach()]
        if master.end_at_start <= local.begin:
            text = (
                f"the master began again at {master.end_at_start}: of this log, from {local.begin} on, it has nothing"
            )
            return [self._end(text, Reason.NOTHING_IN_COMMON)]
        self.state = SlaveState.PARTING
        return [Cut(master.end_at_start)]

    def parted(self, end: int, epochs: tuple[tuple[int, int], ...] = ()) -> list[Action]:
        """The log was cut, to a record's start at or below what `Cut` said."""
        if self.state is not SlaveState.PARTING:
            return []
        self._next = self._end_of_log = end
        return [self._attach()]

    def _attach(self) -> Attached:
        self.state = SlaveState.ATTACHING
        return Attached(0)

    def attached(self, synced: int, now: float) -> list[Action]:
        """Ask for the log."""
        if self.state is not SlaveState.ATTACHING:
            return []
        self.state = SlaveState.FOLLOWING
        self._heard = self._spoke = now
        if self._next == 0:
            self._next, self._lacks_first_byte = len(_FIRST_BYTE), True
        elif self._end_of_log:
            own = self._last_record(self._next)
            if own is None or own[0] < self._master_begins_at:
                text = f"the log ends at {self._next}, and of what lies below the master has nothing to compare"
                return [self._end(text, Reason.GONE)]
            self._overlap = Overlap(*own, self._next)
            self._next = own[0]
        return [Send(_REPORT.pack(self._next))]

    # -- the log

    def receive_data(self, data: bytes, now: float) -> list[Action]:
        """What the master sent."""
        if self.is_ended:
            return []
        self._heard = now
        actions, bodies, end = list[Action](), list[memoryview](), None
        try:
            for frame in self._frames.receive_data(data):
                if self.state is not SlaveState.FOLLOWING:
                    raise ProtocolError("bytes of a log that nobody has asked for")
                if frame.offset != self._next:
                    raise ProtocolError(f"bytes at {frame.offset}, where {self._next} is next")
                body = frame.body
                if (overlap := self._overlap) is not None:
                    body = overlap.behind(body)
                    self._next = overlap.next
                    if overlap.is_over:
                        self._overlap = None
                        actions.append(self._report(now))
                if body:
                    bodies.append(body)
                    self._next += len(body)
        except AnotherLog:
            text = (
                f"the master's log is another one: it differs below {self._end_of_log}, where this one ends: begin "
                "with an empty directory"
            )
            return [self._end(text, Reason.MISMATCH)]
        except ProtocolError as error:
            end = self._end(f"the master broke the protocol: {error.remark}")
        if bodies:
            actions.append(self._append(bodies))
        return [*actions, end] if end is not None else actions

    def _append(self, bodies: list[memoryview]) -> Append:
        """What has been gathered of the log, as one."""
        size = sum(map(len, bodies))
        self.received += size
        at = self._next - size
        if not self._lacks_first_byte:
            return Append(at, bodies[0] if len(bodies) == 1 else b"".join(bodies))
        self._lacks_first_byte = False
        return Append(at - len(_FIRST_BYTE), b"".join((_FIRST_BYTE, *bodies)))

    def stored(self, end: int, synced: int, now: float) -> list[Action]:
        """The log ends there by now: acknowledge it. Nobody confirms anything: what is here is all that is known."""
        if self.state is not SlaveState.FOLLOWING or end <= self._end_of_log:
            return []
        self._end_of_log = end
        return [self._report(now), Confirmed(end)]

    def _report(self, now: float) -> Send:
        self._spoke = now
        return Send(_REPORT.pack(self._end_of_log))

    def _end(self, why: str, reason: Reason | None = None) -> End:
        self.state = SlaveState.ENDED
        return End(why, None if reason is None else refusal(reason, why))
