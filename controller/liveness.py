"""Who was heard last, and when: the heartbeats of brokers, by broker set and id.

A member lives while the connection stands on which it was heard last and its own time-out has not passed (`decision`).
Times are monotonic. Nothing here survives the process: who begins waits one time-out for what it has not heard.

Bounded: `MAX_SETS` names with `MAX_IDS` ids each; what was not heard for `FORGET_MS` is forgotten.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from controller.broker_set import Member
from controller.decision import Asked, Report
from infra.clock import Clock

MAX_SETS = 2_000
MAX_IDS = 128
FORGET_MS = 3_600_000

_Born = tuple[str, int, str]
_NOBODY: Mapping[int, Sequence[Report]] = {}


@dataclass(slots=True)
class _Heard:
    report: Report
    connection: Hashable


class Liveness:
    """The reports of everybody; single-threaded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sets: dict[str, dict[int, _Heard]] = {}
        self._strangers: dict[str, dict[int, Report]] = {}  # by the id that they spoke under
        self._of_connection: dict[Hashable, set[tuple[str, int]]] = {}
        self._awaited: dict[tuple[str, int], set[asyncio.Future[None]]] = {}

    def now_ms(self) -> int:
        """The time that reports are in."""
        return round(self._clock.monotonic() * 1000)

    def hear(self, name: str, broker_id: int, said: Report, connection: Hashable, member: Member | None) -> bool:
        """A heartbeat of now. False: somebody else who lives has the id, or there is no room.

        `member` is who registered with the id: what it says counts whoever else may speak for it.
        """
        heard = self._sets.get(name, {})
        before = heard.get(broker_id)
        if before is None and (len(heard) >= MAX_IDS or (not heard and len(self._sets) >= MAX_SETS)):
            return False
        if before is not None and _born(before.report) != _born(said):
            registered = _registered(member) if member is not None else None
            if _born(said) != registered and self._lives(before.report):
                self._note_stranger(name, broker_id, said)
                return False
        self._sets.setdefault(name, {})[broker_id] = _Heard(
            replace(said, heard_ms=self.now_ms(), connected=True), connection
        )
        self._of_connection.setdefault(connection, set()).add((name, broker_id))
        for waiter in self._awaited.pop((name, broker_id), ()):
            if not waiter.done():
                waiter.set_result(None)
        return True

    async def until_heard(self, name: str, broker_id: int, seconds: float) -> None:
        """Returns when it lives, at once if it does, or when the time is up."""
        heard = self._sets.get(name, {}).get(broker_id)
        if heard is not None and self._lives(heard.report):
            return
        waiter = asyncio.get_running_loop().create_future()
        waiters = self._awaited.setdefault((name, broker_id), set())
        waiters.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter
        except TimeoutError:
            return
        finally:
            waiters.discard(waiter)
            if not waiters and self._awaited.get((name, broker_id)) is waiters:
                del self._awaited[name, broker_id]

    def reports(
        self,
        name: str,
        asked: Mapping[int, Asked],
        elsewhere: Mapping[int, Sequence[Report]] = _NOBODY,
        members: Sequence[Member] = (),
    ) -> dict[int, Report]:
        """Of all who speak for a set, here or to another controller; with what those that were asked have answered."""
        own, born = self._sets.get(name, {}), {member.id: _registered(member) for member in members}
        found = {}
        for broker_id in {*own, *elsewhere}:
            heard = [own[broker_id].report] if broker_id in own else []
            others = [replace(report, heard_ms=self.now_ms()) for report in elsewhere.get(broker_id, ())]
            report = self._best([*heard, *others], born.get(broker_id))
            found[broker_id] = replace(report, asked=asked[broker_id]) if broker_id in asked else report
        return found

    def strangers(self, name: str) -> tuple[Report, ...]:
        """What was said under an id that is another's, who lives. A register that was wiped may give an id again: who
        had it before knows more than the register.
        """
        now = self.now_ms()
        return tuple(said for said in self._strangers.get(name, {}).values() if now - said.heard_ms <= FORGET_MS)

    def _note_stranger(self, name: str, broker_id: int, said: Report) -> None:
        under = self._strangers.setdefault(name, {})
        both = (replace(said, heard_ms=self.now_ms()), under.get(broker_id))
        under[broker_id] = max((one for one in both if one is not None), key=lambda one: (one.epochs, one.max_offset))

    def living(self, name: str) -> dict[int, Report]:
        """Who of a set lives, as far as is heard here."""
        return {
            broker_id: heard.report
            for broker_id, heard in self._sets.get(name, {}).items()
            if self._lives(heard.report)
        }

    def names(self) -> set[str]:
        """The sets of which anybody was heard."""
        return set(self._sets)

    def _best(self, reports: Sequence[Report], registered: _Born | None) -> Report:
        """Who registered, before who lives, before who was heard here; with the highest epochs that any tells."""
        best = max(reports, key=lambda one: (self._lives(one) and _born(one) == registered, self._lives(one)))
        newest = max(reports, key=lambda one: (one.master_epoch, one.sync_state_set_epoch))
        if (newest.master_epoch, newest.sync_state_set_epoch) <= (best.master_epoch, best.sync_state_set_epoch):
            return best
        return replace(best, master_epoch=newest.master_epoch, sync_state_set_epoch=newest.sync_state_set_epoch)

    def closed(self, connection: Hashable) -> set[str]:
        """Nobody is connected by this any more; the sets of whom that is true."""
        affected = set()
        for name, broker_id in self._of_connection.pop(connection, ()):
            heard = self._sets.get(name, {}).get(broker_id)
            if heard is not None and heard.connection == connection:
                heard.report = replace(heard.report, connected=False)
                affected.add(name)
        return affected

    def silent(self) -> list[tuple[str, int, Hashable]]:
        """Whose time-out has passed on a connection that stands; also forgets those of long ago."""
        now_ms, found = self.now_ms(), []
        for name, heard in list(self._sets.items()):
            for broker_id, one in list(heard.items()):
                if now_ms - one.report.heard_ms > FORGET_MS:
                    self.forget(name, broker_id)
                elif one.report.connected and not self._lives(one.report):
                    found.append((name, broker_id, one.connection))
        return found

    def forget(self, name: str, broker_id: int | None = None) -> None:
        """Drop what a broker, or all of a set, has said."""
        heard = self._sets.get(name, {})
        for gone in [broker_id] if broker_id is not None else list(heard):
            self._strangers.get(name, {}).pop(gone, None)
            one = heard.pop(gone, None)
            if one is not None and one.connection in self._of_connection:
                self._of_connection[one.connection].discard((name, gone))
        if not heard:
            self._sets.pop(name, None)
            self._strangers.pop(name, None)

    def _lives(self, report: Report) -> bool:
        return report.connected and self.now_ms() - report.heard_ms <= report.timeout_ms


def _born(report: Report) -> _Born:
    return report.incarnation, report.starts, report.process


def _registered(member: Member) -> _Born:
    return member.incarnation, member.starts, member.process
