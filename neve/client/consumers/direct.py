"""A message that an administrator has delivered, outside all offsets: the verdict on it goes back to the broker."""

from __future__ import annotations

import asyncio

from neve.client.group.delivery import DeliveryBuffer, DeliveryQueue
from neve.client.group.group_requests import Verdict
from neve.client.group.in_work import Asker
from neve.client.group.received import Received, Settles, received
from neve.client.model import Message

DIRECT_WAIT_S = 10.0  # a broker waits as long for the verdict on a message


class DirectRun:
    """The receipt of such a message."""

    def __init__(self) -> None:
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    def settle(self, result: str, remark: str | None = None) -> None:
        """The first verdict counts."""
        if not self._verdict.done():
            self._verdict.set_result((result, remark))

    async def verdict(self) -> Verdict:
        """
        Raises:
            TimeoutError: the application did not settle it in time.
        """
        async with asyncio.timeout(DIRECT_WAIT_S):
            return await self._verdict


class Direct:
    """Puts it before all that waits; it is no part of traces, statistics or positions."""

    def __init__(self, buffer: DeliveryBuffer, consumer: Settles) -> None:
        self._buffer = buffer
        self._consumer = consumer
        self._lane = DeliveryQueue()

    async def verdict(self, message: Message) -> Verdict:
        """CR_SUCCESS, CR_LATER, CR_THROW_EXCEPTION, and a remark.

        Raises:
            TimeoutError: the application did not settle it in time.
        """
        run = DirectRun()
        self._buffer.put(self._lane, [received(message, self._consumer, run)], first=True)
        try:
            return await run.verdict()
        finally:
            self._buffer.discard(self._lane)

    # ---- the way of its receipt

    def hand_over(self, message: Received, now: float, asker: Asker) -> bool:
        return True

    def ack(self, message: Received) -> None:
        message.receipt.settle("CR_SUCCESS")

    def nack(self, message: Received, delay_level: int) -> None:
        message.receipt.settle("CR_LATER")

    def let_go(self, message: Received, seconds: float) -> None:
        message.receipt.settle("CR_LATER")

    def raised(self, message: Received, error: BaseException) -> None:
        message.receipt.settle("CR_THROW_EXCEPTION", repr(error))
