"""What is pulled: queue by queue from an offset on, settled into a position that is committed.

A push consumer has all its messages from here; a pop consumer those that brokers give out to be pulled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from neve.client.consumers.life import Jobs
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.delivery import DeliveryBuffer
from neve.client.group.fetcher import Fetcher
from neve.client.group.group_requests import RunningState
from neve.client.group.in_work import Asker, at_work
from neve.client.group.offset_store import BrokerOffsetStore, LocalFileOffsetStore
from neve.client.group.positions import Positions
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.queue_locks import LOCK_RENEWAL_S, LOCK_VALID_S, QueueLocks
from neve.client.group.rebalance import Rounds
from neve.client.group.received import Received, Settles
from neve.client.group.send_back import SendBack
from neve.client.group.settlement import Settlement
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.client.trace.format import Ended
from neve.client.trace.recorder import ConsumeTraces
from neve.errors import NeveError

log = logging.getLogger(__name__)


class Pulled:
    """The queues that one member pulls, and the way back of their messages.

    `rounds` are those of the rebalancer that gives out the queues. `buffer` is one that others fill too; its owner
    calls `fetcher.wake` when there is room in it.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        settings: ConsumerSettings,
        consumer: Settles,
        traces: ConsumeTraces,
        *,
        rounds: Rounds,
        subscription: Callable[[str], Subscription],
        buffer: DeliveryBuffer | None = None,
    ) -> None:
        self._session = session
        self._group = group
        self._settings = settings
        self._traces = traces
        self._rounds = rounds
        self.fetcher = Fetcher(
            session, group, consumer, settings.limits, subscription=subscription, moved=self.seek, buffer=buffer
        )
        self.buffer = self.fetcher.buffer
        store = BrokerOffsetStore(Puller(session), group)
        self.offsets = Positions(session, self.fetcher, store, settings.start, in_order=settings.in_order)
        self._send_back = SendBack(session, group, settings.redeliveries)
        again = None if settings.broadcast else self._send_back
        self.settlement = Settlement(self.fetcher, self.offsets, again, settings.consume_timeout)
        self._locks = QueueLocks(session, group) if settings.in_order and not settings.broadcast else None

    # ---- life

    async def open(self) -> None:
        """
        Raises:
            ClientError: the stored offsets cannot be read.
        """
        if self._settings.broadcast:
            self.offsets.store = LocalFileOffsetStore(self._offsets_path())
        await self.offsets.store.load()

    def jobs(self) -> Jobs:
        yield "commit", self.offsets.commit_forever(self._group)
        if self._locks is not None:
            yield "locks", self._renew_forever()
        if not self._settings.in_order:
            yield "consume timeout", self.settlement.forever()

    async def stop(self) -> None:
        await self.fetcher.close()

    def in_work(self) -> Iterable[Asker]:
        return [asker for process_queue in self.fetcher.assigned.values() for asker in process_queue.askers]

    async def finish(self, closer: Asker) -> None:
        await self.offsets.last_commit(self._group)
        # What is in work even now keeps its lock until the broker forgets it: no other member may begin with it.
        free = [
            queue for queue, process_queue in self.fetcher.assigned.items() if not at_work(process_queue.askers, closer)
        ]
        for queue in list(self.fetcher.assigned):
            self.fetcher.drop(queue)
        if self._locks is not None:
            await self._locks.unlock(free)

    def _offsets_path(self) -> Path:
        """RocketMQ's place: by client id, which has no process in it, so that the next run finds the file."""
        directory = self._settings.offsets_directory
        root = Path.home() / ".rocketmq_offsets" if directory is None else Path(directory)
        ip = self._session.client_id.partition("@")[0]
        return root / f"{ip}@DEFAULT" / self._group / "offsets.json"

    # ---- the way of a message (its receipt is its process queue)

    def hand_over(self, message: Received, now: float, asker: Asker) -> bool:
        process_queue: ProcessQueue = message.receipt
        if not process_queue.is_usable(now):  # the lock lapsed: nothing more until the queue is taken anew
            self.buffer.close(process_queue.delivery)
            self.buffer.settled(process_queue.delivery)
            self.buffer.put(process_queue.delivery, [message], first=True)
            return False
        process_queue.handed_over(message, now, asker)
        process_queue.last_consume_ms = self._session.options.now_ms()
        self._traces.begun(message)
        return True

    def ack(self, message: Received) -> None:
        """The offset is committed within `commit_interval` and at the end."""
        process_queue: ProcessQueue = message.receipt
        counts = self.settlement.counts(process_queue, message)
        self._traces.ended(message, Ended.SUCCESS if counts else Ended.TIME_OUT)
        if counts:
            self.settlement.done(process_queue, message, is_consumed=True)
            self._go_on(process_queue, message)

    def nack(self, message: Received, delay_level: int) -> Coroutine[Any, Any, None] | None:
        """Broadcasting there is no second delivery: the message is logged and passed over."""
        process_queue: ProcessQueue = message.receipt
        self._traces.ended(message, Ended.FAILED)
        if not self.settlement.counts(process_queue, message):
            return None
        process_queue.not_in_hand(
            message.queue_offset
        )  # settled once: whoever settles it again while this goes on comes late
        self.fetcher.stats.failed(process_queue.queue.topic, asyncio.get_running_loop().time())
        again = self._send_again if self._locks is None else self._nack_in_order
        return again(process_queue, message, delay_level)

    def let_go(self, message: Received, seconds: float) -> None:
        """A broker delays by its levels only, so the message waits here."""
        process_queue: ProcessQueue = message.receipt
        self._traces.ended(message, Ended.FAILED)
        if self.settlement.counts(process_queue, message):
            self.settlement.repeat(process_queue, message.again(), seconds)

    def raised(self, message: Received, error: BaseException) -> None:
        self._traces.ended(message, Ended.EXCEPTION)

    async def _send_again(self, process_queue: ProcessQueue, message: Received, delay_level: int) -> None:
        await self.settlement.retry(process_queue, message, delay_level)
        self._go_on(process_queue, message)

    async def _nack_in_order(self, process_queue: ProcessQueue, message: Received, delay_level: int) -> None:
        """The queue pauses and repeats the message; after too many times it goes to %DLQ%group."""
        if delay_level < 0 or message.reconsume_times >= self._settings.redeliveries:
            try:
                await self._send_back.send_copy(message, message.reconsume_times)
            except NeveError as error:
                log.warning("%s did not get to the dead letter queue, it is repeated: %s", message.msg_id, error)
            else:
                self.settlement.done(process_queue, message, is_consumed=False)
                self._go_on(process_queue, message)
                return
        self.buffer.close(process_queue.delivery)
        self.buffer.settled(process_queue.delivery)
        # It counts no further while the dead letter queue cannot be reached.
        again = message if message.reconsume_times >= self._settings.redeliveries else message.again()
        self.settlement.repeat(process_queue, again, self._settings.pause_after_nack)

    def _go_on(self, process_queue: ProcessQueue, message: Received) -> None:
        """In order the next message of the queue may come."""
        in_hand = process_queue.delivery.in_hand
        if in_hand is not None and in_hand.queue_offset == message.queue_offset:
            self.buffer.settled(process_queue.delivery)
            if process_queue.is_leaving:  # another member waits for the queue
                self._rounds.wake()

    # ---- queues come and go (Assignee of the rebalancer)

    def held(self) -> Iterable[MessageQueue]:
        return list(self.fetcher.assigned)

    async def take(self, queues: list[MessageQueue]) -> bool:
        locked_until = None
        mine = queues
        if self._locks is not None:
            locked_until = asyncio.get_running_loop().time() + LOCK_VALID_S
            granted, _ = await self._locks.lock(queues)
            mine = [queue for queue in queues if queue in granted]
        try:
            for queue in mine:
                await self.offsets.take(queue, locked_until=locked_until)
        finally:  # none stays locked for nobody
            if self._locks is not None and (unread := [one for one in mine if one not in self.fetcher.assigned]):
                await self._locks.unlock(unread)
        return len(mine) == len(queues)

    def keep(self, queue: MessageQueue) -> None:
        process_queue = self.offsets.process_queue(queue)
        if process_queue.is_leaving:
            process_queue.is_leaving = False
            self.offsets.reopen(process_queue)

    async def leave(self, queue: MessageQueue) -> bool:
        process_queue = self.offsets.process_queue(queue)
        if process_queue.delivery.in_hand is not None:  # the next member must not overtake it
            process_queue.is_leaving = True
            self.buffer.close(process_queue.delivery)
            return False
        try:
            await self.offsets.leave(queue)
        finally:
            if self._locks is not None:
                await self._locks.unlock([queue])
        return True

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Goes on with `offset`: what was fetched is dropped, acks of what was delivered count no more."""
        async with self._rounds.lock:
            self.offsets.process_queue(queue)
            kept = await self.offsets.store.write({queue: offset})
            self.offsets.move(queue, offset, keeper=kept[queue])

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(LOCK_RENEWAL_S)
            async with self._rounds.lock:
                await self.renew_locks()

    async def renew_locks(self) -> None:
        """Renews all; a queue whose lock lapsed or was refused is dropped: another member may have moved its offset."""
        assert self._locks is not None
        now = asyncio.get_running_loop().time()
        granted, unknown = await self._locks.lock(self.fetcher.assigned)
        for queue, process_queue in list(self.fetcher.assigned.items()):
            if queue in granted and process_queue.is_usable(now):
                process_queue.locked_until = now + LOCK_VALID_S
                process_queue.last_lock_ms = self._session.options.now_ms()
            elif queue not in unknown:
                log.warning("%s is not locked for %s any more", queue, self._group)
                self.fetcher.drop(queue)
                self._rounds.wake()

    # ---- what brokers ask

    def wake(self) -> None:
        self._rounds.wake()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self.fetcher.assigned:
                await self.seek(queue, offset)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return self.offsets.of_topic(topic)

    def running_state(self) -> RunningState:
        status = self.fetcher.stats.status_table(asyncio.get_running_loop().time())
        return RunningState(self._settings.in_order, self.fetcher.assigned, {}, status)
