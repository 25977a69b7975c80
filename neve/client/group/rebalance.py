"""Keeps the queues that a member works on equal to its share: at the start, every 20 s, and when a broker says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from neve.client.group.refusals import Refusals
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.errors import NeveError

log = logging.getLogger(__name__)

Share = Callable[[str], Awaitable[set[MessageQueue] | None]]
_AGAIN_S = 1.0  # after a round in which something could not be settled


class Assignee(Protocol):
    """Who works on the queues."""

    def held(self) -> Iterable[MessageQueue]:
        """The queues that it has now."""

    async def take(self, queues: list[MessageQueue]) -> bool:
        """Begins with them; False when some of them could not be had yet."""

    def keep(self, queue: MessageQueue) -> None:
        """One that it has stays with it."""

    async def leave(self, queue: MessageQueue) -> bool:
        """Stops with it; False when it is not free yet."""


class Rounds:
    """`lock` is held while queues change hands: what moves a queue otherwise takes it, too."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.wanted = asyncio.Event()

    def wake(self) -> None:
        """A round at once."""
        self.wanted.set()


class Rebalancer:
    """One for a member."""

    def __init__(
        self,
        session: Session,
        topics: Callable[[], Iterable[str]],
        share: Share,
        assignee: Assignee,
        rounds: Rounds,
    ) -> None:
        self._session = session
        self._topics = topics
        self._share = share
        self._assignee = assignee
        self._refusals = Refusals(log)
        self._rounds = rounds
        self._is_settled = True

    async def forever(self) -> None:
        while True:
            interval = self._session.options.rebalance_interval if self._is_settled else _AGAIN_S
            try:
                async with asyncio.timeout(interval):
                    await self._rounds.wanted.wait()
            except TimeoutError:
                pass
            self._rounds.wanted.clear()
            await self.once()

    async def stop(self, rounds: asyncio.Task[None], patience: float) -> None:
        """Ends `rounds`, the task of `forever`; between two of them, if that comes in time."""
        try:
            async with asyncio.timeout(patience), self._rounds.lock:
                rounds.cancel()
        except TimeoutError:
            rounds.cancel()
        await asyncio.wait({rounds})

    async def once(self) -> None:
        """One round over all topics; the next is soon when some topic could not be settled."""
        settled = True
        async with self._rounds.lock:
            topics = list(self._topics())
            for topic in {*topics, *(queue.topic for queue in self._assignee.held())}:
                try:
                    settled &= await self._settle(topic, is_wanted=topic in topics)
                except NeveError as error:
                    self._refusals.note(f"rebalance of {topic}", error)
                    settled = False
        self._is_settled = settled

    async def _settle(self, topic: str, *, is_wanted: bool) -> bool:
        mine = await self._share(topic) if is_wanted else set()
        if mine is None:  # nobody knows: as it is
            return True
        settled = True
        held = {queue for queue in self._assignee.held() if queue.topic == topic}
        for queue in held & mine:
            self._assignee.keep(queue)
        for queue in sorted(held - mine):
            settled &= await self._assignee.leave(queue)
        fresh = sorted(mine - held)
        if fresh:
            settled &= await self._assignee.take(fresh)
        return settled
