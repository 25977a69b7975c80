"""A consumer that the application polls.

Its queues come from the group (`subscribe`) or from the application (`assign`), never from both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Self

from neve.client.consumers.lifecycle import Lifecycle
from neve.client.consumers.offset_control import OffsetControl
from neve.client.consumers.poll_source import LitePullSettings, PollSource
from neve.client.group.member import ClusterShare, GroupMember, GroupProfile
from neve.client.group.ownership import Owner, PendingWork, current_owner
from neve.client.group.pull import Puller, Subscription, subscription
from neve.client.group.rebalance import Rebalancer, Rounds
from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.client.trace.recorder import ConsumeTraces, Traces
from neve.errors import NeveError


class LitePullConsumer(OffsetControl):
    """`async with client.lite_pull_consumer("group") as consumer: await consumer.subscribe("topic")`, then `poll`."""

    source: PollSource

    def __init__(self, session: Session, group: str, settings: LitePullSettings, traces: Traces | None) -> None:
        self._session = session
        self._settings = settings
        self.group = group
        profile = GroupProfile(group, consume_type="CONSUME_ACTIVELY", start=settings.start)
        self._member = member = GroupMember(session, profile, {})
        rounds = Rounds()
        self.source = source = PollSource(
            session,
            group,
            settings,
            ConsumeTraces(traces, group),
            rounds=rounds,
            subscription=lambda topic: member.topics.get(topic, Subscription()),
        )
        share = ClusterShare(session, member, settings.allocation)
        self._rebalancer = Rebalancer(session, lambda: member.topics, share, source, rounds, failures=source.failures)
        self._puller = Puller(session)
        self._lifecycle = Lifecycle(session, member, self._rebalancer, source, PendingWork(session.spawn, group))

    # ---- lifecycle

    async def __aenter__(self) -> Self:
        await self._lifecycle.enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._settings.auto_commit:
            self.source.ack_polled()
        await self.close()

    async def start(self) -> None:
        """Join the group, without queues. `async with` does this.

        Raises:
            ClientError: this client is already in the group.
        """
        await self._lifecycle.start()

    async def close(self) -> None:
        """Leave the group; with `auto_commit`, commit the acknowledged positions before."""
        await self.close_for(current_owner())

    async def close_for(self, closer: Owner) -> None:
        """Close the consumer. No message is owned by a task or thread: the next poll acknowledges them."""
        await self._lifecycle.close(closer)

    @property
    def is_closed(self) -> bool:
        """Whether the consumer is closed, or being closed."""
        return self._lifecycle.is_closed

    @property
    def problem(self) -> NeveError | None:
        """The latest error of a pull or rebalance that has not succeeded since; None if all succeed."""
        return self.source.failures.latest

    # ---- queues

    async def subscribe(self, topic: str, expression: str | Subscription = "*") -> None:
        """Read this member's share of the topic's queues. A further call for the topic changes the expression.

        Raises:
            ClientError: queues were assigned by `assign`.
        """
        self.source.choose(by_hand=False)
        await self._change_topics({**self._member.topics, topic: subscription(expression)})

    async def unsubscribe(self, topic: str) -> None:
        """Stop reading the topic, and commit its acknowledged positions."""
        await self._change_topics({name: what for name, what in self._member.topics.items() if name != topic})

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly these queues, independently of other members.

        Raises:
            ClientError: there are subscriptions.
        """
        await self.source.assign(queues)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return all readable queues of a topic, sorted."""
        return await self._puller.queues(topic)

    async def _change_topics(self, topics: Mapping[str, Subscription]) -> None:
        self._member.change_topics(topics)
        await self._member.refresh_routes()
        await self._session.membership.heartbeat()
        await self._rebalancer.once()

    # ---- messages

    async def poll(self, timeout: float = 5.0, max_count: int = 32) -> list[Message]:
        """Return the next messages, and acknowledge those of the poll before.

        With `auto_commit` the positions are committed within `commit_interval`, otherwise by `commit`.

        Args:
            timeout: the time to wait for a message in seconds; 0 takes only messages that have already arrived.
            max_count: the largest number of messages.

        Returns:
            The messages; none if the consumer is closed or no message arrived in time.

        Raises:
            BrokerError: a broker refuses messages to this consumer permanently; see `Consumer.receive`.
        """
        self._session.pool.check_usable()
        self.source.ack_polled()
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                while not self.is_closed:
                    if polled := self.source.take(max_count):
                        return polled
                    self.source.failures.raise_permanent()
                    await self.source.buffer.wait()
        except TimeoutError:
            if not limit.expired():
                raise
        return []

    async def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commit the positions behind the last poll, and wait until they are stored.

        Args:
            offsets: offsets to store instead; the positions stay as they are.

        Raises:
            NeveError: a broker did not store its part.
        """
        if offsets is not None:
            await self.source.offsets.store.write(offsets)
            return
        self.source.ack_polled()
        await self.source.offsets.commit()
