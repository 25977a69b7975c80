"""Execution of requests: read the set, decide, write the decision if the set is unchanged, then answer and notify.

This controller changes each set by one request at a time, so that its requests do not conflict with each other. If
another controller on the same register has written first, the compare-and-swap fails and the decision is repeated.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from controller.broker_set import BrokerSet, DamagedBrokerSet, Member
from controller.decision import (
    Answer,
    Ask,
    Asked,
    Decision,
    GetNextBrokerId,
    GetReplicaInfo,
    GetSyncStateData,
    Request,
    Rules,
    Scan,
    decide,
)
from controller.liveness import Liveness
from controller.other_controllers import Heard, OtherControllers
from controller.register import Register, Revision, StoredSet
from neve.errors import BrokerError
from neve.remoting.codes import ResponseCode

log = logging.getLogger(__name__)

# Each attempt reads the value that made the one before fail.
_MOST_TRIES = 16
# Sets that are published or scanned concurrently, so that a slow register does not delay the last of them too long.
_AT_A_TIME = 32

Spawn = Callable[[str, Callable[[], Coroutine[Any, Any, object]]], object]


class Calls(Protocol):
    """Requests to brokers."""

    async def ask(self, name: str, member: Member) -> Asked: ...

    async def notify(self, broker_set: BrokerSet, member: Member) -> None: ...


class SetRegistry:
    """The broker sets of one register, by name."""

    def __init__(
        self,
        register: Register,
        others: OtherControllers,
        liveness: Liveness,
        calls: Calls,
        *,
        rules: Callable[[], Rules],
        notifies: Callable[[], bool],
        spawn: Spawn,
    ) -> None:
        """`rules` and `notifies` are called each time, because an operator may change them.

        `spawn` starts a background task.
        """
        self._register, self._others, self._liveness, self._calls = register, others, liveness, calls
        self._rules, self._notifies, self._spawn = rules, notifies, spawn
        #: Changes written by this controller, and those of them with a new master.
        self.changes = self.elections = 0
        self._living: dict[str, frozenset[int]] = {}  # live members as last published to the other controllers
        self._turns: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    async def carry_out(self, request: Request) -> Answer:
        """Carry out a request and return its answer, after the change is stored.

        Raises RegisterUnavailable if the outcome is unknown; no member is notified then.
        """
        if isinstance(request, GetNextBrokerId | GetReplicaInfo | GetSyncStateData):
            decision = self._decide(*await self._read(request), request, {})
            assert isinstance(decision, Decision)
            assert decision.broker_set is None and not decision.removed
            return decision.answer
        turn = self._turns.setdefault(request.name, asyncio.Lock())
        async with turn:
            return await self._in_turn(request)

    async def stored(self, name: str) -> BrokerSet | None:
        """Return the set in the register."""
        return (await self._register.get(name)).broker_set

    def glance(self, name: str) -> BrokerSet | None:
        """Return the last known value of the set, which is available even if the register is not."""
        return self._register.glance(name)

    async def until_all_have_beaten(self) -> None:
        """Wait until first elections are allowed; this delays them only shortly after the controller's start."""
        left_ms = self._rules().elects_first_from_ms - self._liveness.now_ms()
        if left_ms > 0:
            await asyncio.sleep((left_ms + 1) / 1000)

    def heard(self, name: str) -> None:
        """Note a heartbeat. If it makes a member alive, publish that now instead of in the next period."""
        if not self._others.renew_s:
            return
        living = frozenset(self._liveness.living(name))
        if self._living.get(name) != living:
            self._living[name] = living
            self._spawn("say", partial(self._publish_of, name))

    async def _publish_of(self, name: str) -> None:
        await self._others.publish(name, self._liveness.living(name))

    async def lost(self, name: str) -> None:
        """Handle the loss of a member: publish it to the other controllers, then elect a master if one is missing.

        The election takes place even if the loss could not be published.
        """
        self._living.pop(name, None)
        try:
            await self._publish_of(name)
        finally:
            await self.carry_out(Scan(name))

    async def publish_all(self) -> None:
        """Publish the live members of each set that have changed to the other controllers.

        A failure for one set does not stop the others; the last failure is raised at the end.
        """
        await _each(self._liveness.names() | self._living.keys(), self._publish_and_prune)

    async def _publish_and_prune(self, name: str) -> None:
        living = self._liveness.living(name)
        self._living[name] = frozenset(living)
        await self._others.publish(name, living)
        if not living and not self._living.get(name):  # no member became alive during the write
            self._living.pop(name, None)

    async def scan(self) -> None:
        """Check every set. A failure for one does not stop the others; the last failure is raised at the end.

        A single read of the register shows which sets have a live master and need no election.
        """
        stored = await self._register.all()
        await _each(stored, lambda name: self._scan(name, stored[name]))

    async def _scan(self, name: str, stored: StoredSet | DamagedBrokerSet) -> None:
        if isinstance(stored, DamagedBrokerSet):
            log.error("broker set %r can't be read from the register: %s", name, stored)
            raise stored
        found = self._decide(stored, {}, Scan(name), {})
        if isinstance(found, Ask) or found.broker_set is not None:
            await self.carry_out(Scan(name))

    async def _in_turn(self, request: Request) -> Answer:
        asked: dict[int, Asked] = {}
        for _ in range(_MOST_TRIES):
            stored, heard = await self._read(request)
            found = self._decide(stored, heard, request, asked)
            if isinstance(found, Ask):
                assert stored.broker_set is not None
                asked |= await self._ask(stored.broker_set, found.candidates)
                continue  # decide on the reports as they are now
            if not await self._write(request.name, found, stored.revision):
                continue
            self._follow(stored.broker_set, found)
            return found.answer
        raise BrokerError(
            ResponseCode.SYSTEM_BUSY, f"broker set {request.name} is changed by other requests all the time"
        )

    async def _read(self, request: Request) -> tuple[StoredSet, Heard]:
        """Return the stored value, and the members that the other controllers report as alive."""
        if isinstance(request, GetReplicaInfo):  # all brokers poll it often, and its answer does not depend on liveness
            return await self._register.get(request.name), {}
        stored, heard = await asyncio.gather(self._register.get(request.name), self._others.reports_of(request.name))
        return stored, heard

    def _decide(self, stored: StoredSet, heard: Heard, request: Request, asked: dict[int, Asked]) -> Decision | Ask:
        members = stored.broker_set.members if stored.broker_set is not None else ()
        reports = self._liveness.reports(request.name, asked, heard, members)
        rules = replace(self._rules(), had=stored.had, strangers=self._liveness.strangers(request.name))
        return decide(stored.broker_set, reports, request, self._liveness.now_ms(), rules)

    async def _ask(self, stored: BrokerSet, candidates: tuple[int, ...]) -> dict[int, Asked]:
        members = [member for member in stored.members if member.id in candidates]
        answers = await asyncio.gather(*(self._calls.ask(stored.name, member) for member in members))
        return {member.id: answer for member, answer in zip(members, answers, strict=True)}

    async def _write(self, name: str, decision: Decision, revision: Revision) -> bool:
        """Write the decision. Returns whether it takes effect: the value that it was based on is unchanged."""
        if decision.removed:
            return await self._register.remove(name, revision)
        if decision.broker_set is not None:
            return await self._register.put(decision.broker_set, revision) is not None
        return True

    def _follow(self, stored: BrokerSet | None, decision: Decision) -> None:
        """Act on a change that is in the register: log, count, notify members and elect a successor."""
        if decision.removed:
            assert stored is not None
            log.warning("broker set %r is removed, with members %s", stored.name, list(stored.ids))
            self._liveness.forget(stored.name)
            return
        now = decision.broker_set
        if now is None:
            return
        _log_change(stored, now)
        self.changes += 1
        self.elections += now.master is not None and (stored is None or now.master_epoch != stored.master_epoch)
        for left_id in set(stored.ids if stored is not None else ()) - set(now.ids):
            self._liveness.forget(now.name, left_id)
        if now.master is not None:
            for member in now.members:
                if member.id in decision.notify and self._notifies():
                    self._spawn("notify", partial(self._calls.notify, now, member))
        elif stored is not None and stored.master is not None:
            # The brokers may ask for an election only later.
            self._spawn("elect", partial(self.carry_out, Scan(now.name)))


async def _each(names: Iterable[str], work: Callable[[str], Coroutine[Any, Any, None]]) -> None:
    """Run `work` for all names, some concurrently. Raises the last failure after all of them."""
    places = asyncio.Semaphore(_AT_A_TIME)

    async def in_its_place(name: str) -> None:
        async with places:
            await work(name)

    failures = await asyncio.gather(*map(in_its_place, names), return_exceptions=True)
    failed = [failure for failure in failures if failure is not None]
    if failed:
        raise failed[-1]


def _log_change(old: BrokerSet | None, new: BrokerSet) -> None:
    """Log each change that an operator may look for."""
    name = new.name
    if old is None or old.ids != new.ids:
        log.info("broker set %r of %r has members %s", name, new.cluster, list(new.ids))
    if old is None:
        return
    if new.frozen and not old.frozen:
        log.error("broker set %r is frozen: %s", name, new.frozen.why)
    if new.master != old.master or new.master_epoch != old.master_epoch:
        if new.master is None:
            log.error("broker set %r has no master from epoch %d on; it was %s", name, new.master_epoch, old.master)
        else:
            trusted = new.master in (*old.sync_state_set, *old.eligible)
            log.log(
                logging.INFO if trusted or not old.master_epoch else logging.WARNING,
                "broker set %r: master %d from epoch %d on, was %s; %s",
                name,
                new.master,
                new.master_epoch,
                old.master,
                "in sync" if trusted else "first" if not old.master_epoch else "it may lack acknowledged messages",
            )
    if new.sync_state_set != old.sync_state_set:
        epoch, members = new.sync_state_set_epoch, list(new.sync_state_set)
        log.info("broker set %r: in sync from epoch %d on: %s", name, epoch, members)
    if set(new.unclean) - set(old.unclean):
        log.warning(
            "broker set %r: %s returned after an unclean stop and may lack acknowledged messages",
            name,
            list(new.unclean),
        )
