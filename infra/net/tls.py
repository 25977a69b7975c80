"""TLS and plain text on one port: the first byte of a connection decides (0x16 opens a TLS handshake).

The byte is peeked at in the socket before a transport exists, so a plain connection runs on the same transport, with
the same cost, as one of a server without TLS.
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
_RETRY_S = 0.1  # after accept failed for want of descriptors


class Certificate:
    """A server's certificate and key; files that changed are read again at the next connection."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = (certificate, key)
        self._stamp = self._read_stamp()
        self._context, self._text = self._load()
        self._told = ""  # why files that have changed are not taken

    @property
    def context(self) -> ssl.SSLContext:
        """What connections are served with; another one where the files have changed."""
        try:
            stamp = self._read_stamp()
            if stamp != self._stamp:
                self._context, self._text = self._load()
                self._stamp = stamp
                log.info("certificate %s loaded again", self._files[0])
            self._told = ""
        except OSError as error:  # half-written pairs included: ssl.SSLError is an OSError
            if str(error) != self._told:  # it is asked for all the time
                log.warning("keeping the old certificate: %s: %s", self._files[0], error)
            self._told = str(error)
        return self._context

    def ends_s(self) -> float:
        """When that which is served ends, in seconds since 1970. Raises ssl.SSLError if a peer would not take it now.

        The ssl module shows only a certificate that a handshake has verified: one with itself, in memory.
        """
        trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trusting.check_hostname = False
        trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the chain's root need not be in the file
        trusting.load_verify_locations(cadata=self._text)  # not the file: what is there now may not be served
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        server = self._context.wrap_bio(to_server, to_client, server_side=True)
        client = trusting.wrap_bio(to_client, to_server)
        for side in (client, server, client):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        found = client.getpeercert()
        assert found, "the client's part of the handshake is done"
        return ssl.cert_time_to_seconds(str(found["notAfter"]))

    def _read_stamp(self) -> tuple[tuple[int, int, int], ...]:
        found = [path.stat() for path in self._files]
        return tuple((item.st_mtime_ns, item.st_size, item.st_ino) for item in found)

    def _load(self) -> tuple[ssl.SSLContext, str]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        # An encrypted key must be an error, not a question on the terminal.
        context.load_cert_chain(self._files[0], self._files[1], password="")
        return context, self._files[0].read_text("ascii", "ignore")


class ServerTls:
    """What a server does with a connection's first byte."""

    def __init__(self, certificate: Certificate, *, plain_allowed: bool) -> None:
        self.certificate = certificate
        self.plain_allowed = plain_allowed


def server_tls(mode: str, certificate: str, key: str) -> ServerTls | None:
    """None serves plain text alone: TLS off, or allowed but without a certificate. StartupError for what can't be."""
    if mode == "disabled":
        return None
    if not certificate and not key:
        if mode == "enforcing":
            raise StartupError("tlsServerMode=enforcing needs tlsCertPath and tlsKeyPath")
        return None
    if not certificate or not key:
        raise StartupError("tlsCertPath and tlsKeyPath belong together: one is missing")
    try:
        pair = Certificate(Path(certificate).expanduser(), Path(key).expanduser())
    except OSError as error:
        raise StartupError(f"TLS certificate {certificate} with key {key}: {error}") from error
    return ServerTls(pair, plain_allowed=mode != "enforcing")


def client_context(trust: str = "") -> ssl.SSLContext:
    """For a server that asks another: `trust` is the file of certificates to believe in, '' the system's.

    Servers are known by address, so a chain that ends in an explicit `trust` file is enough, whatever its host name.
    """
    try:
        context = ssl.create_default_context(cafile=str(Path(trust).expanduser()) if trust else None)
    except OSError as error:
        raise StartupError(f"TLS trust file {trust}: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = not trust
    return context


class SniffingServer:
    """Listens like `asyncio.Server`, but looks at the first byte before it makes a transport."""

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
        """Stop listening; connections that have not said a byte yet go as well."""
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
                log.warning("accepting: %s", error)
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
        except OSError as error:  # ssl.SSLError is one: a peer's bad handshake is its own fault
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
    """The port opened, or OSError as from `loop.create_server`."""
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
