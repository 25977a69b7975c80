"""The source of a lite pull consumer: pulled messages, which the next poll acknowledges.

Queues come from the group, or from the application: then rebalances do not touch them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from neve.client.consumers.lifecycle import Jobs
from neve.client.group.allocation import Allocation
from neve.client.group.failures import Failures
from neve.client.group.fetcher import Fetcher, FlowLimits
from neve.client.group.group_requests import RunningState
from neve.client.group.offset_store import BrokerOffsetStore
from neve.client.group.ownership import Owner, current_owner
from neve.client.group.positions import Positions
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.rebalance import Rounds
from neve.client.group.received import Received
from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.client.times import Start
from neve.client.trace.format import Ended
from neve.client.trace.recorder import ConsumeTraces
from neve.errors import ClientError
from neve.remoting.codes import RequestCode

_POLLED_MAX = 64 << 20  # bytes of bodies in one poll; the last message may exceed it


@dataclass(frozen=True, slots=True)
class LitePullSettings:
    """The settings of a lite pull consumer; see `AsyncClient.lite_pull_consumer`."""

    start: Start = "latest"
    auto_commit: bool = True
    allocation: str | Allocation = "average"
    pull_batch: int = 10
    max_buffered: int = 1000
    long_poll: float = 20.0

    @property
    def limits(self) -> FlowLimits:
        return FlowLimits(batch=self.pull_batch, wait=self.long_poll, messages=self.max_buffered)


class PollSource:
    """Fetches the queues of one lite pull consumer. `rounds` are those of its rebalancer."""

    def __init__(
        self,
        session: Session,
        group: str,
        settings: LitePullSettings,
        traces: ConsumeTraces,
        *,
        rounds: Rounds,
        subscription: Callable[[str], Subscription],
    ) -> None:
        self._session = session
        self._group = group
        self._settings = settings
        self._traces = traces
        self._rounds = rounds
        self.fetcher = Fetcher(
            session,
            group,
            self,
            settings.limits,
            subscription=subscription,
            moved=self.seek,
            code=RequestCode.LITE_PULL_MESSAGE,
        )
        self.buffer = self.fetcher.buffer
        self.offsets = Positions(session, self.fetcher, BrokerOffsetStore(Puller(session), group), settings.start)
        self._by_hand: bool | None = None  # None: not yet known
        self._polled: list[Received] = []

    @property
    def failures(self) -> Failures:
        return self.fetcher.failures

    # ---- MessageSource

    async def open(self) -> None:
        """Do nothing: brokers store the offsets."""

    def jobs(self) -> Jobs:
        if self._settings.auto_commit:
            yield "commit", self.offsets.commit_forever(self._group)

    async def stop(self) -> None:
        await self.fetcher.close()

    def owners(self) -> Iterable[Owner]:
        """Return none: polled messages are acknowledged by the next poll only."""
        return ()

    async def finish(self, closer: Owner) -> None:
        if self._settings.auto_commit:
            await self.offsets.last_commit(self._group)
        for queue in list(self.fetcher.assigned):
            self.fetcher.drop(queue)

    # ---- messages

    def take(self, max_count: int) -> list[Message]:
        """Return the polled messages, or if there are none up to `max_count` buffered ones."""
        if not self._polled:
            self._fill(max_count)
        return list(self._polled)

    def _fill(self, max_count: int) -> None:
        now, owner = asyncio.get_running_loop().time(), current_owner()
        size = 0
        while len(self._polled) < max_count and size < _POLLED_MAX and (message := self.buffer.take()) is not None:
            size += len(message.body)
            process_queue: ProcessQueue = message.receipt
            process_queue.delivered(message, now, owner)
            process_queue.last_consume_ms = self._session.options.now_ms()
            self._traces.consumption_started(message)
            self._traces.ended(message, Ended.SUCCESS)  # at delivery, as Java's client does
            self._polled.append(message)

    def ack_polled(self) -> None:
        """Acknowledge the polled messages."""
        polled, self._polled = self._polled, []
        for message in polled:
            message.receipt.ack(message.queue_offset)

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """Acknowledge a message.

        Raises:
            ClientError: a redelivery is asked for. The application seeks back instead.
        """
        if delay_level is not None:
            raise ClientError("a lite pull consumer has no redelivery: seek back instead")
        message.receipt.ack(message.queue_offset)

    async def redeliver(self, message: Received, seconds: float) -> None:
        raise ClientError("a lite pull consumer has no redelivery: seek back instead")

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue a queue at `offset`, and drop its fetched messages."""
        async with self._rounds.lock:
            self.offsets.move(queue, offset)
            self._forget(queue)

    def _forget(self, queue: MessageQueue) -> None:
        self._polled = [message for message in self._polled if message.queue != queue]

    # ---- queues

    def choose(self, *, by_hand: bool) -> None:
        """Record whether the application assigns the queues.

        Raises:
            ClientError: the application chose otherwise before.
        """
        if self._by_hand is not None and self._by_hand != by_hand:
            raise ClientError("subscribe and assign exclude each other")
        self._by_hand = by_hand

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly these queues."""
        self.choose(by_hand=True)
        wanted = set(queues)
        async with self._rounds.lock:
            for queue in self.fetcher.assigned.keys() - wanted:
                await self.leave(queue)
            await self.take_queues(sorted(wanted - self.fetcher.assigned.keys()))

    # ---- Assignee of the rebalancer

    def held(self) -> Iterable[MessageQueue]:
        return [] if self._by_hand else list(self.fetcher.assigned)

    async def take_queues(self, queues: list[MessageQueue]) -> bool:
        for queue in queues:
            await self.offsets.take(queue)
        return True

    def keep(self, queue: MessageQueue) -> None:
        """Do nothing: a queue is left at once."""

    async def leave(self, queue: MessageQueue) -> bool:
        self._forget(queue)
        if self._settings.auto_commit:
            await self.offsets.leave(queue)
        else:
            self.fetcher.drop(queue)
        return True

    # ---- ManagedConsumer

    def wake(self) -> None:
        self._rounds.wake()

    async def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        for queue, offset in offsets.items():
            if queue in self.fetcher.assigned:
                await self.offsets.store.write({queue: offset})
                await self.seek(queue, offset)

    def positions(self, topic: str) -> dict[MessageQueue, int]:
        return self.offsets.of_topic(topic)

    def running_state(self) -> RunningState:
        status = self.fetcher.stats.status_table(asyncio.get_running_loop().time())
        return RunningState(False, self.fetcher.assigned, {}, status)
