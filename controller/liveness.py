"""Heartbeats of brokers: the last report of each member, by broker set and id.

A member is alive while the connection of its last heartbeat is open and its own time-out has not passed (see
`decision`). Times are monotonic milliseconds. Reports are not persistent: after a start, a controller waits one
time-out for members that it has not heard from.

Memory is bounded: `MAX_SETS` sets with `MAX_IDS` ids each. Reports are dropped after `FORGET_MS`.
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
class _LiveBroker:
    report: Report
    connection: Hashable


class Liveness:
    """The last reports of all brokers. Single-threaded."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sets: dict[str, dict[int, _LiveBroker]] = {}
        self._strangers: dict[str, dict[int, Report]] = {}  # by the id that they used
        self._of_connection: dict[Hashable, set[tuple[str, int]]] = {}
        self._awaited: dict[tuple[str, int], set[asyncio.Future[None]]] = {}

    def now_ms(self) -> int:
        """Return the current time on the clock of the reports, in milliseconds."""
        return round(self._clock.monotonic() * 1000)

    def record_heartbeat(
        self, name: str, broker_id: int, heartbeat: Report, connection: Hashable, member: Member | None
    ) -> bool:
        """Record a heartbeat. Returns False if another live process uses the id, or if the limits are reached.

        `member` is the registered owner of the id. Its heartbeat is accepted even if another process uses the id.
        """
        heard = self._sets.get(name, {})
        before = heard.get(broker_id)
        if before is None and (len(heard) >= MAX_IDS or (not heard and len(self._sets) >= MAX_SETS)):
            return False
        if before is not None and _born(before.report) != _born(heartbeat):
            registered = _registered(member) if member is not None else None
            if _born(heartbeat) != registered and self._lives(before.report):
                self._note_stranger(name, broker_id, heartbeat)
                return False
        self._sets.setdefault(name, {})[broker_id] = _LiveBroker(
            replace(heartbeat, heard_ms=self.now_ms(), connected=True), connection
        )
        self._of_connection.setdefault(connection, set()).add((name, broker_id))
        for waiter in self._awaited.pop((name, broker_id), ()):
            if not waiter.done():
                waiter.set_result(None)
        return True

    async def until_alive(self, name: str, broker_id: int, seconds: float) -> None:
        """Wait until the broker is alive, for at most the given time."""
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
        """Return the best report of each id in a set, from here and `elsewhere`, with the answers in `asked`."""
        own, born = self._sets.get(name, {}), {member.id: _registered(member) for member in members}
        found = {}
        for broker_id in {*own, *elsewhere}:
            heard = [own[broker_id].report] if broker_id in own else []
            others = [replace(report, heard_ms=self.now_ms()) for report in elsewhere.get(broker_id, ())]
            report = self._best([*heard, *others], born.get(broker_id))
            found[broker_id] = replace(report, asked=asked[broker_id]) if broker_id in asked else report
        return found

    def strangers(self, name: str) -> tuple[Report, ...]:
        """Return reports under an id that another live process owns.

        A wiped register may assign an id again. The former owner then knows more than the register does.
        """
        now = self.now_ms()
        return tuple(
            heartbeat for heartbeat in self._strangers.get(name, {}).values() if now - heartbeat.heard_ms <= FORGET_MS
        )

    def _note_stranger(self, name: str, broker_id: int, heartbeat: Report) -> None:
        under = self._strangers.setdefault(name, {})
        both = (replace(heartbeat, heard_ms=self.now_ms()), under.get(broker_id))
        under[broker_id] = max((one for one in both if one is not None), key=lambda one: (one.epochs, one.max_offset))

    def living(self, name: str) -> dict[int, Report]:
        """Return the reports of a set's members that are alive for this controller."""
        return {
            broker_id: heard.report
            for broker_id, heard in self._sets.get(name, {}).items()
            if self._lives(heard.report)
        }

    def names(self) -> set[str]:
        """Return the names of all sets with a report."""
        return set(self._sets)

    def _best(self, reports: Sequence[Report], registered: _Born | None) -> Report:
        """Return one of several reports under one id, with the highest epochs of all of them.

        The registered process comes first, then a live one, then one that reported to this controller.
        """
        best = max(reports, key=lambda one: (self._lives(one) and _born(one) == registered, self._lives(one)))
        newest = max(reports, key=lambda one: (one.master_epoch, one.sync_state_set_epoch))
        if (newest.master_epoch, newest.sync_state_set_epoch) <= (best.master_epoch, best.sync_state_set_epoch):
            return best
        return replace(best, master_epoch=newest.master_epoch, sync_state_set_epoch=newest.sync_state_set_epoch)

    def closed(self, connection: Hashable) -> set[str]:
        """Mark the members of a closed connection as disconnected. Returns the names of their sets."""
        affected = set()
        for name, broker_id in self._of_connection.pop(connection, ()):
            heard = self._sets.get(name, {}).get(broker_id)
            if heard is not None and heard.connection == connection:
                heard.report = replace(heard.report, connected=False)
                affected.add(name)
        return affected

    def silent(self) -> list[tuple[str, int, Hashable]]:
        """Return the members whose time-out has passed on an open connection; drop reports older than FORGET_MS."""
        now_ms, found = self.now_ms(), []
        for name, heard in list(self._sets.items()):
            for broker_id, one in list(heard.items()):
                if now_ms - one.report.heard_ms > FORGET_MS:
                    self.forget(name, broker_id)
                elif one.report.connected and not self._lives(one.report):
                    found.append((name, broker_id, one.connection))
        return found

    def forget(self, name: str, broker_id: int | None = None) -> None:
        """Drop the reports of a broker, or of all brokers of a set."""
        heard = self._sets.get(name, {})
        for removed in [broker_id] if broker_id is not None else list(heard):
            self._strangers.get(name, {}).pop(removed, None)
            one = heard.pop(removed, None)
            if one is not None and one.connection in self._of_connection:
                self._of_connection[one.connection].discard((name, removed))
        if not heard:
            self._sets.pop(name, None)
            self._strangers.pop(name, None)

    def _lives(self, report: Report) -> bool:
        return report.connected and self.now_ms() - report.heard_ms <= report.timeout_ms


def _born(report: Report) -> _Born:
    return report.incarnation, report.starts, report.process


def _registered(member: Member) -> _Born:
    return member.incarnation, member.starts, member.process
