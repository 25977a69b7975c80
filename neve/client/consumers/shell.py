"""What all consumers that deliver message by message have in common: their life, iteration, receiving and settling.

    supply ──▶ buffer ──▶ `next`, `receive`, iteration, `run` ──▶ application ──▶ ack, nack ──▶ the message's way back

A message's receipt says how it is settled: of each kind there is one `Way` in a table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol, Self

from neve.client.consumers.consume_loop import Handler, consume
from neve.client.consumers.direct import Direct, DirectRun
from neve.client.consumers.life import Life, Supply
from neve.client.group.in_work import Asker, AutoAcks, Endings, current_asker
from neve.client.group.member import GroupMember
from neve.client.group.rebalance import Rebalancer
from neve.client.group.received import Received
from neve.client.net.session import Session
from neve.errors import ClientError


class Way(Protocol):
    """How messages with one kind of receipt are handed out and settled."""

    def hand_over(self, message: Received, now: float, asker: Asker) -> bool:
        """`asker` gets the message; False when it may not be given to anybody, or not now. `now` is the loop's."""

    def ack(self, message: Received) -> asyncio.Future[None] | None:
        """Done with it; the outcome, where there is one to wait for."""

    def nack(self, message: Received, delay_level: int) -> Coroutine[Any, Any, None] | None:
        """It comes again: what has to be finished for that, whatever becomes of the caller."""

    def let_go(self, message: Received, seconds: float) -> Coroutine[Any, Any, None] | None:
        """As `nack`, so many seconds from now."""

    def raised(self, message: Received, error: BaseException) -> None:
        """The application's handler raised; a nack follows."""


class Shell:
    """Of one consumer: `supply` has its messages, `ways` the ways back of all that it has."""

    def __init__(
        self,
        session: Session,
        member: GroupMember,
        rebalancer: Rebalancer,
        supply: Supply,
        ways: Mapping[type, Way],
        *,
        auto_ack: bool,
        close_timeout: float,
    ) -> None:
        self._session = session
        self.group = member.group
        self._buffer = supply.buffer
        self._auto_ack = auto_ack
        self._auto = AutoAcks()
        self._endings = Endings(session.spawn, member.group)
        direct = Direct(supply.buffer, self)
        self._ways: Mapping[type, Way] = {**ways, DirectRun: direct}
        self._life = Life(
            session,
            member,
            rebalancer,
            supply,
            self._endings,
            close_timeout=close_timeout,
            direct=direct.verdict,
        )

    # ---- life

    async def __aenter__(self) -> Self:
        await self._life.enter()
        return self

    def __aexit__(self, kind: type[BaseException] | None, *_: object) -> Coroutine[Any, Any, None]:
        return self._leave_block(current_asker(), is_unharmed=kind is None)

    async def _leave_block(self, asker: Asker, *, is_unharmed: bool) -> None:
        if is_unharmed:
            self._ack_done(asker)
        await self.close_for(asker)

    async def start(self) -> None:
        """Joins the group and takes the first share of queues.

        Raises:
            ClientError: this client is already in the group, or the stored offsets cannot be read.
            BrokerError: a broker refuses a filter expression.
        """
        await self._life.start()

    def close(self) -> Coroutine[Any, Any, None]:
        """Takes no more, gives back what nobody saw, waits at most `close_timeout` for what is in work, tells the
        brokers how far it came, and leaves the group.

        In order, queues are given back after that only: no other member begins with what is still in work here. A
        handler of `run` that calls this goes on at once: `run` returns when all of it is done.
        """
        return self.close_for(current_asker())

    async def close_for(self, closer: Asker) -> None:
        """As `close`, on behalf of `closer`: what that one has in hand is not waited for."""
        await self._life.close(closer)

    @property
    def is_closed(self) -> bool:
        return self._life.is_closed

    # ---- delivery

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, Received]:
        return self._iterate(current_asker())

    async def _iterate(self, asker: Asker) -> Received:
        message = await self.following(asker)
        if message is None:
            raise StopAsyncIteration
        return message

    async def following(self, asker: Asker) -> Received | None:
        """The next message of an iteration by `asker`; None at its end, with the consumer or with the client."""
        if self.is_closed:
            self._ack_done(asker)
            return None
        return await self._receive(asker, None)

    def receive(self, timeout: float | None = None) -> Coroutine[Any, Any, Received | None]:
        """The next message; None when the consumer is closed, or nothing came within `timeout` seconds.

        With `auto_ack`, asking for the next message acks those that the same task (or thread) got before; so does
        leaving the `with` block unharmed.
        """
        return self._receive(current_asker(), timeout)

    async def _receive(self, asker: Asker, timeout: float | None) -> Received | None:
        self._ack_done(asker)
        self._session.pool.check_usable()
        message = None if self.is_closed else self._take(asker)  # what is at hand needs no timer
        if message is None:
            try:
                async with asyncio.timeout(timeout):
                    message = await self._next(asker)
            except TimeoutError:
                return None
        if self._auto_ack and message is not None:
            self._auto.give(asker, message)
        return message

    def next(self) -> Coroutine[Any, Any, Received | None]:
        """The next message, whatever became of the one before; None when the consumer is closed."""
        return self._next(current_asker())

    async def _next(self, asker: Asker) -> Received | None:
        while not self.is_closed:
            self._session.pool.check_usable()
            if (message := self._take(asker)) is not None:
                return message
            await self._buffer.wait()
        return None

    def _take(self, asker: Asker) -> Received | None:
        now = asyncio.get_running_loop().time()
        while (message := self._buffer.take()) is not None:
            if self._way(message).hand_over(message, now, asker):
                return message
        return None

    async def run(self, handler: Handler, *, workers: int = 1, delay_level: int = 0) -> None:
        """Gives every message to `handler` until the consumer is closed: returning acks, raising nacks.

        Args:
            workers: so many handlers run beside each other; in order still only one for each queue.
            delay_level: of the nack, see `Received.nack`.
        """
        await consume(self, self._endings, handler, workers, delay_level)
        await self.close()  # it was closed; what that has still to do is done when this returns

    # ---- settling

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """See `Received.ack` and `Received.nack`. An ack of a popped message returns when the broker has it.

        Raises:
            NeveError: the broker could not be told; the message comes again.
        """
        if delay_level is not None:
            await self._finished(message, self._way(message).nack(message, delay_level))
        elif (outcome := self._ack(message)) is not None:
            await asyncio.shield(outcome)

    async def failed(self, message: Received, error: BaseException, delay_level: int) -> None:
        """The application's handler raised: as a nack."""
        self._way(message).raised(message, error)
        await self.settle(message, delay_level)

    async def _let_go(self, message: Received, seconds: float) -> None:
        await self._finished(message, self._way(message).let_go(message, seconds))

    def _ack_done(self, asker: Asker) -> None:
        """Without waiting: an ack that fails means one more delivery."""
        for message in self._auto.done_with(asker):
            self._ack(message)

    def _ack(self, message: Received) -> asyncio.Future[None] | None:
        self._auto.settled(message)
        outcome = self._way(message).ack(message)
        self._endings.settled()
        return outcome

    async def _finished(self, message: Received, again: Coroutine[Any, Any, None] | None) -> None:
        """Even where the caller is cancelled: half done, it would leave the message nowhere."""
        self._auto.settled(message)
        self._endings.settled()
        if again is not None:
            await self._endings.finish(again)

    def _way(self, message: Received) -> Way:
        way = self._ways.get(type(message.receipt))
        if way is None:
            raise ClientError("this message was not delivered by this consumer")
        return way
