"""The handlers by request code, and the set of read-only codes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from infra.net.error_answers import not_supported
from infra.net.remoting_server import Answer, Connection, Express, Handler
from neve.remoting.command import RemotingCommand


class RequestRouter:
    """Dispatches requests to handlers by code; the answer to an unknown code is REQUEST_CODE_NOT_SUPPORTED (3)."""

    def __init__(self) -> None:
        self._registered: dict[int, Handler] = {}
        self._handlers = self._registered
        self.reads: frozenset[int] = frozenset()
        self.express: Express | None = None

    def register(self, code: int, handler: Handler, *, reads: bool = False) -> None:
        """Serve `code` with `handler`; a later registration replaces it.

        `reads`: the request has no side effects, so it is cancelled when its client disconnects. Others run to the end.
        """
        assert self._handlers is self._registered, "handlers are registered before any is replaced"
        self._registered[int(code)] = handler
        self.reads = self.reads | {int(code)} if reads else self.reads - {int(code)}

    def replace(self, others: Mapping[int, Handler]) -> None:
        """Override the handlers of some codes; replaces the overrides of an earlier call."""
        assert others.keys() <= self._registered.keys()
        self._handlers = {**self._registered, **others} if others else self._registered

    def wrap(self, codes: Iterable[int], wrapper: Callable[[Handler], Handler]) -> None:
        """Replace the handlers of `codes` by `wrapper(handler)`; codes without a handler are ignored."""
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
