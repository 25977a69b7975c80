"""The offsets of a consumer's queues: where it begins, where it is moved to, what it commits."""

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
from neve.client.times import Start, start_position
from neve.errors import ClientError, NeveError
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)


class Positions:
    """The offsets of a fetcher's queues. `store` may be replaced before the first queue is taken."""

    def __init__(
        self, session: Session, fetcher: Fetcher, store: OffsetStore, start: Start, *, in_order: bool = False
    ) -> None:
        self._session = session
        self._fetcher = fetcher
        self._puller = Puller(session)
        self._start = start_position(start)
        self._in_order = in_order
        self.store = store

    def process_queue(self, queue: MessageQueue) -> ProcessQueue:
        """Return the state of an assigned queue.

        Raises:
            ClientError: the queue is not assigned.
        """
        process_queue = self._fetcher.assigned.get(queue)
        if process_queue is None:
            raise ClientError(f"{queue} is not assigned to this consumer")
        return process_queue

    def of_topic(self, topic: str) -> dict[MessageQueue, int]:
        """Return the positions of the assigned queues of a topic."""
        return {
            queue: process_queue.committable
            for queue, process_queue in self._fetcher.assigned.items()
            if queue.topic == topic
        }

    async def take(self, queue: MessageQueue, *, locked_until: float | None = None) -> None:
        """Begin a queue at its committed offset, else at the start position, which the next commit stores."""
        stored = await self.store.read(queue)
        if stored is not None:
            self.begin(queue, stored, locked_until=locked_until)
        else:
            self.begin(queue, await self._start_offset(queue), locked_until=locked_until, is_stored=False)

    async def _start_offset(self, queue: MessageQueue) -> int:
        """Return where a queue without a committed offset begins. Redeliveries are never skipped."""
        if queue.topic.startswith(RETRY_PREFIX) or self._start == "earliest":
            return await self._puller.min_offset(queue)
        if self._start == "latest":
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
        """Fetch a queue from `offset` on. `keeper` has stored the offset; by default the present keeper has."""
        process_queue = ProcessQueue(queue, offset, in_order=self._in_order)
        process_queue.locked_until = locked_until
        process_queue.last_lock_ms = self._session.options.now_ms() if locked_until is not None else 0
        process_queue.committed = offset if is_stored else -1
        process_queue.keeper = self.store.keeper(queue) if keeper is None else keeper
        process_queue.is_paused = is_paused
        process_queue.delivery.is_open = not is_paused
        self._fetcher.take_over(process_queue)

    def move(self, queue: MessageQueue, offset: int, *, keeper: object = None) -> None:
        """Continue a queue at `offset`, which `keeper` has stored if it is given.

        Fetched messages are dropped, and delivered ones can no longer be settled.
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
        """Stop a queue and commit its position."""
        process_queue = self._fetcher.drop(queue)
        if self._is_due(process_queue):
            await self.store.write({queue: process_queue.committable})

    async def commit(self, *, once: bool = False) -> None:
        """Commit the positions that changed since the last commit, or that the store may have lost.

        With `once` a failed request is not retried: the caller commits again later.
        """
        process_queues = list(self._fetcher.assigned.values())
        offsets = {one: one.committable for one in process_queues if self._is_due(one)}
        kept = await self.store.write({one.queue: offset for one, offset in offsets.items()}, once=once)
        for one, offset in offsets.items():
            one.committed, one.keeper = offset, kept[one.queue]

    def _is_due(self, process_queue: ProcessQueue) -> bool:
        """Return whether the position changed, or a new keeper may not have the committed one."""
        if process_queue.committable != process_queue.committed:
            return True
        return process_queue.keeper is not self.store.keeper(process_queue.queue)

    async def commit_forever(self, group: str) -> None:
        while True:
            await asyncio.sleep(self._session.options.commit_interval)
            try:
                await self.commit(once=True)
            except NeveError as error:
                log.warning("commit failed, retrying: group=%s cause=%s", group, error)

    async def last_commit(self, group: str) -> None:
        """Commit before the consumer closes; a failure is logged."""
        try:
            await self.commit()
        except NeveError as error:
            log.warning("commit at close failed, some messages are redelivered: group=%s cause=%s", group, error)

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
        """Deliver the messages of a queue again, unless it is paused or being left."""
        if not (process_queue.is_paused or process_queue.is_leaving):
            self._fetcher.buffer.open(process_queue.delivery)
