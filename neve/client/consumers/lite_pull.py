"""A consumer that is asked: `poll` gives the next messages, offsets move when the application says so.

Queues come from the group (`subscribe`) or are chosen by hand (`assign`), never both.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from neve.client.group.allocation import Allocation
from neve.client.group.fetcher import Fetcher, FlowLimits
from neve.client.group.group_requests import GroupRequests, RunningState
from neve.client.group.in_work import Asker, Endings, current_asker
from neve.client.group.member import ClusterShare, GroupMember, GroupProfile
from neve.client.group.offset_store import BrokerOffsetStore
from neve.client.group.positions import Positions
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription, subscription
from neve.client.group.rebalance import Rebalancer
from neve.client.group.received import Received
from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.client.trace.format import Ended
from neve.client.trace.recorder import ConsumeTraces, Traces
from neve.errors import ClientError, NeveError
from neve.remoting.codes import RequestCode

log = logging.getLogger(__name__)

_POLLED_MAX = 64 << 20  # bytes of bodies that one poll gives, or passes by one message


@dataclass(frozen=True, slots=True)
class LitePullSettings:
    """See `AsyncClient.lite_pull_consumer`."""

    start: str | int = "last"
    auto_commit: bool = True
    allocation: str | Allocation = "average"
    pull_batch: int = 10
    max_buffered: int = 1000
    long_poll: float = 20.0


class LitePullConsumer:
    """`async with client.lite_pull_consumer("group") as consumer: await consumer.subscribe("topic")`, then `poll`."""

    def __init__(self, session: Session, group: str, settings: LitePullSettings, traces: Traces | None) -> None:
        self._session = session
        self._settings = settings
        self.group = group
        profile = GroupProfile(group, consume_type="CONSUME_ACTIVELY", start=settings.start)
        self._member = GroupMember(session, profile, {})
        share = ClusterShare(session, self._member, settings.allocation)
        self._rebalancer = Rebalancer(session, lambda: self._member.topics, share, self)
        self._puller = Puller(session)
        self._fetcher = Fetcher(
            session,
            group,
            self,
            FlowLimits(batch=settings.pull_batch, wait=settings.long_poll, messages=settings.max_buffered),
            subscription=lambda topic: self._member.topics.get(topic, Subscription()),
            moved=self.seek,
            code=RequestCode.LITE_PULL_MESSAGE,
        )
        self._positions = Positions(session, self._fetcher, BrokerOffsetStore(self._puller, group), settings.start)
        self._traces = ConsumeTraces(traces, group)
        self._out: list[Received] = []
        self._by_hand: bool | None = None  # None: neither `subscribe` nor `assign` yet
        self._tasks: list[asyncio.Task[None]] = []
        self._endings = Endings(session.spawn, group)
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

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._settings.auto_commit:
            self._polled_is_done()
        await self.close()

    async def start(self) -> None:
        """Joins the group, without queues."""
        if self._tasks:
            return
        await self._member.join(GroupRequests(self._session, self._member, self))
        self._started_ms = self._session.options.now_ms()
        self._tasks = [
            self._session.spawn(self._rebalancer.forever(), f"rebalance {self.group}"),
            self._session.spawn(self._commit_forever(), f"commit {self.group}"),
        ]

    async def close(self) -> None:
        """With `auto_commit` commits what is done with, and leaves the group."""
        self._is_closed = True
        self._fetcher.buffer.wake()
        await self._endings.close(self, self._end)

    async def close_for(self, _: Asker) -> None:
        """As `close`: nothing is in work, only the next poll says what is done with."""
        await self.close()

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, self._fetcher.close(), return_exceptions=True)
        if self._settings.auto_commit:
            try:
                await self._positions.commit()
            except NeveError as error:
                log.warning("the last commit of %s failed; some messages will come again: %s", self.group, error)
        for queue in list(self._fetcher.assigned):
            self._fetcher.drop(queue)
        await self._member.leave()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # ---- which queues

    async def subscribe(self, topic: str, expression: str | Subscription = "*") -> None:
        """Reads this member's share of the topic's queues, from now on; again with another expression changes it.

        Raises:
            ClientError: queues were assigned by hand.
        """
        self._choose(by_hand=False)
        await self._change_topics({**self._member.topics, topic: subscription(expression)})

    async def unsubscribe(self, topic: str) -> None:
        """Reads the topic no more; what was done with is committed."""
        await self._change_topics({name: what for name, what in self._member.topics.items() if name != topic})

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Reads exactly these queues, whatever other members do; those that it had before are left.

        Raises:
            ClientError: there are subscriptions.
        """
        self._choose(by_hand=True)
        wanted = set(queues)
        async with self._rebalancer.lock:
            for queue in self._fetcher.assigned.keys() - wanted:
                await self.leave(queue)
            await self.take(sorted(wanted - self._fetcher.assigned.keys()))

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, sorted."""
        return sorted(self._fetcher.assigned)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic, to choose from."""
        return await self._puller.queues(topic)

    def _choose(self, *, by_hand: bool) -> None:
        if self._by_hand is not None and self._by_hand != by_hand:
            raise ClientError("a lite pull consumer subscribes or is assigned queues by hand, not both")
        self._by_hand = by_hand

    async def _change_topics(self, topics: Mapping[str, Subscription]) -> None:
        self._member.change_topics(topics)
        await self._member.refresh_routes()
        await self._session.heartbeat()
        await self._rebalancer.once()

    # ---- messages

    async def poll(self, timeout: float = 5.0, max_count: int = 32) -> list[Message]:
        """Up to `max_count` next messages; none when none came within `timeout` seconds.

        Asking means that the messages of the call before are done with; with `auto_commit` that is stored within
        `commit_interval`, else by `commit`.
        """
        self._session.pool.check_usable()
        self._polled_is_done()
        try:
            async with asyncio.timeout(timeout):
                while not self._out and not self._is_closed:
                    self._take(max_count)
                    if not self._out:
                        await self._fetcher.buffer.wait()
        except TimeoutError:
            return []
        return list(self._out)

    def _take(self, max_count: int) -> None:
        now, asker = asyncio.get_running_loop().time(), current_asker()
        size = 0
        while (
            len(self._out) < max_count and size < _POLLED_MAX and (message := self._fetcher.buffer.take()) is not None
        ):
            size += len(message.body)
            books: ProcessQueue = message.receipt
            books.handed_over(message, now, asker)
            books.last_consume_ms = self._session.options.now_ms()
            self._traces.begun(message)
            self._traces.ended(message, Ended.SUCCESS)  # at once, as Java's: nobody will say when it is done with
            self._out.append(message)

    def _polled_is_done(self) -> None:
        polled, self._out = self._out, []
        for message in polled:
            message.receipt.ack(message.queue_offset)

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """An ack counts at once. There is no nack: the application seeks back, or keeps the message itself."""
        if delay_level is not None:
            raise ClientError("a lite pull consumer has no retry")
        message.receipt.ack(message.queue_offset)

    # ---- offsets

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which all of the queue is done with."""
        return self._positions.books(queue).committable

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """The next poll goes on with `offset`; what was fetched is dropped."""
        async with self._rebalancer.lock:
            self._positions.move(queue, offset, is_stored=False)
            self._out = [message for message in self._out if message.queue != queue]

    async def seek_to_begin(self, queue: MessageQueue) -> None:
        await self.seek(queue, await self._puller.min_offset(queue))

    async def seek_to_end(self, queue: MessageQueue) -> None:
        await self.seek(queue, await self._puller.max_offset(queue))

    async def seek_to_time(self, queue: MessageQueue, time_ms: int) -> None:
        """Goes on with the first message that was stored at `time_ms` or later."""
        await self.seek(queue, await self._puller.offset_by_time(queue, time_ms))

    async def offset_for_time(self, queue: MessageQueue, time_ms: int) -> int:
        """The first offset that was stored at `time_ms` or later."""
        return await self._puller.offset_by_time(queue, time_ms)

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Stores these offsets, or without any how far the last poll came in each queue; waits for the answers."""
        if offsets is not None:
            await self._positions.store.write(offsets)
            return
        self._polled_is_done()
        await self._positions.commit()

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's stored offset; None when it has none."""
        return await self._puller.committed(self.group, queue)

    async def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Polls give nothing of them until `resume`."""
        self._positions.pause(queues)

    async def resume(self, queues: Iterable[MessageQueue]) -> None:
        self._positions.resume(queues)

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._session.options.commit_interval)
            if self._settings.auto_commit:
                try:
                    await self._positions.commit(oneway=True)
                except NeveError as error:
                    log.warning("commit of %s, tried again later: %s", self.group, error)

    # ---- queues come and go (Assignee of the rebalancer)

    def held(self) -> Iterable[MessageQueue]:
        return [] if self._by_hand else list(self._fetcher.assigned)

    async def take(self, queues: list[MessageQueue]) -> bool:
        for queue in queues:
            await self._positions.take(queue)
        return True

    def keep(self, queue: MessageQueue) -> None:
        """Nothing was done towards leaving it."""

    async def leave(self, queue: MessageQueue) -> bool:
        self._out = [message for message in self._out if message.queue != queue]
        if self._settings.auto_commit:
            await self._positions.leave(queue)
        else:
            self._fetcher.drop(queue)
        return True

    # ---- what brokers ask (Asked of the group's requests)

    def wake(self) -> None:
        self._rebalancer.wake()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self._fetcher.assigned:
                await self._positions.store.write({queue: offset})
                await self.seek(queue, offset)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return {queue: books.committable for queue, books in self._fetcher.assigned.items() if queue.topic == topic}

    def running_state(self) -> RunningState:
        status = self._fetcher.stats.status_table(asyncio.get_running_loop().time())
        return RunningState(self._started_ms, False, self._fetcher.assigned, {}, status)

    async def consume_directly(self, message: Message) -> tuple[str, str | None] | None:
        return None
