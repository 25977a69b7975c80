"""Fake brokers for controller tests: a connection that sends heartbeats, and a port that answers queries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from controller.controller_config import ControllerConfig
from controller.controller_manager import ControllerManager
from controller.register import Register
from controller.registers import register_of
from infra.clock import ManualClock
from infra.disk.filesystem import RealDisk
from infra.net.remoting_server import Connection, RemotingServer, open_connection
from neve.remoting.codes import RequestCode, ResponseCode
from neve.remoting.command import RemotingCommand


@asynccontextmanager
async def controlling(
    root: Path,
    clock: ManualClock | None = None,
    register: Register | None = None,
    *,
    pulse_ms: int = 3_600_000,
    first_ms: int = 0,
    **settings: Any,
) -> AsyncIterator[ControllerManager]:
    """Run a controller whose waiting time after the start is over.

    Tests call `scan` themselves and advance the clock in steps. The default `pulse_ms` is so long that the controller
    does not mistake such a step for a suspension.
    """
    clock = clock or ManualClock()
    config = ControllerConfig(listen_port=0, bind_address="127.0.0.1", controller_store_path=str(root))
    config.scan_not_active_broker_interval = 3_600_000
    for name, value in settings.items():
        setattr(config, name, value)
    disk = RealDisk()
    named, others = register_of(config, disk)
    server = ControllerManager(config, clock, disk, register or named, others, pulse_ms=pulse_ms, first_ms=first_ms)
    await server.start()
    try:
        yield server
    finally:
        await server.shutdown()


class FakeBroker:
    """A fake broker. `born` has the incarnation fields that a neve broker sends; an Apache broker sends none."""

    def __init__(self, controller: ControllerManager, name: str = "b", born: dict[str, str] | None = None) -> None:
        self._controller, self.name, self.born = controller, name, born or {}
        self.id = 0
        self.told: list[RemotingCommand] = []
        self.epochs: list[dict[str, int]] = []
        self.end = 0
        self.answers_as: dict[str, str] | None = None  # fields of a process other than the registered one
        self.connection: Connection | None = None
        self.is_frozen = False
        self._port = RemotingServer(self._serve, host="127.0.0.1")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port.port}"

    async def open(self) -> FakeBroker:
        await self._port.start()
        await self.connect()
        return self

    async def connect(self) -> None:
        self.connection = await open_connection("127.0.0.1", self._controller.port)

    async def close(self) -> None:
        """Close the port and the connection, as a lost machine does."""
        await self._port.shutdown(0)
        self.hang_up()

    async def close_port(self) -> None:
        """Close only the port: heartbeats continue, queries fail."""
        await self._port.shutdown(0)

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close()

    def _serve(self, _: Connection, request: RemotingCommand) -> RemotingCommand | None:
        if request.code == RequestCode.NOTIFY_BROKER_ROLE_CHANGED:
            self.told.append(request)
            return None
        assert request.code == RequestCode.GET_BROKER_EPOCH_CACHE
        if self.is_frozen:
            return None
        body = {"clusterName": "c", "brokerName": self.name, "epochList": self.epochs, "maxOffset": self.end}
        born = self.born if self.answers_as is None else self.answers_as
        return RemotingCommand.response(request, ResponseCode.SUCCESS, ext=born, body=json.dumps(body).encode())

    async def ask(self, code: int, ext: dict[str, Any] | None = None, body: bytes = b"") -> RemotingCommand:
        assert self.connection is not None
        fields = {name: str(value) for name, value in (ext or {}).items()}
        return await self.connection.invoke(RemotingCommand(code, ext=fields, body=body), 20)

    async def join(self) -> FakeBroker:
        """Apply for an id, register, and send a heartbeat."""
        own = {"clusterName": "c", "brokerName": self.name}
        answer = await self.ask(RequestCode.CONTROLLER_GET_NEXT_BROKER_ID, own)
        self.id = int(answer.ext["nextBrokerId"])
        code = {**own, "appliedBrokerId": self.id, "registerCheckCode": f"{self.address};1"}
        assert (await self.ask(RequestCode.CONTROLLER_APPLY_BROKER_ID, code)).code == ResponseCode.SUCCESS
        assert (await self.register()).code == ResponseCode.SUCCESS
        assert (await self.beat()).code == ResponseCode.SUCCESS
        return self

    async def register(self, **more: Any) -> RemotingCommand:
        own = {"clusterName": "c", "brokerName": self.name, "brokerId": self.id, "brokerAddress": self.address}
        return await self.ask(RequestCode.CONTROLLER_REGISTER_BROKER, {**own, **self.born, **more})

    async def beat(self, **more: Any) -> RemotingCommand:
        own = {"clusterName": "c", "brokerName": self.name, "brokerId": self.id, "brokerAddr": self.address}
        log = {"epoch": self.epochs[-1]["epoch"] if self.epochs else -1, "maxOffset": self.end, "confirmOffset": 0}
        return await self.ask(RequestCode.BROKER_HEARTBEAT, {**own, **log, **self.born, **more})

    async def elect(self, **more: Any) -> RemotingCommand:
        own = {"clusterName": "c", "brokerName": self.name, "brokerId": self.id, "designateElect": "false"}
        return await self.ask(RequestCode.CONTROLLER_ELECT_MASTER, {**own, **more})

    async def alter(self, *brokers: FakeBroker) -> RemotingCommand:
        info = await self.info()
        body = json.loads(info.body)
        ext = {"brokerName": self.name, "masterBrokerId": self.id, "masterEpoch": info.ext["masterEpoch"]}
        body["syncStateSet"] = sorted(broker.id for broker in brokers)
        return await self.ask(RequestCode.CONTROLLER_ALTER_SYNC_STATE_SET, ext, json.dumps(body).encode())

    async def info(self) -> RemotingCommand:
        return await self.ask(RequestCode.CONTROLLER_GET_REPLICA_INFO, {"brokerName": self.name})


async def in_sync(*brokers: FakeBroker) -> None:
    """Start brokers, elect the first as master, and add all to its SyncStateSet."""
    for broker in brokers:
        await broker.open()
        await broker.join()
    assert (await brokers[0].elect()).code == ResponseCode.SUCCESS
    if len(brokers) > 1:
        assert (await brokers[0].alter(*brokers)).code == ResponseCode.SUCCESS


async def closed(*brokers: FakeBroker) -> None:
    await asyncio.gather(*(broker.close() for broker in brokers))
