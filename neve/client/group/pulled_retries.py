"""%RETRY%group beside a group that pops: what its members could not handle while they pulled.

The group's messages that were popped and failed come back with the next pop. Those that were pulled and failed are in
%RETRY%group, whose queues brokers give out to be pulled, whatever the mode of the topics: popped, they would get
receipts that lead nowhere. So Java's consumers pull them while they pop, and this does the same into the same buffer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from neve.client.group.delivery import DeliveryBuffer
from neve.client.group.fetcher import Fetcher, FlowLimits
from neve.client.group.in_work import Asker
from neve.client.group.offset_store import BrokerOffsetStore
from neve.client.group.positions import Positions
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.received import Received, Settles
from neve.client.group.send_back import SendBack
from neve.client.group.settlement import Settlement
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.errors import NeveError
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)


class PulledRetries:
    """This member's queues of %RETRY%group. The owner of `buffer` calls `wake` when there is room in it."""

    def __init__(
        self,
        session: Session,
        group: str,
        consumer: Settles,
        buffer: DeliveryBuffer,
        send_back: SendBack,
        *,
        max_buffered: int,
        consume_timeout: float,
    ) -> None:
        self._session = session
        self._group = group
        self.topic = f"{RETRY_PREFIX}{group}"
        self._fetcher = Fetcher(
            session,
            group,
            consumer,
            FlowLimits(messages=max_buffered),
            subscription=lambda _: Subscription(),
            moved=self._moved,
            buffer=buffer,
        )
        store = BrokerOffsetStore(Puller(session), group)
        self._positions = Positions(session, self._fetcher, store, "first")
        self._settlement = Settlement(self._fetcher, self._positions, send_back, consume_timeout)
        self._tasks: list[asyncio.Task[None]] = []
        self.stats = self._fetcher.stats

    # ---- life

    def start(self) -> None:
        self._tasks = [
            self._session.spawn(self._positions.commit_forever(self._group), f"commit {self.topic}"),
            self._session.spawn(self._settlement.forever(), f"consume timeout of {self.topic}"),
        ]

    async def stop(self) -> None:
        """Fetches no more; what was delivered may still be settled."""
        await self._fetcher.close()

    async def close(self) -> None:
        """Stores how far it came; what was not settled comes again, to another member."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self._fetcher.close(), return_exceptions=True)
        try:
            await self._positions.commit()
        except NeveError as error:
            log.warning("the last commit of %s failed; some messages will come again: %s", self.topic, error)
        for queue in list(self._fetcher.assigned):
            self._fetcher.drop(queue)

    def wake(self) -> None:
        """There is room in the buffer."""
        self._fetcher.wake()

    # ---- queues

    @property
    def assigned(self) -> Mapping[MessageQueue, ProcessQueue]:
        return self._fetcher.assigned

    async def take(self, queues: Iterable[MessageQueue]) -> None:
        for queue in queues:
            await self._positions.take(queue)

    async def leave(self, queue: MessageQueue) -> None:
        await self._positions.leave(queue)

    def move(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Goes on with these offsets, of the queues that are ours; the next commit stores them."""
        for queue, offset in offsets.items():
            if queue in self._fetcher.assigned:
                self._positions.move(queue, offset, is_stored=False)

    async def _moved(self, queue: MessageQueue, offset: int) -> None:
        self.move({queue: offset})

    # ---- messages

    @property
    def askers(self) -> list[Asker]:
        """Who has messages that are not settled, once for each."""
        return [asker for books in self._fetcher.assigned.values() for asker in books.askers]

    def handed_over(self, books: ProcessQueue, message: Received, now: float, asker: Asker) -> None:
        books.handed_over(message, now, asker)
        books.last_consume_ms = self._session.options.now_ms()

    def ack(self, books: ProcessQueue, message: Received) -> None:
        if self._settlement.counts(books, message):
            self._settlement.done(books, message, is_consumed=True)

    def nack(self, books: ProcessQueue, message: Received, delay_level: int) -> Coroutine[Any, Any, None] | None:
        """What sends it back to %RETRY%group, or to %DLQ%group after too many times; None when it is settled."""
        if not self._settlement.counts(books, message):
            return None
        books.not_in_hand(message.queue_offset)
        self.stats.failed(books.queue.topic, asyncio.get_running_loop().time())
        return self._settlement.retry(books, message, delay_level)

    def again_in(self, books: ProcessQueue, message: Received, seconds: float) -> None:
        """A broker delays by its levels only, so the message waits here."""
        if self._settlement.counts(books, message):
            self._settlement.repeat(books, message.again(), seconds)
