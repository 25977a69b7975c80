"""The shared parts of a client: its connections, and what is built on them.

name servers ──▶ routes ──▶ requests to brokers ──▶ membership
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from neve.client.model import BrokerInfo
from neve.client.net.connection import Connection, ConnectionPool
from neve.client.net.membership import Membership
from neve.client.net.name_servers import NameServers
from neve.client.net.requests import BrokerRequests
from neve.client.net.routes import Routes
from neve.client.net.tasks import Tasks
from neve.client.options import ClientOptions
from neve.errors import ClientError
from neve.record.ids import UniqueIdGenerator
from neve.remoting.command import RemotingCommand


class Session:
    """The connections of one client, and its identity."""

    def __init__(self, namesrv: str, options: ClientOptions) -> None:
        self.options = options
        self._tasks = Tasks()
        self._ids: UniqueIdGenerator | None = None
        self.pool = self._new_pool(self._connected)
        self.name_servers = NameServers(self.pool, namesrv, options.attempt_timeout)
        self.routes = Routes(self.name_servers, options.route_interval, self._learned)
        self.requests = BrokerRequests(self.pool, self.routes, self._tasks, options)
        self.membership = Membership(self.requests, self.routes, self._tasks)

    @property
    def client_id(self) -> str:
        """The id by which brokers know this client; empty before the start."""
        return self.membership.client_id

    async def start(self) -> None:
        """Connect to a name server, and begin to send heartbeats.

        Raises:
            ConnectionFailed: no name server is reachable.
        """
        ip = await self.name_servers.connect()
        self.membership.client_id = f"{ip}@{self.options.instance_name}"
        salt_of_ids = int.from_bytes(self.options.entropy(4))
        self._ids = UniqueIdGenerator(ip, os.getpid(), salt_of_ids, self.options.now_ms())
        self.spawn(self.membership.heartbeat_forever(self.options.heartbeat_interval), "heartbeat")

    async def close(self) -> None:
        """End all background tasks, leave all producer groups, and close the connections."""
        try:
            await self._tasks.close()
            await self.membership.leave_producer_groups()
        finally:
            await self.pool.close()

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run `work` in the background until it ends or the client closes; log its error."""
        return self._tasks.spawn(work, name)

    def next_unique_key(self) -> str:
        """Return the id of the next message.

        Raises:
            ClientError: the client is not started.
        """
        if self._ids is None:
            raise ClientError("the client is not started: use `async with connect(...)`")
        return self._ids.next(self.options.now_ms())

    def another_pool(self) -> ConnectionPool:
        """Return a pool of connections for one part of the client, which closes it."""
        return self._new_pool(lambda _: None)

    def _new_pool(self, on_connect: Callable[[str], None]) -> ConnectionPool:
        return ConnectionPool(
            self.options.connect_timeout,
            self._serve,
            on_connect,
            on_lost=self._lost,
            on_refused=self._refused,
            credentials=self.options.credentials,
            tls=self.options.tls,
        )

    # ---- events of connections and routes, whose receivers are constructed later

    def _connected(self, address: str) -> None:
        self.membership.connected(address)

    def _lost(self, address: str) -> None:
        self.routes.mark_doubtful(address)

    def _refused(self, address: str) -> None:
        self.routes.mark_master_doubtful(address)

    def _learned(self, brokers: Mapping[str, BrokerInfo]) -> None:
        self.membership.learn(brokers)

    def _serve(self, connection: Connection, request: RemotingCommand) -> None:
        self.membership.serve(connection, request)
