"""What is polled: as pulled messages, but asking for more says that those of the poll before are done with.

Queues come from the group, or are chosen by hand: then no rebalance touches them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from neve.client.consumers.life import Jobs
from neve.client.group.allocation import Allocation
from neve.client.group.fetcher import Fetcher, FlowLimits
from neve.client.group.group_requests import RunningState
from neve.client.group.in_work import Asker, current_asker
from neve.client.group.offset_store import BrokerOffsetStore
from neve.client.group.positions import Positions
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.rebalance import Rounds
from neve.client.group.received import Received
from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.client.trace.format import Ended
from neve.client.trace.recorder import ConsumeTraces
from neve.errors import ClientError
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

    @property
    def limits(self) -> FlowLimits:
        return FlowLimits(batch=self.pull_batch, wait=self.long_poll, messages=self.max_buffered)


class Polled:
    """The queues of one member whose application polls. `rounds` are those of the rebalancer that gives them out."""

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
        self._by_hand: bool | None = None  # None: not chosen yet
        self._out: list[Received] = []

    # ---- life

    async def open(self) -> None:
        """The brokers have the offsets."""

    def jobs(self) -> Jobs:
        if self._settings.auto_commit:
            yield "commit", self.offsets.commit_forever(self._group)

    async def stop(self) -> None:
        await self.fetcher.close()

    def in_work(self) -> Iterable[Asker]:
        """Nobody: only the next poll says what is done with."""
        return ()

    async def finish(self, closer: Asker) -> None:
        if self._settings.auto_commit:
            await self.offsets.last_commit(self._group)
        for queue in list(self.fetcher.assigned):
            self.fetcher.drop(queue)

    # ---- messages

    def take_out(self, max_count: int) -> list[Message]:
        """Those that are out; when there are none, the next that have come."""
        if not self._out:
            self._fill(max_count)
        return list(self._out)

    def _fill(self, max_count: int) -> None:
        now, asker = asyncio.get_running_loop().time(), current_asker()
        size = 0
        while len(self._out) < max_count and size < _POLLED_MAX and (message := self.buffer.take()) is not None:
            size += len(message.body)
            process_queue: ProcessQueue = message.receipt
            process_queue.handed_over(message, now, asker)
            process_queue.last_consume_ms = self._session.options.now_ms()
            self._traces.begun(message)
            self._traces.ended(message, Ended.SUCCESS)  # at once, as Java's: nobody will say when it is done with
            self._out.append(message)

    def all_done(self) -> None:
        """What is out is done with."""
        polled, self._out = self._out, []
        for message in polled:
            message.receipt.ack(message.queue_offset)

    async def settle(self, message: Received, delay_level: int | None) -> None:
        """An ack counts at once. There is no nack: the application seeks back, or keeps the message itself."""
        if delay_level is not None:
            raise ClientError("a lite pull consumer has no retry")
        message.receipt.ack(message.queue_offset)

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """The next poll goes on with `offset`; what was fetched is dropped."""
        async with self._rounds.lock:
            self.offsets.move(queue, offset)
            self._forget(queue)

    def _forget(self, queue: MessageQueue) -> None:
        self._out = [message for message in self._out if message.queue != queue]

    # ---- which queues

    def choose(self, *, by_hand: bool) -> None:
        """
        Raises:
            ClientError: it was chosen otherwise before.
        """
        if self._by_hand is not None and self._by_hand != by_hand:
            raise ClientError("a lite pull consumer subscribes or is assigned queues by hand, not both")
        self._by_hand = by_hand

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Exactly these from now on."""
        self.choose(by_hand=True)
        wanted = set(queues)
        async with self._rounds.lock:
            for queue in self.fetcher.assigned.keys() - wanted:
                await self.leave(queue)
            await self.take(sorted(wanted - self.fetcher.assigned.keys()))

    # (Assignee of the rebalancer)

    def held(self) -> Iterable[MessageQueue]:
        return [] if self._by_hand else list(self.fetcher.assigned)

    async def take(self, queues: list[MessageQueue]) -> bool:
        for queue in queues:
            await self.offsets.take(queue)
        return True

    def keep(self, queue: MessageQueue) -> None:
        """Nothing was done towards leaving it."""

    async def leave(self, queue: MessageQueue) -> bool:
        self._forget(queue)
        if self._settings.auto_commit:
            await self.offsets.leave(queue)
        else:
            self.fetcher.drop(queue)
        return True

    # ---- what brokers ask

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
