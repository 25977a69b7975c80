"""A consumer that is asked: `poll` gives the next messages, offsets move when the application says so.

Queues come from the group (`subscribe`) or are chosen by hand (`assign`), never both.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping
from typing import Self

from neve.client.consumers.life import Life
from neve.client.consumers.polled import LitePullSettings, Polled
from neve.client.group.in_work import Asker, Endings, current_asker
from neve.client.group.member import ClusterShare, GroupMember, GroupProfile
from neve.client.group.pull import Puller, Subscription, subscription
from neve.client.group.rebalance import Rebalancer, Rounds
from neve.client.model import Message, MessageQueue
from neve.client.net.session import Session
from neve.client.trace.recorder import ConsumeTraces, Traces


class LitePullConsumer:
    """`async with client.lite_pull_consumer("group") as consumer: await consumer.subscribe("topic")`, then `poll`."""

    def __init__(self, session: Session, group: str, settings: LitePullSettings, traces: Traces | None) -> None:
        self._session = session
        self._settings = settings
        self.group = group
        profile = GroupProfile(group, consume_type="CONSUME_ACTIVELY", start=settings.start)
        self._member = member = GroupMember(session, profile, {})
        rounds = Rounds()
        self.supply = Polled(
            session,
            group,
            settings,
            ConsumeTraces(traces, group),
            rounds=rounds,
            subscription=lambda topic: member.topics.get(topic, Subscription()),
        )
        share = ClusterShare(session, member, settings.allocation)
        self._rebalancer = Rebalancer(session, lambda: member.topics, share, self.supply, rounds)
        self._puller = Puller(session)
        self._life = Life(session, member, self._rebalancer, self.supply, Endings(session.spawn, group))

    # ---- life

    async def __aenter__(self) -> Self:
        await self._life.enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._settings.auto_commit:
            self.supply.all_done()
        await self.close()

    async def start(self) -> None:
        """Joins the group, without queues."""
        await self._life.start()

    async def close(self) -> None:
        """With `auto_commit` commits what is done with, and leaves the group."""
        await self.close_for(current_asker())

    async def close_for(self, closer: Asker) -> None:
        """As `close`: nothing is in work, only the next poll says what is done with."""
        await self._life.close(closer)

    @property
    def is_closed(self) -> bool:
        return self._life.is_closed

    # ---- which queues

    async def subscribe(self, topic: str, expression: str | Subscription = "*") -> None:
        """Reads this member's share of the topic's queues, from now on; again with another expression changes it.

        Raises:
            ClientError: queues were assigned by hand.
        """
        self.supply.choose(by_hand=False)
        await self._change_topics({**self._member.topics, topic: subscription(expression)})

    async def unsubscribe(self, topic: str) -> None:
        """Reads the topic no more; what was done with is committed."""
        await self._change_topics({name: what for name, what in self._member.topics.items() if name != topic})

    async def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Reads exactly these queues, whatever other members do; those that it had before are left.

        Raises:
            ClientError: there are subscriptions.
        """
        await self.supply.assign(queues)

    @property
    def assigned(self) -> list[MessageQueue]:
        """The queues that this member reads now, sorted."""
        return sorted(self.supply.fetcher.assigned)

    async def queues(self, topic: str) -> list[MessageQueue]:
        """All queues of a topic, to choose from."""
        return await self._puller.queues(topic)

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
        self.supply.all_done()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self.is_closed:
                    if polled := self.supply.take_out(max_count):
                        return polled
                    await self.supply.buffer.wait()
        return []

    # ---- offsets

    def position(self, queue: MessageQueue) -> int:
        """The offset up to which all of the queue is done with."""
        return self.supply.offsets.process_queue(queue).committable

    async def seek(self, queue: MessageQueue, offset: int) -> None:
        """The next poll goes on with `offset`; what was fetched is dropped."""
        await self.supply.seek(queue, offset)

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
            await self.supply.offsets.store.write(offsets)
            return
        self.supply.all_done()
        await self.supply.offsets.commit()

    async def committed(self, queue: MessageQueue) -> int | None:
        """The group's stored offset; None when it has none."""
        return await self._puller.committed(self.group, queue)

    async def pause(self, queues: Iterable[MessageQueue]) -> None:
        """Polls give nothing of them until `resume`."""
        self.supply.offsets.pause(queues)

    async def resume(self, queues: Iterable[MessageQueue]) -> None:
        self.supply.offsets.resume(queues)
