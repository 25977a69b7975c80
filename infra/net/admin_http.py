"""A small HTTP/1.1 server on loopback: metrics, health, archive verbs. One request per connection, no keep-alive.

It serves tools on this machine, not web pages in a local browser. A request from a page (Origin, Sec-Fetch-Site) or for
a foreign host name (Host: the domain of a page may resolve to this machine) is refused. Requests with side effects or
high cost are POST, and their concurrency is limited. Only a port with nothing but metrics may be public (`is_public`).

Every local account can connect. A POST therefore proves that its sender can read the token of the data directory
(`infra/net/admin_token.py`): by the token, or by a signature of the request (`neve/admin_token.py`). Neither silent
connections nor clients that do not read their answer keep other clients out.
"""

import asyncio
import ipaddress
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import parse_qsl, unquote, urlsplit

from infra.net.admin_token import AdminToken
from neve.admin_token import SCHEME

log = logging.getLogger(__name__)

_HEAD_LIMIT = 16 * 1024
_HEAD_TIMEOUT = 10.0
_WRITE_TIMEOUT_S = 10.0
_CHUNK_BYTES = 64 * 1024
_MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request; header names are in lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    target: str = ""  # path and query as they were sent

    def flag(self, name: str) -> bool:
        """Return the value of a flag: `?roll`, `?roll=1` and `?roll=true` are true."""
        return self.query.get(name, "false").lower() in ("", "1", "true", "yes")


@dataclass(slots=True)
class Response:
    """An answer: `body`, or a stream of JSON objects (`lines`), one per line."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    lines: AsyncGenerator[object, None] | None = field(default=None)
    headers: dict[str, str] = field(default_factory=dict)


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, json.dumps(value).encode() + b"\n", "application/json")


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class _Route:
    handler: Handler
    at_once: int
    running: int = 0


class AdminHttp:
    """The port and its routes. Handlers run on the event loop; their exceptions become a status and a line of text."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        expected: tuple[type[Exception], ...] = (),
        *,
        token: AdminToken | None = None,
        is_public: bool = False,
    ) -> None:
        """
        Args:
            expected: exceptions that the client can act on: answered with 503, without a traceback in the log.
            token: required for each request that is not a GET; without it the port has GET pages only.
            is_public: other machines may connect, by any host name; only for pages without confidential data.
        """
        self._host, self._port, self._expected, self._is_public = host, port, expected, is_public
        self._token = token
        self._routes: dict[tuple[str, str], _Route] = {}
        self._connections: set[asyncio.StreamWriter] = set()
        #: Connections without a complete request, the oldest first.
        self._silent: dict[asyncio.StreamWriter, None] = {}
        self._closers: list[Callable[[], None]] = []
        self._server: asyncio.Server | None = None

    def route(self, method: str, path: str, handler: Handler, *, at_once: int = _MAX_CONNECTIONS) -> None:
        """Add a route; a path that ends with `/` includes all below it. Above `at_once` requests the answer is 409."""
        if method != "GET" and self._token is None:
            raise ValueError(f"{method} {path} needs a token, and this port has none")
        self._routes[method, path] = _Route(handler, at_once)

    async def start(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=_HEAD_LIMIT)
        host, self._port = self._server.sockets[0].getsockname()[:2]
        return str(host), self._port

    def on_shutdown(self, close: Callable[[], None]) -> None:
        self._closers.append(close)

    async def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        for close in self._closers:
            close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS and not self._make_room():
            log.warning("admin connection refused: connections=%d", len(self._connections))
            writer.transport.abort()
            return
        self._connections.add(writer)
        self._silent[writer] = None
        try:
            await self._converse(reader, writer)
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError) as error:
            log.debug("admin connection ended: %r", error)
            writer.transport.abort()
        finally:
            self._silent.pop(writer, None)
            self._connections.discard(writer)
            writer.close()

    def _make_room(self) -> bool:
        """Close the oldest connection that has not sent a complete request."""
        oldest = next(iter(self._silent), None)
        if oldest is None:
            return False
        del self._silent[oldest]
        self._connections.discard(oldest)
        oldest.transport.abort()
        return True

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_HEAD_TIMEOUT):
            head = await reader.readuntil(b"\r\n\r\n")
        self._silent.pop(writer, None)
        try:
            request = parse_head(head)
        except ValueError as error:
            await self._write(writer, Response(400, f"{error}\n".encode()))
        else:
            await self._answer(request, writer)
        writer.close()
        async with asyncio.timeout(_WRITE_TIMEOUT_S):
            await writer.wait_closed()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        foreign, route = None if self._is_public else from_elsewhere(request), self._find(request)
        if foreign is not None:
            await self._write(writer, Response(403, f"{foreign}\n".encode()))
        elif route is None:
            await self._write(writer, Response(404, b"no such page\n"))
        elif (refusal := self._refusal(request)) is not None:
            await self._write(writer, refusal)
        elif route.running >= route.at_once:
            text = f"{request.path}: {route.running} at a time, and as many run already\n"
            await self._write(writer, Response(409, text.encode()))
        else:
            route.running += 1
            try:
                await self._write(writer, await self._handled(route.handler, request))
            finally:
                route.running -= 1

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without the token that it needs."""
        if request.method == "GET" or self._token is None:
            return None
        given, path = request.headers.get("authorization", ""), self._token.path
        if self._token.accepts(given, self._port, request.method, request.target):
            log.info("admin request: method=%s path=%s", request.method, request.path)
            return None
        if given:
            log.warning("admin request refused: wrong token, method=%s path=%s", request.method, request.path)
        is_signed = given.lower().startswith(SCHEME.lower())
        if is_signed:
            text = f"the request is not signed with the token of {path}, or for another port than {self._port}\n"
        else:
            what = "the token sent is not that of" if given else "it needs the token of"
            text = f"{what} {path}: send it as `Authorization: Bearer TOKEN`\n"
        challenge = f'{SCHEME} token_file="{path}", nonce="{self._token.nonce}", Bearer realm="neve"'
        return Response(401, text.encode(), headers={"WWW-Authenticate": challenge})

    async def _handled(self, handler: Handler, request: Request) -> Response:
        try:
            return await handler(request)
        except self._expected as error:
            return Response(503, f"{error}\n".encode())
        except Exception as error:
            log.exception("admin request %s %s", request.method, request.path)
            return Response(500, f"{type(error).__name__}: {error}\n".encode())

    async def _write(self, writer: asyncio.StreamWriter, response: Response) -> None:
        kind = "application/x-ndjson" if response.lines is not None else response.content_type
        status = f"{response.status} {HTTPStatus(response.status).phrase}"
        fields = {"Content-Type": kind, "Connection": "close", **response.headers}
        if response.lines is None:
            fields["Content-Length"] = str(len(response.body))
        head = f"HTTP/1.1 {status}\r\n" + "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        await _send(writer, f"{head}\r\n".encode() + response.body)
        if response.lines is not None:  # the end of the connection ends the stream
            async with aclosing(response.lines) as lines:
                await self._stream(writer, lines)

    async def _stream(self, writer: asyncio.StreamWriter, lines: AsyncGenerator[object, None]) -> None:
        while True:
            try:
                item = await anext(lines)
            except StopAsyncIteration:
                return
            except Exception as error:
                expected = isinstance(error, self._expected)
                if not expected:
                    log.exception("admin stream")
                text = str(error) if expected else f"{type(error).__name__}: {error}"
                await _send(writer, json.dumps({"error": text}).encode() + b"\n")
                return
            await _send(writer, json.dumps(item).encode() + b"\n")

    def _find(self, request: Request) -> _Route | None:
        exact = self._routes.get((request.method, request.path))
        if exact is not None:
            return exact
        for (method, path), route in self._routes.items():
            if method == request.method and path.endswith("/") and request.path.startswith(path):
                return route
        return None


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Send data, and wait while the client reads it.

    Raises:
        TimeoutError: the client reads nothing.
        OSError: the client disconnected.
    """
    view = memoryview(data)
    for begin in range(0, len(view), _CHUNK_BYTES):
        writer.write(view[begin : begin + _CHUNK_BYTES])
        async with asyncio.timeout(_WRITE_TIMEOUT_S):  # per chunk, for slow clients
            await writer.drain()


def from_elsewhere(request: Request) -> str | None:
    """Return why a request is not from a local tool; None if it is."""
    if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none":
        return "not from a browser"
    host = request.headers.get("host", "")
    name = host[: host.index("]") + 1].strip("[]") if host.startswith("[") and "]" in host else host.partition(":")[0]
    try:
        is_local = ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_local = name.lower() == "localhost"
    return None if is_local else f"Host {host[:100]!r} is not this machine: 127.0.0.1, ::1 or localhost"


def parse_head(head: bytes) -> Request:
    first, *rest = head.decode("latin-1").split("\r\n")
    parts = first.split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1"):
        raise ValueError("not an HTTP/1 request")
    target = urlsplit(parts[1])
    headers = {}
    for line in rest:
        name, separator, value = line.partition(":")
        if separator:
            headers[name.strip().lower()] = value.strip()
    query = dict(parse_qsl(target.query, keep_blank_values=True))
    return Request(parts[0], unquote(target.path), query, headers, parts[1])
