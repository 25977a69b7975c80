"""Where an answer waits for the broker set, and through which the set says what may be answered.

RocketMQ's GroupTransferService. An answer that promises a record is given once both are true: the own flush rule
(`flusher`) and, here, that the set has confirmed the log so far. Who waits:

    sends, in all lanes          `Intake.acknowledge` → the flusher, under SYNC_FLUSH → `wait`
    what a pop hands out         `pop_message` → `replicated`
    every other change           `requests/promises`, around the handlers → `replicated`

    said by the set (`BrokerSet`)     here
    leads, may_append                 asked before each append (`LogWriter`): SYSTEM_BUSY, or SYSTEM_ERROR `in-sync
                                      replicas not enough`
    acknowledged                      how far it is confirmed; -1: nobody is acknowledged, and nothing is appended
    told by the set
    `confirmed`                       who waits for what lies below is answered
    `Intake.stop_acknowledging`       this member is the master no more: all who wait are told FLUSH_SLAVE_TIMEOUT, in
                                      every room, before anything else is done. A new *term* begins

A confirm offset of a later term says nothing of what was appended in an earlier one: the log may have been cut and
grown again in between. So who awaits anything between an append and its answer brings the term that it began in.

A broker that stands alone has `STANDS_ALONE`: it is asked once, when the parts are made, and no answer comes by here.
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

# So many bytes of the log may wait for their answers, half a million of the smallest sends: a client that sends on
# without waiting for them must not fill the memory.
UNCONFIRMED_MAX = 128 << 20
NOT_ENOUGH = "in-sync replicas not enough"
NOT_SAFE = "stored, but not known to be with all members of the SyncStateSet"


_Waiter = WaitingSend | asyncio.Future[None]


class AppendRefused(StoreNotWritable):
    """The set takes no record of this member now."""

    def __init__(self, code: ResponseCode, remark: str) -> None:
        super().__init__(remark)
        self.code = code


class BrokerSet(Protocol):
    """What a member's set says; asked on the loop, often, and answered at once."""

    @property
    def leads(self) -> bool:
        """Whether this member is the master, and hands over to nobody."""

    def may_append(self) -> bool:
        """Whether enough members are in sync, of a master."""

    def acknowledged(self) -> int:
        """Below this a record may be acknowledged; -1: nothing may."""

    def why_silent(self) -> str:
        """For who is refused while nothing may be acknowledged."""

    def appended(self) -> None:
        """The log has grown; `acknowledged` may know it when this returns."""


class Replication(Protocol):
    """What the parts that append and answer know of a set."""

    @property
    def waits(self) -> bool:
        """Whether there is a set: else nothing here is ever called."""

    @property
    def term(self) -> int:
        """Another one: what was appended before is not promised by what is confirmed now."""

    def takes(self) -> bool:
        """Whether `check_append` would say nothing."""

    def check_append(self) -> None:
        """Raises AppendRefused."""

    def appended(self) -> None:
        """The log has grown."""

    def wait(self, send: WaitingSend) -> None:
        """Answer the send once it is confirmed; to be called in the turn, or at least in the term, of its append."""

    async def replicated(self, end: int, term: int) -> None:
        """Returns when the log is confirmed up to `end`, in the term in which that was appended.

        Raises BrokerError with FLUSH_SLAVE_TIMEOUT.
        """

    def answer_all(self) -> None:
        """See `Intake.stop_acknowledging`."""


class StandsAlone:
    """Of a broker that is in no set: everything may come in, and nobody waits."""

    waits, term = False, 0

    def takes(self) -> bool:
        return True

    def check_append(self) -> None:
        """Always."""

    def appended(self) -> None:
        """Nobody follows."""

    def wait(self, send: WaitingSend) -> None:
        send.connection.send_raw(send.render(ResponseCode.SUCCESS))

    async def replicated(self, end: int, term: int) -> None:
        """At once."""

    def answer_all(self) -> None:
        """Nobody waits."""


STANDS_ALONE = StandsAlone()


class GroupTransfer:
    """Who waits for the set. See the module."""

    waits = True

    def __init__(self, broker_set: BrokerSet, clock: Clock, faults: Faults, *, slave_timeout: float) -> None:
        """`slave_timeout`: after so many seconds an answer says that the record is stored, and not that it is safe."""
        self._set, self._clock, self._faults = broker_set, clock, faults
        self._waiting = Waiting[_Waiter](slave_timeout)
        self._newest = 0  # the highest end that an answer waits for
        self.term = 0
        self.timeouts = 0

    @property
    def waiting(self) -> int:
        """How many answers wait."""
        return len(self._waiting)

    # ---- before an append, and after it

    def takes(self) -> bool:
        """Whether `check_append` would say nothing."""
        return self._refusal() is None

    def check_append(self) -> None:
        """Raises AppendRefused."""
        refused = self._refusal()
        if refused is not None:
            raise AppendRefused(*refused)

    def _refusal(self) -> tuple[ResponseCode, str] | None:
        if not self._set.leads:
            return ResponseCode.SYSTEM_BUSY, "this member of the broker set takes no messages now"
        acknowledged = self._set.acknowledged()
        if acknowledged < 0:
            return ResponseCode.SYSTEM_ERROR, self._set.why_silent()
        if not self._set.may_append():
            return ResponseCode.SYSTEM_ERROR, NOT_ENOUGH
        if self._newest - acknowledged > UNCONFIRMED_MAX:
            return ResponseCode.SYSTEM_BUSY, f"{UNCONFIRMED_MAX >> 20} MiB wait for the broker set"
        return None

    def appended(self) -> None:
        self._set.appended()

    # ---- who waits

    def wait(self, send: WaitingSend) -> None:
        """Answer the send once it is confirmed."""
        if self._set.acknowledged() >= send.end_offset:
            self._answer(send, ResponseCode.SUCCESS)
        else:
            self._add(send.end_offset, send)

    async def replicated(self, end: int, term: int) -> None:
        """See `Replication`."""
        if term != self.term:
            raise not_safe()
        if self._set.acknowledged() >= end:
            return
        self._set.appended()  # a segment may have been sealed since the last append: the slaves have to have its end
        if self._set.acknowledged() >= end:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._add(end, waiter)
        await waiter

    def _add(self, end: int, waiter: _Waiter) -> None:
        self._newest = max(self._newest, end)
        self._waiting.add(end, waiter, self._clock.monotonic())

    # ---- what the set tells, and the time

    def confirmed(self) -> None:
        """`acknowledged` has moved."""
        if not self._waiting:
            return
        for waiter in self._waiting.reached(self._set.acknowledged()):
            self._answer(waiter, ResponseCode.SUCCESS)

    def answer_all(self) -> None:
        """See `Intake.stop_acknowledging`."""
        self.term += 1
        self._newest = 0
        for waiter in self._waiting.all():
            self._answer(waiter, ResponseCode.FLUSH_SLAVE_TIMEOUT)

    def check_deadlines(self) -> None:
        """Who has waited for `slave_timeout` is told that it is stored; if the slaves have it nobody knows."""
        for waiter in self._waiting.overdue(self._clock.monotonic()):
            self.timeouts += 1
            self._answer(waiter, ResponseCode.FLUSH_SLAVE_TIMEOUT)

    def _answer(self, waiter: _Waiter, code: ResponseCode) -> None:
        if isinstance(waiter, asyncio.Future):
            if waiter.done():
                return  # its asker hung up
            if code == ResponseCode.SUCCESS:
                waiter.set_result(None)
            else:
                waiter.set_exception(not_safe())
            return
        try:
            waiter.connection.send_raw(waiter.render(code))
        except Exception as error:  # noqa: BLE001 - one answer that can't be made; the others are waited for
            self._faults.add("the answer to a send", error, f"that ends at {waiter.end_offset}")


def not_safe() -> BrokerError:
    """What is told where a send would be answered FLUSH_SLAVE_TIMEOUT."""
    return BrokerError(ResponseCode.FLUSH_SLAVE_TIMEOUT, NOT_SAFE)
