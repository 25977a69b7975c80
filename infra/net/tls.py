"""TLS and plain text on one port, distinguished by the first byte of a connection (0x16 starts a TLS handshake).

The byte is peeked from the socket before a transport exists, so a plain connection has the same transport, and the same
cost, as on a server without TLS.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from infra.process.startup import StartupError

log = logging.getLogger(__name__)

HANDSHAKE = 0x16
FIRST_BYTE_S = 10.0
_BACKLOG = 1024
_ACCEPTS_PER_TURN = 64
_RETRY_S = 0.1  # after accept failed without free descriptors


class Certificate:
    """A server's certificate and key; changed files are loaded at the next connection."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._stamp = self._read_stamp()
        self._context, self._text = self._load()
        self._fault = ""  # why changed files are not used

    @property
    def context(self) -> ssl.SSLContext:
        """The context of the next connection; a new one if the files have changed."""
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._context, self._text = self._load()
                self._stamp = stamp
                log.info("certificate %s reloaded", self._files[0])
            self._fault = ""
        except OSError as error:  # half-written pairs included: ssl.SSLError is an OSError
            if str(error) != self._fault:  # logged once: every connection comes here
                log.warning("keeping the old certificate: %s: %s", self._files[0], error)
            self._fault = str(error)
        return self._context

    def ends_s(self) -> float:
        """Return the end of the certificate in seconds since 1970. Raises ssl.SSLError if clients reject it now.

        The ssl module exposes only a certificate that a handshake has verified, so this makes one in memory.
        """
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the file may lack the root of the chain
        trusting.load_verify_locations(cadata=self._text)  # not the file, which may have changed since
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self._context.wrap_bio(to_server, to_client, server_side=True)
        client = trusting.wrap_bio(to_client, to_server)
        for side in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        found = client.getpeercert()
        assert found, "the client side of the handshake is done"
        return ssl.cert_time_to_seconds(str(found["notAfter"]))

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = [path.stat() for path in self._files]
        return tuple((item.st_mtime_ns, item.st_size, item.st_ino) for item in found)

    def _load(self) -> tuple[ssl.SSLContext, str]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        # An encrypted key is an error instead of a prompt on the terminal.
        context.load_cert_chain(self._files[0], self._files[1], password="")
        return context, self._files[0].read_text("ascii", "ignore")


class ServerTls:
    """The TLS settings of a server; `plain_allowed`: it accepts plain text, too."""

    def __init__(self, certificate: Certificate, *, plain_allowed: bool) -> None:
        self.certificate = certificate
        self.plain_allowed = plain_allowed


def server_tls(mode: str, certificate: str, key: str) -> ServerTls | None:
    """Return TLS settings; None if TLS is off, or allowed without a certificate. Raises StartupError."""
    if mode == "disabled":
        return None
    if not certificate and not key:
        if mode == "enforcing":
            raise StartupError("tlsServerMode=enforcing needs tlsCertPath and tlsKeyPath")
        return None
    if not certificate or not key:
        raise StartupError("tlsCertPath and tlsKeyPath are needed together: one is missing")
    try:
        pair = Certificate(Path(certificate).expanduser(), Path(key).expanduser())
    except OSError as error:
        raise StartupError(f"TLS certificate {certificate} with key {key}: {error}") from error
    return ServerTls(pair, plain_allowed=mode != "enforcing")


def client_context(trust: str = "") -> ssl.SSLContext:
    """Return the TLS context of a client. `trust`: a file of trusted certificates; empty: those of the system.

    Servers are configured by address, so with a `trust` file the host name of a certificate is not checked.
    """
    try:
        context = ssl.create_default_context(cafile=str(Path(trust).expanduser()) if trust else None)
    except OSError as error:
        raise StartupError(f"TLS trust file {trust}: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = not trust
    return context


class SniffingServer:
    """Listens like `asyncio.Server`, but peeks at the first byte of a connection before it makes a transport."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        tls: ServerTls,
        listening: list[socket.socket],
        *,
        max_waiting: int,
        handshake_s: float,
    ) -> None:
        self._make, self._tls = make, tls
        self.sockets = listening
        self._max_waiting, self._handshake_s = max_waiting, handshake_s
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._handshakes: set[asyncio.Task[None]] = set()
        for item in listening:
            self._loop.add_reader(item, self._accept, item)

    def close(self) -> None:
        """Stop listening, and close connections without a transport."""
        for item in self.sockets:
            if item.fileno() >= 0:
                self._loop.remove_reader(item)
                item.close()
        for item in tuple(self._waiting):
            self._forget(item)
            item.close()
        for task in tuple(self._handshakes):
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("accept failed: %s", error)
                self._loop.remove_reader(listening)
                self._loop.call_later(_RETRY_S, self._listen_again, listening)
                return
            if len(self._waiting) + len(self._handshakes) >= self._max_waiting:
                sock.close()
                continue
            sock.setblocking(False)
            self._waiting[sock] = self._loop.call_later(FIRST_BYTE_S, self._drop, sock)
            self._loop.add_reader(sock, self._first_byte, sock)

    def _listen_again(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening, self._accept, listening)

    def _first_byte(self, sock: socket.socket) -> None:
        try:
            first = sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            first = b""
        self._forget(sock)
        encrypted = first[:1] == bytes([HANDSHAKE])
        if not first or not (encrypted or self._tls.plain_allowed):
            sock.close()
            return
        context = self._tls.certificate.context if encrypted else None
        task = self._loop.create_task(self._connect(sock, context))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)

    async def _connect(self, sock: socket.socket, context: ssl.SSLContext | None) -> None:
        timeout = self._handshake_s if context is not None else None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._make, sock, ssl=context, ssl_handshake_timeout=timeout)
        except OSError as error:  # includes ssl.SSLError, for an invalid handshake
            log.info("TLS handshake failed: %s", error)
            sock.close()

    def _drop(self, sock: socket.socket) -> None:
        self._forget(sock)
        sock.close()

    def _forget(self, sock: socket.socket) -> None:
        timer = self._waiting.pop(sock, None)
        if timer is not None:
            timer.cancel()
            self._loop.remove_reader(sock)


async def listen(
    make: Callable[[], asyncio.Protocol], tls: ServerTls, host: str, port: int, *, max_waiting: int, handshake_s: float
) -> SniffingServer:
    """Open the port. Raises OSError as `loop.create_server` does."""
    loop = asyncio.get_running_loop()
    listening: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, protocol)
            listening.append(sock)
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(_BACKLOG)
    except OSError:
        for sock in listening:
            sock.close()
        raise
    return SniffingServer(make, tls, listening, max_waiting=max_waiting, handshake_s=handshake_s)
