"""Keeps the queues of a member equal to its share: at the start, every 20 s, and when a broker asks for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

from neve.client.group.failures import Failures
from neve.client.model import MessageQueue
from neve.client.net.session import Session
from neve.errors import BrokerError, NeveError
from neve.remoting.codes import ResponseCode
from neve.remoting.names import RETRY_PREFIX

log = logging.getLogger(__name__)

Share = Callable[[str], Awaitable[set[MessageQueue] | None]]
_RETRY_S = 1.0  # the pause after a round that is not complete


class Assignee(Protocol):
    """The source that reads the assigned queues."""

    def held(self) -> Iterable[MessageQueue]:
        """Return the queues that it reads."""

    async def take_queues(self, queues: list[MessageQueue]) -> bool:
        """Begin to read queues; return False if some of them are not available yet."""

    def keep(self, queue: MessageQueue) -> None:
        """Continue to read a queue, also if leaving it has begun."""

    async def leave(self, queue: MessageQueue) -> bool:
        """Stop reading a queue; return False if it is not free yet."""


class Rounds:
    """Synchronizes the rounds of a rebalancer. Whatever else moves a queue holds the `lock`, too."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.wanted = asyncio.Event()

    def wake(self) -> None:
        """Begin a round now."""
        self.wanted.set()


class Rebalancer:
    """Rebalances the queues of one member."""

    def __init__(
        self,
        session: Session,
        topics: Callable[[], Iterable[str]],
        share: Share,
        assignee: Assignee,
        rounds: Rounds,
        *,
        failures: Failures,
    ) -> None:
        self._session = session
        self._topics = topics
        self._share = share
        self._assignee = assignee
        self._rounds = rounds
        self._failures = failures
        self._is_complete = True

    async def forever(self) -> None:
        while True:
            interval = self._session.options.rebalance_interval if self._is_complete else _RETRY_S
            try:
                async with asyncio.timeout(interval):
                    await self._rounds.wanted.wait()
            except TimeoutError:
                pass
            self._rounds.wanted.clear()
            await self.once()

    async def stop(self, rounds: asyncio.Task[None], timeout: float) -> None:
        """End `rounds`, the task of `forever`: after its present round if that ends within `timeout` seconds."""
        try:
            async with asyncio.timeout(timeout), self._rounds.lock:
                rounds.cancel()
        except TimeoutError:
            rounds.cancel()
        await asyncio.wait({rounds})

    async def once(self) -> None:
        """Rebalance all topics. If a topic is not complete, the next round begins soon."""
        is_complete = True
        async with self._rounds.lock:
            topics = list(self._topics())
            for topic in {*topics, *(queue.topic for queue in self._assignee.held())}:
                operation = f"rebalance of {topic}"
                try:
                    is_complete &= await self._rebalance(topic, is_wanted=topic in topics)
                    self._failures.resolve(operation)
                except NeveError as error:
                    if _is_first_start(topic, error):
                        log.info("%s waits until brokers have created the topic", operation)
                    else:
                        self._failures.record(operation, error)
                    is_complete = False
        self._is_complete = is_complete

    async def _rebalance(self, topic: str, *, is_wanted: bool) -> bool:
        mine = await self._share(topic) if is_wanted else set()
        if mine is None:  # the broker does not know the assignment yet
            return True
        is_complete = True
        held = {queue for queue in self._assignee.held() if queue.topic == topic}
        for queue in held & mine:
            self._assignee.keep(queue)
        for queue in sorted(held - mine):
            is_complete &= await self._assignee.leave(queue)
        fresh = sorted(mine - held)
        if fresh:
            is_complete &= await self._assignee.take_queues(fresh)
        return is_complete


def _is_first_start(topic: str, error: NeveError) -> bool:
    """Return whether a retry topic does not exist yet: brokers create it at the first heartbeat of a group."""
    return (
        topic.startswith(RETRY_PREFIX) and isinstance(error, BrokerError) and error.code == ResponseCode.TOPIC_NOT_EXIST
    )
