"""The consumers of one client: where each kind is made, with what can be set about it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

from neve.client.consumers.lite_pull import LitePullConsumer, LitePullSettings
from neve.client.consumers.pop import PopConsumer, PopSettings
from neve.client.consumers.push import Consumer
from neve.client.group.allocation import Allocation
from neve.client.group.consumer_settings import ConsumerSettings
from neve.client.group.in_work import Asker
from neve.client.group.pop_requests import POP_BATCH_MAX
from neve.client.group.pull import Subscription
from neve.client.net.session import Session

Topics = str | Iterable[str] | Mapping[str, str | Subscription]


class Consumers:
    """Makes them, and closes those that are still open with the client."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._open: list[Consumer | PopConsumer | LitePullConsumer] = []

    async def close(self, closer: Asker) -> None:
        """All of them, beside each other."""
        await asyncio.gather(*(consumer.close_for(closer) for consumer in self._open))

    def consumer(
        self,
        group: str,
        topics: Topics,
        *,
        start: str | int = "last",
        auto_ack: bool = True,
        in_order: bool = False,
        broadcast: bool = False,
        allocation: str | Allocation = "average",
        pull_batch: int = 32,
        max_buffered: int = 1000,
        max_buffered_per_queue: int = 1000,
        max_buffered_bytes: int = 64 << 20,
        long_poll: float = 15.0,
        max_redeliveries: int | None = None,
        pause_after_nack: float = 1.0,
        consume_timeout: float = 900.0,
        close_timeout: float = 15.0,
        offsets_directory: str | Path | None = None,
    ) -> Consumer:
        """A member of a group; enter it to join.

        Args:
            topics: a name, names, or {name: "*" | "TagA || TagB" | Subscription}.
            start: where a group without a stored offset begins: `first`, `last`, or ms since 1970.
            auto_ack: asking for the next message, or leaving the `with` block unharmed, acks the one that the same
                task (or thread) got before; else call `await message.ack()`.
            in_order: each queue has one reader in the group (locked at its broker) and one message in hand at a time;
                a nack repeats the message after `pause_after_nack` seconds, before any other of its queue.
            broadcast: every member reads every queue; offsets are kept in a file below `offsets_directory`
                (default `~/.rocketmq_offsets`), there are no retries.
            allocation: `average`, `circular`, `consistent_hash`, or one made with `neve.client.group.allocation`;
                the same for all members.
            max_buffered: no more is pulled while so many messages wait for the application; `max_buffered_bytes`
                likewise, and `max_buffered_per_queue` for each queue.
            max_redeliveries: after so many nacks a message goes to %DLQ%group; 16, in order without end.
            consume_timeout: seconds after which a message that was not settled is taken back and delivered again, so
                that the queue's offset can go on; settling it then has no effect. Not in order.
            close_timeout: seconds that closing waits for what is in work: for handlers of `run`, and for other tasks
                and threads that have not settled what they got. What is not settled by then comes again.

        Raises:
            ClientError: an argument is out of its range.
        """
        settings = ConsumerSettings(
            start=start,
            auto_ack=auto_ack,
            in_order=in_order,
            broadcast=broadcast,
            allocation=allocation,
            pull_batch=pull_batch,
            max_buffered=max_buffered,
            max_buffered_per_queue=max_buffered_per_queue,
            max_buffered_bytes=max_buffered_bytes,
            long_poll=long_poll,
            max_redeliveries=max_redeliveries,
            pause_after_nack=pause_after_nack,
            consume_timeout=consume_timeout,
            close_timeout=close_timeout,
            offsets_directory=offsets_directory,
        )
        consumer = Consumer(self._session, group, _subscriptions(topics), settings)
        self._keep(consumer)
        return consumer

    def pop_consumer(
        self,
        group: str,
        topics: Topics,
        *,
        start: str = "last",
        auto_ack: bool = True,
        in_order: bool = False,
        invisible: float = 60.0,
        hold_limit: float = 3600.0,
        close_timeout: float = 15.0,
        pop_batch: int = POP_BATCH_MAX,
        max_buffered: int = 96,
        long_poll: float = 15.0,
        max_redeliveries: int = 16,
    ) -> PopConsumer:
        """A member of a group that pops: the broker hands each message to one member for a while; enter it to join.

        Args:
            start: where a group that never popped here begins: `first` or `last`.
            in_order: no more of a queue until all that was popped from it is settled.
            invisible: seconds that a message is this member's own; renewed as long as it is held, so it is only the
                wait before others get what a dead member held.
            hold_limit: seconds after which a held message is renewed no more, or sent back if it was pulled from
                %RETRY%group.
            max_redeliveries: after so many a nack sends the message to %DLQ%group.
            topics, auto_ack, max_buffered, close_timeout: as of `consumer`.

        Raises:
            ClientError: an argument is out of its range.
        """
        settings = PopSettings(
            start=start,
            auto_ack=auto_ack,
            in_order=in_order,
            invisible=invisible,
            hold_limit=hold_limit,
            close_timeout=close_timeout,
            pop_batch=pop_batch,
            max_buffered=max_buffered,
            long_poll=long_poll,
            max_redeliveries=max_redeliveries,
        )
        consumer = PopConsumer(self._session, group, _subscriptions(topics), settings)
        self._keep(consumer)
        return consumer

    def lite_pull_consumer(
        self,
        group: str,
        *,
        start: str | int = "last",
        auto_commit: bool = True,
        allocation: str | Allocation = "average",
        pull_batch: int = 10,
        max_buffered: int = 1000,
        long_poll: float = 20.0,
    ) -> LitePullConsumer:
        """A consumer that is asked: enter it, `subscribe` or `assign`, then `poll`.

        Args:
            auto_commit: a poll means that the messages of the poll before are done with; else call `commit`.
            start, allocation, max_buffered: as of `consumer`.

        Raises:
            ClientError: an argument is out of its range.
        """
        settings = LitePullSettings(
            start=start,
            auto_commit=auto_commit,
            allocation=allocation,
            pull_batch=pull_batch,
            max_buffered=max_buffered,
            long_poll=long_poll,
        )
        consumer = LitePullConsumer(self._session, group, settings)
        self._keep(consumer)
        return consumer

    def _keep(self, consumer: Consumer | PopConsumer | LitePullConsumer) -> None:
        self._open = [*(known for known in self._open if not known.is_closed), consumer]


def subscription(expression: str | Subscription) -> Subscription:
    return expression if isinstance(expression, Subscription) else Subscription(expression)


def _subscriptions(topics: Topics) -> dict[str, Subscription]:
    if isinstance(topics, str):
        return {topics: Subscription()}
    if isinstance(topics, Mapping):
        return {topic: subscription(expression) for topic, expression in topics.items()}
    return {topic: Subscription() for topic in topics}
