"""The broker's admin port: JSON, or JSON lines while something runs."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode

from neve.cli.failures import AUTH, CONFLICT, FAILED, NOT_FOUND, UNREACHABLE, Failure

_EXIT_CODES = {401: AUTH, 403: AUTH, 404: NOT_FOUND, 409: CONFLICT, 412: CONFLICT, 503: UNREACHABLE, 504: UNREACHABLE}
CONNECT_TIMEOUT = 5.0
# Between two lines of progress: one topic may be long to encode, silence for this long means a dead broker.
READ_TIMEOUT = 600.0


def get_json(admin: str, path: str, **query: str) -> Any:
    with _request(admin, "GET", path, query) as response:
        return json.loads(response.read())


def post_json(admin: str, path: str, **query: str) -> Any:
    with _request(admin, "POST", path, query) as response:
        return json.loads(response.read())


def get_text(admin: str, path: str) -> str:
    with _request(admin, "GET", path, {}) as response:
        return response.read().decode()


def post_lines(admin: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines answer as they come; an `error` in one of them is raised."""
    with _request(admin, "POST", path, query) as response:
        for line in response:
            if not line.strip():
                continue
            item = json.loads(line)
            if isinstance(item, dict) and item.get("error"):
                raise Failure(FAILED, str(item["error"]))
            yield item


@contextmanager
def _request(admin: str, method: str, path: str, query: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
    host, _, port = admin.rpartition(":")
    if not host or not port.isdigit():
        raise Failure(2, f"--admin {admin!r} is not host:port")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=CONNECT_TIMEOUT)
    target = f"{path}?{urlencode(query)}" if query else path
    try:
        connection.connect()
        connection.sock.settimeout(READ_TIMEOUT)
        connection.request(method, target)
        response = connection.getresponse()
        if response.status != http.client.OK:
            text = response.read().decode("utf-8", "replace").strip()
            code = _EXIT_CODES.get(response.status, FAILED)
            raise Failure(code, f"{method} {path} at {admin}: {text or response.reason}")
        yield response
    except (OSError, http.client.HTTPException) as error:
        raise Failure(UNREACHABLE, f"the broker's admin port {admin} cannot be reached: {error}") from error
    finally:
        connection.close()
