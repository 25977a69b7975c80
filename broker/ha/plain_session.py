"""A slave's side of one connection to an Apache master without a controller (RocketMQ's DefaultHAClient). Pure.

slave to master    end of the slave's log i64
master to slave    offset i64 | size i32 | bytes of the log from `offset` on; none: a heartbeat

state       waits for     then
GREETING    `master_read` compare the master's properties, queried after the connection was made, with the own log. If
                          they diverge: `Truncate` and PARTING; if not: continue as after `parted`
PARTING     `parted`      `Attached`, and ATTACHING until the followed life of the master is saved
ATTACHING   `attached`    request the log from the start of its last record on
FOLLOWING   bytes         that record has to be equal; then `Append`; the caller calls `stored`, which acknowledges
ENDED

This stream has no epochs and no checks. A master that lost its tail continues from the offset that its slave requests,
and the logs differ from there on, unnoticed. Therefore each life of the master is distinguished from the one before. If
a new life began below the end of this log, the log is truncated there first.

A life that began and ended while this slave was disconnected can't be detected. Therefore the last record of this log
has to be the master's, too. A request for 0 gets the newest file: an empty log requests offset 1 instead, and adds byte
0 itself. That byte is 0x00, the highest byte of the first record's size.
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
    End,
    Local,
    Send,
    SlaveState,
    Truncate,
)
from broker.ha.stock_master import MasterLife, StockMaster, unlike_stock
from neve.errors import ProtocolError

_REPORT = Struct(">q")
_HEAD = Struct(">qi")
assert (_REPORT.size, _HEAD.size) == (8, 12)
_FIRST_BYTE = b"\x00"


class AskMaster(msgspec.Struct, frozen=True):
    """Query the master's properties, then call `master_read`. An earlier answer may be of another life."""


Action = Send | AskMaster | Truncate | Attached | Append | Confirmed | End


class PlainTransfer(msgspec.Struct, frozen=True):
    """Bytes of the master's log. `body` is a view of received bytes, valid until the next call of the reader."""

    offset: int
    body: memoryview


class PlainFrames:
    """Parser of a master's frames. After a ProtocolError the connection has to be closed."""

    __slots__ = ("_bytes",)

    def __init__(self) -> None:
        self._bytes = ReceivedBytes(_measure)

    @property
    def held(self) -> int:
        """Return the number of bytes of an incomplete frame."""
        return self._bytes.held

    def receive_data(self, data: bytes) -> Iterator[PlainTransfer]:
        """Yield the frames that are complete now, one at a time. Frames before a fault are valid."""
        self._bytes.receive(data)
        while (frame := self._bytes.next()) is not None:
            yield PlainTransfer(_HEAD.unpack_from(frame)[0], frame[_HEAD.size :])


def _measure(buffer: bytes, position: int, available: int) -> int:
    if available < _HEAD.size:
        return 0
    offset, size = _HEAD.unpack_from(buffer, position)
    if offset < 0 or not 0 <= size <= BODY_MAX:
        raise ProtocolError(f"{size} bytes of a log at {offset}: the limit is {BODY_MAX}")
    return _HEAD.size + int(size)


class PlainSession:
    """Protocol of one connection to a master without a controller, without I/O."""

    def __init__(self, local: Local, own: Hello, last_record: LastRecord) -> None:
        self.state = SlaveState.GREETING
        self._last_record = last_record
        self._overlap: Overlap | None = None  # bytes that have to be received again first
        self._master_begins_at = 0
        self.received = 0  # bytes of the log
        self._local, self._own = local, own
        self._next = -1  # offset of the next byte of the log
        self._lacks_first_byte = False
        self._end_of_log = local.end
        self._frames = PlainFrames()
        self._heard = self._spoke = 0.0

    def start(self, now: float) -> list[Action]:
        """Start the session on a new connection."""
        self._heard = self._spoke = now
        return [AskMaster()]

    @property
    def is_ended(self) -> bool:
        """Return whether the session has ended: from then on it has no actions."""
        return self.state is SlaveState.ENDED

    @property
    def wake_at(self) -> float:
        """Return the time at which `tick` may have an action."""
        silent_at = self._heard + SILENCE_S
        return min(self._spoke + STOCK_HEARTBEAT_S, silent_at) if self.state is SlaveState.FOLLOWING else silent_at

    def tick(self, now: float, synced: int = -1) -> list[Action]:
        """Return the actions that are due. The durable end is not reported: this protocol has no field for it."""
        if self.is_ended:
            return []
        if now - self._heard >= SILENCE_S:
            return [self._end(f"the master is silent for {SILENCE_S:.0f} s")]
        if self.state is SlaveState.FOLLOWING and now - self._spoke >= STOCK_HEARTBEAT_S:
            return [self._report(now)]
        return []

    # -- before the first byte of the log

    def master_read(self, master: StockMaster, followed: MasterLife | None, now: float) -> list[Action]:
        """Compare the master's properties with the log. `followed` is the life of the master whose log this is."""
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
            text = f"the log ends at {local.end} and its origin is unknown: begin with an empty directory"
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
            text = f"the master restarted at {master.end_at_start}, and has no part of this log from {local.begin} on"
            return [self._end(text, Reason.NOTHING_IN_COMMON)]
        self.state = SlaveState.PARTING
        return [Truncate(master.end_at_start)]

    def parted(self, end: int, epochs: tuple[tuple[int, int], ...] = ()) -> list[Action]:
        """Continue after a truncation to a record's start at or below the offset of `Truncate`."""
        if self.state is not SlaveState.PARTING:
            return []
        self._next = self._end_of_log = end
        return [self._attach()]

    def _attach(self) -> Attached:
        self.state = SlaveState.ATTACHING
        return Attached(0)

    def attached(self, synced: int, now: float) -> list[Action]:
        """Request the log."""
        if self.state is not SlaveState.ATTACHING:
            return []
        self.state = SlaveState.FOLLOWING
        self._heard = self._spoke = now
        if self._next == 0:
            self._next, self._lacks_first_byte = len(_FIRST_BYTE), True
        elif self._end_of_log:
            own = self._last_record(self._next)
            if own is None or own[0] < self._master_begins_at:
                text = f"the log ends at {self._next}, and the master has no record below that to compare"
                return [self._end(text, Reason.GONE)]
            self._overlap = Overlap(*own, self._next)
            self._next = own[0]
        return [Send(_REPORT.pack(self._next))]

    # -- the log

    def receive_data(self, data: bytes, now: float) -> list[Action]:
        """Return the actions for received bytes."""
        if self.is_ended:
            return []
        self._heard = now
        actions, bodies, end = list[Action](), list[memoryview](), None
        try:
            for frame in self._frames.receive_data(data):
                if self.state is not SlaveState.FOLLOWING:
                    raise ProtocolError("bytes of a log that was not requested")
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
                f"the master's log is another one: it differs below {self._end_of_log}, the end of this one: begin "
                "with an empty directory"
            )
            return [self._end(text, Reason.MISMATCH)]
        except ProtocolError as error:
            end = self._end(f"the master broke the protocol: {error.remark}")
        if bodies:
            actions.append(self._append(bodies))
        return [*actions, end] if end is not None else actions

    def _append(self, bodies: list[memoryview]) -> Append:
        """Return the collected bytes of the log as one `Append`."""
        size = sum(map(len, bodies))
        self.received += size
        at = self._next - size
        if not self._lacks_first_byte:
            return Append(at, bodies[0] if len(bodies) == 1 else b"".join(bodies))
        self._lacks_first_byte = False
        return Append(at - len(_FIRST_BYTE), b"".join((_FIRST_BYTE, *bodies)))

    def stored(self, end: int, synced: int, now: float) -> list[Action]:
        """Acknowledge the log, which now ends at `end`.

        Such a master confirms nothing, so all stored bytes are visible.
        """
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
