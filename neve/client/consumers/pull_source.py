"""The source of consumers that pull: messages are fetched queue by queue from an offset, and acks move the offset.

A push consumer has all its messages from here, a pop consumer those of its retry topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from neve.client.consumers.lifecycle import Jobs
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.delivery import DeliveryBuffer
from neve.client.group.failures import Failures
from neve.client.group.fetcher import Fetcher
from neve.client.group.group_requests import RunningState
from neve.client.group.offset_store import BrokerOffsetStore, LocalFileOffsetStore
from neve.client.group.ownership import Owner, still_owned
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


class PullSource:
    """Pulls the queues that one member is assigned, and settles their messages.

    `rounds` are those of the rebalancer that assigns the queues. If a `buffer` is given, other sources fill it too, and
    its owner calls `fetcher.wake` when there is room in it.
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
        send_back = None if settings.broadcast else self._send_back
        self.settlement = Settlement(self.fetcher, self.offsets, send_back, settings.consume_timeout)
        self._locks = QueueLocks(session, group) if settings.in_order and not settings.broadcast else None

    @property
    def failures(self) -> Failures:
        return self.fetcher.failures

    # ---- MessageSource

    async def open(self) -> None:
        """Load the stored offsets of a broadcasting member.

        Raises:
            ClientError: they cannot be read.
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

    def owners(self) -> Iterable[Owner]:
        return [owner for process_queue in self.fetcher.assigned.values() for owner in process_queue.owners]

    async def finish(self, closer: Owner) -> None:
        await self.offsets.last_commit(self._group)
        # A queue with an owned message keeps its lock until the broker expires it: no other member may begin with it.
        free = [
            queue
            for queue, process_queue in self.fetcher.assigned.items()
            if not still_owned(process_queue.owners, closer)
        ]
        for queue in list(self.fetcher.assigned):
            self.fetcher.drop(queue)
        if self._locks is not None:
            await self._locks.unlock(free)

    def _offsets_path(self) -> Path:
        """Return RocketMQ's path. Its client id has no process in it, so that the next run finds the file."""
        directory = self._settings.offsets_directory
        root = Path.home() / ".rocketmq_offsets" if directory is None else Path(directory)
        ip = self._session.client_id.partition("@")[0]
        return root / f"{ip}@DEFAULT" / self._group / "offsets.json"

    # ---- Settler of pulled messages, whose receipt is a `ProcessQueue`

    def deliver(self, message: Received, now: float, owner: Owner) -> bool:
        process_queue: ProcessQueue = message.receipt
        if not process_queue.is_usable(now):  # its lock expired: deliver nothing until the queue is taken again
            self.buffer.close(process_queue.delivery)
            self.buffer.settled(process_queue.delivery)
            self.buffer.put(process_queue.delivery, [message], first=True)
            return False
        process_queue.delivered(message, now, owner)
        process_queue.last_consume_ms = self._session.options.now_ms()
        self._traces.consumption_started(message)
        return True

    def ack(self, message: Received) -> None:
        """Acknowledge the message; its offset is committed within `commit_interval` and at close."""
        process_queue: ProcessQueue = message.receipt
        counts = self.settlement.counts(process_queue, message)
        self._traces.ended(message, Ended.SUCCESS if counts else Ended.TIME_OUT)
        if counts:
            self.settlement.done(process_queue, message, is_consumed=True)
            self._release(process_queue, message)

    def nack(self, message: Received, delay_level: int) -> Coroutine[Any, Any, None] | None:
        """Give the message back. In broadcasting mode there is no redelivery: it is logged and skipped."""
        process_queue: ProcessQueue = message.receipt
        self._traces.ended(message, Ended.FAILED)
        if not self.settlement.counts(process_queue, message):
            return None
        process_queue.give_back(message.queue_offset)  # a second settlement, made meanwhile, has no effect
        self.fetcher.stats.failed(process_queue.queue.topic, asyncio.get_running_loop().time())
        retry = self._retry if self._locks is None else self._retry_in_order
        return retry(process_queue, message, delay_level)

    def redeliver(self, message: Received, seconds: float) -> None:
        """Redeliver the message from here: the delays of a broker have fixed levels."""
        process_queue: ProcessQueue = message.receipt
        self._traces.ended(message, Ended.FAILED)
        if self.settlement.counts(process_queue, message):
            self.settlement.repeat(process_queue, message.next_delivery(), seconds)

    def raised(self, message: Received, error: BaseException) -> None:
        self._traces.ended(message, Ended.EXCEPTION)

    async def _retry(self, process_queue: ProcessQueue, message: Received, delay_level: int) -> None:
        await self.settlement.retry(process_queue, message, delay_level)
        self._release(process_queue, message)

    async def _retry_in_order(self, process_queue: ProcessQueue, message: Received, delay_level: int) -> None:
        """Pause the queue and redeliver the message, or move it to the dead letter queue."""
        if delay_level < 0 or message.reconsume_times >= self._settings.redeliveries:
            try:
                await self._send_back.send_copy(message, message.reconsume_times)
            except NeveError as error:
                log.warning("dead letter not stored, redelivered: msg_id=%s cause=%s", message.msg_id, error)
            else:
                self.settlement.done(process_queue, message, is_consumed=False)
                self._release(process_queue, message)
                return
        self.buffer.close(process_queue.delivery)
        self.buffer.settled(process_queue.delivery)
        # While the dead letter queue is unreachable, the count of redeliveries stays at its limit.
        is_last = message.reconsume_times >= self._settings.redeliveries
        following = message if is_last else message.next_delivery()
        self.settlement.repeat(process_queue, following, self._settings.pause_after_nack)

    def _release(self, process_queue: ProcessQueue, message: Received) -> None:
        """In order, allow the delivery of the next message of the queue."""
        current = process_queue.delivery.current
        if current is not None and current.queue_offset == message.queue_offset:
            self.buffer.settled(process_queue.delivery)
            if process_queue.is_leaving:  # another member waits for the queue
                self._rounds.wake()

    # ---- Assignee of the rebalancer

    def held(self) -> Iterable[MessageQueue]:
        return list(self.fetcher.assigned)

    async def take_queues(self, queues: list[MessageQueue]) -> bool:
        locked_until = None
        mine = queues
        if self._locks is not None:
            locked_until = asyncio.get_running_loop().time() + LOCK_VALID_S
            granted, _ = await self._locks.lock(queues)
            mine = [queue for queue in queues if queue in granted]
        try:
            for queue in mine:
                await self.offsets.take(queue, locked_until=locked_until)
        finally:  # unlock queues that could not be taken
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
        if process_queue.delivery.current is not None:  # in order: the next member must not deliver before it
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
        """Continue a queue at `offset`; drop fetched messages and ignore acks of delivered ones."""
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
        """Renew all locks; drop a queue whose lock expired or was refused: another member may have read it."""
        assert self._locks is not None
        now = asyncio.get_running_loop().time()
        granted, unknown = await self._locks.lock(self.fetcher.assigned)
        for queue, process_queue in list(self.fetcher.assigned.items()):
            if queue in granted and process_queue.is_usable(now):
                process_queue.locked_until = now + LOCK_VALID_S
                process_queue.last_lock_ms = self._session.options.now_ms()
            elif queue not in unknown:
                log.warning("lock lost, queue dropped: queue=%s group=%s", queue, self._group)
                self.fetcher.drop(queue)
                self._rounds.wake()

    # ---- ManagedConsumer

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
