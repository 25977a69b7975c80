"""Where a replay's messages come from: brokers, which have both tiers; or a store alone, see `archive_source`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from neve.client.client import AsyncClient
from neve.client.model import Message, MessageQueue, PullResult, PullStatus
from neve.errors import ClientError, ConnectionFailed, UnknownOutcome

_PULL = 256  # messages; brokers of RocketMQ hand out 32 at a time
CHUNK_BYTES = 8 << 20
_PATIENCE_S, _PAUSE_S = 30.0, 0.5
#: Brokers search by time in a binary way, which is exact only where store times never run backwards. They do after a
#: step of the clock and after a failover to a machine whose clock is behind: so far back a search allows for.
CLOCK_STEP_MS = 24 * 3_600_000


class Bounds(NamedTuple):
    """What a queue has, the end excluded."""

    begin: int
    end: int


class Chunk(NamedTuple):
    """`next_offset` is where to read on: offsets below it that have no message here exist nowhere.

    `expired` counts those of them that had one when the task began.
    """

    messages: Sequence[Message]
    next_offset: int
    expired: int = 0


class Source(Protocol):
    """A topic's queues, read by offset."""

    async def bounds(self) -> dict[MessageQueue, Bounds]: ...

    async def span(self, queue: MessageQueue, bounds: Bounds, since: int | None, until: int | None) -> Bounds:
        """Return bounds within `bounds` that hold every message stored in [since, until), and possibly others.

        Times are in ms since 1970; None is no limit. Store times may run backwards.
        """

    async def read(self, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
        """At least one message, unless there is none below `end`."""


class BrokerSource:
    """Through the brokers of a cluster, which serve what is archived as well."""

    def __init__(self, client: AsyncClient, topic: str) -> None:
        self._client = client
        self._topic = topic

    async def bounds(self) -> dict[MessageQueue, Bounds]:
        client, topic = self._client, self._topic
        return {
            queue: Bounds(await client.min_offset(topic, queue), await client.max_offset(topic, queue))
            for queue in await client.queues(topic)
        }

    async def span(self, queue: MessageQueue, bounds: Bounds, since: int | None, until: int | None) -> Bounds:
        """As `Source.span`, if no store time is more than CLOCK_STEP_MS below one before it.

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
        return Bounds(begin, min(max(end, begin), bounds.end))

    async def read(self, queue: MessageQueue, offset: int, end: int, count: int) -> Chunk:
        found: list[Message] = []
        size = expired = 0
        while len(found) < count and offset < end and size < CHUNK_BYTES:
            result = await self._pulled(queue, offset, min(count - len(found), _PULL))
            if result.status is PullStatus.OFFSET_ILLEGAL:  # it lies below the queue's minimum by now
                expired += min(result.next_offset, end) - offset
            below = [message for message in result.messages if message.queue_offset < end]
            size += sum(len(message.body) for message in below)
            found += below
            offset = result.next_offset
        return Chunk(found, min(offset, end), expired)

    async def _pulled(self, queue: MessageQueue, offset: int, count: int) -> PullResult:
        """What leads on. Asked again for a while where the broker can't be reached, says nothing, or has nothing there.

        The last is a slave that lacks what its master has: it sends the reader on to that.
        """
        now = asyncio.get_running_loop().time
        deadline = now() + _PATIENCE_S
        while True:
            try:
                result = await self._client.pull(self._topic, queue, offset, count)
            except (ConnectionFailed, UnknownOutcome):
                if now() + _PAUSE_S > deadline:
                    raise
            else:
                if result.next_offset > offset:
                    return result
                if now() + _PAUSE_S > deadline:
                    raise ClientError(f"{queue}: nothing at {offset}, though the queue went on when this began")
            await asyncio.sleep(_PAUSE_S)
