"""The common surface of consumers that deliver message by message: lifecycle, receiving, iteration, handlers, settling.

source ──▶ buffer ──▶ `receive`, iteration, `run` ──▶ application ──▶ ack, nack ──▶ settler of the receipt
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, Self

from neve.client.consumers.consume_loop import Handler, consume
from neve.client.consumers.direct import DirectDelivery, DirectReceipt
from neve.client.consumers.lifecycle import Lifecycle, MessageSource
from neve.client.group.member import GroupMember
from neve.client.group.ownership import AutoAcks, Owner, PendingWork, current_owner
from neve.client.group.rebalance import Rebalancer
from neve.client.group.received import Received
from neve.client.net.session import Session
from neve.errors import ClientError, NeveError


class Settler(Protocol):
    """Delivers and settles the messages that have one type of receipt."""

    def deliver(self, message: Received, now: float, owner: Owner) -> bool:
        """Record that `owner` receives the message at `now`, the loop's time in seconds.

        Return False if the message must not be delivered, or not now.
        """

    def ack(self, message: Received) -> asyncio.Future[None] | None:
        """Acknowledge the message; return the outcome if there is one to wait for."""

    def nack(self, message: Received, delay_level: int) -> Coroutine[Any, Any, None] | None:
        """Give the message back; return the work that has to finish even if the caller is cancelled."""

    def redeliver(self, message: Received, seconds: float) -> Coroutine[Any, Any, None] | None:
        """Give the message back, to be redelivered after `seconds`; return as `nack` does."""

    def raised(self, message: Received, error: BaseException) -> None:
        """Record that the application's handler raised; a nack follows."""


class DeliveringConsumer:
    """A consumer whose `source` fetches messages and whose `settlers` settle them by the type of their receipts."""

    def __init__(
        self,
        session: Session,
        member: GroupMember,
        rebalancer: Rebalancer,
        source: MessageSource,
        settlers: Mapping[type, Settler],
        *,
        auto_ack: bool,
        close_timeout: float,
        takes_delay: bool = False,
    ) -> None:
        self._session = session
        self.group = member.group
        self._buffer = source.buffer
        self._failures = source.failures
        self._auto_ack = auto_ack
        self._takes_delay = takes_delay
        self._iterated = AutoAcks()
        self._pending = PendingWork(session.spawn, member.group)
        direct = DirectDelivery(source.buffer, self)
        self._settlers: Mapping[type, Settler] = {**settlers, DirectReceipt: direct}
        self._lifecycle = Lifecycle(
            session,
            member,
            rebalancer,
            source,
            self._pending,
            close_timeout=close_timeout,
            direct=direct.verdict,
        )

    # ---- lifecycle

    async def __aenter__(self) -> Self:
        await self._lifecycle.enter()
        return self

    def __aexit__(self, kind: type[BaseException] | None, *_: object) -> Coroutine[Any, Any, None]:
        return self._leave_block(current_owner(), is_clean=kind is None)

    async def _leave_block(self, owner: Owner, *, is_clean: bool) -> None:
        if is_clean:
            self._ack_iterated(owner)
        await self.close_for(owner)

    async def start(self) -> None:
        """Join the group and get the first assignment of queues. `async with` does this.

        Raises:
            ClientError: this client is already in the group, or the stored offsets cannot be read.
            BrokerError: a broker rejected a filter expression.
        """
        await self._lifecycle.start()

    def close(self) -> Coroutine[Any, Any, None]:
        """Close the consumer: stop fetching, wait for owned messages, commit, and leave the group.

        Waits at most `close_timeout` seconds until other tasks and threads, and the handlers of `run`, have settled
        their messages. A consumer in order keeps its queues until then. In a handler of `run` this returns at once,
        and `run` returns when the consumer is closed.
        """
        return self.close_for(current_owner())

    async def close_for(self, closer: Owner) -> None:
        """Close the consumer on behalf of `closer`, whose own messages are not waited for."""
        await self._lifecycle.close(closer)

    @property
    def is_closed(self) -> bool:
        """Whether the consumer is closed, or being closed."""
        return self._lifecycle.is_closed

    @property
    def problem(self) -> NeveError | None:
        """The latest error of a pull, pop or rebalance that has not succeeded since; None if all succeed."""
        return self._failures.latest

    # ---- delivery

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Received]:
        return self._iterate(current_owner())

    async def _iterate(self, owner: Owner) -> Received:
        message = await self.iterate(owner)
        if message is None:
            raise StopAsyncIteration
        return message

    async def iterate(self, owner: Owner) -> Received | None:
        """Return the next message of an iteration by `owner`, or None at its end.

        With `auto_ack` this acknowledges the message of the step before.
        """
        self._ack_iterated(owner)
        message = await self._next(owner)
        if self._auto_ack and message is not None:
            self._iterated.give(owner, message)
        return message

    def receive(self, timeout: float | None = None) -> Coroutine[Any, Any, Received | None]:
        """Return the next message, which the caller owns: acknowledge it, or use `async with message:`.

        Args:
            timeout: the time to wait in seconds; 0 takes only a message that has already arrived.

        Returns:
            The message, or None if the consumer is closed or no message arrived in time.

        Raises:
            BrokerError: a broker refuses messages to this consumer permanently: NO_PERMISSION,
                SUBSCRIPTION_GROUP_NOT_EXIST or SUBSCRIPTION_PARSE_FAILED. The next call waits for the next attempt.
        """
        return self._receive(current_owner(), timeout)

    async def _receive(self, owner: Owner, timeout: float | None) -> Received | None:
        self._session.pool.check_usable()
        if not self.is_closed and (message := self._take(owner)) is not None:
            return message  # without the cost of a timer
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                return await self._next(owner)
        except TimeoutError:
            if not limit.expired():
                raise
            return None

    async def _next(self, owner: Owner) -> Received | None:
        while not self.is_closed:
            self._session.pool.check_usable()
            if (message := self._take(owner)) is not None:
                return message
            self._failures.raise_permanent()
            await self._buffer.wait()
        return None

    def _take(self, owner: Owner) -> Received | None:
        now = asyncio.get_running_loop().time()
        while (message := self._buffer.take()) is not None:
            if self._settler(message).deliver(message, now, owner):
                return message
        return None

    async def run(self, handler: Handler, *, workers: int = 1, delay_level: int = 0) -> None:
        """Call `handler` with every message until the consumer is closed.

        A message is acknowledged if its handler returns, and redelivered if its handler raises.

        Args:
            handler: a coroutine function that takes a `Received`.
            workers: the number of handlers that run at a time. In order, one runs for each queue.
            delay_level: the delay of redeliveries; see `Received.nack`.

        Raises:
            BrokerError: as `receive`. The handlers are cancelled, and the consumer stays open.
            ClientError: `workers` is less than 1.
        """
        await consume(self, self._pending, handler, workers, delay_level)
        await self.close()  # waits for the close that ended the loop

    # ---- settling

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """Acknowledge the message (None), or have it redelivered; for `Received`."""
        if delay_level is not None:
            await self._finish(message, self._settler(message).nack(message, delay_level))
        elif (outcome := self._ack(message)) is not None:
            await asyncio.shield(outcome)

    async def redeliver(self, message: Received, seconds: float) -> None:
        """Have the message redelivered after `seconds`; for `Received`."""
        if not self._takes_delay:
            raise ClientError("only messages of pop consumers take a delay in seconds: use delay_level")
        await self._finish(message, self._settler(message).redeliver(message, seconds))

    async def failed(self, message: Received, error: BaseException, delay_level: int) -> None:
        """Have the message redelivered because its handler raised `error`."""
        self._settler(message).raised(message, error)
        await self.settle(message, delay_level)

    def _ack_iterated(self, owner: Owner) -> None:
        """Acknowledge what `owner` iterated over, without waiting: if an ack fails, the message is redelivered."""
        for message in self._iterated.done_with(owner):
            self._ack(message)

    def _ack(self, message: Received) -> asyncio.Future[None] | None:
        self._iterated.settled(message)
        outcome = self._settler(message).ack(message)
        self._pending.settled()
        return outcome

    async def _finish(self, message: Received, work: Coroutine[Any, Any, None] | None) -> None:
        """Finish settling even if the caller is cancelled: a message must not be lost between client and broker."""
        self._iterated.settled(message)
        self._pending.settled()
        if work is not None:
            await self._pending.finish(work)

    def _settler(self, message: Received) -> Settler:
        settler = self._settlers.get(type(message.receipt))
        if settler is None:
            raise ClientError("this message was not delivered by this consumer")
        return settler
