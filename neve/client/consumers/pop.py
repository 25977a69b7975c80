"""A member of a group that pops: the broker hands each message to one member for a while and tracks it.

    assignment ──▶ a pop loop for each assigned queue ──▶ buffer ──▶ application ──▶ ack, or visible again later
               └─▶ %RETRY%group, pulled ─────────────────┘

A message that is neither acknowledged nor renewed in time is redelivered to any member.
"""

from __future__ import annotations

from collections.abc import Mapping

from neve.client.consumers.base import DeliveringConsumer
from neve.client.consumers.pop_source import PopSettings, PopSource
from neve.client.group.member import GroupMember, GroupProfile
from neve.client.group.pop_settle import Held
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Subscription
from neve.client.group.rebalance import Rebalancer, Rounds
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.client.trace.recorder import ConsumeTraces, Traces
from neve.errors import ClientError
from neve.remoting.names import RETRY_PREFIX


class PopConsumer(DeliveringConsumer):
    """`async with client.pop_consumer(...) as consumer: async for message in consumer: ...`."""

    def __init__(
        self,
        session: Session,
        group: str,
        topics: Mapping[str, Subscription],
        settings: PopSettings,
        traces: Traces | None,
    ) -> None:
        if not topics:
            raise ClientError("a consumer needs at least one topic")
        retry = {f"{RETRY_PREFIX}{group}": Subscription()}
        member = GroupMember(session, GroupProfile(group, start=settings.start), {**topics, **retry})
        rounds = Rounds()
        self.source = source = PopSource(
            session,
            group,
            settings,
            self,
            ConsumeTraces(traces, group),
            rounds=rounds,
            subscription=member.topics.__getitem__,
        )
        super().__init__(
            session,
            member,
            Rebalancer(session, lambda: member.topics, source.share, source, rounds, failures=source.failures),
            source,
            {Held: source, ProcessQueue: source.retries},
            auto_ack=settings.auto_ack,
            close_timeout=settings.close_timeout,
            takes_delay=True,
        )

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member pops, sorted; queue id -1 means all queues of that broker."""
        return sorted(self.source.popped_queues)
