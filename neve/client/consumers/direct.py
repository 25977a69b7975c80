"""Delivers a message that an administrator sent to one consumer. Its outcome is the answer to the broker."""

from __future__ import annotations

import asyncio

from neve.client.group.delivery import DeliveryBuffer, DeliveryQueue
from neve.client.group.group_requests import Verdict
from neve.client.group.ownership import Owner
from neve.client.group.received import Received, Settles, received
from neve.client.model import Message

DIRECT_WAIT_S = 10.0  # a broker waits as long for the answer


class DirectReceipt:
    """The receipt of such a message."""

    def __init__(self) -> None:
        self._verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()

    def settle(self, result: str, remark: str | None = None) -> None:
        """Set the verdict, unless there is one."""
        if not self._verdict.done():
            self._verdict.set_result((result, remark))

    async def verdict(self) -> Verdict:
        """Wait for the verdict of the application.

        Raises:
            TimeoutError: the application did not settle the message in time.
        """
        async with asyncio.timeout(DIRECT_WAIT_S):
            return await self._verdict


class DirectDelivery:
    """Delivers before all buffered messages. Traces, statistics and offsets do not include these deliveries."""

    def __init__(self, buffer: DeliveryBuffer, consumer: Settles) -> None:
        self._buffer = buffer
        self._consumer = consumer
        self._queue = DeliveryQueue()

    async def verdict(self, message: Message) -> Verdict:
        """Deliver the message; return CR_SUCCESS, CR_LATER or CR_THROW_EXCEPTION, and a remark.

        Raises:
            TimeoutError: the application did not settle the message in time.
        """
        receipt = DirectReceipt()
        self._buffer.put(self._queue, [received(message, self._consumer, receipt)], first=True)
        try:
            return await receipt.verdict()
        finally:
            self._buffer.discard(self._queue)

    # ---- Settler

    def deliver(self, message: Received, now: float, owner: Owner) -> bool:
        return True

    def ack(self, message: Received) -> None:
        message.receipt.settle("CR_SUCCESS")

    def nack(self, message: Received, delay_level: int) -> None:
        message.receipt.settle("CR_LATER")

    def redeliver(self, message: Received, seconds: float) -> None:
        message.receipt.settle("CR_LATER")

    def raised(self, message: Received, error: BaseException) -> None:
        message.receipt.settle("CR_THROW_EXCEPTION", repr(error))
