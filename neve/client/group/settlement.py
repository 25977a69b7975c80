"""What becomes of pulled messages: done with, back to the broker, again from here, or taken back from their holder.

One message that an application never settles would keep its queue's offset where it is, and everything behind it would
come again after a restart. So, as RocketMQ's clients do (ProcessQueue.cleanExpiredMsg), the first open message of a
queue goes back to the broker when it was held for `consume_timeout`; its holder's word counts no more. Only the first:
one behind it holds up nothing.
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

_AGAIN_HERE_S = 5.0  # a message that could not be sent back is delivered again by us
_TAKEN_BACK_LEVEL = 3  # 10 s
_TAKEN_BACK_AT_ONCE = 16  # of each queue in a round
_ROUNDS_PER_TIMEOUT = 15


class Settlement:
    """Over the queues of one fetcher. Without `send_back` there is no second delivery (broadcasting)."""

    def __init__(
        self, fetcher: Fetcher, positions: Positions, send_back: SendBack | None, consume_timeout: float
    ) -> None:
        self._fetcher = fetcher
        self._positions = positions
        self._send_back = send_back
        self._consume_timeout = consume_timeout

    # ---- by the application

    def counts(self, process_queue: ProcessQueue, message: Received) -> bool:
        """Whether the message can still be settled; its holder is told when it was taken back."""
        if message.queue_offset in process_queue.taken_back:
            log.warning(
                "%s at %s %d is settled too late, without effect: it was taken back after %g s",
                message.msg_id, process_queue.queue, message.queue_offset, self._consume_timeout,
            )  # fmt: skip
            return False
        return process_queue.is_in_hand(message.queue_offset)

    def done(self, process_queue: ProcessQueue, message: Received, *, is_consumed: bool) -> None:
        now = asyncio.get_running_loop().time()
        handed_over = process_queue.ack(message.queue_offset)
        if handed_over is not None and is_consumed:
            self._fetcher.stats.consumed(process_queue.queue.topic, now - handed_over if handed_over else 0.0, now)

    async def retry(self, process_queue: ProcessQueue, message: Received, delay_level: int) -> None:
        """The message comes again later; broadcasting it is logged and passed over."""
        process_queue.not_in_hand(message.queue_offset)  # else it could be taken back while it goes back
        try:
            await self._give_back(process_queue, message, delay_level)
        except NeveError as error:
            log.warning("%s stays here and comes again in %g s: %s", message.msg_id, _AGAIN_HERE_S, error)
            self.repeat(process_queue, message.again(), _AGAIN_HERE_S)

    def repeat(self, process_queue: ProcessQueue, again: Received, delay: float) -> None:
        """Delivers the message again from here; until then its offset stays open."""

        def put() -> None:
            if not process_queue.is_dropped:
                self._fetcher.buffer.put(process_queue.delivery, [again], first=True)
                self._positions.reopen(process_queue)

        process_queue.not_in_hand(again.queue_offset)
        asyncio.get_running_loop().call_later(delay, put)

    async def _give_back(self, process_queue: ProcessQueue, message: Received, delay_level: int) -> None:
        if self._send_back is None:
            log.warning(
                "%s of %s failed and is passed over: broadcasting has no retry", message.msg_id, process_queue.queue
            )
        else:
            await self._send_back.retry(message, delay_level)
        self.done(process_queue, message, is_consumed=False)

    # ---- by the clock

    async def forever(self) -> None:
        """Takes back what is held too long. Not for consumers in order: theirs may be held for ever."""
        while True:
            await asyncio.sleep(self._consume_timeout / _ROUNDS_PER_TIMEOUT)
            await self.take_back_overdue(asyncio.get_running_loop().time())

    async def take_back_overdue(self, now: float) -> None:
        """One round. `now` is on the loop's clock, in seconds."""
        for process_queue in list(self._fetcher.assigned.values()):
            for _ in range(_TAKEN_BACK_AT_ONCE):
                message = process_queue.overdue(now - self._consume_timeout)
                if message is None or not await self._take_back(process_queue, message):
                    break

    async def _take_back(self, process_queue: ProcessQueue, message: Received) -> bool:
        """False: it could not be sent back; it stays open, and the next round tries again."""
        log.warning(
            "%s at %s %d was not settled within %g s: it is taken back from the application",
            message.msg_id, process_queue.queue, message.queue_offset, self._consume_timeout,
        )  # fmt: skip
        process_queue.taken_back.append(
            message.queue_offset
        )  # before the broker has it: else a nack now made a second copy
        try:
            await self._give_back(process_queue, message, _TAKEN_BACK_LEVEL)
        except NeveError as error:
            log.warning("%s could not be sent back: %s", message.msg_id, error)
            process_queue.taken_back.remove(message.queue_offset)
            return False
        return True
