"""A master's side of one connection from a slave: bytes go in, actions come out. Pure.

state       takes         then
NEW         HELLO         check it against the own one, which answers it               GREETED, with a secret PROVING
            H1            of a stock member, if those are admitted; send H2            SHAKEN
PROVING     HELLO         the same again, with its proof                               GREETED
GREETED     H1            of the same member; send H2                                  SHAKEN
SHAKEN      T1            the first offset to send: `SlaveConnected`, `Reported`       STREAMING
STREAMING   T1            `Reported`
ENDED

`advance` returns the next frames. A T2 has at most `batch` bytes, and does not cross the end of an epoch or of a file.
A described append is sent whole, if the batch of this turn has room for it. A stock member gets files whole. For a neve
member the padding after an END record is omitted.

A slave that is far behind gets at most `rate` bytes a second. No slave gets more than TURN_BYTES in one iteration of
the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

import msgspec

from broker.ha.epochs import EpochCache
from broker.ha.frames import (
    DESCRIBES_FROM,
    Hello,
    SlaveAck,
    SlaveFrame,
    SlaveFrames,
    SlaveHandshake,
    StreamRefusal,
    encode_described_head,
    encode_hello,
    encode_master_handshake,
    encode_refusal,
    encode_transfer_head,
)
from broker.ha.greeting import Reason, refusal, unlike
from broker.ha.proof import MASTER, SLAVE, is_proven, proven
from broker.store.described import Described, DescribedAppend
from neve.errors import ProtocolError

HEARTBEAT_S = 5.0  # RocketMQ's haSendHeartbeatInterval
SILENCE_S = 20.0  # RocketMQ's haHousekeepingInterval
GREETING_S = 10.0  # a peer that has not requested the log after this many seconds is disconnected
# A slave gets the confirm offset with the next bytes. If there are none, a heartbeat carries it, at most this often.
CONFIRM_EVERY_S = 0.1
TURN_BYTES = 256 << 10
FAR_BEHIND = 8 << 20
# Below the confirm offset, no member truncates or deletes its log without an operator.
AWAY_TOO_LONG = "it was away for too long: let it rejoin as a new member, with an empty data directory"


class LogSource(Protocol):
    """The master's log, as slaves read it."""

    @property
    def min_physical_offset(self) -> int:
        """Return the start of the log."""

    @property
    def max_physical_offset(self) -> int:
        """Return the end of the log."""

    @property
    def newest_segment_base(self) -> int:
        """Return the start of the newest file."""

    def log_bytes(self, start: int, end: int, limit: int, *, padding: bool = False) -> tuple[int, memoryview]:
        """Return the first offset of the bytes, which is not below `start`, and the bytes of [start, end) in one file.

        At most `limit` bytes are returned. They are empty if there are none yet. `padding` includes padding.
        """

    @property
    def described(self) -> Described:
        """Return the descriptions of the latest appends."""


class StreamRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of replication streams."""

    batch: int = 32 << 10  # haTransferBatchSize
    rate: int = 0  # bytes per second to a slave that is far behind; 0: no limit
    admits_stock: bool = False
    secret: bytes = b""  # shared by the members of the set, which slaves have to prove; empty: no proof is needed


# -- actions


class Send(msgspec.Struct, frozen=True):
    """Write these bytes."""

    data: tuple[bytes | memoryview, ...]


class SlaveConnected(msgspec.Struct, frozen=True):
    """A slave has requested the log: from here on its reports count. A stock member has no `hello`."""

    member_id: int
    is_learner: bool
    hello: Hello | None


class Reported(msgspec.Struct, frozen=True):
    """End of a slave's log, and of its durable part; -1: not reported."""

    end: int
    synced: int


class End(msgspec.Struct, frozen=True):
    """Close the connection after the pending bytes are sent."""

    why: str
    refusal: StreamRefusal | None = None


Action = Send | SlaveConnected | Reported | End


class MasterState(Enum):
    """State of a session. The table in the module's docstring explains each."""

    NEW = auto()
    PROVING = auto()
    GREETED = auto()
    SHAKEN = auto()
    STREAMING = auto()
    ENDED = auto()


_EXPECTED: dict[MasterState, tuple[type, ...]] = {
    MasterState.NEW: (Hello, SlaveHandshake),
    MasterState.PROVING: (Hello,),
    MasterState.GREETED: (SlaveHandshake,),
    MasterState.SHAKEN: (SlaveAck,),
    MasterState.STREAMING: (SlaveAck,),
    MasterState.ENDED: (),
}
assert _EXPECTED.keys() == set(MasterState)
_NOT_PROVEN = refusal(Reason.STRANGER, "it does not prove that it knows the set's credentials")


class MasterSession:
    """Protocol of one connection from a slave, without I/O."""

    def __init__(
        self,
        log: LogSource,
        epochs: EpochCache,
        own: Hello,
        rules: StreamRules,
        *,
        is_member: Callable[[int], bool],
        confirm: Callable[[], int],
        now: float,
    ) -> None:
        """Create a session. `own` is the master's HELLO without `answers`. `epochs` is read whenever it is needed."""
        self.state = MasterState.NEW
        self.slave: Hello | None = None
        self.member_id = 0
        self.position = -1  # where the next T2 begins
        self.sent = 0  # bytes of the log
        self._log, self._epochs, self._own, self._rules = log, epochs, own, rules
        self._is_member, self._confirm = is_member, confirm
        self._from_last_file = self._is_learner = False
        self._confirm_sent = -1
        self._frames = SlaveFrames()
        self._begun = self._heard = self._spoke = now
        self._allowance, self._allowed_at = float(TURN_BYTES), now

    @property
    def is_ended(self) -> bool:
        """Return whether the session has ended: from then on it has no actions."""
        return self.state is MasterState.ENDED

    @property
    def is_streaming(self) -> bool:
        """Return whether the slave has requested the log."""
        return self.state is MasterState.STREAMING

    @property
    def takes_descriptions(self) -> bool:
        """Return whether the slave accepts descriptions of appends along with their bytes."""
        return self.slave is not None and self.slave.format >= DESCRIBES_FROM

    @property
    def wake_at(self) -> float:
        """Return the time at which `tick` may have an action."""
        if self.state is not MasterState.STREAMING:
            return self._begun + GREETING_S
        soon = self._spoke + (CONFIRM_EVERY_S if self._confirm() > self._confirm_sent else HEARTBEAT_S)
        return min(soon, self._heard + SILENCE_S)

    def tick(self, now: float) -> list[Action]:
        """Return the actions that are due."""
        if self.is_ended:
            return []
        if self.state is not MasterState.STREAMING:
            late = now - self._begun >= GREETING_S
            return [self._end(f"it has not asked for the log within {GREETING_S:.0f} s")] if late else []
        if now - self._heard >= SILENCE_S:
            return [self._end(f"it is silent for {SILENCE_S:.0f} s")]
        if now >= self._spoke + HEARTBEAT_S or (
            now >= self._spoke + CONFIRM_EVERY_S and self._confirm() > self._confirm_sent
        ):
            return [self._heartbeat(now)]
        return []

    def receive_data(self, data: bytes, now: float) -> list[Action]:
        """Return the actions for received bytes. Of several reports only the last counts."""
        if self.is_ended:
            return []
        self._heard = now
        if self.state is MasterState.STREAMING and (report := self._frames.only_report(data)) is not None:
            return [Reported(report.end, report.synced)]
        actions = list[Action]()
        reported: Reported | None = None
        try:
            for frame in self._frames.receive_data(data):
                if isinstance(frame, SlaveAck) and self.state is MasterState.STREAMING:
                    reported = Reported(frame.end, frame.synced)
                    continue
                actions += self._answer(frame, now)
                if self.is_ended:
                    return actions
        except ProtocolError as error:
            actions.append(self._end(f"it broke the protocol: {error.remark}"))
            return actions
        if reported is not None:
            actions.append(reported)
        return actions

    # -- before the first byte of the log

    def _answer(self, frame: SlaveFrame, now: float) -> list[Action]:
        if self.state is MasterState.PROVING and isinstance(frame, SlaveHandshake):
            return self._refuse(_NOT_PROVEN)
        if not isinstance(frame, _EXPECTED[self.state]):
            raise ProtocolError(f"a {type(frame).__name__} while {self.state.name}")
        if isinstance(frame, Hello):
            return self._prove(frame) if self.state is MasterState.PROVING else self._greet(frame, now)
        if isinstance(frame, SlaveHandshake):
            return self._shake(frame, now)
        return self._begin(frame)

    def _greet(self, slave: Hello, now: float) -> list[Action]:
        own = self._own
        fault = unlike(own, slave)
        if fault is None and not self._is_member(slave.member_id):
            fault = refusal(Reason.MEMBER, f"the set {own.broker_set!r} has no member {slave.member_id}")
        if fault is None and slave.master_epoch != own.master_epoch:
            epochs = f"this is the master of epoch {own.master_epoch}, it follows the one of {slave.master_epoch}"
            fault = refusal(Reason.MASTER_EPOCH, epochs)
        if fault is not None:
            return self._refuse(fault)
        self.slave, self.member_id = slave, slave.member_id
        self._spoke = now
        answer, secret = msgspec.structs.replace(own, answers=slave.nonce), self._rules.secret
        if secret:
            self.state = MasterState.PROVING
            return [Send((encode_hello(proven(answer, MASTER, secret)),))]
        self.state = MasterState.GREETED
        return [Send((encode_hello(answer),))]

    def _prove(self, again: Hello) -> list[Action]:
        """Check the proof. Nothing about the log is sent before that."""
        slave, secret = self.slave, self._rules.secret
        assert slave is not None
        same = msgspec.structs.replace(again, answers="", proof="") == slave
        if not same or again.answers != self._own.nonce or not is_proven(again, SLAVE, secret):
            return self._refuse(_NOT_PROVEN)
        self.state = MasterState.GREETED
        return []

    def _shake(self, h1: SlaveHandshake, now: float) -> list[Action]:
        if self.slave is None:
            if not self._rules.admits_stock or self._rules.secret:
                return [
                    self._end(
                        "Apache's brokers are not admitted as members", refusal(Reason.STOCK, "it sends no HELLO")
                    )
                ]
            if not self._is_member(h1.member_id) or h1.member_id == self._own.member_id:
                fault = refusal(Reason.MEMBER, f"the set {self._own.broker_set!r} has no member {h1.member_id}")
                return [self._end(fault.text, fault)]
        elif h1.member_id != self.slave.member_id:
            raise ProtocolError(f"member {h1.member_id} in its H1, {self.slave.member_id} in its HELLO")
        self.member_id = h1.member_id
        self._from_last_file, self._is_learner = h1.from_last_file, h1.is_learner
        self.state = MasterState.SHAKEN
        self._spoke = now
        return [Send((encode_master_handshake(self._log.max_physical_offset, self._epochs.entries()),))]

    def _begin(self, request: SlaveAck) -> list[Action]:
        """Start streaming at the offset in the first T1."""
        log, at = self._log, request.end
        if at == 0:
            at = log.newest_segment_base if self._from_last_file else log.min_physical_offset
        if at > log.max_physical_offset:
            text = f"it requests the log from {at} on, which ends at {log.max_physical_offset}"
            return self._refuse(refusal(Reason.AHEAD, text))
        if at < log.min_physical_offset:
            text = f"it requests the log from {at} on, which begins at {log.min_physical_offset}: {AWAY_TOO_LONG}"
            return self._refuse(refusal(Reason.GONE, text))
        if at < log.max_physical_offset and self._epochs.at(at) is None:
            return self._refuse(refusal(Reason.NO_EPOCHS, f"the epoch of the log at {at} is unknown"))
        self.position = at
        self.state = MasterState.STREAMING
        return [SlaveConnected(self.member_id, self._is_learner, self.slave), Reported(request.end, request.synced)]

    def _refuse(self, fault: StreamRefusal) -> list[Action]:
        """Refuse the slave. A stock member gets no reason, which it would not understand."""
        answers: list[Action] = [Send((encode_refusal(fault),))] if self._frames_of_neve else []
        return [*answers, self._end(f"refused: {fault.text}", fault)]

    @property
    def _frames_of_neve(self) -> bool:
        return self.state is MasterState.NEW or self.slave is not None

    def dismiss(self) -> list[Action]:
        """End the session, because this member is no longer the master."""
        if self.is_ended:
            return []
        return self._refuse(refusal(Reason.NOT_MASTER, "it is no longer the master"))

    def _end(self, why: str, fault: StreamRefusal | None = None) -> End:
        self.state = MasterState.ENDED
        return End(why, fault)

    # -- the log

    @property
    def has_more(self) -> bool:
        """Return whether `advance` may have bytes to send."""
        return self.state is MasterState.STREAMING and self.position < self._log.max_physical_offset

    @property
    def is_far_behind(self) -> bool:
        """Return whether the next bytes may have to be read from the disk."""
        return self.has_more and self._log.max_physical_offset - self.position > FAR_BEHIND

    def may_send_at(self, now: float) -> float:
        """Return the time at which a slave that is far behind may get the next bytes."""
        rate = self._rules.rate
        if not rate or not self.is_far_behind:
            return now
        self._allow(now, rate)
        return now if self._allowance >= 1 else now + (TURN_BYTES - self._allowance) / rate

    def advance(self, now: float) -> list[Action]:
        """Return the frames of one batch."""
        if not self.has_more:
            return []
        left = TURN_BYTES
        if self._rules.rate and self.is_far_behind:
            self._allow(now, self._rules.rate)
            left = min(left, int(self._allowance))
        data = list[bytes | memoryview]()
        while left > 0 and self.has_more:
            if self.takes_descriptions and (found := self._log.described.at(self.position)) is not None:
                size = found.end - self.position
                if size > left and data:
                    break  # sent whole, in the next turn
                if size <= left and self._send_described(found, data):
                    left -= size
                    continue
            body = self._next_body(min(self._rules.batch, left))
            if body is None:
                if self.slave is None and not data:
                    return self._hole()
                break
            offset = self.position
            held = self._epochs.at(offset)
            assert held is not None, "the request was within the epochs, and they only grow"
            confirm = self._confirm()
            data += (encode_transfer_head(len(body), offset, held[0], held[1], confirm), body)
            self._sent(len(body), confirm)
            left -= len(body)
        if not data:
            return []
        self._spoke = now
        return [Send(tuple(data))]

    def _send_described(self, append: DescribedAppend, data: list[bytes | memoryview]) -> bool:
        """Send an append as a whole. Return False if it is not in one epoch, or not in one file."""
        offset, end = self.position, append.end
        held = self._epochs.at(offset)
        if held is None or (held[2] is not None and held[2] < end):
            return False
        body: bytes | memoryview = append.records
        if not body:
            start, body = self._log.log_bytes(offset, end, end - offset)
            if start != offset or len(body) != end - offset:
                return False
        confirm = self._confirm()
        data += (encode_described_head(len(body), offset, held[0], held[1], confirm, append.description), body)
        self._sent(len(body), confirm)
        return True

    def _sent(self, size: int, confirm: int) -> None:
        self._confirm_sent = confirm
        self.position += size
        self.sent += size
        self._allowance -= size

    def _next_body(self, limit: int) -> memoryview | None:
        """Return the bytes at `position`, after skipping padding and holes."""
        log, is_stock = self._log, self.slave is None
        while True:
            held = self._epochs.at(self.position)
            epoch_end = held[2] if held is not None else None
            end = log.max_physical_offset if epoch_end is None else min(epoch_end, log.max_physical_offset)
            start, body = log.log_bytes(self.position, end, limit, padding=is_stock)
            if len(body):
                if is_stock and start != self.position:
                    return None
                self.position = start
                return body
            if end == log.max_physical_offset:
                return None
            self.position = end

    def _hole(self) -> list[Action]:
        """End the session: a stock member can't continue its log after a hole."""
        text = f"nothing lies at {self.position}: a stock member can't be led over a hole in the log"
        return [self._end(text, refusal(Reason.GONE, text))]

    def _allow(self, now: float, rate: int) -> None:
        gained = (now - self._allowed_at) * rate
        self._allowance = min(max(self._allowance, 0.0) + gained, float(TURN_BYTES))
        self._allowed_at = now

    def _heartbeat(self, now: float) -> Action:
        """Return a T2 without bytes: the present epoch, and the confirm offset."""
        self._spoke, self._confirm_sent = now, self._confirm()
        held = self._epochs.at(self.position) or (self._epochs.last_epoch, self._epochs.last_start, None)
        return Send((encode_transfer_head(0, self.position, max(held[0], 0), held[1], self._confirm_sent),))
