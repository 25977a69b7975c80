"""A slave's side of one connection to its master: bytes go in, actions come out. Pure.

state       waits for          then
GREETING    HELLO              check it against the own one; send H1              (a stock master is greeted with H1)
SHAKING     H2                 if the logs diverge: `Truncate` and PARTING; if not: continue as after `parted`
PARTING     `parted`           `Attached`, and ATTACHING until the followed epoch is saved
ATTACHING   `attached`         send T1 with the own end; to a stock master, with the start of the own last record, which
                               has to be the master's, too
FOLLOWING   T2                 `TakeEpochs`, `Append`; the caller calls `stored`, which acknowledges
ENDED

The caller does all actions in order, each completely before the next, and closes the connection at an `End`. Epochs are
saved before their first byte is appended. The bytes of several T2 that arrived together are one `Append`.
"""

from __future__ import annotations

from enum import Enum, auto

import msgspec

from broker.ha.epochs import EpochCache, EpochConflict, truncation_point
from broker.ha.frames import (
    Hello,
    MasterFrames,
    MasterHandshake,
    SlaveHandshake,
    StreamRefusal,
    Transfer,
    encode_ack,
    encode_hello,
    encode_slave_handshake,
)
from broker.ha.greeting import Reason, refusal, unlike
from broker.ha.overlap import AnotherLog, LastRecord, Overlap
from broker.ha.proof import MASTER, SLAVE, is_proven, proven
from neve.errors import ProtocolError

HEARTBEAT_S = 1.0  # an `async` master that hears from no other process for `isolated_after` acknowledges nothing
STOCK_HEARTBEAT_S = 5.0  # RocketMQ's haSendHeartbeatInterval
SILENCE_S = 20.0  # RocketMQ's haHousekeepingInterval


class Local(msgspec.Struct, frozen=True):
    """A slave's log when it connects."""

    begin: int
    end: int  # end of the last whole record
    epochs: tuple[tuple[int, int], ...]
    confirm: int
    followed_epoch: int  # the master epoch for which the log was truncated last


# -- actions


class Send(msgspec.Struct, frozen=True):
    """Write these bytes."""

    data: bytes


class Truncate(msgspec.Struct, frozen=True):
    """Save the log above this offset, truncate it and its epochs there, then call `parted`.

    The logs diverge there. It may be the end of the log: then the last epoch is unknown to the master and has no bytes.
    """

    to: int


class Attached(msgspec.Struct, frozen=True):
    """The whole log is the master's: save that this epoch is followed, then call `attached`."""

    master_epoch: int


class TakeEpochs(msgspec.Struct, frozen=True):
    """Save these epochs before any later action."""

    entries: tuple[tuple[int, int], ...]


class Append(msgspec.Struct, frozen=True):
    """Store the master's bytes. Call `stored` after the last of these actions."""

    at: int
    data: bytes | memoryview
    description: bytes | memoryview = b""  # description of these bytes, if the master has one


class Confirmed(msgspec.Struct, frozen=True):
    """The log is confirmed up to this offset, and these bytes are stored."""

    offset: int


class End(msgspec.Struct, frozen=True):
    """Close the connection. With a `refusal` the next connection would fail in the same way; without it may succeed."""

    why: str
    refusal: StreamRefusal | None = None


Action = Send | Truncate | Attached | TakeEpochs | Append | Confirmed | End


class SlaveState(Enum):
    """State of a session. The table in the module's docstring explains each."""

    GREETING = auto()
    SHAKING = auto()
    PARTING = auto()
    ATTACHING = auto()
    FOLLOWING = auto()
    ENDED = auto()


# Expected frame by state. Any other frame violates the protocol, except a REFUSAL, which may arrive at any time.
_EXPECTED: dict[SlaveState, type | None] = {
    SlaveState.GREETING: Hello,
    SlaveState.SHAKING: MasterHandshake,
    SlaveState.PARTING: None,
    SlaveState.ATTACHING: None,
    SlaveState.FOLLOWING: Transfer,
    SlaveState.ENDED: None,
}
assert _EXPECTED.keys() == set(SlaveState)


class SlaveSession:
    """Protocol of one connection to a master, without I/O."""

    def __init__(
        self,
        local: Local,
        *,
        member_id: int,
        master_epoch: int,
        hello: Hello | None,
        begins_at_frontier: bool = False,
        from_last_file: bool = False,
        is_learner: bool = False,
        secret: bytes = b"",
        last_record: LastRecord = lambda _: None,
    ) -> None:
        """Create a session.

        `hello` is the own HELLO; None: the master is Apache's, which does not use it. `secret` is shared by the set, if
        it has one. `last_record` returns the last record of the own log; None: there is none to compare.

        `master_epoch` was read at a controller. With `begins_at_frontier` an empty log begins at the offset below which
        the master's log may be evicted, because bytes below it are archived.
        """
        self.state = SlaveState.GREETING if hello is not None else SlaveState.SHAKING
        self.master: Hello | None = None
        self.received = 0  # bytes of the log
        self._hello, self._master_epoch, self._secret = hello, master_epoch, secret
        self._beats_every = STOCK_HEARTBEAT_S if hello is None else HEARTBEAT_S
        self._h1 = SlaveHandshake(member_id, from_last_file, is_learner)
        self._begins_at_frontier = begins_at_frontier
        self._local = local
        self._epochs = EpochCache(local.epochs)
        self._masters_epochs: tuple[tuple[int, int], ...] = ()
        self._next = -1  # offset of the next byte of the log; -1: the start of the master's
        self._last_record = last_record
        self._overlap: Overlap | None = None  # bytes that a stock master has to repeat first
        self._reported = (-1, -1)
        self._end_of_log, self._masters_confirm, self._confirm = local.end, -1, local.confirm
        self._frames = MasterFrames()
        self._heard = self._spoke = 0.0

    def start(self, now: float) -> list[Action]:
        """Start the session on a new connection."""
        self._heard = self._spoke = now
        first = encode_slave_handshake(self._h1) if self._hello is None else encode_hello(self._hello)
        return [Send(first)]

    @property
    def is_ended(self) -> bool:
        """Return whether the session has ended: from then on it has no actions."""
        return self.state is SlaveState.ENDED

    @property
    def wake_at(self) -> float:
        """Return the time at which `tick` may have an action."""
        silent_at = self._heard + SILENCE_S
        return min(self._spoke + self._beats_every, silent_at) if self.state is SlaveState.FOLLOWING else silent_at

    def tick(self, now: float, synced: int = -1) -> list[Action]:
        """Return the actions that are due. `synced` is the end of the durable part of the log.

        The master archives bytes that all members have on their disks. It therefore needs reports of bytes that became
        durable after they were acknowledged.
        """
        if self.is_ended:
            return []
        if now - self._heard >= SILENCE_S:
            return [self._end(f"the master is silent for {SILENCE_S:.0f} s")]
        if self.state is SlaveState.FOLLOWING and now - self._spoke >= self._beats_every:
            end, reported = self._reported
            self._reported = end, reported if reported < 0 else max(reported, min(synced, end))
            return [self._report(now)]
        return []

    def receive_data(self, data: bytes, now: float) -> list[Action]:
        """Return the actions for received bytes."""
        if self.is_ended:
            return []
        self._heard = now
        actions = list[Action]()
        bodies = list[memoryview]()
        try:
            for frame in self._frames.receive_data(data):
                if isinstance(frame, Transfer) and self.state is SlaveState.FOLLOWING:
                    if self._overlap is None:
                        self._take(frame, actions, bodies)
                    elif (rest := self._behind_overlap(self._overlap, frame, actions, now)) is not None:
                        self._take(rest, actions, bodies)
                    continue
                actions.append(self._answer(frame, now))
                if self.is_ended:
                    break
        except AnotherLog:
            return [self._end_of_another_log()]
        except ProtocolError as error:
            self._flush(actions, bodies)
            actions.append(self._end(f"the master broke the protocol: {error.remark}"))
        except EpochConflict as error:
            self._flush(actions, bodies)
            actions.append(self._end(f"the master's epochs don't follow those that are here: {error}"))
        self._flush(actions, bodies)
        if self.state is SlaveState.FOLLOWING:
            self._send_confirm(actions)
        return actions

    # -- before the first byte of the log

    def _answer(self, frame: Hello | StreamRefusal | MasterHandshake | Transfer, now: float) -> Action:
        if isinstance(frame, StreamRefusal):
            return self._end(f"the master refuses: {frame.text}", frame)
        expected = _EXPECTED[self.state]
        if expected is None or not isinstance(frame, expected):
            raise ProtocolError(f"a {type(frame).__name__} while {self.state.name}")
        if isinstance(frame, Hello):
            return self._greet(frame, now)
        assert isinstance(frame, MasterHandshake)
        return self._part(frame)

    def _greet(self, master: Hello, now: float) -> Action:
        own = self._hello
        assert own is not None
        if master.answers != own.nonce:
            raise ProtocolError("a HELLO that answers another one")
        if self._secret and not is_proven(master, MASTER, self._secret):
            text = "this master does not prove that it knows the set's credentials"
            return self._end(text, refusal(Reason.STRANGER, text))
        fault = unlike(own, master)
        if fault is not None:
            return self._end(f"this master is not followed: {fault.text}", fault)
        if master.master_epoch != self._master_epoch:
            epochs = f"it has epoch {master.master_epoch}, expected {self._master_epoch}"
            return self._end(f"another master: {epochs}")
        self.master = master
        self.state = SlaveState.SHAKING
        self._spoke = now
        h1 = encode_slave_handshake(self._h1)
        if not self._secret:
            return Send(h1)
        again = msgspec.structs.replace(own, answers=master.nonce)
        return Send(encode_hello(proven(again, SLAVE, self._secret)) + h1)

    def _part(self, h2: MasterHandshake) -> Action:
        """Find where the two logs diverge."""
        local, epoch = self._local, self._master_epoch
        if local.followed_epoch > epoch or h2.last_epoch > epoch:
            epochs = f"this log followed epoch {local.followed_epoch}, its log has {h2.last_epoch}"
            return self._end(f"a master of epoch {epoch} can't be the last one: {epochs}")
        self._masters_epochs = h2.epochs
        if local.begin == local.end:
            return self._truncate_or_attach(local.end, h2)
        if not local.epochs:
            fault = refusal(Reason.NO_EPOCHS, f"the log ends at {local.end} and its epochs are unknown: resync it")
            return self._end(fault.text, fault)
        point = truncation_point(
            local.epochs,
            local.end,
            h2.epochs,
            h2.end,
            master_epoch=epoch,
            followed_epoch=local.followed_epoch,
            last_confirm=local.confirm,
        )
        if point is None or point < local.begin:
            text = f"the logs diverge below this one's begin {local.begin}: epochs {local.epochs[:3]}, {h2.epochs[:3]}"
            return self._end(text, refusal(Reason.NOTHING_IN_COMMON, text))
        return self._truncate_or_attach(point, h2)

    def _truncate_or_attach(self, point: int, h2: MasterHandshake) -> Action:
        local = self._local
        if point >= local.end and (not local.epochs or local.epochs[-1] in h2.epochs):
            return self._attach(local.end)
        self.state = SlaveState.PARTING
        return Truncate(point)

    def parted(self, end: int, epochs: tuple[tuple[int, int], ...]) -> list[Action]:
        """Continue after a truncation to a record's start at or below the offset of `Truncate`."""
        if self.state is not SlaveState.PARTING:
            return []
        self._epochs = EpochCache(epochs)
        self._confirm = min(self._confirm, end)  # the confirm offset of an `async` master was its own end
        return [self._attach(end)]

    def _attach(self, end: int) -> Action:
        self._next = self._end_of_log = end
        self.state = SlaveState.ATTACHING
        return Attached(self._master_epoch)

    @property
    def is_learner(self) -> bool:
        """Return whether the handshake declared this member a learner."""
        return self._h1.is_learner

    @property
    def is_empty(self) -> bool:
        """Return whether the log was empty when this member connected."""
        return self._local.begin == self._local.end == 0

    @property
    def begins_at(self) -> int:
        """Return the offset at which an empty log has to begin, before it is requested.

        The master may have nothing to send from there on. 0: the log is not empty, or begins with the first byte that
        arrives.
        """
        if self.master is None or not (self._begins_at_frontier and self.is_empty):
            return 0
        return self.master.eviction_frontier

    def attached(self, synced: int, now: float) -> list[Action]:
        """Request the log. `synced` is the end of its durable part."""
        if self.state is not SlaveState.ATTACHING:
            return []
        self.state = SlaveState.FOLLOWING
        asked = self._next
        if self.is_empty:
            asked = self._end_of_log = self.begins_at
            self._next = asked or -1
        elif self.master is None and (own := self._last_record(asked)) is not None and own[0] + len(own[1]) == asked:
            # Only a record in the last, unfinished file: the master may have evicted a finished file.
            self._overlap = Overlap(*own, asked)
            asked = self._next = own[0]
        self._reported = (asked, min(synced, asked) if self.master is not None else -1)
        return [self._report(now)]

    # -- the log

    def _behind_overlap(self, overlap: Overlap, frame: Transfer, actions: list[Action], now: float) -> Transfer | None:
        """Return the new part of a frame; None: nothing in it counts yet. Raise AnotherLog or ProtocolError."""
        if not frame.body:
            return None
        if frame.offset != overlap.next:
            raise ProtocolError(f"bytes at {frame.offset}, where {overlap.next} is next")
        new = overlap.behind(memoryview(frame.body))
        self._next = overlap.next
        if not overlap.is_over:
            return None
        self._overlap = None
        self._reported = (overlap.end, -1)
        actions.append(self._report(now))
        return msgspec.structs.replace(frame, offset=self._next, body=new)

    def _end_of_another_log(self) -> End:
        text = (
            f"the master's log is another one: it differs below {self._end_of_log}, the end of this one. It lost its "
            "tail and overwrote it in the same epoch: have a member elected that has all acknowledged messages"
        )
        return self._end(text, refusal(Reason.MISMATCH, text))

    def _take(self, frame: Transfer, actions: list[Action], bodies: list[memoryview]) -> None:
        size = len(frame.body)
        if size and self.master is None and self._next not in (frame.offset, -1):
            raise ProtocolError(f"bytes at {frame.offset}, where {self._next} is next")
        if size and frame.offset != self._next:  # a neve master omits padding
            if frame.offset < self._next:
                raise ProtocolError(f"bytes at {frame.offset} again, where {self._next} is next")
            self._flush(actions, bodies)
            self._next = frame.offset
        if size and frame.epoch < self._epochs.last_epoch:
            raise EpochConflict(f"bytes of epoch {frame.epoch} after epoch {self._epochs.last_epoch}")
        end = self._next + size
        entries = self._new_epochs(frame, end)
        if entries:
            self._flush(actions, bodies)
            actions.append(TakeEpochs(entries))
        if size:
            if frame.description is not None:
                self._flush(actions, bodies)
                actions.append(Append(self._next, frame.body, frame.description))
            else:
                bodies.append(frame.body)
            self._next = end
            self.received += size
        self._masters_confirm = max(self._masters_confirm, frame.confirm)

    def _new_epochs(self, frame: Transfer, end: int) -> tuple[tuple[int, int], ...]:
        """Return new epochs of this frame and of the master's list up to the frame's end."""
        last = self._epochs.last_epoch
        if frame.epoch <= last:
            return ()
        starts = {epoch: start for epoch, start in self._masters_epochs if last < epoch < frame.epoch and start <= end}
        if frame.epoch_start <= end:
            starts[frame.epoch] = frame.epoch_start
        return tuple(entry for entry in sorted(starts.items()) if self._epochs.assign(*entry))

    def _flush(self, actions: list[Action], bodies: list[memoryview]) -> None:
        """Add the collected bytes of the log as one `Append`."""
        if bodies:
            data = bodies[0] if len(bodies) == 1 else b"".join(bodies)
            actions.append(Append(self._next - sum(map(len, bodies)), data))
            bodies.clear()

    def stored(self, end: int, synced: int, now: float) -> list[Action]:
        """Acknowledge the log, which now ends at `end` and is durable up to `synced`."""
        if self.state is not SlaveState.FOLLOWING or self._overlap is not None:
            return []
        actions = list[Action]()
        self._end_of_log = end
        synced = min(synced, end) if self.master is not None else -1
        if (end, synced) > self._reported:
            self._reported = (end, synced)
            actions.append(self._report(now))
        self._send_confirm(actions)
        return actions

    def _send_confirm(self, actions: list[Action]) -> None:
        """Add a `Confirmed` for the stored part of the log that the master has confirmed."""
        confirm = min(self._masters_confirm, self._end_of_log)
        if confirm > self._confirm:
            self._confirm = confirm
            actions.append(Confirmed(confirm))

    def _report(self, now: float) -> Action:
        self._spoke = now
        return Send(encode_ack(*self._reported))

    def _end(self, why: str, fault: StreamRefusal | None = None) -> End:
        self.state = SlaveState.ENDED
        return End(why, fault)
