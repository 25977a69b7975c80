"""A consumer's life: it joins its group, takes its share of queues, works, and leaves in the order that loses nothing.

    open ──▶ join ──▶ first share ──▶ jobs …            start
    no more rounds ──▶ no more messages ──▶ what is in work is settled, or given up after `close_timeout`
        ──▶ no more jobs ──▶ the last word to the brokers ──▶ leave          close, once, whoever asks

What differs between consumers, where their messages come from, is a `Supply`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any, Protocol

from neve.client.group.delivery import DeliveryBuffer
from neve.client.group.group_requests import GivesDirectly, GroupRequests, ManagedConsumer
from neve.client.group.in_work import Asker, Endings, current_asker
from neve.client.group.member import GroupMember
from neve.client.group.rebalance import Rebalancer
from neve.client.net.session import Session

log = logging.getLogger(__name__)

Jobs = Iterable[tuple[str, Coroutine[Any, Any, None]]]


class Supply(ManagedConsumer, Protocol):
    """Where one kind of consumer has its messages from, and how it ends with them."""

    @property
    def buffer(self) -> DeliveryBuffer:
        """Where they wait for the application."""

    async def open(self) -> None:
        """Before the group hears of us: what can fail without leaving anything behind."""

    def jobs(self) -> Jobs:
        """What is done beside the application, with names, from the first share of queues on."""

    async def stop(self) -> None:
        """Asks brokers for no more, and gives back what nobody saw."""

    def in_work(self) -> Iterable[Asker]:
        """Who has messages that are not settled."""

    async def finish(self, closer: Asker) -> None:
        """The last word to the brokers, when nothing more will be settled but by `closer`, who waits for this."""


class Life:
    """Of one consumer.

    `rebalancer` gives queues to the supply; `direct` gives the application a message that an administrator sent.
    """

    def __init__(
        self,
        session: Session,
        member: GroupMember,
        rebalancer: Rebalancer,
        supply: Supply,
        endings: Endings,
        *,
        close_timeout: float = 0.0,
        direct: GivesDirectly | None = None,
    ) -> None:
        self._session = session
        self._member = member
        self._rebalancer = rebalancer
        self._supply = supply
        self._endings = endings
        self._close_timeout = close_timeout
        self._direct = direct
        self._rounds: asyncio.Task[None] | None = None
        self._jobs: list[asyncio.Task[None]] = []
        self.is_closed = False

    async def enter(self) -> None:
        """As `start`, at the beginning of a block."""
        try:
            await self.start()
        except BaseException:  # nobody will leave the block, so the group has to be left here
            await self.close(current_asker())
            raise

    async def start(self) -> None:
        """Joins the group and takes the first share of queues.

        Raises:
            ClientError: this client is already in the group, or the stored offsets cannot be read.
            BrokerError: a broker refuses a filter expression.
        """
        if self._rounds is not None:
            return
        supply, group = self._supply, self._member.group
        await supply.open()
        await self._member.join(GroupRequests(self._session, self._member, supply, self._direct))
        await self._rebalancer.once()
        self._rounds = self._session.spawn(self._rebalancer.forever(), f"rebalance {group}")
        self._jobs = [self._session.spawn(work, f"{name} of {group}") for name, work in supply.jobs()]

    async def close(self, closer: Asker) -> None:
        """What `closer` has in hand is not waited for; a handler of the consumer goes on at once."""
        self.is_closed = True
        self._supply.buffer.wake()
        await self._endings.close(lambda: self._end(closer))

    async def _end(self, closer: Asker) -> None:
        supply, patience, group = self._supply, self._close_timeout, self._member.group
        if self._rounds is not None:
            await self._rebalancer.stop(self._rounds, patience)
        await supply.stop()
        left = await self._endings.until_settled(supply.in_work, closer, patience)
        if left:
            log.warning("%s: %d messages are still in work after %g s, they come again", group, left, patience)
        await self._endings.until_finished()
        for job in self._jobs:
            job.cancel()
        await asyncio.gather(*self._jobs, return_exceptions=True)
        await supply.finish(closer)
        await self._member.leave()
