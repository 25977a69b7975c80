"""A member of a consumer group: takes its share of the queues, pulls them, keeps the books, commits.

    rebalance ──▶ one pull loop per assigned queue ──▶ lanes (bounded) ──▶ application ──▶ ack ──▶ committed offset

Delivery is at least once: what was not acked when a queue moves to another member is delivered again there. In order,
a queue has one reader in the group and one message in hand at a time; broadcasting, every member reads all queues and
keeps its offsets in a file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from neve.client.group.consume_loop import Handler, consume
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.delivery import Lane
from neve.client.group.fetcher import Fetcher
from neve.client.group.group_requests import DirectRun, GroupRequests, RunningState
from neve.client.group.in_work import Asker, AutoAcks, Endings, at_work, current_asker
from neve.client.group.member import BroadcastShare, ClusterShare, GroupMember, GroupProfile
from neve.client.group.offset_store import BrokerOffsetStore, LocalFileOffsetStore
from neve.client.group.positions import Positions
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.queue_locks import LOCK_RENEWAL_S, LOCK_VALID_S, QueueLocks
from neve.client.group.rebalance import Rebalancer
from neve.client.group.received import Received, received
from neve.client.group.send_back import SendBack
from neve.client.group.settlement import Settlement
from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.client.trace.format import Ended
from neve.client.trace.recorder import ConsumeTraces, Traces
from neve.errors import ClientError, NeveError
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)

__all__ = ["Consumer", "Received"]


class Consumer:
    """`async with client.consumer(...) as consumer: async for message in consumer: ...`"""

    def __init__(
        self,
        session: Session,
        group: str,
        topics: Mapping[str, Subscription],
        settings: ConsumerSettings,
        traces: Traces | None,
    ) -> None:
        if not topics:
            raise ClientError("a consumer needs at least one topic")
        self._session = session
        self._settings = settings
        model = "BROADCASTING" if settings.broadcast else "CLUSTERING"
        profile = GroupProfile(group, message_model=model, start=settings.start)
        retry = {} if settings.broadcast else {f"{RETRY_PREFIX}{group}": Subscription()}
        self.group = group
        self._member = GroupMember(session, profile, {**topics, **retry})
        clustered = ClusterShare(session, self._member, settings.allocation)
        share = BroadcastShare(session) if settings.broadcast else clustered
        self._rebalancer = Rebalancer(session, lambda: self._member.topics, share, self)
        self._puller = Puller(session)
        self._locks = QueueLocks(session, group) if settings.in_order and not settings.broadcast else None
        self._send_back = SendBack(session, group, settings.redeliveries)
        self._fetcher = Fetcher(
            session, group, self, settings.limits, subscription=self._member.topics.__getitem__, moved=self.seek
        )
        store = BrokerOffsetStore(self._puller, group)
        self._positions = Positions(session, self._fetcher, store, settings.start, in_order=settings.in_order)
        again = None if settings.broadcast else self._send_back
        self._settlement = Settlement(self._fetcher, self._positions, again, settings.consume_timeout)
        self._traces = ConsumeTraces(traces, group)
        self._buffer = self._fetcher.buffer
        self._direct = Lane()
        self._auto = AutoAcks()
        self._endings = Endings(session.spawn, group)
        self._rounds: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._started_ms = 0
        self._is_closed = False

    # ---- life

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:  # nobody will leave the block, so the group has to be left here
            await self.close()
            raise
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
        if self._tasks:
            return
        if self._settings.broadcast:
            self._positions.store = LocalFileOffsetStore(self._offsets_path())
        await self._positions.store.load()
        await self._member.join(GroupRequests(self._session, self._member, self))
        self._started_ms = self._session.options.now_ms()
        await self._rebalancer.once()
        self._rounds = self._session.spawn(self._rebalancer.forever(), f"rebalance {self.group}")
        self._tasks = [
            self._session.spawn(self._positions.commit_forever(self.group), f"commit {self.group}"),
        ]
        if self._locks is not None:
            self._tasks.append(self._session.spawn(self._renew_forever(), f"locks of {self.group}"))
        if not self._settings.in_order:
            self._tasks.append(self._session.spawn(self._settlement.forever(), f"consume timeout of {self.group}"))

    def close(self) -> Coroutine[Any, Any, None]:
        """Takes no more, waits at most `close_timeout` for what is in work, commits, and leaves the group.

        In order, queues are given back after that only: no other member begins with what is still in work here. A
        handler of `run` that calls this goes on at once: `run` returns when all of it is done.
        """
        return self.close_for(current_asker())

    async def close_for(self, closer: Asker) -> None:
        """As `close`, on behalf of `closer`: what that one has in hand is not waited for."""
        self._is_closed = True
        self._buffer.wake()
        await self._endings.close(self, lambda: self._end(closer))

    async def _end(self, closer: Asker) -> None:
        patience = self._settings.close_timeout
        if self._rounds is not None:
            await self._rebalancer.stop(self._rounds, patience)
        await self._fetcher.close()
        left = await self._endings.until_settled(self._in_work, closer, patience)
        if left:
            log.warning("%s: %d messages are still in work after %g s, they come again", self.group, left, patience)
        await self._endings.until_finished()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self.commit()
        except NeveError as error:
            log.warning("the last commit of %s failed; some messages will come again: %s", self.group, error)
        # What is in work even now keeps its lock until the broker forgets it: no other member may begin with it.
        free = [queue for queue, books in self._fetcher.assigned.items() if not at_work(books.askers, closer)]
        for queue in list(self._fetcher.assigned):
            self._fetcher.drop(queue)
        if self._locks is not None:
            await self._locks.unlock(free)
        await self._member.leave()

    def _in_work(self) -> Iterable[Asker]:
        return [asker for books in self._fetcher.assigned.values() for asker in books.askers]

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def _offsets_path(self) -> Path:
        """RocketMQ's place: by client id, which has no process in it, so that the next run finds the file."""
        directory = self._settings.offsets_directory
        root = Path.home() / ".rocketmq_offsets" if directory is None else Path(directory)
        ip = self._session.client_id.partition("@")[0]
        return root / f"{ip}@DEFAULT" / self.group / "offsets.json"

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
        if self._is_closed:
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
        try:
            async with asyncio.timeout(timeout):
                message = await self._next(asker)
        except TimeoutError:
            return None
        if self._settings.auto_ack and message is not None:
            self._auto.give(asker, message)
        return message

    def next(self) -> Coroutine[Any, Any, Received | None]:
        """The next message, whatever became of the one before; None when the consumer is closed."""
        return self._next(current_asker())

    async def _next(self, asker: Asker) -> Received | None:
        while not self._is_closed:
            self._session.pool.check_usable()
            if (message := self._take(asker)) is not None:
                return message
            await self._buffer.wait()
        return None

    async def run(self, handler: Handler, *, workers: int = 1, delay_level: int = 0) -> None:
        """Gives every message to `handler` until the consumer is closed: returning acks, raising nacks.

        Args:
            workers: so many handlers run beside each other; in order still only one for each queue.
            delay_level: of the nack, see `Received.nack`.
        """
        await consume(self, handler, workers, delay_level)
        await self.close()  # it was closed; what that has still to do is done when this returns

    def _take(self, asker: Asker) -> Received | None:
        now = asyncio.get_running_loop().time()
        while (message := self._buffer.take()) is not None:
            books = message.receipt
            if not isinstance(books, ProcessQueue):
                return message
            if books.is_usable(now):
                books.handed_over(message, now, asker)
                books.last_consume_ms = self._session.options.now_ms()
                self._traces.begun(message)
                return message
            self._put_back(books, message)  # the lock lapsed: nothing more until the queue is taken anew
        return None

    def _put_back(self, books: ProcessQueue, message: Received) -> None:
        self._buffer.close(books.lane)
        self._buffer.settled(books.lane)
        self._buffer.put(books.lane, [message], first=True)

    # ---- settling

    def _ack_done(self, asker: Asker) -> None:
        for message in self._auto.done_with(asker):
            self.ack(message)

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """See `Received.ack` and `Received.nack`."""
        if delay_level is None:
            self.ack(message)
        else:
            await self.nack(message, delay_level)

    async def failed(self, message: Received, error: BaseException, delay_level: int) -> None:
        """The application's handler raised: as a nack."""
        if isinstance(message.receipt, DirectRun):
            message.receipt.settle("CR_THROW_EXCEPTION", repr(error))
        self._traces.ended(message, Ended.EXCEPTION)
        await self.nack(message, delay_level)

    def ack(self, message: Received) -> None:
        """Marks it done; the offset is committed within `commit_interval` and at close."""
        self._auto.settled(message)
        books = message.receipt
        if isinstance(books, DirectRun):
            books.settle("CR_SUCCESS")
        if not isinstance(books, ProcessQueue):
            return
        counts = self._settlement.counts(books, message)
        self._traces.ended(message, Ended.SUCCESS if counts else Ended.TIME_OUT)
        if counts:
            self._done(books, message, is_consumed=True)

    async def nack(self, message: Received, delay_level: int = 0) -> None:
        """See `Received.nack`. Broadcasting there is no second delivery: the message is logged and passed over.

        It is finished even where the caller is cancelled: half done, it would leave the message nowhere.
        """
        self._auto.settled(message)
        books = message.receipt
        if isinstance(books, DirectRun):
            books.settle("CR_LATER")
        self._traces.ended(message, Ended.FAILED)
        if not isinstance(books, ProcessQueue) or not self._settlement.counts(books, message):
            return
        books.not_in_hand(message.queue_offset)  # settled once: whoever settles it again while this goes on comes late
        self._fetcher.stats.failed(books.queue.topic, asyncio.get_running_loop().time())
        again = self._send_again if self._locks is None else self._nack_in_order
        await self._endings.finish(again(books, message, delay_level))
        self._endings.settled()

    async def _send_again(self, books: ProcessQueue, message: Received, delay_level: int) -> None:
        await self._settlement.retry(books, message, delay_level)
        self._go_on(books, message)

    async def _nack_in_order(self, books: ProcessQueue, message: Received, delay_level: int) -> None:
        """The queue pauses and repeats the message; after too many times it goes to %DLQ%group."""
        if delay_level < 0 or message.reconsume_times >= self._settings.redeliveries:
            try:
                await self._send_back.send_copy(message, message.reconsume_times)
            except NeveError as error:
                log.warning("%s did not get to the dead letter queue, it is repeated: %s", message.msg_id, error)
            else:
                self._done(books, message, is_consumed=False)
                return
        self._buffer.close(books.lane)
        self._buffer.settled(books.lane)
        # It counts no further while the dead letter queue cannot be reached.
        again = message if message.reconsume_times >= self._settings.redeliveries else message.again()
        self._settlement.repeat(books, again, self._settings.pause_after_nack)

    def _done(self, books: ProcessQueue, message: Received, *, is_consumed: bool) -> None:
        self._settlement.done(books, message, is_consumed=is_consumed)
        self._endings.settled()
        self._go_on(books, message)

    def _go_on(self, books: ProcessQueue, message: Received) -> None:
        """In order the next message of the queue may come."""
        in_hand = books.lane.in_hand
        if in_hand is not None and in_hand.queue_offset == message.queue_offset:
            self._buffer.settled(books.lane)
            if books.is_leaving:  # another member waits for the queue
                self._rebalancer.wake()

    # ---- offsets

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, sorted; those of the group's retry topic are not among them."""
        return sorted(queue for queue in self._fetcher.assigned if not queue.topic.startswith(RETRY_PREFIX))

    @property
    def problem(self) -> NeveError | None:
        """Why nothing may come: the latest error of a pull that is tried again, and has not succeeded since."""
        return self._fetcher.problem

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which all of the queue is acked."""
        return self._positions.books(queue).committable

    async def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Fetches and delivers nothing more of them until `resume`; they stay assigned to this member."""
        self._positions.pause(queues)

    async def resume(self, queues: Iterable[MessageQueue]) -> None:
        self._positions.resume(queues)

    async def commit(self) -> None:
        """Stores the positions of all assigned queues and waits for the answers."""
        await self._positions.commit()

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Goes on with `offset`: what was fetched is dropped, acks of what was delivered count no more."""
        async with self._rebalancer.lock:
            self._positions.books(queue)
            await self._positions.store.write({queue: offset})
            self._positions.move(queue, offset, is_stored=True)

    async def seek_to_time(self, time_ms: int, queues: Iterable[MessageQueue] | None = None) -> None:
        """Goes on with the first message that was stored at `time_ms` or later, in each of the queues."""
        for queue in self.assigned if queues is None else list(queues):
            await self.seek(queue, await self._puller.offset_by_time(queue, time_ms))

    async def seek_to_begin(self) -> None:
        for queue in self.assigned:
            await self.seek(queue, await self._puller.min_offset(queue))

    async def seek_to_end(self) -> None:
        for queue in self.assigned:
            await self.seek(queue, await self._puller.max_offset(queue))

    # ---- queues come and go (Assignee of the rebalancer)

    def held(self) -> Iterable[MessageQueue]:
        return list(self._fetcher.assigned)

    async def take(self, queues: list[MessageQueue]) -> bool:
        locked_until = None
        mine = queues
        if self._locks is not None:
            locked_until = asyncio.get_running_loop().time() + LOCK_VALID_S
            granted, _ = await self._locks.lock(queues)
            mine = [queue for queue in queues if queue in granted]
        try:
            for queue in mine:
                await self._positions.take(queue, locked_until=locked_until)
        finally:  # none stays locked for nobody
            if self._locks is not None and (unread := [one for one in mine if one not in self._fetcher.assigned]):
                await self._locks.unlock(unread)
        return len(mine) == len(queues)

    def keep(self, queue: MessageQueue) -> None:
        books = self._positions.books(queue)
        if books.is_leaving:
            books.is_leaving = False
            self._positions.reopen(books)

    async def leave(self, queue: MessageQueue) -> bool:
        books = self._positions.books(queue)
        if books.lane.in_hand is not None:  # the next member must not overtake it
            books.is_leaving = True
            self._buffer.close(books.lane)
            return False
        try:
            await self._positions.leave(queue)
        finally:
            if self._locks is not None:
                await self._locks.unlock([queue])
        return True

    async def _renew_forever(self) -> None:
        while True:
            await asyncio.sleep(LOCK_RENEWAL_S)
            async with self._rebalancer.lock:
                await self.renew_locks()

    async def renew_locks(self) -> None:
        """Renews all; a queue whose lock lapsed or was refused is dropped: another member may have moved its offset."""
        assert self._locks is not None
        now = asyncio.get_running_loop().time()
        granted, unknown = await self._locks.lock(self._fetcher.assigned)
        for queue, books in list(self._fetcher.assigned.items()):
            if queue in granted and books.is_usable(now):
                books.locked_until = now + LOCK_VALID_S
                books.last_lock_ms = self._session.options.now_ms()
            elif queue not in unknown:
                log.warning("%s is not locked for %s any more", queue, self.group)
                self._fetcher.drop(queue)
                self._rebalancer.wake()

    # ---- what brokers ask (Asked of the group's requests)

    def wake(self) -> None:
        self._rebalancer.wake()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self._fetcher.assigned:
                await self.seek(queue, offset)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return {queue: books.committable for queue, books in self._fetcher.assigned.items() if queue.topic == topic}

    def running_state(self) -> RunningState:
        status = self._fetcher.stats.status_table(asyncio.get_running_loop().time())
        return RunningState(self._started_ms, self._settings.in_order, self._fetcher.assigned, {}, status)

    async def consume_directly(self, message: Message) -> tuple[str, str | None] | None:
        run = DirectRun()
        self._buffer.put(self._direct, [received(message, self, run)], first=True)
        try:
            return await run.verdict()
        finally:
            self._buffer.discard(self._direct)
