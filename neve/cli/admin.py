"""Requests to the admin port of a broker, which answers with JSON, or with JSON lines as progress."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import click

from neve.admin_token import SCHEME, TOKEN_FILE, signature
from neve.cli.failures import AUTH, CONFLICT, FAILED, NOT_FOUND, UNREACHABLE, Failure
from neve.cli.output import ADMIN_TOKEN

_EXIT_CODES = {401: AUTH, 403: AUTH, 404: NOT_FOUND, 409: CONFLICT, 412: CONFLICT, 503: UNREACHABLE, 504: UNREACHABLE}
CONNECT_TIMEOUT = 5.0
# Between two lines of progress. A large topic takes long to encode; a longer silence means a dead broker.
READ_TIMEOUT = 600.0
_TOKEN = re.compile(r"[0-9a-f]{64}")


def get_json(admin: str, path: str, **query: str) -> Any:
    """Return the JSON of the answer to a GET request."""
    with _request(admin, "GET", path, query) as response:
        return json.loads(response.read())


def post_json(admin: str, path: str, **query: str) -> Any:
    """Return the JSON of the answer to a POST request."""
    with _request(admin, "POST", path, query) as response:
        return json.loads(response.read())


def post_lines(admin: str, path: str, **query: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of the answer to a POST request as they arrive.

    Raises:
        Failure: an object has a field `error`.
    """
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
    given = _given_token_file()
    headers = {} if given is None else {"Authorization": f"Bearer {_token_of(given)}"}
    target = f"{path}?{urlencode(query)}" if query else path
    with closing(_Exchange(admin)) as exchange:
        response = exchange.ask(method, target, headers)
        if response.status == http.client.UNAUTHORIZED and given is None:
            response = exchange.ask(method, target, _signed(response, admin, method, target))
        if response.status != http.client.OK:
            text = response.read().decode("utf-8", "replace").strip()
            code = _EXIT_CODES.get(response.status, FAILED)
            raise Failure(code, f"{method} {path} at {admin}: {text or response.reason}")
        try:
            yield response
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(admin, error) from error


class _Exchange:
    """Sends requests to one port, each over a connection of its own: the port closes it after each answer."""

    def __init__(self, admin: str) -> None:
        host, _, port = admin.rpartition(":")
        self._admin = admin
        self._connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=CONNECT_TIMEOUT)

    def ask(self, method: str, target: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        self._connection.close()
        try:
            self._connection.timeout = CONNECT_TIMEOUT
            self._connection.connect()
            self._connection.sock.settimeout(READ_TIMEOUT)
            self._connection.request(method, target, headers=headers)
            return self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise _unreachable(self._admin, error) from error

    def close(self) -> None:
        self._connection.close()


def _unreachable(admin: str, error: Exception) -> Failure:
    return Failure(UNREACHABLE, f"the broker's admin port {admin} cannot be reached: {error}")


def _given_token_file() -> Path | None:
    """Return the file of `--admin-token` or of the environment."""
    context = click.get_current_context(silent=True)
    found = None if context is None else context.meta.get(ADMIN_TOKEN)
    return found if isinstance(found, Path) else None


def _signed(refusal: http.client.HTTPResponse, admin: str, method: str, target: str) -> dict[str, str]:
    """Return the header that signs the request with the token that the broker names in its refusal.

    Another local process may have taken the port, so no file of another name is read.
    """
    challenge = refusal.headers.get("WWW-Authenticate", "")
    file, nonce = (re.search(f'{name}="([^"]+)"', challenge) for name in ("token_file", "nonce"))
    path = None if file is None else Path(file[1])
    if path is None or nonce is None or path.name != TOKEN_FILE:
        raise Failure(AUTH, f"{admin} refuses the request and names no file {TOKEN_FILE}: is it a neve broker?")
    port = int(admin.rpartition(":")[2])
    return {"Authorization": f"{SCHEME} {signature(_token_of(path), nonce[1], port, method, target)}"}


def _token_of(path: Path) -> str:
    """Return the token in a file.

    Raises:
        Failure: the file cannot be read, or holds no token.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Failure(
            AUTH,
            f"the broker's admin token {path} cannot be read: {reason}; run the command as the user of the broker "
            f"(sudo -u neve), or give a copy of the file with --admin-token or {ADMIN_TOKEN}",
        ) from error
    if not _TOKEN.fullmatch(token):
        raise Failure(AUTH, f"{path} holds no admin token: 64 hexadecimal digits are expected")
    return token
