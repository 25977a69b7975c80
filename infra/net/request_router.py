"""Which handler serves a request code, and which requests change nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from infra.net.error_answers import not_supported
from infra.net.remoting_server import Answer, Connection, Express, Handler
from neve.remoting.command import RemotingCommand


class RequestRouter:
    """A handler out of handlers by request code; an unknown code is answered 3."""

    def __init__(self) -> None:
        self._registered: dict[int, Handler] = {}
        self._handlers = self._registered
        self.reads: frozenset[int] = frozenset()
        self.express: Express | None = None

    def register(self, code: int, handler: Handler, *, reads: bool = False) -> None:
        """Serve `code` with `handler`; the last registration counts.

        `reads`: it changes nothing, and ends when its asker hangs up. Any other that has begun runs to its end.
        """
        assert self._handlers is self._registered, "handlers are registered before any is replaced"
        self._registered[int(code)] = handler
        self.reads = self.reads | {int(code)} if reads else self.reads - {int(code)}

    def replace(self, others: Mapping[int, Handler]) -> None:
        """From now on `others` serve their codes, and no more those of the call before."""
        assert others.keys() <= self._registered.keys()
        self._handlers = {**self._registered, **others} if others else self._registered

    def wrap(self, codes: Iterable[int], wrapper: Callable[[Handler], Handler]) -> None:
        """Of `codes`, those that are served are served by `wrapper(handler)`."""
        assert self._handlers is self._registered, "handlers are wrapped before any is replaced"
        for code in self._registered.keys() & {int(code) for code in codes}:
            self._registered[code] = wrapper(self._registered[code])

    @property
    def codes(self) -> frozenset[int]:
        """The codes that have a handler."""
        return frozenset(self._registered)

    def __call__(self, connection: Connection, command: RemotingCommand) -> Answer | Awaitable[Answer]:
        handler = self._handlers.get(command.code)
        return not_supported(command) if handler is None else handler(connection, command)
