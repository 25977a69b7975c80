"""Rows of request codes, each above the method that handles the code.

A server serves exactly the codes of the rows of its processors. A row that lacks a fact fails at import, so no code is
served without a permission.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from access.permissions import Permission
from infra.net.remoting_server import Answer, Connection
from infra.net.request_router import RequestRouter
from neve.remoting.codes import RequestCode
from neve.remoting.command import RemotingCommand

_ROUTES = "routes"
_Method = TypeVar("_Method", bound=Callable[[Any, Connection, RemotingCommand], Answer | Awaitable[Answer]])


@dataclass(frozen=True)
class Route:
    """The facts about a request code; a decorator of its handler."""

    code: RequestCode
    permission: Permission
    #: The request changes nothing, so it is cancelled when its client disconnects. Others run to the end.
    reads: bool = field(kw_only=True)

    def __call__(self, handler: _Method) -> _Method:
        handler.__dict__.setdefault(_ROUTES, []).append(self)
        return handler


_Row = TypeVar("_Row", bound=Route)


def _rows(processor: type) -> Iterator[tuple[str, Route]]:
    for name, member in vars(processor).items():
        for route in getattr(member, _ROUTES, ()):
            yield name, route


def routes_of(kind: type[_Row], processors: Iterable[type]) -> dict[int, _Row]:
    """Return the rows of all handlers by code. Raise ValueError for a code with two rows."""
    found: dict[int, _Row] = {}
    for processor in processors:
        for name, route in _rows(processor):
            if not isinstance(route, kind) or route.code in found:
                raise ValueError(
                    f"{processor.__name__}.{name}: {route.code.name} has a row, or needs a {kind.__name__}"
                )
            found[route.code] = route
    return found


def register_handlers(router: RequestRouter, processor: object) -> None:
    """Register the handlers of a processor by their rows."""
    for name, route in _rows(type(processor)):
        router.register(route.code, getattr(processor, name), reads=route.reads)
