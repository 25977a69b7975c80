"""Settles pulled messages: acknowledged, sent back to the broker, redelivered from here, or expired.

A message that an application never settles would hold the offset of its queue, and a restart would redeliver all
messages behind it. Therefore, as in RocketMQ's clients (ProcessQueue.cleanExpiredMsg), the first open message of a
queue expires after `consume_timeout`: it is sent back to the broker, and its owner can no longer settle it. The
messages behind it hold no offset and do not expire.
"""

from __future__ import annotations

import asyncio
import logging

from neve.client.group.fetcher import Fetcher
from neve.client.group.positions import Positions
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.received import Received
from neve.client.group.send_back import SendBack
from neve.errors import NeveError

log = logging.getLogger(__name__)

_LOCAL_REDELIVERY_S = 5.0  # the delay of a message that could not be sent back
_EXPIRED_LEVEL = 3  # 10 s
_EXPIRED_PER_ROUND = 16  # for each queue
_ROUNDS_PER_TIMEOUT = 15


class Settlement:
    """Settles the messages of one fetcher. Without `send_back` (broadcasting) there is no redelivery."""

    def __init__(
        self, fetcher: Fetcher, positions: Positions, send_back: SendBack | None, consume_timeout: float
    ) -> None:
        self._fetcher = fetcher
        self._positions = positions
        self._send_back = send_back
        self._consume_timeout = consume_timeout

    # ---- by the application

    def counts(self, process_queue: ProcessQueue, message: Received) -> bool:
        """Return whether the message can be settled; log a warning if it has expired."""
        if message.queue_offset in process_queue.expired:
            log.warning(
                "settled too late, ignored: msg_id=%s queue=%s offset=%d consume_timeout_s=%g",
                message.msg_id, process_queue.queue, message.queue_offset, self._consume_timeout,
            )  # fmt: skip
            return False
        return process_queue.is_owned(message.queue_offset)

    def done(self, process_queue: ProcessQueue, message: Received, *, is_consumed: bool) -> None:
        """Record that the message is acknowledged, or that the broker redelivers it."""
        now = asyncio.get_running_loop().time()
        delivered_at = process_queue.ack(message.queue_offset)
        if delivered_at is not None and is_consumed:
            self._fetcher.stats.consumed(process_queue.queue.topic, now - delivered_at if delivered_at else 0.0, now)

    async def retry(self, process_queue: ProcessQueue, message: Received, delay_level: int) -> None:
        """Send the message back to the broker; if that fails, redeliver it from here."""
        process_queue.give_back(message.queue_offset)  # so that it does not expire meanwhile
        try:
            await self._return(process_queue, message, delay_level)
        except NeveError as error:
            log.warning(
                "send back failed, redelivered by this client: msg_id=%s delay_s=%g cause=%s",
                message.msg_id, _LOCAL_REDELIVERY_S, error,
            )  # fmt: skip
            self.repeat(process_queue, message.next_delivery(), _LOCAL_REDELIVERY_S)

    def repeat(self, process_queue: ProcessQueue, message: Received, delay: float) -> None:
        """Redeliver the message from here after `delay` seconds; until then its offset stays open."""

        def put() -> None:
            if not process_queue.is_dropped:
                self._fetcher.buffer.put(process_queue.delivery, [message], first=True)
                self._positions.reopen(process_queue)

        process_queue.give_back(message.queue_offset)
        asyncio.get_running_loop().call_later(delay, put)

    async def _return(self, process_queue: ProcessQueue, message: Received, delay_level: int) -> None:
        if self._send_back is None:
            log.warning(
                "message failed, skipped: broadcasting has no redelivery: msg_id=%s queue=%s",
                message.msg_id, process_queue.queue,
            )  # fmt: skip
        else:
            await self._send_back.retry(message, delay_level)
        self.done(process_queue, message, is_consumed=False)

    # ---- by the consume timeout

    async def forever(self) -> None:
        """Expire overdue messages. Consumers in order do not run this: their messages never expire."""
        while True:
            await asyncio.sleep(self._consume_timeout / _ROUNDS_PER_TIMEOUT)
            await self.expire_overdue(asyncio.get_running_loop().time())

    async def expire_overdue(self, now: float) -> None:
        """Run one round. `now` is the loop's time in seconds."""
        for process_queue in list(self._fetcher.assigned.values()):
            for _ in range(_EXPIRED_PER_ROUND):
                message = process_queue.overdue(now - self._consume_timeout)
                if message is None or not await self._expire(process_queue, message):
                    break

    async def _expire(self, process_queue: ProcessQueue, message: Received) -> bool:
        """Send an overdue message back; return False if that failed, and the next round retries."""
        log.warning(
            "not settled in time, redelivered: msg_id=%s queue=%s offset=%d consume_timeout_s=%g",
            message.msg_id, process_queue.queue, message.queue_offset, self._consume_timeout,
        )  # fmt: skip
        process_queue.expired.append(message.queue_offset)  # first: a nack in the meantime would send a second copy
        try:
            await self._return(process_queue, message, _EXPIRED_LEVEL)
        except NeveError as error:
            log.warning("send back failed, retried in the next round: msg_id=%s cause=%s", message.msg_id, error)
            process_queue.expired.remove(message.queue_offset)
            return False
        return True
