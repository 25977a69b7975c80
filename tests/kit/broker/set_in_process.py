"""A controller and brokers of one set in the test's own process, on one event loop, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from broker.broker_controller import BrokerController
from broker.config import BrokerConfig
from broker.ha.member import State
from broker.ha.replicas_manager import ReplicasManager
from broker.machine import Machine
from broker.role import Role
from controller.controller_config import ControllerConfig
from controller.controller_manager import ControllerManager
from controller.registers import register_of
from infra.clock import SystemClock
from infra.config.properties import load
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection, open_connection
from tests.kit.broker.in_process import ROOM_ENOUGH
from tests.kit.clock.waiting import until
from tests.kit.server.processes import free_ports

DEADLINE_S = 60


class BrokerMember:
    """One broker of the set; it may stop and start again on the same port and directory."""

    def __init__(self, root: Path, controller: str, settings: tuple[str, ...]) -> None:
        port, ha_port = free_ports(2)
        own = [
            f"storePathRootDir={root}",
            "mappedFileSizeCommitLog=1m",
            f"listenPort={port}",
            f"haListenPort={ha_port}",
        ]
        own += ["adminPort=0", "bindAddress=127.0.0.1", "brokerIP1=127.0.0.1"]
        own += [ROOM_ENOUGH, f"controllerAddr={controller}"]
        self.root, self._settings = root, [*own, *settings]
        self.broker: BrokerController
        self.is_up = False

    async def start(self) -> Self:
        config = load(BrokerConfig, None, self._settings)
        self.broker = BrokerController(config, Machine(clock=SystemClock(), disk=RealDisk()))
        await self.broker.start()
        self.is_up = True
        return self

    async def stop(self) -> None:
        self.is_up = False
        await self.broker.shutdown()

    @property
    def replicas(self) -> ReplicasManager:
        assert self.broker.replicas is not None
        return self.broker.replicas

    @property
    def state(self) -> State:
        return self.replicas.member.state

    @property
    def leads(self) -> bool:
        return self.is_up and self.replicas.role.leads

    @property
    def role(self) -> Role:
        return self.broker.role.current

    @property
    def end(self) -> int:
        return self.broker.store.max_physical_offset

    async def connect(self) -> Connection:
        return await open_connection(*self.broker.address)


class Set:
    """A broker set, usually of three members."""

    def __init__(self, members: list[BrokerMember], controller: ControllerManager) -> None:
        self.members, self.controller = members, controller

    async def master(self) -> BrokerMember:
        """Wait for a master, and return it."""
        await until(lambda: any(member.leads for member in self.members), "a member leads")
        return next(member for member in self.members if member.leads)

    async def slaves(self) -> list[BrokerMember]:
        """Wait until all members are in sync; return the slaves."""
        master = await self.master()
        await until(lambda: self.in_sync(master) == len(self.members), "all are in sync")
        return [member for member in self.members if member is not master]

    def in_sync(self, master: BrokerMember) -> int:
        """Return the number of in-sync members, as the master knows it."""
        confirming = master.replicas.member.confirming
        return 0 if confirming is None else len(confirming.sync_state_set.members)


@asynccontextmanager
async def broker_set(
    directory: Path, *settings: str, members: int = 3, replication: str = "sync", security: tuple[str, ...] = ()
) -> AsyncIterator[Set]:
    """Run a set; `security` are keys of the controller as well."""
    (port,) = free_ports(1)
    own = [f"listenPort={port}", "bindAddress=127.0.0.1", f"controllerStorePath={directory / 'register'}", *security]
    config, disk = load(ControllerConfig, None, own), RealDisk()
    controller = ControllerManager(config, SystemClock(), disk, *register_of(config, disk))
    await controller.start()
    of_set = (f"replication={replication}", *settings, *security)
    made = [BrokerMember(directory / str(number), f"127.0.0.1:{port}", of_set) for number in range(1, members + 1)]
    try:
        async with asyncio.timeout(DEADLINE_S):
            for member in made:
                await member.start()
            yield Set(made, controller)
    finally:
        for member in made:
            if member.is_up:
                await member.stop()
        await controller.shutdown()
