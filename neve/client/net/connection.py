"""Connections to name servers and brokers: one for each address, shared by all callers, opened when first needed.

If no answer arrives in time, or the connection breaks after the request was written, the outcome is unknown
(`UnknownOutcome`). If the request was never written, the error is `ConnectionFailed`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from neve.errors import ClientError, ConnectionFailed, ConnectionLost, NeveError, RequestTimeout, seconds_text
from neve.remoting.address import parse_address
from neve.remoting.codes import ResponseCode
from neve.remoting.command import RemotingCommand, decode_command, encode_command
from neve.remoting.frame import FrameDecoder
from neve.remoting.signature import signed

if TYPE_CHECKING:
    from typing_extensions import override  # in `typing` from Python 3.12 on
else:
    F = TypeVar("F")

    def override(method: F) -> F:
        return method


log = logging.getLogger(__name__)

FRAME_LIMIT = 16 << 20
_ONEWAY = 2
#: The codes of a member of a broker set that is a slave, has no role yet, or is in a switchover.
NOT_MASTER = frozenset({ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE})
# With the code of a master that lost its role during the request.
_NOT_HERE = NOT_MASTER | {ResponseCode.SLAVE_NOT_AVAILABLE}

ServerRequestHandler = Callable[["Connection", RemotingCommand], None]
_WANTS_TLS = " before any answer; if the server accepts TLS only, connect with TLS (--tls, --tls-ca FILE)"
_WANTS_PLAIN = "; TLS is on: if the server has no certificate, connect without TLS (--no-tls)"


class Connection(asyncio.Protocol):
    """One TCP connection; requests of all callers are interleaved and matched by opaque."""

    def __init__(
        self,
        address: str,
        on_request: ServerRequestHandler,
        credentials: tuple[str, str] | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """`on_lost` is called with the address when the connection has ended."""
        self.address = address
        self._on_lost = on_lost
        self._credentials = credentials
        self._on_request = on_request
        self._decoder = FrameDecoder(FRAME_LIMIT)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[RemotingCommand]] = {}
        self._opaque = 0
        self._outgoing: list[bytes | memoryview] = []
        self._writable = asyncio.Event()
        self._writable.set()
        self._received = 0
        self._is_retiring = False
        self.is_closed = False

    @property
    def local_ip(self) -> str:
        name: tuple[str, int] | None = self._transport.get_extra_info("sockname") if self._transport else None
        return name[0] if name else "127.0.0.1"

    # ---- asyncio.Protocol

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is no subclass of asyncio's

    @override
    def data_received(self, data: bytes) -> None:
        self._received += 1
        try:
            self._decoder.receive_data(data)
            while (frame := self._decoder.next_frame()) is not None:
                self._dispatch(decode_command(frame))
        except NeveError as error:
            log.warning("invalid data received, connection closed: address=%s cause=%s", self.address, error)
            self.close()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._writable.set()
        waiting, self._waiting = self._waiting, {}
        is_plain = self._transport is None or self._transport.get_extra_info("ssl_object") is None
        hint = _WANTS_TLS if is_plain and not self._received else ""
        for future in waiting.values():
            if not future.done():
                text = f"the connection to {self.address} broke: {exc or 'closed'}{hint}"
                future.set_exception(ConnectionLost(text))
        if self._on_lost is not None:
            self._on_lost(self.address)

    @override
    def pause_writing(self) -> None:
        self._writable.clear()

    @override
    def resume_writing(self) -> None:
        self._writable.set()

    # ---- for the pool

    async def invoke(self, code: int, ext: Mapping[str, str], body: bytes, timeout: float) -> RemotingCommand:
        """Send a request; return the answer, whatever its code.

        Raises:
            ConnectionFailed: the connection was closed before the request was written.
            RequestTimeout: no answer arrived within `timeout` seconds.
            ConnectionLost: the connection broke.
        """
        if self.is_closed or not self._writable.is_set():
            began = self._loop.time()
            await self._wait_writable(timeout)
            timeout = max(timeout - (self._loop.time() - began), 0.001)  # the rest is for the answer
        opaque = self._next_opaque()
        # First, because it raises if the request cannot be encoded.
        self._write(RemotingCommand(code=code, opaque=opaque, ext=self._fields(ext, body), body=body))
        future: asyncio.Future[RemotingCommand] = self._loop.create_future()
        self._waiting[opaque] = future
        timer = self._loop.call_later(timeout, self._expire, opaque, self._received, timeout)
        try:
            return await future
        finally:
            timer.cancel()
            self._waiting.pop(opaque, None)
            self._close_if_retired()

    async def send_oneway(self, code: int, ext: Mapping[str, str], body: bytes, timeout: float) -> None:
        await self._wait_writable(timeout)
        fields = self._fields(ext, body)
        self._write(RemotingCommand(code=code, opaque=self._next_opaque(), flag=_ONEWAY, ext=fields, body=body))

    def answer(self, request: RemotingCommand, code: int, remark: str | None = None, body: bytes = b"") -> None:
        if not request.is_oneway and not self.is_closed:
            self._write(RemotingCommand.response(request, code, remark=remark, body=body))

    @property
    def received(self) -> int:
        """The number of times that data was received."""
        return self._received

    @property
    def is_waiting(self) -> bool:
        """Whether a request waits for its answer."""
        return bool(self._waiting)

    def abort(self) -> None:
        """Close the connection without sending buffered data. Waiting requests raise ConnectionLost."""
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def retire(self) -> None:
        """Close the connection as soon as no request on it waits for an answer."""
        self._is_retiring = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._is_retiring and not self._waiting and not self.is_closed:
            self.close()

    def close(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._flush()
            self._transport.close()

    # ---- internal

    def _fields(self, ext: Mapping[str, str], body: bytes) -> dict[str, str]:
        return dict(ext) if self._credentials is None else signed(*self._credentials, ext, body)

    async def _wait_writable(self, timeout: float) -> None:
        if not self._writable.is_set():
            try:
                async with asyncio.timeout(timeout):
                    await self._writable.wait()
            except TimeoutError:
                raise ConnectionFailed(f"{self.address} does not read what it is sent") from None
        if self.is_closed:
            raise ConnectionFailed(f"the connection to {self.address} is closed")

    def _next_opaque(self) -> int:
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque

    def _write(self, command: RemotingCommand) -> None:
        """Buffer a command. All commands of one iteration of the loop are written together."""
        if not self._outgoing:
            self._loop.call_soon(self._flush)
        self._outgoing += encode_command(command)

    def _flush(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if outgoing and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))

    def _expire(self, opaque: int, received: int, timeout: float) -> None:
        future = self._waiting.pop(opaque, None)
        if future is not None and not future.done():
            future.set_exception(RequestTimeout(f"no answer from {self.address} within {seconds_text(timeout)}"))
        if received == self._received:  # nothing was received since: the peer or the network has failed
            self.close()

    def _dispatch(self, command: RemotingCommand) -> None:
        if not command.is_response:
            self._on_request(self, command)
            return
        future = self._waiting.pop(command.opaque, None)
        if future is not None and not future.done():
            future.set_result(command)


class ConnectionPool:
    """Connections by address.

    `on_lost` is called with the address if a connection ended or could not be opened. `on_refused` is called with the
    address of a broker that answered as one does that is not the master, or is busy.
    """

    def __init__(
        self,
        connect_timeout: float,
        on_request: ServerRequestHandler,
        on_connect: Callable[[str], None],
        *,
        on_lost: Callable[[str], None] = lambda _: None,
        on_refused: Callable[[str], None] = lambda _: None,
        credentials: tuple[str, str] | None = None,
        tls: ssl.SSLContext | bool = False,
    ) -> None:
        self._credentials = credentials
        self._tls = tls or None
        self._connect_timeout = connect_timeout
        self._on_request = on_request
        self._on_connect = on_connect
        self._on_lost = on_lost
        self._on_refused = on_refused
        self._connections: dict[str, Connection] = {}
        self._retiring: set[Connection] = set()  # they wait for answers, and get no new requests
        self._opening: dict[str, asyncio.Task[Connection]] = {}
        self._pid = os.getpid()
        self._is_closed = False

    async def get(self, address: str) -> Connection:
        """Return the open connection to `address`, or open one.

        Raises:
            ClientError: the client is closed, or this process was forked from the one that opened it.
            ConnectionFailed: the address is unreachable.
        """
        self.check_usable()
        connection = self._connections.get(address)
        if connection is not None and not connection.is_closed:
            return connection
        opening = self._opening.get(address)
        if opening is None:
            opening = asyncio.create_task(self._open(address), name=f"connect {address}")
            self._opening[address] = opening
            opening.add_done_callback(lambda _: self._opening.pop(address, None))
        return await asyncio.shield(opening)  # a cancelled caller must not cancel the connection of others

    async def invoke(
        self, address: str, code: int, ext: Mapping[str, str], *, body: bytes = b"", timeout: float
    ) -> RemotingCommand:
        """Send a request; return the answer, whatever its code. `timeout` includes the time to connect."""
        deadline = asyncio.get_running_loop().time() + timeout
        connection = self._connections.get(address)
        if connection is None or connection.is_closed or self._pid != os.getpid() or self._is_closed:
            connection = await self._connected(address, deadline)
        remaining = deadline - asyncio.get_running_loop().time()
        answer = await connection.invoke(code, ext, body, max(remaining, 0.001))
        if answer.code == ResponseCode.GO_AWAY:
            self._retire(connection)
        elif answer.code in _NOT_HERE:
            self._on_refused(address)
        return answer

    def _retire(self, connection: Connection) -> None:
        """Use a connection for no new requests, because its broker is about to stop; answers still arrive over it."""
        if self._connections.get(connection.address) is connection:
            del self._connections[connection.address]
        self._retiring = {other for other in self._retiring if not other.is_closed}
        connection.retire()
        if not connection.is_closed:
            self._retiring.add(connection)

    def open_connection(self, address: str) -> Connection | None:
        """Return the open connection to `address`, or None."""
        connection = self._connections.get(address)
        return None if connection is None or connection.is_closed else connection

    async def _connected(self, address: str, deadline: float) -> Connection:
        try:
            async with asyncio.timeout_at(deadline):
                return await self.get(address)
        except TimeoutError:
            raise ConnectionFailed(f"{address} did not accept a connection in time") from None

    async def send_oneway(
        self, address: str, code: int, ext: Mapping[str, str], *, body: bytes = b"", timeout: float
    ) -> None:
        deadline = asyncio.get_running_loop().time() + timeout
        connection = await self._connected(address, deadline)
        remaining = deadline - asyncio.get_running_loop().time()
        await connection.send_oneway(code, ext, body, max(remaining, 0.001))

    def check_usable(self) -> None:
        """Raise ClientError if the client is closed, or this process was forked from the one that opened it."""
        if self._pid != os.getpid():
            raise ClientError("this client was created before a fork: create one in this process")
        if self._is_closed:
            raise ClientError("the client is closed")

    async def close(self) -> None:
        self._is_closed = True
        for task in list(self._opening.values()):
            task.cancel()
        for connection in (*self._connections.values(), *self._retiring):
            connection.close()
        self._connections.clear()
        self._retiring.clear()

    async def _open(self, address: str) -> Connection:
        try:
            host, port = parse_address(address)
        except ValueError as error:
            raise ClientError(str(error)) from error
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(address, self._on_request, self._credentials, self._lost),
                    host,
                    port,
                    ssl=self._tls,
                )
        except ssl.SSLCertVerificationError as error:
            why = f"its certificate is not trusted: {error.verify_message}"
            raise ConnectionFailed(f"{address} is reachable, but {why}") from error
        except ssl.SSLError as error:
            raise ConnectionFailed(
                f"{address} is reachable, but TLS with it failed: {error.reason or error}"
            ) from error
        except (OSError, TimeoutError) as error:
            self._lost(address)
            hint = _WANTS_PLAIN if self._tls and not isinstance(error, ConnectionRefusedError) else ""
            raise ConnectionFailed(f"{address} cannot be reached: {str(error) or 'timed out'}{hint}") from error
        self._connections[address] = connection
        self._on_connect(address)
        return connection

    def _lost(self, address: str) -> None:
        if not self._is_closed:
            self._on_lost(address)
