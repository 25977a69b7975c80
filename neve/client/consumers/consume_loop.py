"""Runs the handlers of a consumer and settles each message by the outcome of its handler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from neve.client.group.ownership import PendingWork, handling_for
from neve.client.group.received import Received
from neve.client.net.tasks import ended
from neve.errors import ClientError, NeveError

log = logging.getLogger(__name__)

Handler = Callable[[Received], Awaitable[None]]


class HandledConsumer(Protocol):
    """A consumer that has joined its group."""

    def receive(self) -> Awaitable[Received | None]:
        """Return the next message, or None if the consumer is closed."""

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """Acknowledge the message (None), or have it redelivered after a delay level."""

    async def failed(self, message: Received, error: BaseException, delay_level: int) -> None:
        """Have the message redelivered because its handler raised `error`."""


async def consume(
    consumer: HandledConsumer, pending: PendingWork, handler: Handler, workers: int, delay_level: int
) -> None:
    """Run up to `workers` handlers at a time until the consumer is closed.

    A message is acknowledged if its handler returns. If the handler raises, the error is logged and the message is
    redelivered after `delay_level`. A broker that does not confirm this redelivers the message.

    If this coroutine is cancelled, it cancels the handlers and waits for their end. Their messages are redelivered.

    Raises:
        NeveError: the consumer cannot receive messages. The handlers are cancelled.
    """
    if workers < 1:
        raise ClientError(f"workers must be at least 1, got {workers}")
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(_work(consumer, pending, handler, delay_level))
    except BaseExceptionGroup as errors:  # callers expect the first error, which cancelled the other workers
        raise errors.exceptions[0] from None


async def _work(consumer: HandledConsumer, pending: PendingWork, handler: Handler, delay_level: int) -> None:
    while (message := await consumer.receive()) is not None:
        with handling_for(pending):
            run = asyncio.ensure_future(handler(message))
        await ended(run)
        error = asyncio.CancelledError("the handler cancelled itself") if run.cancelled() else run.exception()
        try:
            if error is None:
                await consumer.settle(message, None)
            else:
                log.warning("handler failed: msg_id=%s", message.msg_id, exc_info=error)
                await consumer.failed(message, error, delay_level)
        except NeveError as problem:
            log.warning("settling failed, the message is redelivered: msg_id=%s cause=%s", message.msg_id, problem)
