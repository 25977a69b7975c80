"""Requests to brokers and name servers, each to the server that the caller means.

A connection per address is kept until `close`. A request is answered within `REQUEST_S` seconds or fails; at most
`CONCURRENT` requests are in flight.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Mapping, Sequence

from neve.admin.errors import NotFound, Unreachable
from neve.client.model import BrokerInfo
from neve.client.net.answers import require_success
from neve.client.net.connection import Connection, ConnectionPool
from neve.errors import ConnectionFailed, NeveError, UnknownOutcome
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand

REQUEST_S = 10.0
_CONNECT_S = 3.0
CONCURRENT = 16
#: Later than every store timestamp, for requests that must name an upper bound.
FAR_FUTURE_MS = 1 << 53


def new_pool(credentials: tuple[str, str] | None, tls: ssl.SSLContext | bool) -> ConnectionPool:
    """Return a pool of connections that answers no request of a server; the caller closes it."""
    return ConnectionPool(_CONNECT_S, _refuse, lambda _: None, credentials=credentials, tls=tls)


def _refuse(connection: Connection, request: RemotingCommand) -> None:
    connection.answer(request, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)


def split_addresses(text: str) -> list[str]:
    """Return the addresses of a list that is separated by `;`, `,` or white space."""
    return [address for address in re.split(r"[;,\s]+", text) if address]


def config_of(answer: RemotingCommand) -> dict[str, str]:
    """Return the keys and values of a successful answer to GET_BROKER_CONFIG, sorted by key."""
    lines = require_success(answer).body.decode().splitlines()
    pairs = (line.partition("=") for line in lines if line and line[0] not in "#!")
    return dict(sorted((key.strip(), value.strip()) for key, _, value in pairs))


class ServerRequests:
    """Requests to the servers of one cluster. The list of brokers is the one at the time of construction."""

    def __init__(self, pool: ConnectionPool, name_servers: Sequence[str], brokers: Mapping[str, BrokerInfo]) -> None:
        self._pool = pool
        self.name_servers = tuple(name_servers)
        self.brokers = brokers
        self._slots = asyncio.Semaphore(CONCURRENT)

    def require(self, broker: str | None) -> list[str]:
        """Return the names of all brokers, or only `broker`.

        Raises:
            NotFound: the name servers know no broker of that name.
        """
        if broker is None:
            return sorted(self.brokers)
        if broker not in self.brokers:
            raise NotFound(f"the name server knows no broker {broker}, only {', '.join(sorted(self.brokers))}")
        return [broker]

    async def ask(
        self, address: str, code: int, ext: Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Return the answer of one server, whatever its response code.

        Raises:
            ConnectionFailed, UnknownOutcome: the server was not reached, or did not answer in time.
        """
        async with self._slots:
            return await self._pool.invoke(address, code, ext or {}, body=body, timeout=REQUEST_S)

    async def ask_name_server(self, code: int, ext: Mapping[str, str] | None = None) -> RemotingCommand:
        """Return the answer of the first name server that gives one, whatever its response code."""
        problem: NeveError | None = None
        for address in self.name_servers:
            try:
                return await self.ask(address, code, ext)
            except (ConnectionFailed, UnknownOutcome) as error:
                problem = problem or error
        assert problem is not None, "a cluster has a name server at least"
        raise problem

    async def ask_master(
        self, broker: str, code: int, ext: Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Return the answer of the master of a broker. Every change must go to it.

        Raises:
            Unreachable: the broker has no master at present.
        """
        address = self.brokers[broker].master
        if address is None:
            raise Unreachable(
                f"broker {broker} has no master at present: wait for an election, then repeat the command"
            )
        return await self.ask(address, code, ext, body)

    async def ask_member(self, broker: str, code: int, ext: Mapping[str, str] | None = None) -> RemotingCommand:
        """Return the answer of the master of a broker, or of the slave with the lowest id while there is none."""
        addresses = self.brokers[broker].addresses
        if not addresses:
            raise Unreachable(f"the name server knows no member of broker {broker}")
        return await self.ask(addresses[min(addresses)], code, ext)

    async def ask_every_broker(self, code: int, ext: Mapping[str, str] | None = None) -> dict[str, RemotingCommand]:
        """Return the answers of one member of each broker by broker name, whatever their response codes.

        A broker that does not answer is an error: without its part the result would pass for the whole.
        """
        names = sorted(self.brokers)
        answers = await asyncio.gather(*(self.ask_member(name, code, ext) for name in names))
        return dict(zip(names, answers, strict=True))

    def limited_to(self, broker: str) -> ServerRequests:
        """Return requests that see this broker only; the pool is shared."""
        return ServerRequests(self._pool, self.name_servers, {broker: self.brokers[broker]})
