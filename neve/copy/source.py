"""The source of a copy: a topic at brokers, which have both tiers; `archive_source` reads a topic of an archive."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from neve.client.client import AsyncClient
from neve.client.model import Message, MessageQueue, PullResult, PullStatus
from neve.errors import BrokerError, ClientError, ConnectionFailed, UnknownOutcome
from neve.remoting.codes import ResponseCode

_PULL = 256  # messages; brokers of RocketMQ return at most 32
CHUNK_BYTES = 8 << 20
_PATIENCE_S, _PAUSE_S = 60.0, 0.5
#: Brokers search a time by bisection, which is exact only if store times never decrease. They do after a step of the
#: clock, and after a failover to a machine whose clock is behind. This is the maximum that a search allows for.
CLOCK_STEP_MS = 24 * 3_600_000


class OffsetRange(NamedTuple):
    """The offsets [begin, end) of a queue."""

    begin: int
    end: int


class Chunk(NamedTuple):
    """Messages of a queue in order.

    Args:
        next_offset: where the next chunk begins; offsets below it without a message here do not exist.
        expired: the number of those that existed when the copy began.
    """

    messages: Sequence[Message]
    next_offset: int
    expired: int = 0


class TopicSource(Protocol):
    """The queues of a topic, read by offset."""

    async def bounds(self) -> dict[MessageQueue, OffsetRange]:
        """Return the bounds of all queues."""
        ...

    async def span(self, queue: MessageQueue, bounds: OffsetRange, since: int | None, until: int | None) -> OffsetRange:
        """Return bounds within `bounds` that hold every message stored in [since, until), and possibly others.

        Times are in ms since 1970; None is no limit. Store times may run backwards.
        """
        ...

    async def read(self, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
        """Return at most `count` messages from an offset on, at least one unless there is none below `end`."""
        ...


class BrokerSource:
    """A topic at the brokers of a cluster, including its archived messages."""

    def __init__(self, client: AsyncClient, topic: str) -> None:
        self._client = client
        self._topic = topic

    async def bounds(self) -> dict[MessageQueue, OffsetRange]:
        return {queue: await self.bounds_of(queue) for queue in await self._client.queues(self._topic)}

    async def bounds_of(self, queue: MessageQueue) -> OffsetRange:
        """Return the bounds of one queue."""
        client, topic = self._client, self._topic
        return OffsetRange(await client.min_offset(topic, queue), await client.max_offset(topic, queue))

    async def span(self, queue: MessageQueue, bounds: OffsetRange, since: int | None, until: int | None) -> OffsetRange:
        """As `TopicSource.span`, if no store time is more than CLOCK_STEP_MS below an earlier one.

        A binary search for T ends at an offset x with time(x - 1) < T <= time(x). With steps of at most S, all before x
        are older than T + S, and all from x on are as young as T - S. Brokers of RocketMQ 4.9 return the record nearest
        to T instead, which may be x - 1: the last record, if all are older.
        """
        begin, end = bounds
        if since is not None:
            begin = await self._client.offset_by_time(self._topic, queue, max(since - CLOCK_STEP_MS, 0))
        if until is not None:
            end = await self._client.offset_by_time(self._topic, queue, until + CLOCK_STEP_MS) + 1
        begin = min(max(begin, bounds.begin), bounds.end)
        return OffsetRange(begin, min(max(end, begin), bounds.end))

    async def read(self, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
        found: list[Message] = []
        size = expired = 0
        while len(found) < count and offset < end and size < CHUNK_BYTES:
            result = await self._pull(queue, offset, min(count - len(found), _PULL))
            if result.status is PullStatus.OFFSET_ILLEGAL:  # the offset is below the minimum of the queue now
                expired += min(result.next_offset, end) - offset
            below = [message for message in result.messages if message.queue_offset < end]
            size += sum(len(message.body) for message in below)
            found += below
            offset = result.next_offset
        return Chunk(found, min(offset, end), expired)

    async def _pull(self, queue: MessageQueue, offset: int, count: int) -> PullResult:
        """Pull until the broker returns a larger offset, for at most _PATIENCE_S.

        A broker may be unreachable or busy, or a slave may lack messages of its master, to which it redirects readers.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + _PATIENCE_S
        while True:
            is_last = now() + _PAUSE_S > deadline
            try:
                result = await self._client.pull(self._topic, queue, offset, count)
            except (ConnectionFailed, UnknownOutcome, BrokerError) as error:
                is_busy = not isinstance(error, BrokerError) or error.code == ResponseCode.SYSTEM_BUSY
                if is_last or not is_busy:
                    raise
            else:
                if result.next_offset > offset:
                    return result
                if is_last:
                    raise ClientError(f"{queue}: no message at offset {offset}, below the end of the queue")
            await asyncio.sleep(_PAUSE_S)
