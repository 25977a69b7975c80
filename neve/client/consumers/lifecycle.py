"""The start and the end of a consumer.

    start   open the source ──▶ join the group ──▶ first rebalance ──▶ background tasks
    close   stop rebalances ──▶ stop the source ──▶ wait for owned messages, at most `close_timeout` ──▶
            stop background tasks ──▶ commit ──▶ leave the group

The end runs once, also if it is requested several times. Each kind of consumer has its own `MessageSource`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from neve.client.group.delivery import DeliveryBuffer
from neve.client.group.failures import Failures
from neve.client.group.group_requests import GivesDirectly, GroupRequests, ManagedConsumer
from neve.client.group.member import GroupMember
from neve.client.group.ownership import Owner, PendingWork, current_owner
from neve.client.group.rebalance import Rebalancer
from neve.client.net.session import Session

log = logging.getLogger(__name__)

Jobs = Iterable[tuple[str, Coroutine[Any, Any, None]]]


class MessageSource(ManagedConsumer, Protocol):
    """Fetches the messages of one kind of consumer."""

    @property
    def buffer(self) -> DeliveryBuffer:
        """The messages that wait for the application."""

    @property
    def failures(self) -> Failures:
        """The failing operations of this consumer."""

    async def open(self) -> None:
        """Prepare before the consumer joins its group. A failure leaves nothing behind."""

    def jobs(self) -> Jobs:
        """Return background tasks and their names, which run from the first rebalance on."""

    async def stop(self) -> None:
        """Stop requesting messages, and give back those that the application has not received."""

    def owners(self) -> Iterable[Owner]:
        """Return the owners of messages that are not settled, once for each message."""

    async def finish(self, closer: Owner) -> None:
        """Commit to the brokers. Only `closer`, which waits for this, may own unsettled messages now."""


class Lifecycle:
    """The lifecycle of one consumer.

    `rebalancer` assigns queues to the source. `direct` delivers a message that an administrator sent.
    """

    def __init__(
        self,
        session: Session,
        member: GroupMember,
        rebalancer: Rebalancer,
        source: MessageSource,
        pending: PendingWork,
        *,
        close_timeout: float = 0.0,
        direct: GivesDirectly | None = None,
    ) -> None:
        self._session = session
        self._member = member
        self._rebalancer = rebalancer
        self._source = source
        self._pending = pending
        self._close_timeout = close_timeout
        self._direct = direct
        self._rounds: asyncio.Task[None] | None = None
        self._jobs: list[asyncio.Task[None]] = []
        self.is_closed = False

    async def enter(self) -> None:
        """Start the consumer at the beginning of an `async with` block."""
        try:
            await self.start()
        except BaseException:  # `__aexit__` is not called, so the group is left here
            await self.close(current_owner())
            raise

    async def start(self) -> None:
        """Join the group and get the first assignment of queues.

        Raises:
            ClientError: this client is already in the group, or the stored offsets cannot be read.
            BrokerError: a broker rejected a filter expression.
        """
        if self._rounds is not None:
            return
        source, group = self._source, self._member.group
        await source.open()
        await self._member.join(GroupRequests(self._session, self._member, source, self._direct))
        await self._rebalancer.once()
        self._rounds = self._spawn(self._rebalancer.forever(), f"rebalance {group}")
        self._jobs = [self._spawn(work, f"{name} of {group}") for name, work in source.jobs()]

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._source.failures.watch(self._session.spawn(work, name))

    async def close(self, closer: Owner) -> None:
        """Close the consumer without waiting for messages that `closer` owns. In a handler, return at once."""
        self.is_closed = True
        self._source.buffer.wake()
        await self._pending.close(lambda: self._end(closer))

    async def _end(self, closer: Owner) -> None:
        source, timeout, group = self._source, self._close_timeout, self._member.group
        if self._rounds is not None:
            await self._rebalancer.stop(self._rounds, timeout)
        await source.stop()
        left = await self._pending.until_settled(source.owners, closer, timeout)
        if left:
            log.warning("unsettled at close, redelivered: group=%s count=%d after_s=%g", group, left, timeout)
        await self._pending.until_finished()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await source.finish(closer)
        await self._member.leave()
