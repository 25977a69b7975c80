"""Waiting for the replicas of a broker set, and the set's permission to append (RocketMQ's GroupTransferService).

An answer that promises a record is given once the local flush rule (`flusher`) is met and the set has confirmed the log
up to the record's end. Waiters:

    sends, in all lanes     `Acknowledgement` → the flusher, under SYNC_FLUSH → `wait`
    results of a pop        `pop_message` → `replicated`
    all other changes       `requests/replicated_answers`, around the handlers → `replicated`

Queries to the set (`BrokerSetState`):

    leads, may_append       before each append (`LogWriter`). Refusals: SYSTEM_BUSY, or SYSTEM_ERROR with
                            `in-sync replicas not enough`
    acknowledged            the confirm offset; if -1, nothing is acknowledged and nothing is appended

Notifications from the set:

    `confirmed`                    answers every waiter below the new confirm offset
    `Acknowledgement.stop`         this member is no longer master: all waiters in all stages are answered
                                   FLUSH_SLAVE_TIMEOUT before anything else happens, and a new *term* begins

A confirm offset of a later term proves nothing about records of an earlier one, because the log may have been truncated
and appended to in between. So code that awaits between an append and its answer passes the term of the append.

A broker outside a set uses `STANDS_ALONE`. It is checked once, when the broker is assembled, and no answer passes
through this module.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from broker.ha.confirm import Waiting
from broker.intake.flusher import WaitingSend
from broker.store.errors import StoreNotWritable
from infra.clock import Clock
from infra.loop.supervisor import Faults
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

# Limit on the log bytes that wait for confirmation, half a million of the smallest sends. A client that pipelines sends
# without waiting for answers must not exhaust the memory.
UNCONFIRMED_MAX = 128 << 20
NOT_ENOUGH = "in-sync replicas not enough"
NOT_SAFE = "stored, but not confirmed by all members of the SyncStateSet"


_Waiter = WaitingSend | asyncio.Future[None]


class AppendRefused(StoreNotWritable):
    """The set does not allow this member to append now."""

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code


class BrokerSetState(Protocol):
    """State of this member's broker set. The event loop queries it often, so no method may block."""

    @property
    def leads(self) -> bool:
        """Whether this member is the master and no switchover is in progress."""

    def may_append(self) -> bool:
        """Return whether enough members are in sync; only of a master."""

    def acknowledged(self) -> int:
        """Return the physical offset below which records may be acknowledged, or -1 if none may."""

    def why_silent(self) -> str:
        """Return the reason for refusals while nothing may be acknowledged."""

    def appended(self) -> None:
        """Report that the log has grown; `acknowledged` may be higher after this call."""


class Replication(Protocol):
    """Interface of a broker set for the modules that append and answer."""

    @property
    def waits(self) -> bool:
        """Whether there is a set. If not, no other method is called."""

    @property
    def term(self) -> int:
        """Leadership term of this process. In a new term, confirm offsets do not cover records of earlier terms."""

    def takes(self) -> bool:
        """Return whether `check_append` would pass."""

    def check_append(self) -> None:
        """Raise AppendRefused if the set accepts no append now."""

    def appended(self) -> None:
        """Report that the log has grown."""

    def wait(self, send: WaitingSend) -> None:
        """Answer the send once it is confirmed. Call this in the term of its append, best in the same turn."""

    async def replicated(self, end: int, term: int) -> None:
        """Return when the log is confirmed up to `end`, which was appended in `term`.

        Raises BrokerError with FLUSH_SLAVE_TIMEOUT on a timeout, or if the term has changed.
        """

    def answer_all(self) -> None:
        """Answer all waiters with FLUSH_SLAVE_TIMEOUT and begin a new term; for `Acknowledgement.stop`."""


class StandsAlone:
    """Replication of a broker outside a set: every append is allowed, and nothing waits."""

    waits, term = False, 0

    def takes(self) -> bool:
        return True

    def check_append(self) -> None:
        """Allow every append."""

    def appended(self) -> None:
        """Do nothing: there is no replica."""

    def wait(self, send: WaitingSend) -> None:
        send.connection.send_raw(send.render(ResponseCode.SUCCESS))

    async def replicated(self, end: int, term: int) -> None:
        """Return at once."""

    def answer_all(self) -> None:
        """Do nothing: there are no waiters."""


STANDS_ALONE = StandsAlone()


class GroupTransfer:
    """Waiters for the confirm offset of a broker set (RocketMQ's GroupTransferService)."""

    waits = True

    def __init__(self, broker_set: BrokerSetState, clock: Clock, faults: Faults, *, slave_timeout: float) -> None:
        """`slave_timeout`, in seconds, limits the wait; after it the answer is FLUSH_SLAVE_TIMEOUT."""
        self._set, self._clock, self._faults = broker_set, clock, faults
        self._waiting = Waiting[_Waiter](slave_timeout)
        self._newest = 0  # highest end offset of any waiter
        self.term = 0
        self.timeouts = 0

    @property
    def waiting(self) -> int:
        """The number of answers that wait."""
        return len(self._waiting)

    # ---- appends

    def takes(self) -> bool:
        """Return whether `check_append` would pass."""
        return self._refusal() is None

    def check_append(self) -> None:
        """Raise AppendRefused if the set accepts no append now."""
        refused = self._refusal()
        if refused is not None:
            raise AppendRefused(*refused)

    def _refusal(self) -> tuple[ResponseCode, str] | None:
        if not self._set.leads:
            return ResponseCode.SYSTEM_BUSY, "this member of the broker set accepts no messages at present"
        acknowledged = self._set.acknowledged()
        if acknowledged < 0:
            return ResponseCode.SYSTEM_ERROR, self._set.why_silent()
        if not self._set.may_append():
            return ResponseCode.SYSTEM_ERROR, NOT_ENOUGH
        if self._newest - acknowledged > UNCONFIRMED_MAX:
            return ResponseCode.SYSTEM_BUSY, f"{UNCONFIRMED_MAX >> 20} MiB are unconfirmed by the broker set"
        return None

    def appended(self) -> None:
        self._set.appended()

    # ---- waiters

    def wait(self, send: WaitingSend) -> None:
        """Answer the send once it is confirmed."""
        if self._set.acknowledged() >= send.end_offset:
            self._answer(send, ResponseCode.SUCCESS)
        else:
            self._add(send.end_offset, send)

    async def replicated(self, end: int, term: int) -> None:
        """Return when the log is confirmed up to `end`, which was appended in `term`; raise BrokerError otherwise."""
        if term != self.term:
            raise not_safe()
        if self._set.acknowledged() >= end:
            return
        self._set.appended()  # a segment may have been sealed since the last append, and the slaves need its end
        if self._set.acknowledged() >= end:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._add(end, waiter)
        await waiter

    def _add(self, end: int, waiter: _Waiter) -> None:
        self._newest = max(self._newest, end)
        self._waiting.add(end, waiter, self._clock.monotonic())

    # ---- notifications and timeouts

    def confirmed(self) -> None:
        """Answer all waiters below the confirm offset, which has moved."""
        if not self._waiting:
            return
        for waiter in self._waiting.reached(self._set.acknowledged()):
            self._answer(waiter, ResponseCode.SUCCESS)

    def answer_all(self) -> None:
        """Answer all waiters with FLUSH_SLAVE_TIMEOUT and begin a new term; for `Acknowledgement.stop`."""
        self.term += 1
        self._newest = 0
        for waiter in self._waiting.all():
            self._answer(waiter, ResponseCode.FLUSH_SLAVE_TIMEOUT)

    def check_deadlines(self) -> None:
        """Answer waiters older than `slave_timeout` as stored; whether the slaves have the records is unknown."""
        for waiter in self._waiting.overdue(self._clock.monotonic()):
            self.timeouts += 1
            self._answer(waiter, ResponseCode.FLUSH_SLAVE_TIMEOUT)

    def _answer(self, waiter: _Waiter, code: ResponseCode) -> None:
        if isinstance(waiter, asyncio.Future):
            if waiter.done():
                return  # the client disconnected
            if code == ResponseCode.SUCCESS:
                waiter.set_result(None)
            else:
                waiter.set_exception(not_safe())
            return
        try:
            waiter.connection.send_raw(waiter.render(code))
        except Exception as error:  # noqa: BLE001 - one failed answer must not stop the others
            self._faults.add("the answer to a send", error, f"that ends at {waiter.end_offset}")


def not_safe() -> BrokerError:
    """Return the error that corresponds to a send's FLUSH_SLAVE_TIMEOUT."""
    return BrokerError(ResponseCode.FLUSH_SLAVE_TIMEOUT, NOT_SAFE)
