"""A small HTTP/1.1 server on loopback: metrics, health, archive verbs. One request for each connection, no keep-alive.

GET is open to local tools; anything that changes something is POST and refused when a browser sends it (Origin header).
"""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, unquote, urlsplit

log = logging.getLogger(__name__)

_HEAD_LIMIT = 16 * 1024
_HEAD_TIMEOUT = 10.0
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
            409: "Conflict", 500: "Internal Server Error", 503: "Service Unavailable"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Request:
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


class AdminHttp:
    def __init__(self, host: str = "127.0.0.1", port: int = 0, expected: tuple[type[Exception], ...] = ()) -> None:
        """`expected` are failures that whoever asks can act on: told to them (503), with no traceback in the log."""
        self._host, self._port, self._expected = host, port, expected
        self._routes: dict[tuple[str, str], Handler] = {}
        self._server: asyncio.Server | None = None

    def route(self, method: str, path: str, handler: Handler) -> None:
        """A path that ends with `/` takes everything below it."""
        self._routes[method, path] = handler

    async def start(self) -> tuple[str, int]:
        self._server = await asyncio.start_server(self._serve, self._host, self._port, limit=_HEAD_LIMIT)
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    async def shutdown(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT):
                head = await reader.readuntil(b"\r\n\r\n")
            await self._answer(parse_head(head), writer)
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError) as error:
            log.debug("admin connection ended: %r", error)
        except ValueError as error:
            await self._write(writer, Response(400, f"{error}\n".encode()))
        finally:
            writer.close()

    async def _answer(self, request: Request, writer: asyncio.StreamWriter) -> None:
        handler = self._find(request)
        if handler is None:
            response = Response(404, b"no such page\n")
        elif request.method != "GET" and "origin" in request.headers:
            response = Response(403, b"not from a browser\n")
        else:
            try:
                response = await handler(request)
            except self._expected as error:
                response = Response(503, f"{error}\n".encode())
            except Exception as error:
                log.exception("admin request %s %s", request.method, request.path)
                response = Response(500, f"{type(error).__name__}: {error}\n".encode())
        await self._write(writer, response)

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

    def _find(self, request: Request) -> Handler | None:
        exact = self._routes.get((request.method, request.path))
        if exact is not None:
            return exact
        for (method, path), handler in self._routes.items():
            if method == request.method and path.endswith("/") and request.path.startswith(path):
                return handler
        return None


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
