"""How far a consumer is in each of its queues: where it begins, where it is moved to, what it stores."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from neve.client.group.fetcher import Fetcher
from neve.client.group.offset_store import OffsetStore
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.errors import ClientError, NeveError
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)


class Positions:
    """Over the queues of a fetcher. `store` may be exchanged before the first queue is taken over."""

    def __init__(
        self, session: Session, fetcher: Fetcher, store: OffsetStore, start: str | int, *, in_order: bool = False
    ) -> None:
        self._session = session
        self._fetcher = fetcher
        self._puller = Puller(session)
        self._start = start
        self._in_order = in_order
        self.store = store

    def process_queue(self, queue: MessageQueue) -> ProcessQueue:
        """
        Raises:
            ClientError: the queue is not assigned.
        """
        process_queue = self._fetcher.assigned.get(queue)
        if process_queue is None:
            raise ClientError(f"{queue} is not assigned to this consumer")
        return process_queue

    def of_topic(self, topic: str) -> dict[MessageQueue, int]:
        """The next offset to be consumed of each of its queues."""
        return {
            queue: process_queue.committable
            for queue, process_queue in self._fetcher.assigned.items()
            if queue.topic == topic
        }

    async def take(self, queue: MessageQueue, *, locked_until: float | None = None) -> None:
        """Begins with a queue at the stored offset, else where `start` says; that is then stored at the next commit."""
        stored = await self.store.read(queue)
        if stored is not None:
            self.begin(queue, stored, locked_until=locked_until)
        else:
            self.begin(queue, await self._unstored(queue), locked_until=locked_until, is_stored=False)

    async def _unstored(self, queue: MessageQueue) -> int:
        """Retries are never skipped."""
        if queue.topic.startswith(RETRY_PREFIX) or self._start == "first":
            return await self._puller.min_offset(queue)
        if self._start == "last":
            return await self._puller.max_offset(queue)
        return await self._puller.offset_by_time(queue, int(self._start))

    def begin(
        self,
        queue: MessageQueue,
        offset: int,
        *,
        locked_until: float | None = None,
        is_paused: bool = False,
        is_stored: bool = True,
        keeper: object = None,
    ) -> None:
        """Fetches the queue from `offset` on; `keeper` was told that, without one it is who would be now."""
        process_queue = ProcessQueue(queue, offset, in_order=self._in_order)
        process_queue.locked_until = locked_until
        process_queue.last_lock_ms = self._session.options.now_ms() if locked_until is not None else 0
        process_queue.committed = offset if is_stored else -1
        process_queue.keeper = self.store.keeper(queue) if keeper is None else keeper
        process_queue.is_paused = is_paused
        process_queue.delivery.is_open = not is_paused
        self._fetcher.take_over(process_queue)

    def move(self, queue: MessageQueue, offset: int, *, keeper: object = None) -> None:
        """Goes on with `offset`, which `keeper` was told if there is one: what was fetched is dropped, acks of what was
        delivered count no more.
        """
        self.process_queue(queue)
        old = self._fetcher.drop(queue)
        is_stored = keeper is not None
        self.begin(
            queue,
            offset,
            locked_until=old.locked_until,
            is_paused=old.is_paused,
            is_stored=is_stored,
            keeper=keeper,
        )

    async def leave(self, queue: MessageQueue) -> None:
        """Ends with the queue and stores how far it came."""
        process_queue = self._fetcher.drop(queue)
        if self._is_owed(process_queue):
            await self.store.write({queue: process_queue.committable})

    async def commit(self, *, once: bool = False) -> None:
        """Stores what changed since the last time, and what its keeper may have lost; `once`: see the store."""
        process_queue = list(self._fetcher.assigned.values())
        offsets = {one: one.committable for one in process_queue if self._is_owed(one)}
        kept = await self.store.write({one.queue: offset for one, offset in offsets.items()}, once=once)
        for one, offset in offsets.items():
            one.committed, one.keeper = offset, kept[one.queue]

    def _is_owed(self, process_queue: ProcessQueue) -> bool:
        """Also what was stored already, where whoever has it may have lost it since."""
        if process_queue.committable != process_queue.committed:
            return True
        return process_queue.keeper is not self.store.keeper(process_queue.queue)

    async def commit_forever(self, group: str) -> None:
        while True:
            await asyncio.sleep(self._session.options.commit_interval)
            try:
                await self.commit(once=True)
            except NeveError as error:
                log.warning("commit of %s, tried again later: %s", group, error)

    async def last_commit(self, group: str) -> None:
        try:
            await self.commit()
        except NeveError as error:
            log.warning("the last commit of %s failed; some messages will come again: %s", group, error)

    # ---- pausing

    def pause(self, queues: Iterable[MessageQueue]) -> None:
        for process_queue in [self.process_queue(queue) for queue in queues]:
            process_queue.is_paused = True
            self._fetcher.buffer.close(process_queue.delivery)

    def resume(self, queues: Iterable[MessageQueue]) -> None:
        for process_queue in [self.process_queue(queue) for queue in queues]:
            process_queue.is_paused = False
            self.reopen(process_queue)
        self._fetcher.wake()

    def reopen(self, process_queue: ProcessQueue) -> None:
        """Hands out the queue's messages again, unless something else forbids it."""
        if not (process_queue.is_paused or process_queue.is_leaving):
            self._fetcher.buffer.open(process_queue.delivery)
