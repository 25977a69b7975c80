"""A small HTTP/1.1 server on loopback: metrics, health, archive verbs. One request for each connection, no keep-alive.

It is for tools on this machine, not for web pages, which a browser here lets ask as well: a request that comes from a
page (Origin, Sec-Fetch-Site), or by a name that is not this machine's (Host: a page's own domain may point here), is
refused. What changes something or costs much is POST, and so many at a time run, no more. A port with metrics alone may
be public (`is_public`).
"""

import asyncio
import ipaddress
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

log = logging.getLogger(__name__)

_HEAD_LIMIT = 16 * 1024
_HEAD_TIMEOUT = 10.0
_MAX_CONNECTIONS = 64
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
            409: "Conflict", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
    """One HTTP request of a tool on this machine; names of `headers` are lower case."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]

    def flag(self, name: str) -> bool:
        """`?roll` and `?roll=1` and `?roll=true` are all yes."""
        return self.query.get(name, "false").lower() in ("", "1", "true", "yes")


@dataclass(slots=True)
class Response:
    """`lines` streams one JSON object a line as they come; otherwise `body` is the whole answer."""

    status: int = 200
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    lines: AsyncIterator[object] | None = field(default=None)


def json_response(value: object, status: int = 200) -> Response:
    return Response(status, json.dumps(value).encode() + b"\n", "application/json")


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(slots=True)
class _Route:
    handler: Handler
    at_once: int
    running: int = 0


class AdminHttp:
    """The port and its routes: handlers run on the loop, what they raise becomes a status and a line of text."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        expected: tuple[type[Exception], ...] = (),
        *,
        is_public: bool = False,
    ) -> None:
        """`expected` are failures that whoever asks can act on: told to them (503), with no traceback in the log.

        `is_public`: other machines may ask, by any name. It must have pages alone that everybody may read.
        """
        self._host, self._port, self._expected, self._is_public = host, port, expected, is_public
        self._routes: dict[tuple[str, str], _Route] = {}
        self._connections = 0
        self._closers: list[Callable[[], None]] = []
        self._server: asyncio.Server | None = None

    def route(self, method: str, path: str, handler: Handler, *, at_once: int = _MAX_CONNECTIONS) -> None:
        """A path that ends with `/` takes everything below it. Above `at_once` the answer is 409."""
        self._routes[method, path] = _Route(handler, at_once)

    async def start(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=_HEAD_LIMIT)
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    def on_shutdown(self, close: Callable[[], None]) -> None:
        self._closers.append(close)

    async def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()
        for close in self._closers:
            close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections >= _MAX_CONNECTIONS:
            log.warning("admin connection refused: there are %d", self._connections)
            writer.transport.abort()
            return
        self._connections += 1
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._answer(parse_head(head), writer)
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
            log.debug("admin connection ended: %r", error)
        except ValueError as error:
            await self._write(writer, Response(400, f"{error}\n".encode()))
        finally:
            self._connections -= 1
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        foreign, route = None if self._is_public else from_elsewhere(request), self._find(request)
        if foreign is not None:
            await self._write(writer, Response(403, f"{foreign}\n".encode()))
        elif route is None:
            await self._write(writer, Response(404, b"no such page\n"))
        elif route.running >= route.at_once:
            text = f"{request.path}: {route.running} at a time, and as many run already\n"
            await self._write(writer, Response(409, text.encode()))
        else:
            route.running += 1
            try:
                await self._write(writer, await self._handled(route.handler, request))
            finally:
                route.running -= 1

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
        status = f"{response.status} {_REASONS.get(response.status, '')}"
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n"
        if response.lines is None:
            writer.write(f"{head}Content-Length: {len(response.body)}\r\n\r\n".encode() + response.body)
            await writer.drain()
            return
        writer.write(f"{head}\r\n".encode())  # The end of the connection is the end of the lines.
        try:
            async for item in response.lines:
                writer.write(json.dumps(item).encode() + b"\n")
                await writer.drain()
        except (ConnectionResetError, BrokenPipeError):
            raise  # who asked has gone
        except Exception as error:
            expected = isinstance(error, self._expected)
            if not expected:
                log.exception("admin stream")
            text = str(error) if expected else f"{type(error).__name__}: {error}"
            writer.write(json.dumps({"error": text}).encode() + b"\n")
            await writer.drain()

    def _find(self, request: Request) -> _Route | None:
        exact = self._routes.get((request.method, request.path))
        if exact is not None:
            return exact
        for (method, path), route in self._routes.items():
            if method == request.method and path.endswith("/") and request.path.startswith(path):
                return route
        return None


def from_elsewhere(request: Request) -> str | None:
    """Why it is none of a local tool's requests, if it is none."""
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
    return Request(parts[0], unquote(target.path), dict(parse_qsl(target.query, keep_blank_values=True)), headers)
