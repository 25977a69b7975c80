"""Which handler serves a request code, and which requests change nothing."""

from __future__ import annotations

from collections.abc import Awaitable

from infra.remoting_answers import not_supported
from infra.remoting_server import Answer, Connection, Express, Handler
from neve.remoting.command import RemotingCommand


class RequestRouter:
    """A handler out of handlers by request code; an unknown code is answered 3."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self.reads: frozenset[int] = frozenset()
        self.express: Express | None = None

    def register(self, code: int, handler: Handler, *, reads: bool = False) -> None:
        """Serve `code` with `handler`; the last registration counts.

        `reads`: it changes nothing, and ends when its asker hangs up. Any other that has begun runs to its end.
        """
        self._handlers[int(code)] = handler
        self.reads = self.reads | {int(code)} if reads else self.reads - {int(code)}

    @property
    def codes(self) -> frozenset[int]:
        """The codes that have a handler."""
        return frozenset(self._handlers)

    def __call__(self, connection: Connection, command: RemotingCommand) -> Answer | Awaitable[Answer]:
        handler = self._handlers.get(command.code)
        return not_supported(command) if handler is None else handler(connection, command)
