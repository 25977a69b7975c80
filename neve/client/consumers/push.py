"""A member of a consumer group: takes its share of the queues, pulls them, keeps the books, commits.

    rebalance ──▶ a pull loop for each queue ──▶ delivery queues (bounded) ──▶ application ──▶ ack ──▶ committed offset

Delivery is at least once: what was not acked when a queue moves to another member is delivered again there. In order,
a queue has one reader in the group and one message in hand at a time; broadcasting, every member reads all queues and
keeps its offsets in a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from neve.client.consumers.pulled import Pulled
from neve.client.consumers.shell import Shell
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.member import BroadcastShare, ClusterShare, GroupMember, GroupProfile
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.rebalance import Rebalancer, Rounds
from neve.client.group.received import Received
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.client.trace.recorder import ConsumeTraces, Traces
from neve.errors import ClientError, NeveError
from neve.remoting.names import RETRY_PREFIX

__all__ = ["Consumer", "Received"]


class Consumer(Shell):
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
        model = "BROADCASTING" if settings.broadcast else "CLUSTERING"
        profile = GroupProfile(group, message_model=model, start=settings.start)
        retry = {} if settings.broadcast else {f"{RETRY_PREFIX}{group}": Subscription()}
        member = GroupMember(session, profile, {**topics, **retry})
        clustered = ClusterShare(session, member, settings.allocation)
        share = BroadcastShare(session) if settings.broadcast else clustered
        rounds = Rounds()
        self.supply = Pulled(
            session,
            group,
            settings,
            self,
            ConsumeTraces(traces, group),
            rounds=rounds,
            subscription=member.topics.__getitem__,
        )
        self._puller = Puller(session)
        super().__init__(
            session,
            member,
            Rebalancer(session, lambda: member.topics, share, self.supply, rounds),
            self.supply,
            {ProcessQueue: self.supply},
            auto_ack=settings.auto_ack,
            close_timeout=settings.close_timeout,
        )

    # ---- settling

    def ack(self, message: Received) -> None:
        """Marks it done; the offset is committed within `commit_interval` and at close."""
        self._ack(message)

    async def nack(self, message: Received, delay_level: int = 0) -> None:
        """See `Received.nack`. Broadcasting there is no second delivery: the message is logged and passed over."""
        await self.settle(message, delay_level)

    # ---- offsets

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, sorted; those of the group's retry topic are not among them."""
        return sorted(queue for queue in self.supply.held() if not queue.topic.startswith(RETRY_PREFIX))

    @property
    def problem(self) -> NeveError | None:
        """Why nothing may come: the latest error of a pull that is tried again, and has not succeeded since."""
        return self.supply.fetcher.problem

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which all of the queue is acked."""
        return self.supply.offsets.process_queue(queue).committable

    async def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Fetches and delivers nothing more of them until `resume`; they stay assigned to this member."""
        self.supply.offsets.pause(queues)

    async def resume(self, queues: Iterable[MessageQueue]) -> None:
        self.supply.offsets.resume(queues)

    async def commit(self) -> None:
        """Stores the positions of all assigned queues and waits for the answers."""
        await self.supply.offsets.commit()

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """Goes on with `offset`: what was fetched is dropped, acks of what was delivered count no more."""
        await self.supply.seek(queue, offset)

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
