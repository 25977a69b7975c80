"""A member of a group that pops: the broker hands each message to one member for a while, and keeps the books itself.

    query assignment ──▶ one pop loop per assigned queue ──▶ deliveries ──▶ application ──▶ ack, or visible again later
                     └─▶ %RETRY%group, pulled ─────────────┘

What is neither acknowledged nor renewed in time comes again, to any member.
"""

from __future__ import annotations

from collections.abc import Mapping

from neve.client.consumers.popped import Popping, PopSettings
from neve.client.consumers.shell import Shell
from neve.client.group.member import GroupMember, GroupProfile
from neve.client.group.pop_settle import Held
from neve.client.group.process_queue import ProcessQueue
from neve.client.group.pull import Subscription
from neve.client.group.rebalance import Rebalancer, Rounds
from neve.client.group.received import Received
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.client.trace.recorder import ConsumeTraces, Traces
from neve.errors import ClientError, NeveError
from neve.remoting.names import RETRY_PREFIX


class PopConsumer(Shell):
    """`async with client.pop_consumer(...) as consumer: async for message in consumer: ...`"""

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
        self.supply = Popping(
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
            Rebalancer(session, lambda: member.topics, self.supply.share, self.supply, rounds),
            self.supply,
            {Held: self.supply, ProcessQueue: self.supply.retries},
            auto_ack=settings.auto_ack,
            close_timeout=settings.close_timeout,
        )

    @property
    def problem(self) -> NeveError | None:
        """As of `Consumer.problem`, of pops."""
        return self.supply.problem

    @property
    def assigned(self) -> list[MessageQueue]:
        """What this member pops, sorted; queue id -1 is any queue of that broker."""
        return sorted(self.supply.popped_queues)

    async def change_invisible(self, message: Received, seconds: float) -> None:
        """Lets go of the message: it comes again `seconds` from now, to any member."""
        await self._let_go(message, seconds)
