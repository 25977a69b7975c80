"""A member of a consumer group that pulls its share of the queues.

    rebalance ──▶ a pull loop for each queue ──▶ bounded buffer ──▶ application ──▶ ack ──▶ committed offset

Delivery is at least once: messages that are not acknowledged when a queue moves to another member are redelivered
there. In order, a queue has one reader in the group and delivers one message at a time. In broadcasting mode, every
member reads all queues and stores its offsets in a file.
"""

from __future__ import annotations

from collections.abc import Mapping

from neve.client.consumers.base import DeliveringConsumer
from neve.client.consumers.offset_control import OffsetControl
from neve.client.consumers.pull_source import PullSource
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.member import BroadcastShare, ClusterShare, GroupMember, GroupProfile
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Puller, Subscription
from neve.client.group.rebalance import Rebalancer, Rounds
from neve.client.group.received import Received
from neve.client.net.session import Session
from neve.client.trace.recorder import ConsumeTraces, Traces
from neve.errors import ClientError
from neve.remoting.names import RETRY_PREFIX

__all__ = ["Consumer", "Received"]


class Consumer(OffsetControl, DeliveringConsumer):
    """`async with client.consumer(...) as consumer: async for message in consumer: ...`."""

    source: PullSource

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
        self.source = source = PullSource(
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
            Rebalancer(session, lambda: member.topics, share, source, rounds, failures=source.failures),
            source,
            {ProcessQueue: source},
            auto_ack=settings.auto_ack,
            close_timeout=settings.close_timeout,
        )

    async def commit(self) -> None:
        """Commit the positions of all assigned queues, and wait until they are stored.

        Raises:
            NeveError: a broker did not store its part.
        """
        await self.source.offsets.commit()
