"""A server's connection to another one: made when it is needed, shared by all callers, closed after an error."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from infra.net.remoting_server import Connection, open_connection
from neve.errors import NeveError
from neve.remoting.address import parse_address
from neve.remoting.command import RemotingCommand
from neve.remoting.signature import signed

Sign = Callable[[Mapping[str, str], bytes], dict[str, str]]


class PeerSecurity(NamedTuple):
    """How a server presents itself to another one.

    `credentials`: a name and a secret; None: requests are not signed. `tls`: None: connections are in plain text.
    """

    credentials: tuple[str, str] | None = None
    tls: ssl.SSLContext | None = None

    def sign(self, ext: Mapping[str, str], body: bytes) -> dict[str, str]:
        """Return the fields of a request with its signature, if this server has credentials."""
        return dict(ext) if self.credentials is None else signed(*self.credentials, dict(ext), body)


class RemotingPeer:
    """At most one connection to one address. Every method may raise OSError, TimeoutError or NeveError."""

    def __init__(
        self,
        address: str,
        security: PeerSecurity,
        *,
        connect_s: float,
        max_timeouts: int = 1,
        on_connect: Callable[[Connection], Awaitable[None]] | None = None,
    ) -> None:
        """
        Args:
            max_timeouts: requests in a row without an answer after which the connection is closed.
            on_connect: called with a new connection before any caller gets it; an error closes the connection.
        """
        self.address = address
        self._security, self._connect_s = security, connect_s
        self._max_timeouts, self._on_connect = max_timeouts, on_connect
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._failure: Exception | None = None  # of the last attempt to connect
        self._timeouts = 0
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.is_closed

    async def connect(self) -> Connection:
        """Return the open connection, or make one. Callers that waited for an attempt share its failure."""
        seen = self._failure
        async with self._connecting:
            if self._connection is not None and not self._connection.is_closed:
                return self._connection
            if self._failure is not None and self._failure is not seen:
                raise self._failure
            try:
                self._connection = await self._open()
            except (OSError, TimeoutError, NeveError) as error:
                self._failure = error
                raise
            self._timeouts = 0
            return self._connection

    async def _open(self) -> Connection:
        self._check_not_closed()
        try:
            host, port = parse_address(self.address)
        except ValueError as error:
            raise NeveError(None, str(error)) from error
        async with asyncio.timeout(self._connect_s):
            connection = await open_connection(host, port, tls=self._security.tls)
        try:
            if self._on_connect is not None:
                await self._on_connect(connection)
            self._check_not_closed()
        except BaseException:
            connection.close()
            raise
        return connection

    def _check_not_closed(self) -> None:
        if self._is_closed:
            raise ConnectionAbortedError(f"the connection to {self.address} was closed by this server")

    def request(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> RemotingCommand:
        """Return a signed request."""
        return RemotingCommand(code, ext=self._security.sign(ext, body), body=body)

    async def invoke(
        self,
        code: int,
        ext: Mapping[str, str],
        body: bytes = b"",
        *,
        timeout: float,  # noqa: ASYNC109 - of the answer
    ) -> RemotingCommand:
        """Connect if necessary, send a request and return its answer, whatever its code."""
        connection = await self.connect()
        try:
            answer = await connection.invoke(self.request(code, ext, body), timeout)
        except TimeoutError:
            self._timeouts += 1
            if self._timeouts >= self._max_timeouts:
                connection.close()
            raise
        except (OSError, NeveError):
            connection.close()
            raise
        self._timeouts = 0
        return answer

    def drop(self) -> None:
        """Close the connection; the next caller makes another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def close(self) -> None:
        """Close the connection for good, one that is being made as well."""
        self._is_closed = True
        self.drop()
