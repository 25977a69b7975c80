"""A consumer driven by a handler: every message goes to it, and what becomes of the handler settles the message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from neve.client.group.in_work import Endings, handling_for
from neve.client.group.received import Received
from neve.client.net.session import ended
from neve.errors import ClientError, NeveError

log = logging.getLogger(__name__)

Handler = Callable[[Received], Awaitable[None]]


class Source(Protocol):
    """A consumer that has been joined."""

    def next(self) -> Awaitable[Received | None]:
        """The next message, unsettled; None when the consumer is closed."""

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """As of `Received`."""

    async def failed(self, message: Received, error: BaseException, delay_level: int) -> None:
        """The handler raised."""


async def consume(source: Source, endings: Endings, handler: Handler, workers: int, delay_level: int) -> None:
    """Runs up to `workers` handlers beside each other until the consumer is closed.

    A handler that returns acks; one that raises nacks with `delay_level`, and the error is logged. A broker that cannot
    be told so delivers the message again; that ends nothing. When this is cancelled the handlers are cancelled and have
    ended when it returns; their messages are left unsettled, so they come again.

    Raises:
        NeveError: of `source.next`. The other handlers are cancelled then.
    """
    if workers < 1:
        raise ClientError(f"{workers} workers")
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(_work(source, endings, handler, delay_level))
    except BaseExceptionGroup as several:  # callers handle the error itself, and the first one ended the others
        raise several.exceptions[0] from None


async def _work(source: Source, endings: Endings, handler: Handler, delay_level: int) -> None:
    while (message := await source.next()) is not None:
        with handling_for(endings):
            run = asyncio.ensure_future(handler(message))
        await ended(run)
        error = asyncio.CancelledError("cancelled by itself") if run.cancelled() else run.exception()
        try:
            if error is None:
                await source.settle(message, None)
            else:
                log.warning("the handler of %s failed", message.msg_id, exc_info=error)
                await source.failed(message, error, delay_level)
        except NeveError as problem:
            log.warning("%s comes again, its broker could not be told what became of it: %s", message.msg_id, problem)
