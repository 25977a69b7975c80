"""Execute a plan of faults on real processes and links, and heal all of it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable

from tests.histories.clients import now_ms
from tests.histories.faults import (
    ALL,
    ANY,
    CLIENTS,
    CONTROLLER,
    MASTER,
    NAME_SERVER,
    OTHER_SLAVE,
    SLAVE,
    Fault,
    Kind,
    Way,
)
from tests.histories.history import Replaced, Switched
from tests.histories.links import Direction, Links
from tests.histories.servers import JAVA_CLIENTS, MEMBERS, NEVE_CLIENTS, FaultySet

Undo = Callable[[], Coroutine[None, None, None]]


class Injector:
    """Executes faults. `tell` gets each step, and the kind at each begin; `note` gets the outcome of requests."""

    def __init__(
        self,
        brokers: FaultySet,
        links: Links,
        chance: random.Random,
        tell: Callable[[str, str], None],
        note: Callable[[Switched | Replaced], None],
    ) -> None:
        self._brokers, self._links, self._chance, self._tell, self._note = brokers, links, chance, tell, note

    async def carry_out(self, plan: Iterable[Fault]) -> None:
        """Execute each fault at its time, concurrently; heal everything at the end."""
        try:
            async with asyncio.TaskGroup() as group:
                for fault in plan:
                    group.create_task(self._one(fault))
        finally:
            await self.heal()

    async def heal(self) -> None:
        """Start every server and open every link."""
        self._links.heal(breaks=self._chance.random() < 0.5)
        await self._thaw(name for name, server in self._brokers.servers.items() if server.is_frozen)
        await self._start(self._brokers.servers)
        self._tell("all is healed", "")

    async def _one(self, fault: Fault) -> None:
        await _passed(fault.at)
        names = await self._names(fault.target)
        peers = await self._peers(fault, names)
        self._tell(f"{', '.join(names)}: {fault}", fault.kind)
        undo = await self._begin(fault, names, peers)
        await _passed(fault.lasts)
        await undo()
        self._tell(f"{', '.join(names)}: over: {fault}", "")

    async def _names(self, target: str) -> list[str]:
        """Return the members that have this role now."""
        if target in (CONTROLLER, NAME_SERVER):
            return [target]
        if target == ALL:
            return list(MEMBERS)
        if target == ANY:
            return [self._chance.choice(MEMBERS)]
        master = await self._brokers.master() or self._chance.choice(MEMBERS)
        slaves = [name for name in MEMBERS if name != master]
        return [{MASTER: master, SLAVE: slaves[0], OTHER_SLAVE: slaves[1]}[target]]

    async def _peers(self, fault: Fault, names: list[str]) -> list[str]:
        clients = [NEVE_CLIENTS, JAVA_CLIENTS]
        if fault.kind is Kind.CUT:
            return clients if fault.peer == CLIENTS else await self._names(fault.peer)
        if fault.kind is Kind.HAND_OVER:
            return await self._names(fault.peer) if fault.peer else []
        if fault.kind in (Kind.ISOLATE, Kind.RESET):
            rest = [name for name in (*MEMBERS, CONTROLLER, NAME_SERVER) if name not in names]
            return rest + (clients if fault.with_clients or fault.kind is Kind.RESET else [])
        return []

    async def _begin(self, fault: Fault, names: list[str], peers: list[str]) -> Undo:
        """Begin a fault; return the function that ends it."""
        links = [link for name in names for peer in peers for link in _directions(name, peer, fault.way)]
        match fault.kind:
            case Kind.KILL | Kind.STOP:
                await asyncio.gather(*(self._end(name, fault.kind) for name in names))
                return lambda: self._start(names)
            case Kind.FREEZE:
                for name in names:
                    self._brokers.servers[name].freeze()
                return lambda: self._thaw(names)
            case Kind.CUT | Kind.ISOLATE:
                self._links.cut(links)
                return lambda: self._join(links, breaks=fault.breaks)
            case Kind.RESET:
                self._links.break_off(links)
            case Kind.HAND_OVER:
                self._note(await self._brokers.hand_over(names[0], peers[0] if peers else ""))
            case Kind.REPLACE:
                for name in names:
                    await self._brokers.replace(
                        name, lambda member: self._note(Replaced(at=now_ms(), member=member)), begins=False
                    )
                return lambda: self._start(names)
            case Kind.OFFLOAD:
                await self._brokers.offload(names[0])
            case Kind.DESIGNATE:
                self._note(await self._brokers.designate(names[0]))
        return _nothing

    async def _end(self, name: str, kind: Kind) -> None:
        server = self._brokers.servers[name]
        async with self._brokers.turns[name]:
            await asyncio.to_thread(server.kill if kind is Kind.KILL else server.stop)

    async def _start(self, names: Iterable[str]) -> None:
        for name in names:
            server = self._brokers.servers[name]
            async with self._brokers.turns[name]:
                if not server.is_running:
                    await asyncio.to_thread(server.begin)

    async def _thaw(self, names: Iterable[str]) -> None:
        for name in names:
            self._brokers.servers[name].thaw()

    async def _join(self, links: Iterable[Direction], *, breaks: bool) -> None:
        self._links.heal(links, breaks=breaks)


async def _nothing() -> None:
    """Do nothing: the fault ended at once."""


async def _passed(seconds: float) -> None:
    """Wait for the time that the plan names."""
    come: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    timer = asyncio.get_running_loop().call_later(seconds, come.set_result, None)
    try:
        await come
    finally:
        timer.cancel()


def _directions(name: str, peer: str, way: Way) -> list[Direction]:
    towards, back = (peer, name), (name, peer)
    return {Way.BOTH: [towards, back], Way.TO: [towards], Way.FROM: [back]}[way]
